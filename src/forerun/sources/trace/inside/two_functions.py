"""Makes one program of the two functions that `forerun.trace` is given. Only a traced process imports this module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from forerun.sources.trace.inside.world import World


def training(
    build: Callable[..., Any], step: Callable[[Any], Any], mesh: Mapping[str, int] | None, device: str
) -> Callable[[World], None]:
    """Returns a program that calls `build` once, with the device mesh if there is one, and then `step` on its result
    until the step is recorded."""

    def program(world: World) -> None:
        job, steps = world.job, world.steps
        torch.cuda.set_device(job.local_rank)
        if job.world_size > 1 or mesh:
            dist.init_process_group("nccl" if device == "cuda" else "gloo")
        sizes = tuple((mesh or {}).values())
        state = build(init_device_mesh(device, sizes, mesh_dim_names=tuple(mesh))) if mesh else build()
        while True:
            before = steps.done, steps.updates
            step(state)
            # If none of torch's optimizers steps, the call itself is the step.
            if (steps.done, steps.updates) == before:
                steps.mark_step()

    return program
