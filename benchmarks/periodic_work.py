"""The host times of cost/periodic.yaml, measured on this machine. Run: python benchmarks/periodic_work.py.

It needs torch and no GPU. What depends on a GPU (CUPTI, the symbols of a memory snapshot) is not measured.
"""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

TURNS = 5
LAYERS = 32


class Block(nn.Module):
    """A residual block of two products."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    torch.set_num_threads(1)
    collections()
    profiler()
    checkpoints()
    log_line()


def seconds(work: Callable[[], Any]) -> float:
    """The fastest of some calls: others may use this machine too."""
    times = []
    for _ in range(TURNS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def training(recomputes: bool) -> Callable[[], None]:
    """A step of a small model."""
    blocks = nn.ModuleList(Block() for _ in range(LAYERS))
    optimizer = torch.optim.AdamW(blocks.parameters(), foreach=True)

    def step() -> None:
        x = torch.ones(4, 32)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return step


def collections() -> None:
    """Garbage of steps with automatic collection off."""
    gc.disable()
    for recomputes in (False, True):
        step, times, found = training(recomputes), [], 0
        for _ in range(TURNS):
            gc.collect(1)
            for _ in range(50):
                step()
            start = time.perf_counter()
            found = gc.collect(1)
            times.append(time.perf_counter() - start)
        taken = min(times)
        print(f"gc: recomputing {recomputes}: {found / 50 / LAYERS:.2f} objects a layer and step, {taken * 1e6:.0f} us")
        if found:
            print(f"gc: {taken / found * 1e6:.2f} us an object")
    gc.enable()


class Counting(TorchDispatchMode):
    """Counts operators."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += 1
        return func(*args, **(kwargs or {}))


def profiler() -> None:
    """Recording and exporting a step."""
    step = training(recomputes=False)
    with Counting() as counting:
        step()
    plain = seconds(step)
    recording = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    recording.start()
    slower = seconds(step)
    start = time.perf_counter()
    recording.stop()
    stopped = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recording.export_chrome_trace(str(path))
        exported = time.perf_counter()
        events = len(json.loads(path.read_text())["traceEvents"])
    print(f"profiler: {(slower - plain) / counting.n * 1e6:.1f} us an operator of {counting.n} in a step")
    stop_us, export_us = (stopped - start) / events * 1e6, (exported - stopped) / events * 1e6
    print(f"profiler: stop {stop_us:.1f}, export {export_us:.1f} us an event")


def checkpoints() -> None:
    """Saving, staging and loading many small tensors, and copies into new memory."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    few, many = 100, 1000
    states = {n: {f"{i}": torch.zeros(16) for i in range(n)} for n in (few, many)}

    def stage(n: int) -> float:
        start = time.perf_counter()
        response = dcp.async_save(states[n], checkpoint_id=folder / "async")
        taken = time.perf_counter() - start
        getattr(response, "upload_completion", response).result()
        return taken

    works: dict[str, Callable[[int], float]] = {
        "save": lambda n: seconds(lambda: dcp.save(states[n], checkpoint_id=folder / str(n))),
        "load": lambda n: seconds(lambda: dcp.load(states[n], checkpoint_id=folder / str(n))),
        "stage": lambda n: min(stage(n) for _ in range(TURNS)),
    }
    try:
        for name, work in works.items():
            print(f"checkpoint: {name} {(work(many) - work(few)) / (many - few) * 1e6:.0f} us a tensor")
    finally:
        torch.distributed.destroy_process_group()
        shutil.rmtree(folder)
    source = torch.ones(64 * 2**20)
    print(f"checkpoint: {source.nbytes / seconds(lambda: source.clone()) / 1e9:.1f} GB/s into new memory")


def log_line() -> None:
    """The statistics of the caching allocator sorted by name, and a line of text of them."""
    figures = {kind: dict.fromkeys(("current", "peak", "allocated", "freed"), 1) for kind in "abc"}
    every_figure = {f"figure_{i}": figures for i in range(12)}

    def flat(prefix: str, value: Any) -> list[tuple[str, int]]:
        if not isinstance(value, dict):
            return [(prefix, value)]
        return [pair for name, inner in value.items() for pair in flat(f"{prefix}.{name}", inner)]

    log = logging.getLogger("periodic_work")
    log.setLevel(logging.INFO)
    log.propagate = False
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(logging.Formatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s"))
    log.addHandler(handler)

    def line() -> None:
        found = OrderedDict(sorted(flat("", every_figure)))
        log.info(" ".join(f"{name}: {value:7.4f}" for name, value in list(found.items())[:8]))

    print(f"metrics: {seconds(line) * 1e6:.0f} us a line")


if __name__ == "__main__":
    main()
