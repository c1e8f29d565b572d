"""Computes lower bounds of all plans of a space at once: memory first, then the time of plans that may fit.

The figures that plans share (`Shared`) are computed once; the rest is arithmetic on columns. A bound must never exceed
the simulation of the same plan, so that a discarded plan can't fit and a plan that comes last can't win.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.answers.search.least import LeastSizes, LeastTimes, recomputing
from forerun.answers.search.shared import Shared
from forerun.answers.search.space_table import SpaceTable
from forerun.answers.search.table import PlanTable
from forerun.answers.search.unit_runs import UnitRuns
from forerun.common.units import US
from forerun.core.cost.memory_bound import memory_rates
from forerun.core.cost.rates import rates_of
from forerun.core.memory.outside import context_bytes, least_communicator_bytes
from forerun.core.memory.reserved import reserve_model
from forerun.core.memory.workspaces import workspace_bytes
from forerun.core.program.types import F64
from forerun.describe.model.layer_parameters import layer_parameters
from forerun.describe.model.parameters import outer_parameters
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan import rules
from forerun.describe.plan.columns import Column, Plans, no, where
from forerun.describe.stacks.catalog import load_stack
from forerun.describe.stacks.stack import Stack
from forerun.sources.symbolic.states import (
    States,
    least_moment_bytes,
    least_update_of,
    resident_states,
    update_gradient_bytes,
)

CAUSES = ("parameter", "gradient", "optimizer", "activation", "unsharded")
"""categories of memory that a bound distinguishes"""
_CHUNK = 1 << 16
Parts = tuple[F64 | float, ...]
"""allocated bytes for each entry of CAUSES, (n,) or one value each"""


@dataclass(frozen=True)
class Screened:
    """Lower bounds of the plans of a table, each (n,)."""

    need_bytes: F64
    """memory that a rank needs: allocated memory, and the allocator's losses when memory is short"""
    held_bytes: F64
    """reserved memory of a rank when memory is plentiful, which is its allocated memory"""
    cause: npt.NDArray[np.uint8]
    """index of the largest of CAUSES in that memory"""
    cause_bytes: F64
    too_large: npt.NDArray[np.bool_]
    time_s: F64
    """seconds of a step; 0 for plans that are too large"""


@dataclass(frozen=True)
class RankStates:
    """Numbers of elements whose state the ranks of plans hold, each (n,) or one value."""

    local: F64
    """elements that a rank updates"""
    total: F64
    """elements of a rank's parameters before data-parallel sharding"""
    resident: States

    @classmethod
    def of(cls, plans: Plans, stack: Stack, dense: F64, experts: F64) -> RankStates:
        """Returns the states of ranks of `plans` with `dense` and `experts` elements before data-parallel sharding."""
        total = dense + experts
        shards = dense / plans.state_ranks + experts / np.maximum(1, plans.expert_ranks)
        local = where(plans.shards_optimizer, shards, total)
        gradients = total * rules.element_bytes(rules.accumulate_dtype(plans, stack))
        moments = local * least_moment_bytes(plans)
        return cls(local, total, resident_states(plans, stack, total, local, gradients, moments))

    def reduced(self, plans: Plans, stack: Stack) -> Column:
        """Returns the bytes of gradients at the end of the step, without those that stay between steps."""
        buffers = self.total * rules.element_bytes(rules.accumulate_dtype(plans, stack))
        shards = self.local * rules.element_bytes(plans.master_dtype) * (plans.offload != "params")
        whole = buffers * (not rules.keeps_gradient_buffer(stack))
        return where(rules.gathers_parameters(plans, stack), shards, whole)


