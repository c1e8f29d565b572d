"""The bytes that data parallelism moves between ranks for a unit, for `build` and for the bounds of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from forerun.common.units import MIB
from forerun.core.program.types import Collective
from forerun.describe.plan import rules
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.stack import Stack
from forerun.sources.symbolic.shapes import ceil_div
from forerun.sources.symbolic.weights import Weights


@dataclass(frozen=True, slots=True)
class Exchange:
    """Tensors that collectives of one kind move over one mesh axis."""

    kind: Collective
    axis: str
    tensors: Sequence[int]
    """elements of each tensor"""
    element_bytes: float

    @property
    def size_bytes(self) -> float:
        """Returns the bytes of all tensors."""
        return sum(self.tensors) * self.element_bytes


# -- shards ----------------------------------------------------------------------------------------------------


def shard_axis(plan: Plan, experts: bool) -> str:
    """Returns the mesh axis whose ranks shard one copy of the dense parameters, or of the experts."""
    return "dp_expert" if experts and plan.experts_apart else "dp_shard"


def replica_axis(plan: Plan, experts: bool) -> str:
    """Returns the mesh axis of all ranks that hold the same dense parameters or experts, in shards or whole."""
    return "dp_expert_all" if experts and plan.experts_apart else "dp_all"


def parts(weights: Weights) -> list[tuple[bool, list[int]]]:
    """Returns (whether they are experts, elements of each tensor) for the parameters that move together."""
    dense = (False, [*weights.matrices, *weights.vectors])
    return [dense, (True, weights.experts)] if weights.experts else [dense]


def sharded(elements: int, ranks: int) -> int:
    """Returns the elements of one of `ranks` equal shards, with padding."""
    return ceil_div(elements, ranks)


def shard_elements(plan: Plan, weights: Weights) -> int:
    """Returns the elements of `weights` on one rank: its shards and the tensors that stay whole.

    Experts are sharded over the ranks that expert parallelism leaves.
    """
    experts = sharded(weights.expert, max(1, plan.expert_ranks)) if weights.experts else 0
    whole = sum(whole_tensors(plan, weights))
    return sharded(weights.dense - whole, plan.state_ranks) + whole + experts


def whole_tensors(plan: Plan, weights: Weights) -> list[int]:
    """Returns the elements of each tensor that is too small for ZeRO-3 to shard; experts are always sharded."""
    if not plan.shards_parameters:
        return []
    least = plan.shard_min_mib * MIB / rules.DTYPE_BYTES[plan.master_dtype]
    return [size for size in (*weights.matrices, *weights.vectors) if size < least]


def gathered_weights(plan: Plan, stack: Stack, weights: Weights) -> Weights:
    """Returns those of `weights` that are sharded between passes: the plan or the stack may leave small ones whole."""
    return _larger(weights, {*whole_tensors(plan, weights)}, stack.persistent_elements)


def _larger(weights: Weights, whole: set[int], least: int = 0) -> Weights:
    if not whole and not least:
        return weights
    matrices, vectors = (
        [size for size in sizes if size > least and size not in whole] for sizes in (weights.matrices, weights.vectors)
    )
    return replace(weights, matrices=matrices, vectors=vectors)


# -- frozen parameters -----------------------------------------------------------------------------------------


def frozen_bytes(plan: Plan, weights: Weights) -> tuple[float, int]:
    """Returns the bytes of the frozen parameters outside experts, and of experts, on a rank that holds them whole."""
    if not weights.freezes:
        return 0.0, 0
    wide = int(rules.weight_bytes(plan))
    dense = sum(weights.frozen) * rules.frozen_matrix_bytes(plan) + sum(weights.frozen_wide) * wide
    return dense, sum(weights.frozen_experts) * wide


def held_frozen_bytes(plan: Plan, weights: Weights) -> float:
    """Returns the bytes of frozen parameters that a rank keeps between passes."""
    dense, experts = frozen_bytes(plan, weights)
    if not plan.shards_parameters:
        return dense + experts
    return dense / plan.state_ranks + experts / max(1, plan.expert_ranks)


# -- bytes -----------------------------------------------------------------------------------------------------


def gathered_bytes(plan: Plan, weights: Weights) -> int:
    """Returns the bytes of a unit's unsharded parameters."""
    frozen = round(sum(frozen_bytes(plan, weights)))
    return _gathered_dense_bytes(plan, weights) + weights.expert * int(rules.weight_bytes(plan)) + frozen


def _gathered_dense_bytes(plan: Plan, weights: Weights) -> int:
    """Returns the bytes of the gathered dense parameters; matrices that are gathered in fp8 take a byte an element."""
    narrow = sum(weights.matrices) - weights.wide if plan.fp8_all_gather else 0
    size = int(rules.weight_bytes(plan))
    return weights.dense * size - narrow * (size - 1)


# -- exchanges -------------------------------------------------------------------------------------------------


def gathers(plan: Plan, stack: Stack, weights: Weights) -> list[Exchange]:
    """Returns the exchanges that gather the parameters of a unit."""
    dense = _gathered_dense_bytes(plan, weights) / max(1, weights.dense)
    trained = [
        Exchange(
            Collective.ALL_GATHER, shard_axis(plan, expert), tensors, rules.weight_bytes(plan) if expert else dense
        )
        for expert, tensors in parts(gathered_weights(plan, stack, weights))
    ]
    return _with_frozen(plan, weights, trained) if weights.freezes else trained


def _with_frozen(plan: Plan, weights: Weights, trained: list[Exchange]) -> list[Exchange]:
    """Returns the exchanges of trained parameters with the frozen ones, which go in the same collectives."""
    of_axis: dict[str, tuple[list[int], float]] = {each.axis: ([*each.tensors], each.size_bytes) for each in trained}
    dense, experts = frozen_bytes(plan, weights)
    frozen = ((False, [*weights.frozen, *weights.frozen_wide], dense), (True, weights.frozen_experts, experts))
    for expert, tensors, size in frozen:
        axis = shard_axis(plan, expert)
        own, own_size = of_axis.get(axis, ([], 0.0))
        of_axis[axis] = ([*own, *tensors], own_size + size)
    return [
        Exchange(Collective.ALL_GATHER, axis, tensors, size / sum(tensors))
        for axis, (tensors, size) in of_axis.items()
        if sum(tensors)
    ]


def reductions(plan: Plan, stack: Stack, weights: Weights) -> list[Exchange]:
    """Returns the exchanges that reduce the gradients of `weights`.

    Gradients are reduce-scattered over the ranks that shard one copy of the weights, or all-reduced over all ranks that
    hold the same weights. Gradients of parameters that stay whole are always all-reduced.
    """
    element = rules.DTYPE_BYTES[rules.reduce_dtype(plan, stack)] * weights.gradient_ratio
    if rules.gathers_parameters(plan, stack) or rules.scatters_gradients(plan, stack):
        whole = whole_tensors(plan, weights)
        of_shards = [
            Exchange(Collective.REDUCE_SCATTER, shard_axis(plan, expert), tensors, element)
            for expert, tensors in parts(_larger(weights, set(whole)))
        ]
        return of_shards + [Exchange(Collective.ALL_REDUCE, shard_axis(plan, False), whole, element)] * bool(whole)
    return [
        Exchange(Collective.ALL_REDUCE, replica_axis(plan, expert), tensors, element)
        for expert, tensors in parts(weights)
    ]
