"""What a traced process does for `trace_module`: build, cut to a depth, parallelise, train until the step is recorded.

Variants of different depth are forks of the process that has imported, built and set up everything.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from forerun.errors import ForerunError
from forerun.trace.inside.depth import Run, keep_repeats, on_meta, repeated_layers
from forerun.trace.inside.parallelize import check_traceable, parallelize
from forerun.trace.inside.parallelize_mesh import Meshes
from forerun.trace.inside.steps import StepRecorded
from forerun.trace.inside.training_loop import Training
from forerun.trace.inside.world import World
from forerun.trace.module_request import DEPTHS, ModuleRequest
from forerun.trace.recording import save_recording


def run(world: World, request: ModuleRequest) -> None:
    """Trace `request` in `world`; recordings of shallower variants are left in the request's folder."""
    note = world.recorder.note
    check_traceable(request.plan, note)
    gc.disable()  # as torchtitan does: a step never waits for it, and what is alive does not depend on it
    torch.cuda.set_device(world.job.local_rank)
    if request.plan.world_size > 1:
        dist.init_process_group("nccl")
    meshes = Meshes(request.plan)
    model = on_meta(request.model_factory)
    run = repeated_layers(model) if request.fold else None
    period = 1
    if run is not None:
        period = foldable_period(run, request)
    if run is None or run.repeats * run.period <= DEPTHS[-1] * period:
        _train(world, request, meshes, model)
        return
    _fork_shallow(world, request, meshes, model, run, period)


def foldable_period(run: Run, request: ModuleRequest) -> int:
    """Layers after which everything repeats: kinds of layers, and which of them are checkpointed."""
    every = request.plan.checkpoint_every if request.plan.activation_checkpointing != "none" else 1
    period = run.period
    while period % every:
        period += run.period
    return period


def _fork_shallow(
    world: World, request: ModuleRequest, meshes: Meshes, model: nn.Module, run: Run, period: int
) -> None:
    """Record the depths in processes of their own, the deepest in this one."""
    rank = world.job.rank
    per_repeat = period // run.period
    rest = run.repeats % per_repeat
    children = {}
    for depth in DEPTHS[:-1]:
        pid = os.fork()
        if pid == 0:
            _shallow(world, request, meshes, model, run, depth * per_repeat + rest, request.recording(depth, rank))
        children[pid] = depth
    Path(request.described(rank)).write_text(
        json.dumps({"period": period, "repeats": run.repeats // per_repeat, "path": run.path}), encoding="utf-8"
    )
    keep_repeats(run, DEPTHS[-1] * per_repeat + rest)
    try:
        _train(world, request, meshes, model)
    finally:
        for pid in children:
            os.waitpid(pid, 0)


def _shallow(
    world: World, request: ModuleRequest, meshes: Meshes, model: nn.Module, run: Run, repeats: int, path: Path
) -> None:
    """Record a variant, in a fork that ends here. What fails leaves no recording, which the parent sees."""
    try:
        keep_repeats(run, repeats)
        with contextlib.suppress(StepRecorded):
            _train(world, request, meshes, model)
        if world.steps.recording is not None:
            save_recording(world.steps.recording, path)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _train(world: World, request: ModuleRequest, meshes: Meshes, model: nn.Module) -> None:
    plan = request.plan
    if plan.pp > 1:
        raise ForerunError("pipeline")
    wrapped = parallelize(model, meshes, plan, request.tp_plan, world.recorder.note)
    training = Training([wrapped], request, meshes)
    world.steps.meta |= {"data_parallel_size": plan.dp}
    while True:
        training.step()


