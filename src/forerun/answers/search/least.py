"""Lower bounds of the memory and times of units, by which most plans are left out before their own units are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from forerun.answers.search.built_units import Key, UnitSizes, UnitTimes
from forerun.answers.search.orders import Groups
from forerun.answers.search.other_fields import OtherFields
from forerun.answers.search.space_table import SpaceTable
from forerun.answers.search.unit_runs import Place, Placed, UnitRuns
from forerun.core.cost.clock import slows_long_kernels
from forerun.core.program.types import I64
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.fsdp_units import EMBEDDING, HEAD

_BUILT = (2, 4)
"""micro batches whose units are built; the memory of larger ones follows, as activations grow with the samples. A layer
may do without a copy of a single sample, so such a micro batch says nothing of others."""
_SURE = 0.999
"""share of that growth that is certain, as the allocator rounds sizes up"""
_TIMED = (2, 16, 128)
"""micro batches whose units are run; those of smaller ones take at least their share of the time"""
_SHARE = 0.995
"""part of that share that is certain, as experts get whole tokens"""
_FEWEST_TOKENS = 256
"""tokens of a rank from which on this holds"""
_UNSPLIT = {"pp_schedule": "1F1B", "virtual_stages": 1}
"""plan fields with which backward passes are whole; units depend on nothing else of them"""


class LeastSizes:
    """Answers a lower bound of the memory of a plan's units, for plans that recompute every layer.

    What a layer keeps is its input, whatever brings tokens to its experts. What its backward pass adds is left out.
    """

    def __init__(self, runs: UnitRuns) -> None:
        self._runs, self._built = runs, cache(_built)

    def prepare(self, placed: Sequence[Placed]) -> None:
        """Builds the units that the bounds of many plans need at once."""
        self._runs.prepare(
            [(built, None) for plan in {plan: None for plan, _ in placed} for built in self._built(plan)]
        )

    def sizes(self, plan: Plan, groups: Groups) -> UnitSizes:
        """Returns the bound for the units of `plan`, in which a split backward pass adds nothing for certain."""
        built = [self._runs.sizes(each) for each in self._built(plan)]
        fewer, sizes = built[0], built[-1]
        if len(built) > 1:
            times = (plan.micro_batch - _BUILT[-1]) / (_BUILT[1] - _BUILT[0])
            kept = _extended(fewer.kept, sizes.kept, times)
            sizes = replace(sizes, kept=kept, backward_rise=_extended(fewer.backward_rise, sizes.backward_rise, times))
        return self._ends_only(sizes, plan.splits_backward)

    @staticmethod
    def _ends_only(sizes: UnitSizes, split: bool) -> UnitSizes:
        """Returns the sizes without the memory that backward passes of layers add. If backward passes are split,
        embedding and head add none either.
        """
        rise = np.zeros_like(sizes.backward_rise)
        if not split:
            rise[[EMBEDDING, HEAD]] = sizes.backward_rise[[EMBEDDING, HEAD]]
        return replace(sizes, backward_rise=rise)


class LeastTimes:
    """Answers lower bounds of the times of units.

    The more samples a micro batch has, the less time a unit takes for each: kernels and collectives have a part that
    does not grow, and larger ones are no less efficient. So the units of a few micro batch sizes stand for those of the
    multiples of these sizes. Where long kernels throttle the device, or the user has measured kernels, each micro batch
    stands for itself. A backward pass takes as long as its input and weight gradients one after the other.
    """

    def __init__(self, runs: UnitRuns) -> None:
        self._runs = runs
        self._most: dict[tuple[Key, Place], int] = {}
        """the largest micro batch of the plans that differ in nothing else that their units depend on"""
        self._with = OtherFields("micro_batch", *_UNSPLIT)
        self._grows_evenly = runs.measured is None and not slows_long_kernels(runs.cluster.device)

    def prepare(self, placed: Sequence[Placed]) -> None:
        """Runs the units that the bounds of many plans need at once."""
        for plan, groups in placed:
            key = self._key(plan, groups)
            self._most[key] = max(self._most.get(key, 0), plan.micro_batch)
        self._runs.prepare([(self._standing(plan, groups), groups) for plan, groups in placed])

    def sizes(self, plan: Plan, groups: Groups) -> UnitSizes:
        """Returns the sizes of the units that stand for those of `plan`; their parameters are the same."""
        return self._runs.sizes(self._standing(plan, groups))

    def times(self, plan: Plan, groups: Groups) -> UnitTimes:
        """Returns the bounds for the units of `plan` with its groups at the places of `groups`."""
        standing = self._standing(plan, groups)
        found, share = self._runs.times(standing, groups), plan.micro_batch / standing.micro_batch
        if share < 1:
            share *= _SHARE
        return UnitTimes(found.forward * share, found.backward * share, found.weights * share)

    def _key(self, plan: Plan, groups: Groups) -> tuple[Key, Place]:
        return self._runs.key(self._built(plan, 1)), self._runs.place(groups)

    def _standing(self, plan: Plan, groups: Groups) -> Plan:
        """Returns the plan whose units stand for those of `plan`."""
        own, most = plan.micro_batch, self._most[self._key(plan, groups)]
        if not self._grows_evenly or own * plan.seq_len < _FEWEST_TOKENS * plan.cp * plan.tp:
            return self._built(plan, own)
        timed = min(most, next((samples for samples in _TIMED if samples >= own), most))
        return self._built(plan, own if timed % own else timed)

    def _built(self, plan: Plan, micro_batch: int) -> Plan:
        return self._with(plan, micro_batch, *_UNSPLIT.values())


def _built(plan: Plan) -> tuple[Plan, ...]:
    """Returns the plans whose units are built for `plan`: itself, or those of smaller micro batches."""
    plan = replace(plan, dispatcher="auto", expert_overlap=False, **_UNSPLIT)  # type: ignore[arg-type]
    if plan.micro_batch <= _BUILT[-1] or plan.activation_offload:  # whole tensors are offloaded
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
    """Returns the bytes of larger micro batches: those of `more`, plus `times` the difference of `more` and `fewer`.

    A peak is the largest of sums that grow or shrink evenly with the samples, so it lies above the line through two of
    its values.
    """
    growth = more - fewer
    grown: I64 = np.maximum(0, more + np.where(growth > 0, growth * _SURE, growth) * times).astype(np.int64)
    return grown
