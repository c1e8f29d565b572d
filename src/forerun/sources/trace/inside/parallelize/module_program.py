"""The program that `trace_module` traces: builds the model, removes layers, parallelises it, and trains until the step
is recorded.

Variants of different depth are forks of one process, which has imported and set up everything.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import traceback
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from forerun.sources.trace.inside.parallelize.apply import check_traceable, parallelize
from forerun.sources.trace.inside.parallelize.data import around_layers
from forerun.sources.trace.inside.parallelize.depth import Run, keep_repeats, layer_containers, on_meta, repeated_layers
from forerun.sources.trace.inside.parallelize.expert import grouped_experts, skew_of
from forerun.sources.trace.inside.parallelize.float8 import to_float8
from forerun.sources.trace.inside.parallelize.mesh import Meshes
from forerun.sources.trace.inside.parallelize.training_loop import Pipeline, Training, loss_of
from forerun.sources.trace.inside.steps import StepRecorded
from forerun.sources.trace.inside.world import World
from forerun.sources.trace.module_request import ModuleRequest
from forerun.sources.trace.recording import save_recording


def run(world: World, request: ModuleRequest) -> None:
    """Traces `request` in `world`; recordings of variants with fewer layers are left in the request's folder."""
    plan = request.plan
    check_traceable(plan, world.recorder.note)
    gc.disable()  # As in torchtitan: a step never waits for the collector, nor does memory depend on it.
    torch.cuda.set_device(world.job.local_rank)
    if plan.world_size > 1:
        dist.init_process_group("nccl")
    meshes = Meshes(plan)
    world.steps.meta["data_parallel_size"] = plan.dp
    model = on_meta(request.model_factory)
    found = repeated_layers(model)
    if plan.ep > 1 and plan.expert_imbalance > 1:
        counts = [next(part.parameters()).shape[0] for part in grouped_experts(model)]
        world.oracle.skew = skew_of(plan.expert_imbalance, max(counts, default=plan.ep), plan.ep)
    if plan.pp > 1:
        _train_stages(world, request, meshes)
    elif request.fold and found is not None and _repeats(found, request) > request.depths[-1]:
        _describe(world, request, _repeats(found, request))
        _fork_shallow(world, request, meshes, model, found)
    else:
        _train(world, request, meshes, model, layer_containers(model))


def _repeats(run: Run, request: ModuleRequest) -> int:
    return run.repeats // _runs_per_repeat(run, request)


def _runs_per_repeat(run: Run, request: ModuleRequest) -> int:
    """Returns after how many periods of layers the choice of checkpointed layers repeats too."""
    every = request.plan.checkpoint_every if request.plan.activation_checkpointing != "none" else 1
    return math.lcm(run.period, every) // run.period


def _describe(world: World, request: ModuleRequest, repeats: int) -> None:
    """Tells the parent how often layers repeat in the whole model."""
    request.described(world.job.rank).write_text(json.dumps({"repeats": repeats}), encoding="utf-8")


def _fork_shallow(world: World, request: ModuleRequest, meshes: Meshes, model: nn.Module, run: Run) -> None:
    """Records the smaller depths in processes of their own and the largest in this one."""
    runs = _runs_per_repeat(run, request)
    rest = run.repeats % runs
    layers = layer_containers(model)
    children = []
    for depth in request.depths:
        own = depth == request.depths[-1]
        pid = 0 if own else os.fork()
        if pid:
            children.append(pid)
            continue
        keep_repeats(run, depth * runs + rest)
        if not own:
            _shallow(world, request, meshes, model, layers, request.recording(depth, world.job.rank))
    try:
        _train(world, request, meshes, model, layers)
    finally:
        for pid in children:
            os.waitpid(pid, 0)


def _shallow(
    world: World, request: ModuleRequest, meshes: Meshes, model: nn.Module, layers: list[nn.Module], path: Path
) -> None:
    """Records a variant in a forked process, which ends here. If it fails, the parent finds no recording."""
    try:
        with contextlib.suppress(StepRecorded):
            _train(world, request, meshes, model, layers)
        if world.steps.recording is not None:
            save_recording(world.steps.recording, path)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _train(world: World, request: ModuleRequest, meshes: Meshes, model: nn.Module, layers: list[nn.Module]) -> None:
    if request.plan.precision == "fp8":
        to_float8(model, head_of(model, layers), request.plan)
    wrapped = parallelize(model, layers, meshes, request.plan, request.tp_plan, world.recorder.note)
    training = Training([wrapped], request, meshes)
    while True:
        training.step()


def head_of(model: nn.Module, layers: list[nn.Module]) -> nn.Module | None:
    """Returns the last leaf module behind the layers, which makes the logits."""
    behind = around_layers(model, layers)[1]
    return behind[-1] if behind else None


# -- pipelines ---------------------------------------------------------------------------------------------------------


def _train_stages(world: World, request: ModuleRequest, meshes: Meshes) -> None:
    """Trains the stages of this rank. A variant has the same small number of layers in each stage."""
    plan, mesh = request.plan, meshes.axis("pp")
    pipeline = import_module("forerun.sources.trace.inside.parallelize.pipeline")  # Imports torch's compiler.
    stages = pipeline.own_stages(plan, mesh.get_local_rank())
    parts = []
    for stage in stages:
        model = on_meta(request.model_factory)
        _shorten(world, request, model)
        layers = layer_containers(model)
        if plan.precision == "fp8":
            to_float8(model, head_of(model, layers), plan)
        pipeline.cut_stage(model, layers, plan, stage)
        parts.append(parallelize(model, layers, meshes, plan, request.tp_plan, world.recorder.note))
    schedule = pipeline.make_schedule(parts, stages, mesh, plan, loss_of(request))
    training = Training(parts, request, meshes, Pipeline(schedule, 0 in stages, plan.n_stages - 1 in stages))
    while True:
        training.step()


def _shorten(world: World, request: ModuleRequest, model: nn.Module) -> None:
    """Removes layers until each stage has `per_stage`, if the removed layers can be put in again."""
    plan, run = request.plan, repeated_layers(model)
    if request.per_stage is None or run is None or plan.layers_per_stage is not None or plan.balance_ends:
        return
    unit = plan.n_stages * _runs_per_repeat(run, request)
    whole = run.n_layers == len(list(run.container.children()))
    if run.period == 1 and whole and run.repeats % unit == 0 and run.repeats // unit > 2 * request.depths[-1]:
        _describe(world, request, run.repeats // unit)
        keep_repeats(run, request.per_stage * unit)