class Screening:
    """Computes lower bounds of the plans of one model and stack on a cluster."""

    def __init__(self, runs: UnitRuns, stack: str) -> None:
        self.runs, self.stack = runs, load_stack(stack)
        self._dense, self._experts = _all_elements(runs.model)
        cluster = runs.cluster
        self._available = float(cluster.device.memory_bytes - context_bytes(self.stack))
        self._communicator = least_communicator_bytes(cluster)
        self._workspaces = workspace_bytes(self.stack, cluster.device.architecture)
        rates, self.rates = memory_rates(cluster.device), rates_of(cluster, self.stack)
        bytes_per_s = min(rates.bytes_per_s * self.rates.memory, rates.peak_bytes_per_s)
        self.s_per_byte = 0.0 if runs.measured is not None else 1.0 / bytes_per_s
        """least seconds per byte of a kernel; 0 if the user has measured kernels, so that no bound is certain"""
        self.host_s_per_byte = 1.0 / (rates.host_fraction * cluster.host_bytes_per_s)

    def run(self, table: SpaceTable) -> Screened:
        """Computes the bounds of every plan of `table`."""
        out = self._before_units(table)
        left = np.flatnonzero(~out.too_large)
        if len(left):
            some = table.take(left)
            shared = Shared(some, self.runs, self.stack, self.s_per_byte)
            self._memory(out, left, some, shared)
            self._times(out, left, some, shared)
        return out

    def coarse(self, table: SpaceTable) -> Screened:
        """Computes lower bounds of the bounds of every plan of `table`, for which few units are built.

        What a plan recomputes makes it smaller and slower. So the memory is that of the same plan with every layer
        recomputed, and the time that of the same plan without recomputation.
        """
        out = self._before_units(table)
        left = np.flatnonzero(~out.too_large)
        if not len(left):
            return out
        some = table.take(left)
        small = Shared(recomputing(some, "full"), self.runs, self.stack, self.s_per_byte, LeastSizes(self.runs))
        self._memory(out, left, some, small)
        left = np.flatnonzero(~out.too_large)
        if len(left):
            some = table.take(left)
            fast = Shared(recomputing(some, "none"), self.runs, self.stack, self.s_per_byte, LeastTimes(self.runs))
            self._times(out, left, some, fast)
        return out

    def _before_units(self, table: SpaceTable) -> Screened:
        """Computes the bounds that need no units."""
        n = len(table)
        out = Screened(np.zeros(n), np.zeros(n), np.zeros(n, np.uint8), np.zeros(n), np.zeros(n, np.bool_), np.zeros(n))
        for first in range(0, n, _CHUNK):
            chunk = slice(first, min(first + _CHUNK, n))
            plans = table.rows(chunk)
            trained = 1.0 * (plans.lora_rank == 0)  # adapters are so few that their bound is 0
            dense, experts = self._dense / plans.pp / plans.tp, self._experts / plans.pp / (plans.ep * plans.etp)
            states = self._states(plans, dense * trained, experts * trained)
            at_end = self._at_the_end(plans, states)
            self._note(out, np.arange(chunk.start, chunk.stop), at_end, states.resident.total, 0)
        return out

    def _memory(self, out: Screened, left: npt.NDArray[np.int64], some: SpaceTable, shared: Shared) -> None:
        """Raises the memory of the rows `left`, whose plans are `some`, to that with activations."""
        elements, moments = shared.elements, shared.moments
        for first in range(0, len(left), _CHUNK):
            part = slice(first, min(first + _CHUNK, len(left)))
            rows, plans, kind = left[part], some.rows(part), shared.kind[part]
            most = elements.most[:, kind]
            resident = self._states(plans, *most).resident.total + self._beside(plans, most)
            groups = self._groups(plans)
            for moment in moments:
                own, *figures = (column[..., kind] for column in moment)
                states = self._states(plans, *own)
                self._note(out, rows, self._at_the_end(plans, states), resident, groups)
                self._note(out, rows, self._at_backward(plans, states, own, *figures), resident, groups)

    def _times(self, out: Screened, left: npt.NDArray[np.int64], some: SpaceTable, shared: Shared) -> None:
        """Sets the time of the rows `left`, whose plans are `some`."""
        elements = shared.elements
        for first in range(0, len(left), _CHUNK):
            part = slice(first, min(first + _CHUNK, len(left)))
            rows, plans, kind = left[part], some.rows(part), shared.kind[part]
            own = np.where(plans.splits_backward, elements.least[:, kind], elements.first[:, kind])
            out.time_s[rows] = np.where(out.too_large[rows], 0.0, self._time_s(plans, own, shared.end_s[kind]))

    # -- memory ------------------------------------------------------------------------------------------------

    def _note(self, out: Screened, rows: npt.NDArray[np.int64], parts: Parts, resident: F64, groups: F64 | int) -> None:
        """Raises the bounds of `rows` to their memory at one moment of the step where it is larger.

        `resident` is an upper bound of the bytes that last through the step, on any rank: the allocator loses a share
        of the rest.
        """
        columns = np.array(np.broadcast_arrays(*parts, out.time_s[rows])[:-1])
        total = columns.sum(axis=0) + self._workspaces
        out.held_bytes[rows] = np.maximum(out.held_bytes[rows], total)
        total = total + reserve_model().least_slack * np.maximum(0.0, total - resident - self._workspaces)
        more = total > out.need_bytes[rows]
        cause = np.argmax(columns, axis=0)
        out.cause[rows] = np.where(more, cause, out.cause[rows])
        out.cause_bytes[rows] = np.where(more, columns.max(axis=0), out.cause_bytes[rows])
        out.need_bytes[rows] = np.where(more, total, out.need_bytes[rows])
        out.too_large[rows] |= total > self._available - groups * self._communicator

    def _groups(self, plans: PlanTable) -> F64:
        """Returns a lower bound of the number of communicators of each plan, (n,)."""
        axes = (plans.dp_replicate * plans.fsdp, plans.tp, plans.cp, plans.pp)
        out: F64 = np.sum(np.broadcast_arrays(*(np.asarray(axis) > 1 for axis in axes)), axis=0)
        return out

    def _states(self, plans: Plans, dense: F64, experts: F64) -> RankStates:
        """Returns the states of ranks of `plans` with `dense` and `experts` elements before data-parallel sharding."""
        return RankStates.of(plans, self.stack, dense, experts)

    def _beside(self, plans: PlanTable, elements: F64) -> F64:
        """Returns an upper bound of the bytes that stay through a step beside the states, (n,)."""
        copies = rules.element_bytes(rules.reduce_dtype(plans, self.stack)) * rules.keeps_bucket_copies(
            plans, self.stack
        )
        unused = rules.gradient_bytes(plans) * self.stack.dummy_weight_grads
        out: F64 = elements.sum(axis=0) * (copies + unused)
        return out

    def _at_the_end(self, plans: Plans, states: RankStates) -> Parts:
        """Returns the allocated bytes when all gradients exist, at the end of the step."""
        resident = states.resident
        return resident.parameter, resident.gradient + states.reduced(plans, self.stack), resident.optimizer, 0.0, 0.0

    def _at_backward(
        self, plans: PlanTable, states: RankStates, elements: F64, alive: F64, gradients: F64, unit: F64
    ) -> Parts:
        """Returns the allocated bytes when a rank with `elements` starts a backward pass with `alive` bytes of
        activations.

        `gradients` elements of earlier micro batches are accumulated; FSDP in a pipeline keeps them unsharded. FSDP
        without resharding keeps all parameters gathered, unless each use gathers them.
        """
        whole = no(plans.reshards) & (not self.stack.parametrized)
        gathered = where(whole, elements.sum(axis=0), unit) * plans.shards_parameters
        weight = where(plans.fp8_all_gather, 1, rules.weight_bytes(plans))
        summed = rules.accumulates(plans, self.stack) & (not rules.keeps_gradient_buffer(self.stack))
        sums = gradients * summed * rules.element_bytes(rules.accumulate_dtype(plans, self.stack))
        resident = states.resident
        return resident.parameter, resident.gradient + sums, resident.optimizer, alive, gathered * weight

    # -- time --------------------------------------------------------------------------------------------------

    def _time_s(self, plans: PlanTable, elements: F64, end_s: F64) -> F64:
        """Returns the seconds of the passes of a rank with `elements`, which take `end_s`, and optimizer, (n,): of the
        first rank; in split schedules, of the rank that ends last."""
        out: F64 = end_s + self.optimizer_s(plans, self._states(plans, *elements).local)
        return out

    def optimizer_s(self, plans: Plans, local: F64) -> F64:
        """Returns a lower bound, in seconds, of the optimizer step of a rank that updates `local` elements."""
        update = least_update_of(plans, self.stack, self.update_gradient_bytes(plans))
        moved = update.read + update.written
        copies = 2 * update.to_host * self.host_s_per_byte * (plans.offload == "optimizer")
        s_per_element = where(plans.offload == "params", moved * self.host_s_per_byte, moved * self.s_per_byte + copies)
        out: F64 = local * s_per_element + self.stack.step_us * US
        return out

    def update_gradient_bytes(self, plans: Plans) -> Column:
        """Returns the bytes per element of the gradients that the optimizer reads."""
        return update_gradient_bytes(plans, rules.element_bytes(rules.accumulate_dtype(plans, self.stack)))


def _all_elements(model: ModelSpec) -> tuple[float, float]:
    """Returns the number of the model's parameters outside experts, and of experts."""
    parts = [layer_parameters(model, layer) for layer in range(model.n_layers)]
    experts = float(sum(part.get("experts", 0) for part in parts))
    everything = sum(sum(part.values()) for part in parts) + sum(outer_parameters(model).values())
    return everything - experts, experts
