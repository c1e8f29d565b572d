"""Bounds of all plans of a space at once: memory first, then time of what may fit.

What plans share (`Shared`) is found once; what is left for each plan is arithmetic on columns. Nothing here may exceed
what a simulation of the same plan gives: what is discarded can't fit, and what is put last can't win.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.answers.search.shared import Shared
from forerun.answers.search.space_table import SpaceTable
from forerun.answers.search.state_bytes import StateBytes, States, sizes
from forerun.answers.search.table import PlanTable
from forerun.answers.search.unit_runs import UnitRuns
from forerun.core.cost.memory_bound import memory_rates
from forerun.core.cost.step_costs import rates_of
from forerun.core.memory.outside import context_bytes, least_communicator_bytes
from forerun.core.memory.reserved import reserve_model
from forerun.core.program.types import F64
from forerun.describe.model.parameters import layer_parameters, outer_parameters
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.constraints import Plans
from forerun.describe.plan.stack import load_stack
from forerun.sources.symbolic.schedule import SPLIT

CAUSES = ("parameter", "gradient", "optimizer", "activation", "unsharded")
"""categories of memory that a bound knows apart"""
_CHUNK = 1 << 16
_US = 1e-6
Parts = tuple[F64 | float, ...]
"""allocated bytes by CAUSES, each (n,) or one value"""


@dataclass(frozen=True)
class Screened:
    """Bounds of the plans of a table, each (n,)."""

    need_bytes: F64
    """what has to be there for the first rank, at least: what is allocated, and what the allocator loses when memory is
    short"""
    held_bytes: F64
    """reserved memory of the first rank, at least, where there is plenty: what is allocated"""
    cause: npt.NDArray[np.uint8]
    """the largest of CAUSES in it"""
    cause_bytes: F64
    too_large: npt.NDArray[np.bool_]
    time_s: F64
    """seconds of a step, at least; 0 of what is too large"""


@dataclass(frozen=True)
class _Own:
    """Columns of the plans of a chunk that come from their kinds, each (n,)."""

    first: F64
    most: F64
    least: F64
    end_s: F64


class Screening:
    """Bounds of the plans of one model and stack on a cluster."""

    def __init__(self, runs: UnitRuns, stack: str) -> None:
        self.runs, self.stack = runs, load_stack(stack)
        self.states = StateBytes(self.stack)
        self._dense, self._experts = _all_elements(runs.model)
        cluster = runs.cluster
        self._available = float(cluster.device.memory_bytes - context_bytes(self.stack))
        self._communicator = least_communicator_bytes(cluster)
        rates, self.rates = memory_rates(cluster.device), rates_of(cluster, self.stack)
        bytes_per_s = min(rates.bytes_per_s * self.rates.memory, rates.peak_bytes_per_s)
        self.s_per_byte = 0.0 if runs.measured is not None else 1.0 / bytes_per_s
        """of kernels; nothing is certain where the user has measured them"""
        self.host_s_per_byte = 1.0 / (rates.host_fraction * cluster.host_bytes_per_s)

    def run(self, table: SpaceTable) -> Screened:
        """Bounds of every plan of `table`."""
        n = len(table)
        out = Screened(np.zeros(n), np.zeros(n), np.zeros(n, np.uint8), np.zeros(n), np.zeros(n, np.bool_), np.zeros(n))
        for first in range(0, n, _CHUNK):  # what needs no units
            chunk = slice(first, min(first + _CHUNK, n))
            plans = table.rows(chunk)
            states = self.states.of(plans, self._dense / plans.pp / plans.tp, self._experts / plans.pp / plans.ep)
            self._note(out, np.arange(chunk.start, chunk.stop), _at_the_end(states), states.resident, 0)
        left = np.flatnonzero(~out.too_large)
        if not len(left):
            return out
        some = table.take(left)
        shared = Shared(some, self.runs, self.states, self.s_per_byte)
        held = shared.held(0), shared.held(1)
        for first in range(0, len(left), _CHUNK):
            part = slice(first, min(first + _CHUNK, len(left)))
            rows, plans, kind = left[part], some.rows(part), shared.kind[part]
            elements = shared.elements
            own = _Own(elements.first[:, kind], elements.most[:, kind], elements.least[:, kind], shared.end_s[kind])
            states = self.states.of(plans, *own.first)
            resident = self.states.of(plans, *own.most).resident + self._beside(own.most)
            groups = self._groups(plans)
            self._note(out, rows, _at_the_end(states), resident, groups)
            for which in held:
                columns = [column[kind] for column in which]
                self._note(out, rows, self._at_backward(plans, states, own, *columns), resident, groups)
            out.time_s[rows] = np.where(out.too_large[rows], 0.0, self._time_s(plans, own))
        return out

    # -- memory ------------------------------------------------------------------------------------------------

    def _note(self, out: Screened, rows: npt.NDArray[np.int64], parts: Parts, resident: F64, groups: F64 | int) -> None:
        """Keep what `rows` need at a moment where it is more than what they needed before.

        `resident` is what lives through the step at most, on any rank: the allocator loses a share of the rest.
        """
        columns = np.array(np.broadcast_arrays(*parts, out.time_s[rows])[:-1])
        total = columns.sum(axis=0)
        out.held_bytes[rows] = np.maximum(out.held_bytes[rows], total)
        total = total + reserve_model().least_slack * np.maximum(0.0, total - resident)
        more = total > out.need_bytes[rows]
        cause = np.argmax(columns, axis=0)
        out.cause[rows] = np.where(more, cause, out.cause[rows])
        out.cause_bytes[rows] = np.where(more, columns.max(axis=0), out.cause_bytes[rows])
        out.need_bytes[rows] = np.where(more, total, out.need_bytes[rows])
        out.too_large[rows] |= total > self._available - groups * self._communicator

    def _groups(self, plans: PlanTable) -> F64:
        """Communicators that a plan has at least."""
        axes = (plans.dp_replicate * plans.fsdp, plans.tp, plans.cp, plans.pp)
        out: F64 = np.sum(np.broadcast_arrays(*(np.asarray(axis) > 1 for axis in axes)), axis=0)
        return out

    def _beside(self, elements: F64) -> F64 | float:
        """Bytes that further lives through a step, at most."""
        total, out = elements.sum(axis=0), 0.0
        out += total * 4 if self.stack.bucket_copies else 0.0
        return out + (total * 2 if self.stack.dummy_weight_grads else 0.0)

    def _at_backward(
        self, plans: PlanTable, states: States, own: _Own, alive: F64, gradients: F64, unit: F64, counts: F64
    ) -> Parts:
        """When the first rank starts a backward pass that holds `alive` bytes of activations.

        `gradients` elements have been added up for earlier micro batches; FSDP in a pipeline keeps them whole, and
        parameters too unless it frees them after each use.
        """
        sharded = (plans.zero_stage == 3) & (plans.fsdp > 1)
        once = (plans.pp > 1) & (plans.reshard_after_forward != "always")
        gathered = np.where(sharded, np.where(once, own.first.sum(axis=0), unit), 0.0)
        sums = np.where((plans.zero_stage == 3) & ((plans.pp == 1) | (plans.fsdp == 1)), 0.0, gradients)
        sums = sums / np.where(plans.zero_stage == 2, plans.fsdp, 1) * (counts > 1)
        if self.states.persistent:
            sums = sums * 0.0
        weight = np.where(plans.fp8_all_gather, 1, self.states.weight_bytes(plans))
        gradient = states.gradient + sums * self.states.sum_bytes(plans)
        return states.parameter, gradient, states.optimizer, alive, gathered * weight

    # -- time --------------------------------------------------------------------------------------------------

    def _time_s(self, plans: PlanTable, own: _Own) -> F64:
        """The passes of the first rank, then its optimizer; of split schedules those of the rank that ends last."""
        split = np.zeros(plans.length, np.bool_)
        for schedule in SPLIT:
            split |= plans.pp_schedule == schedule
        split &= plans.pp > 1
        states = self.states.of(plans, *np.where(split, own.least, own.first))
        out: F64 = own.end_s + self.optimizer_s(plans, states)
        return out

    def optimizer_s(self, plans: Plans, states: States) -> F64:
        """Seconds of the optimizer step of a rank with these states, at least.

        It reads weights, gradient and state and writes weights and state, on the GPU or over the host's link.
        """
        kept = self.states.optimizer_bytes(plans) + sizes(plans.master_dtype)
        on_gpu = states.local * (2 * kept + 2) * self.s_per_byte
        copies = 2 * states.local * kept * self.host_s_per_byte
        moved = np.where(
            plans.offload == "none", on_gpu, np.where(plans.offload == "optimizer", on_gpu + copies, copies)
        )
        out: F64 = moved + self.stack.step_us * _US
        return out


def _at_the_end(states: States) -> Parts:
    """When all gradients are there."""
    return states.parameter, states.gradient + states.reduced, states.optimizer, 0.0, 0.0


def _all_elements(model: ModelSpec) -> tuple[float, float]:
    """Parameters of the model: not of experts, and of experts."""
    parts = [layer_parameters(model, layer) for layer in range(model.n_layers)]
    experts = float(sum(part.get("experts", 0) for part in parts))
    everything = sum(sum(part.values()) for part in parts) + sum(outer_parameters(model).values())
    return everything - experts, experts
