"""Traces a job and returns its Program."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

from forerun.common.errors import ForerunError
from forerun.core.program.storage import save
from forerun.core.program.types import Program
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits, record_call, record_script
from forerun.sources.trace.to_program import to_program


def trace_job(job: Job, limits: Limits, show_output: bool = False) -> tuple[Program, float]:
    """Returns the Program of a script's step, and the seconds that tracing took.

    Raises:
        ForerunError: the script is missing or failed, or where its step ends is not clear.
    """
    start = time.perf_counter()
    program = to_program(record_script(job, limits, show_output))
    return program, time.perf_counter() - start


def trace_call(
    build: Callable[..., Any],
    step: Callable[[Any], Any],
    *,
    world_size: int,
    mesh: Mapping[str, int] | None = None,
    rank: int | None = None,
    device: str = "cuda",
    steps: int = 2,
    gpus_per_node: int = 8,
    expert_skew: float = 0.0,
    limits: Limits | None = None,
) -> Program:
    """Returns the Program of one step of a training loop given as two functions.

    `build()` makes the objects that `step` needs, such as model and optimizer; with `mesh` (axis -> degree, outermost
    first, e.g. `{"dp": 8, "tp": 4}`) it is called with that DeviceMesh of `device`. `step(state)` trains on one batch.
    Both run in forked processes where 'cuda' is virtual, so call this before the process uses a GPU. `steps` steps run
    and the last is recorded. Rank 0 and the ranks that it exchanges messages with are traced, or `rank` alone.

    Raises:
        ForerunError: the degrees of `mesh` don't multiply to `world_size`, the functions fail, or this system can't
        fork.
    """
    if mesh is not None and prod(mesh.values()) != world_size:
        raise ForerunError(f"trace: mesh {dict(mesh)} has {prod(mesh.values())} ranks, world_size is {world_size}")
    job = Job(
        folder="",
        target="program",
        rank=rank or 0,
        world_size=world_size,
        gpus_per_node=gpus_per_node,
        steps=steps,
        expert_skew=expert_skew,
        alone=rank is not None,
    )

    def program(world: Any) -> None:
        # Only the traced process imports torch, which may be missing here.
        import_module("forerun.sources.trace.inside.two_functions").training(build, step, mesh, device)(world)

    return to_program(record_call(job, program, limits or Limits()))


def write_program(program: Program, path: Path) -> None:
    """Saves `program`, making its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save(program, path)
