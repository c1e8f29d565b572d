"""Runs functions of the caller in a traced process. It is only called in a forked process."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from forerun.common.errors import ForerunError
from forerun.sources.trace.inside.world import World, leave
from forerun.sources.trace.job import Failure, Job
from forerun.sources.trace.remains import ASK

Program = Callable[[World], None]


def main(job: Job, program: Program) -> None:
    """Runs `program` as rank `job.rank` and ends the process."""
    fault = job.last_place.open("w", encoding="utf-8")
    faulthandler.enable(fault)
    faulthandler.register(ASK, fault, all_threads=False)
    try:
        world = World(job)
    except ForerunError as error:
        Failure(str(error)).write(job.failure)
        leave(1)
        raise
    leave(world.run(lambda: program(world)))


def training(
    build: Callable[..., Any], step: Callable[[Any], Any], mesh: Mapping[str, int] | None, device: str
) -> Program:
    """Returns a program that calls `build` once, with the device mesh if there is one, and then `step` on its result
    until the step is recorded."""

    def program(world: World) -> None:
        job = world.job
        torch.cuda.set_device(job.local_rank)
        if job.world_size > 1 or mesh:
            dist.init_process_group("nccl" if device == "cuda" else "gloo")
        sizes = tuple((mesh or {}).values())
        state = build(init_device_mesh(device, sizes, mesh_dim_names=tuple(mesh))) if mesh else build()
        while True:
            done = world.steps.done
            step(state)
            if world.steps.done == done:  # no optimizer of torch's stepped: the call itself is the step
                world.steps.mark_step()

    return program
