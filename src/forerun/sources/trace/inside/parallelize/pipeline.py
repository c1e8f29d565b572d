"""Pipeline parallelism: cuts a model into stages of layers and runs them by a schedule of torch.distributed.pipelining.

A part that a stage lacks is replaced by a module that returns its input, so the model's own forward runs in every
stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.describe.plan.plan import Plan
from forerun.sources.trace.inside.parallelize.data import around_layers
from forerun.sources.trace.inside.parallelize.depth import PassThrough
from forerun.sources.trace.inside.parallelize.training_loop import logits_of

_SCHEDULES = {"ZB1P": "InterleavedZeroBubble", "ZBV": "ZBVZeroBubble"}
_V = ("ZBV", "DualPipeV")


def own_stages(plan: Plan, rank: int) -> list[int]:
    """Returns the stages of pipeline rank `rank`: in rounds, or for V schedules down the ranks and up again."""
    if plan.pp_schedule in _V:
        return [rank, 2 * plan.pp - 1 - rank]
    return [rank + turn * plan.pp for turn in range(plan.virtual_stages)]


def stage_sizes(n_layers: int, plan: Plan) -> list[int]:
    """Returns the number of layers of each stage: equal shares, with the remainder in the first stages.

    Raises:
        ImpossiblePlan: there are fewer layers than stages, or `layers_per_stage` doesn't add up to them.
    """
    if plan.layers_per_stage is not None:
        if sum(plan.layers_per_stage) != n_layers or len(plan.layers_per_stage) != plan.n_stages:
            raise ImpossiblePlan(
                f"impossible plan: layers_per_stage {plan.layers_per_stage} does not spread {n_layers} layers over"
                f" {plan.n_stages} stages"
            )
        return list(plan.layers_per_stage)
    # With balance_ends, embedding and head each count as a layer.
    base, more = divmod(n_layers + (2 if plan.balance_ends else 0), plan.n_stages)
    sizes = [base + (stage < more) for stage in range(plan.n_stages)]
    if plan.balance_ends:
        sizes[0] -= 1
        sizes[-1] -= 1
    if min(sizes) < 0 or base == 0:
        raise ImpossiblePlan(f"impossible plan: {n_layers} layers do not spread over {plan.n_stages} stages")
    return sizes


def cut_stage(model: nn.Module, layers: Sequence[nn.Module], plan: Plan, stage: int) -> None:
    """Removes from `model` everything that does not belong to `stage`, in place.

    Raises:
        ForerunError: the model doesn't have its layers in one container.
    """
    if len(layers) != 1:
        raise ForerunError(f"pp {plan.pp}: {type(model).__name__} does not have all its layers in one container")
    front, back = around_layers(model, layers)
    container = layers[0]
    names = list(container._modules)
    ends = list(accumulate(stage_sizes(len(names), plan)))
    first = ends[stage - 1] if stage else 0
    kept = names[first : ends[stage]]
    if isinstance(container, (nn.ModuleList, nn.Sequential)):
        # These containers call their children by number, from 0.
        kept_modules = [container._modules[name] for name in kept]
        container._modules = {str(i): module for i, module in enumerate(kept_modules)}
    else:
        container._modules = {name: container._modules[name] for name in kept}
    if stage > 0:
        _leave_out(model, front)
    if stage < plan.n_stages - 1:
        _leave_out(model, back)


def _leave_out(model: nn.Module, parts: Sequence[nn.Module]) -> None:
    gone = {id(part) for part in parts}
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if id(child) in gone:
                module._modules[name] = PassThrough()


def _explain(part: nn.Module, stage: int, plan: Plan) -> None:
    """Explains the failure of a forward that can't run on the hidden states that a stage receives."""
    forward = part.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise ForerunError(
                f"pp {plan.pp}: the forward of {type(part).__name__} fails in stage {stage}, which lacks parts of the"
                f" model: {type(error).__name__}: {error}; cut the model into stages yourself and use forerun.trace"
            ) from error

    part.forward = call


class _Own(torch.autograd.Function):
    """The same tensor, but not a view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def _no_view(output: Any) -> Any:
    """Prevents `Can't detach views in-place`: schedules that split the backward pass detach what a stage returns, which
    is a view where a model slices its hidden states before a head that the stage lacks."""
    return _Own.apply(output) if isinstance(output, torch.Tensor) and output._is_view() else output


def make_schedule(
    parts: Sequence[nn.Module], stages: Sequence[int], mesh: Any, plan: Plan, loss: Callable[[Any, Any], Any]
) -> Any:
    """Returns the schedule that runs `parts`, which are the `stages` of this rank.

    Raises:
        ImpossiblePlan: PyTorch refuses the number of micro batches or stages.
    """
    for part, number in zip(parts, stages, strict=True):
        _explain(part, number, plan)
        part.register_forward_hook(lambda _module, _inputs, output: _no_view(logits_of(output)))
    device = torch.device("cuda", torch.cuda.current_device())
    made = [
        PipelineStage(part, number, plan.n_stages, device, group=mesh.get_group())
        for part, number in zip(parts, stages, strict=True)
    ]
    name = _SCHEDULES.get(plan.pp_schedule, plan.pp_schedule)
    if plan.pp_schedule == "1F1B" and plan.virtual_stages > 1:
        name = "Interleaved1F1B"
    schedule = get_schedule_class(name)
    several = issubclass(schedule, PipelineScheduleMulti)

    def scaled(output: Any, target: Any) -> Any:
        return loss(output, target) / plan.n_microbatches

    try:
        return schedule(made if several else made[0], plan.n_microbatches, loss_fn=scaled, scale_grads=False)
    except ValueError as error:
        raise ImpossiblePlan(f"impossible plan: pp_schedule {plan.pp_schedule}: {error}") from error
