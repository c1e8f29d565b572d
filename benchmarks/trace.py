"""Seconds to trace training steps from a cold start, and the memory that it takes.

Run: python benchmarks/trace.py. Every line is a process of its own: it starts Python, imports torch, builds the Llama
of examples/llama, applies FSDP2 and tensor parallelism over 8 ranks, runs two steps and makes a Program. The memory is
that of its largest process, and of all of its processes together, at most. Limits are of wall time, which a busy
neighbour stretches: what misses one is traced once more.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

MODELS = {"70B": 80, "405B": 126}
LIMIT_S = {"70B": 6.0, "405B": 10.0}
LIMIT_GIB = 2.0
TRIES = 2
TRACE = """
import sys
from dataclasses import replace

sys.path.insert(0, sys.argv[1])
size, layers, world, seq, checkpointing = sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), 8192, sys.argv[5]

from forerun.describe.plan.plan import Plan
from forerun.sources.trace.module import trace_module

def model():
    from model import SIZES, Llama
    return Llama(replace(SIZES[size], n_layers=layers))

def inputs():
    import torch
    return torch.empty(1, seq, dtype=torch.int64, device="meta")

plan = Plan(seq_len=seq, dp_shard=world // 8, tp=8, activation_checkpointing=checkpointing)
program = trace_module(model, inputs, plan)
nodes = sum(len(program.blocks[block].op) for cls in program.rank_classes for block in cls.block)
notes = [note for note in program.meta["notes"] if "whole model" in note]
print("RESULT", nodes, notes)
"""


def cold_start(size: str, layers: int, world: int, checkpointing: str = "none") -> dict[str, float]:
    """Trace once in a fresh process. Wall time and processor time in seconds, memory in GiB, nodes of a rank's step."""
    example = Path(__file__).parent.parent / "examples" / "llama"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", TRACE, str(example), size, str(layers), str(world), checkpointing],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    memory = _Memory(process.pid)
    output, _ = process.communicate()
    wall_s = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise SystemExit(f"tracing {size} with {layers} layers failed")
    nodes, notes = next(line for line in output.splitlines() if line.startswith("RESULT")).split(maxsplit=2)[1:]
    if json.loads(notes.replace("'", '"')):
        raise SystemExit(f"tracing {size}: {notes}")
    processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    largest_gib, together_gib = memory.stop()
    return {
        "wall_s": wall_s,
        "processor_s": processor_s,
        "largest_gib": largest_gib,
        "together_gib": together_gib,
        "nodes": float(nodes),
    }


class _Memory:
    """The most memory that a process and all that it started have: of one, resident, and together, each page once."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.largest_kib = self.together_kib = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> tuple[float, float]:
        self._ended.set()
        self._thread.join()
        return self.largest_kib / 2**20, self.together_kib / 2**20

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            rss, pss = zip(*(_memory_kib(pid) for pid in _family(self.root)), strict=True)
            self.largest_kib = max(self.largest_kib, *rss, 0)
            self.together_kib = max(self.together_kib, sum(pss))


def _family(root: int) -> list[int]:
    """`root` and what it and its children have started."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        parents[int(path.parent.name)] = int(text.rpartition(")")[2].split()[1])
    family = [root]
    for pid in family:
        family += [child for child, parent in parents.items() if parent == pid]
    return family


def _memory_kib(pid: int) -> tuple[int, int]:
    """Resident and proportional set size."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0, 0
    found = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
    return found.get("Rss:", 0), found.get("Pss:", 0)


def show(label: str, found: dict[str, float], limit: str = "") -> None:
    """One line."""
    print(
        f"{label:44} {found['wall_s']:6.1f} s wall {found['processor_s']:6.1f} s processor"
        f" {found['largest_gib']:5.2f} GiB largest {found['together_gib']:5.2f} GiB together"
        f" {found['nodes']:8.0f} nodes{limit}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the two models only, not the sweeps")
    quick = parser.parse_args().quick
    for size, layers in MODELS.items():
        for _ in range(TRIES):
            found = cold_start(size, layers, 1024)
            met = found["wall_s"] <= LIMIT_S[size] and found["largest_gib"] <= LIMIT_GIB
            said = "met" if met else "NOT MET"
            limit = f"  limit {LIMIT_S[size]:.0f} s, {LIMIT_GIB:.0f} GiB: {said}"
            show(f"{size}, {layers} layers, 1,024 ranks", found, limit)
            if met:
                break
    if quick:
        return
    show("405B, full checkpointing, 1,024 ranks", cold_start("405B", 126, 1024, "full"))
    for world in (64, 256, 4096, 16384):
        show(f"405B, 126 layers, {world:,} ranks", cold_start("405B", 126, world))
    for layers in (8, 16, 32, 64):
        show(f"405B width, {layers} layers, 1,024 ranks", cold_start("405B", layers, 1024))


if __name__ == "__main__":
    main()
