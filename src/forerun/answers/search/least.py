"""Lower bounds of the memory of units, from which many plans are discarded before their own units are built."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from forerun.answers.search.space_table import SpaceTable
from forerun.answers.search.unit_runs import UnitRuns, UnitSizes
from forerun.core.program.types import I64
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.fsdp_units import EMBEDDING, HEAD

_BUILT = (1, 2)
"""micro batches whose units are built; the memory of larger ones follows, as activations grow with the samples"""
_SURE = 0.999
"""share of that growth that is certain, as the allocator rounds sizes up"""


class LeastSizes:
    """Answers a lower bound of the memory of a plan's units, for plans that recompute every layer.

    What a layer keeps is its input, whatever brings tokens to its experts. What its backward pass adds is left out.
    """

    def __init__(self, runs: UnitRuns) -> None:
        self._runs = runs

    def prepare(self, plans: Iterable[Plan]) -> None:
        """Builds the units that the bounds of many plans need at once."""
        self._runs.prepare((built, None) for plan in plans for built in _built(plan))

    def __call__(self, plan: Plan) -> UnitSizes:
        """Returns the bound for the units of `plan`, in which a split backward pass adds nothing for certain."""
        built = [self._runs.sizes(each) for each in _built(plan)]
        fewer, sizes = built[0], built[-1]
        if len(built) > 1:
            times = (plan.micro_batch - _BUILT[-1]) / (_BUILT[1] - _BUILT[0])
            kept = _extended(fewer.kept, sizes.kept, times)
            sizes = replace(sizes, kept=kept, backward_rise=_extended(fewer.backward_rise, sizes.backward_rise, times))
        return self._ends_only(sizes, plan.splits_backward)

    @staticmethod
    def _ends_only(sizes: UnitSizes, split: bool) -> UnitSizes:
        """Returns the sizes without what backward passes of layers add, and those of all units where they are split."""
        rise = np.zeros_like(sizes.backward_rise)
        if not split:
            rise[[EMBEDDING, HEAD]] = sizes.backward_rise[[EMBEDDING, HEAD]]
        return replace(sizes, backward_rise=rise)


def _built(plan: Plan) -> tuple[Plan, ...]:
    """Returns the plans whose units are built for `plan`: itself, or those of smaller micro batches."""
    plan = replace(plan, dispatcher="auto", expert_overlap=False, pp_schedule="1F1B", virtual_stages=1)
    if plan.micro_batch <= _BUILT[-1] or plan.activation_offload:  # its shares are of whole tensors
        return (plan,)
    return tuple(replace(plan, micro_batch=n) for n in _BUILT)


def recomputing(table: SpaceTable, what: str) -> SpaceTable:
    """Returns the plans of `table` with activation checkpointing `what` of whole layers."""
    variants, every = table.variants, np.ones(len(table.variants), np.bool_)
    if not len(variants):
        return table
    variants = variants.with_values("activation_checkpointing", every, what)
    return replace(table, variants=variants.with_values("recompute_modules", every, ()))


def _extended(fewer: I64, more: I64, times: float) -> I64:
    """Returns the bytes of larger micro batches: those of `more`, and what it adds to `fewer`, `times` again."""
    grown: I64 = (more + np.maximum(0, more - fewer) * times * _SURE).astype(np.int64)
    return grown
