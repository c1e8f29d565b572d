"""trace_module: traces a model to which PyTorch's own parallelism is applied as a plan says."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from forerun.common.errors import ForerunError
from forerun.core.program.types import Program
from forerun.describe.plan.plan import Plan
from forerun.sources.trace.fold_layers import fold_layers
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits, record_call
from forerun.sources.trace.module_request import ModuleRequest
from forerun.sources.trace.recording import load_recording
from forerun.sources.trace.to_program import to_program


def trace_module(  # noqa: PLR0913 - a public function whose keyword arguments users name
    model_factory: Callable[[], Any],
    example_inputs: Any,
    plan: Plan,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    target: Any = None,
    optimizer: Callable[[Any], Any] | None = None,
    tp_plan: Mapping[str, Any] | None = None,
    steps: int = 2,
    rank: int = 0,
    gpus_per_node: int = 8,
    device: str = "h100",
    fold: bool = True,
    limits: Limits | None = None,
) -> Program:
    """Returns the Program of one optimizer step of a model, with PyTorch's own parallelism as `plan` says.

    The model runs in forked processes on the CPU, with tensors that have no data. This needs no GPU and does not change
    the caller's torch. The order is torchtitan's: tensor parallelism, activation checkpointing, compilation of each
    layer, then FSDP2, HSDP or DDP.

    `model_factory()` creates the model; it is called on the meta device. `example_inputs` are the inputs of one micro
    batch of one rank, with the whole sequence: a tensor, a tuple, a mapping of keywords, or a function that makes them.
    `loss(output, target)` is by default the model's own loss, else the cross entropy of its logits.
    `optimizer(parameters)` is by default the plan's. `tp_plan` maps patterns of module names to PyTorch's
    `ParallelStyle`s or Hugging Face's words; by default it is the model's own (`tp_plan`, `_tp_plan`), or one for
    modules named as in torchtitan's Llama. Keys that match nothing are skipped, and the Program's notes name them.

    `steps` optimizer steps run and the last is recorded. With `fold`, repeated layers are traced two, three and four
    times and the others are added by their period; if the trace is not periodic, the whole model is traced.

    Raises:
        ForerunError: the plan can't be applied to the model, or the model fails; the message names the operation.
    """
    job = Job(
        "",
        target=_name(model_factory),
        rank=rank,
        world_size=plan.world_size,
        gpus_per_node=gpus_per_node,
        steps=steps,
        device=device,
    )
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="forerun-module-") as folder:
        request = ModuleRequest(
            model_factory, example_inputs, plan, Path(folder), loss, target, optimizer, tp_plan, fold
        )
        try:
            return _folded(job, request, limits)
        except ForerunError as error:
            if not fold or not request.anything_described():
                raise
            why = f"the whole model was traced: {error}"
        whole = record_call(job, lambda world: _run(world, replace(request, fold=False)), limits)
    program = to_program(whole)
    notes = list(cast("list[str]", program.meta["notes"]))
    return replace(program, meta={**program.meta, "notes": [*notes, why]})


def _folded(job: Job, request: ModuleRequest, limits: Limits) -> Program:
    """Returns the Program, traced with as few layers as possible."""
    if not request.fold or request.plan.pp == 1:
        recordings = record_call(job, lambda world: _run(world, request), limits)
        if not request.anything_described():
            return to_program(recordings)
        *forked, own = request.depths
        shallow = {
            depth: [load_recording(request.recording(depth, one.rank)) for one in recordings] for depth in forked
        }
        return fold_layers(shallow | {own: recordings}, request.repeats())
    shallow = {}
    for depth in request.depths:
        short = replace(request, per_stage=depth)
        shallow[depth] = record_call(job, lambda world, short=short: _run(world, short), limits)  # type: ignore[misc]
        if not request.anything_described():
            return to_program(shallow[depth])
    return fold_layers(shallow, request.repeats())


def _run(world: Any, request: ModuleRequest) -> None:
    """Runs in the traced process, the only one that imports torch."""
    import_module("forerun.sources.trace.inside.parallelize.module_program").run(world, request)


def _name(factory: Callable[[], Any]) -> str:
    return str(getattr(factory, "__qualname__", None) or type(factory).__name__)
