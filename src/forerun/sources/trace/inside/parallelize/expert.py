"""Expert parallelism: spreads the experts of a layer over ranks and sends tokens to them and back.

It fits modules that hold all experts of a layer as stacked weights (experts first) and that are called with the tokens
in order of experts, and the number of tokens of each: `experts(x, tokens_per_expert)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from forerun.common.errors import ForerunError
from forerun.describe.plan.plan import Plan
from forerun.sources.trace.inside.parallelize.mesh import Meshes
from forerun.sources.trace.inside.parallelize.tensor import LocalWeights

_STEEPEST, _HALVINGS = 16.0, 40


def grouped_experts(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that hold stacked experts: their weights are 3-D with the same first dimension, and their
    forward takes two inputs."""
    found = []
    for module in model.modules():
        weights = list(module.parameters(recurse=False))
        if not weights or any(w.dim() != 3 for w in weights) or len({w.shape[0] for w in weights}) != 1:
            continue
        needed = [
            p
            for p in inspect.signature(module.forward).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if len(needed) == 2:
            found.append(module)
    return found


def expert_parallel(model: nn.Module, meshes: Meshes, plan: Plan) -> set[nn.Module]:
    """Spreads the experts of `model` over the ep axis and returns the modules that it split.

    Raises:
        ForerunError: the model has no such experts, or ep does not divide their number.
    """
    found = grouped_experts(model)
    if not found:
        raise ForerunError(
            f"ep {plan.ep}: {type(model).__name__} has no module with stacked experts that is called as"
            " experts(tokens, tokens_per_expert)"
        )
    mesh = meshes.experts()
    placements = [Shard(0), Replicate()][: mesh.ndim]
    for module in found:
        n_experts = next(module.parameters(recurse=False)).shape[0]
        if n_experts % plan.ep:
            raise ForerunError(f"{n_experts} experts are not divisible by ep {plan.ep}")
        for name, weight in list(module.named_parameters(recurse=False)):
            split = distribute_tensor(weight, mesh, placements, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(split, weight.requires_grad))
        exchange = _Exchange(meshes.axis("ep"), n_experts)
        module.register_forward_pre_hook(exchange.dispatch)
        module.register_forward_hook(exchange.combine)
        # The ranks of a tp group have different tokens, so each has a partial sum of the gradient.
        LocalWeights([Shard(0), Partial()][: mesh.ndim]).attach(module)
    return set(found)


class _Exchange:
    """The all-to-all exchanges of tokens around the experts of one layer, and the counts that they need."""

    def __init__(self, mesh: Any, n_experts: int) -> None:
        self.mesh, self.size, self.n_local = mesh, mesh.size(), n_experts // mesh.size()
        self._sent: list[int] = []
        self._received: list[int] = []
        self._order: torch.Tensor | None = None
        self._shape: Sequence[int] = ()

    def dispatch(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tokens of all ranks for this rank's experts, in order of experts, and how many each expert
        has."""
        tokens, counts = inputs[0], inputs[1]
        with torch.no_grad():
            theirs = all_to_all_single(counts, None, None, group=self.mesh)
            theirs = torch.ops._c10d_functional.wait_tensor(theirs)
            self._sent = counts.view(self.size, -1).sum(dim=1).to("cpu", non_blocking=True).tolist()
            self._received = theirs.view(self.size, -1).sum(dim=1).to("cpu").tolist()
        here = all_to_all_single_autograd(tokens, self._received, self._sent, self.mesh)
        with torch.no_grad():
            self._order = _by_expert(theirs, self.size, self.n_local)
            local = theirs.view(self.size, self.n_local).sum(dim=0)
        self._shape = here.shape
        return here[self._order], local

    def combine(self, _module: nn.Module, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
        """Returns the results to the ranks whose tokens they are, in the original order."""
        back = out.new_empty((self._shape[0], *out.shape[1:]))
        back[self._order] = out
        self._order = None
        return all_to_all_single_autograd(back, self._sent, self._received, self.mesh)


def _by_expert(counts: torch.Tensor, size: int, n_local: int) -> torch.Tensor:
    """Returns the places of each expert's tokens among the arrived tokens, which are in the order of ranks."""
    expert = torch.arange(n_local, device=counts.device).repeat(size)
    return torch.argsort(torch.repeat_interleave(expert, counts), stable=True)


def skew_of(imbalance: float, n_experts: int, ranks: int) -> float:
    """Returns the exponent s for which the busiest of `ranks` ranks (the first) gets `imbalance` times the mean number
    of tokens, when expert i is chosen in proportion to 1 / (i + 1)^s. If no exponent gives as much, returns the
    greatest one tried.
    """
    low, high = 0.0, _STEEPEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        weights = [1 / (i + 1) ** middle for i in range(n_experts)]
        share = sum(weights[: n_experts // ranks]) / sum(weights) * ranks
        low, high = (middle, high) if share < imbalance else (low, middle)
    return low
