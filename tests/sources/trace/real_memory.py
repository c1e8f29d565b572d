"""Bytes of the steps in `real_models`: on the CPU, as torch's MemTracker counts them, and traced.

python real_memory.py OUT [CASE ...]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from real_models import CASES, SHARDED
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim.optimizer import register_optimizer_step_post_hook

from forerun.core.memory.profile import profile
from forerun.core.program.types import Category
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits, record_call
from forerun.sources.trace.to_program import to_program

STEP = 2
EVERY = CASES | SHARDED
KINDS = {"Parameter": "parameter", "Buffer": "parameter", "Gradient": "gradient", "Optstate": "optimizer"}
KINDS |= {"Activation": "activation", "Temp": "temporary"}


def real(name: str) -> dict[str, object]:
    """What the second step of a case needs on the CPU."""
    tracker = MemTracker()
    cpu = torch.device("cpu")
    ends: list[dict[str, int]] = []

    def stepped(*_: object) -> None:
        ends.append(by_kind(tracker.get_tracker_snapshot()[cpu]))

    with tracker:
        hook = register_optimizer_step_post_hook(stepped)
        step = EVERY[name]("cpu")
        for number in range(1, STEP + 1):
            step(tracker.reset_mod_stats)
            if number == STEP - 1:
                tracker._peak_mem_snap = tracker.get_tracker_snapshot()
                tracker._peak_mem = {device: kinds["Total"] for device, kinds in tracker._peak_mem_snap.items()}
        hook.remove()
        peak = tracker.get_tracker_snapshot("peak")[cpu]
    return {"peak": peak["Total"], "at_peak": by_kind(peak), "at_end": ends[-1]}


def by_kind(snapshot: dict) -> dict[str, int]:
    out: dict[str, int] = {}
    for kind, size in snapshot.items():
        name = KINDS.get(str(getattr(kind, "value", kind)))
        if name is not None:
            out[name] = out.get(name, 0) + int(size)
    return out


def traced(name: str) -> dict[str, object]:
    """What the trace says of the second step of a case on a GPU."""

    def program(_world: object) -> None:
        if name in SHARDED:
            dist.init_process_group("nccl")
        step = EVERY[name]("cuda")
        while True:
            step(lambda: None)

    job = Job("", name, steps=STEP, world_size=2 if name in SHARDED else 1)
    recordings = record_call(job, program, Limits(time_s=120))
    memory = profile(to_program(recordings))[0]
    one = recordings[0]
    left = np.bincount(
        one.tensor_category[one.tensor_free < 0], one.tensor_bytes[one.tensor_free < 0], minlength=len(Category)
    )
    at_end = {Category(i).name.lower(): int(size) for i, size in enumerate(left)}
    return {"peak": memory.peak_bytes, "at_peak": memory.by_category, "at_end": at_end, "notes": one.meta["notes"]}


def main() -> None:
    torch.set_num_threads(1)
    names = sys.argv[2:] or list(EVERY)
    first = os.environ["RANK"] == "0"
    found = {name: {"traced": traced(name)} for name in names if first}
    for name in names:
        if name in CASES and first:
            found[name]["real"] = real(name)
    dist.init_process_group("gloo")
    for name in names:
        if name in SHARDED:
            figures = real(name)
            found.setdefault(name, {})["real"] = figures
    if first:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
