"""Computes a lower bound of the step time of one plan, close to the time that a simulation gives.

The pipeline's schedule runs with the times of units simulated alone, with its transfers, and with the gathers of
parameters that a unit waits for; then come the last reduction of gradients and the optimizer. Everything else that a
simulation models, such as the host and the slowing of kernels by collectives, only adds time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.answers.search.built_units import TurnUnits, UnitSizes, UnitTimes
from forerun.answers.search.orders import Groups
from forerun.answers.search.pipelines import STAGED, Pipeline, StageTimes
from forerun.answers.search.screening import RankStates, Screening
from forerun.answers.search.shared import accumulated_bytes
from forerun.core.cost.op_costs import on_topology
from forerun.core.cost.profile import load_profile
from forerun.core.network.host_path import host_path_s_per_byte
from forerun.core.network.lines import Lines
from forerun.core.network.nccl import collective_lines
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import F64, Collective
from forerun.describe.plan import rules
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.exchanges import Exchange, gathered_bytes, gathers, reductions, shard_axis, shard_elements
from forerun.sources.symbolic.fsdp_units import EMBEDDING, HEAD
from forerun.sources.symbolic.repeated_turns import TurnKind, turn_counts
from forerun.sources.symbolic.states import clipping_bytes


@dataclass(frozen=True, slots=True)
class _Around:
    """Seconds of data parallelism around units by UnitKind, (n_unit_kinds,)."""

    gather: F64
    """gathering of parameters"""
    load: F64
    """copies of offloaded parameters from the host before they are gathered"""
    copy: F64
    """kernels that copy the unsharded parameters out"""
    reduce: F64
    """reduction of gradients over all ranks that share them"""
    again: F64
    """kernels that add the gradients of a micro batch to the earlier ones"""


class TimeBound:
    """Computes lower bounds of the step time of the plans of one screening."""

    def __init__(self, screening: Screening) -> None:
        self._screening, self._runs, self._stack = screening, screening.runs, screening.stack
        self._pipelines: dict[tuple[object, ...], Pipeline] = {}
        self._ends: dict[tuple[object, ...], F64] = {}
        self._lines: dict[tuple[object, ...], Lines] = {}

    def least_step_s(self, plan: Plan, groups: Groups) -> float:
        """Returns a lower bound, in seconds, of a step of `plan` with its groups at the places of `groups`."""
        units, size = self._runs.times(plan, groups), self._runs.sizes(plan)
        pipeline = self._pipeline(plan)
        around = self._around(plan, groups, size)
        end = self._end_s(plan, groups, units, size, pipeline, around)
        if plan.expert_overlap:
            end = np.maximum(end, self._beside_s(plan, groups, units, pipeline))
        first, fewest = self._elements(pipeline, size)
        least, own = (self._after_s(plan, groups, *elements) for elements in (fewest, first))
        last = 0.0 if pipeline.split else float(around.reduce[EMBEDDING])
        stream = self._stream_s(plan, pipeline, around)
        return max(float(end.max()) + least, float(end[0]) + last + own, stream + own)

    def _pipeline(self, plan: Plan) -> Pipeline:
        key = tuple(getattr(plan, name) for name in STAGED)
        if key not in self._pipelines:
            self._pipelines[key] = Pipeline(self._runs.model, plan)
        return self._pipelines[key]

    def _elements(self, pipeline: Pipeline, size: UnitSizes) -> tuple[tuple[float, float], tuple[float, float]]:
        """Returns the dense and expert elements of the first rank, and of the rank with the fewest."""
        dense, experts = pipeline.elements(size.dense, size.tied_elements), pipeline.elements(size.experts, 0.0)
        return (float(dense[0]), float(experts[0])), (float(dense.min()), float(experts.min()))

    # -- collectives -------------------------------------------------------------------------------------------

    def _collective_s(self, kind: Collective, groups: Groups, axis: str, size_bytes: F64 | float) -> F64:
        """Returns the seconds of collectives of `size_bytes`; 0 if the user has measured collectives."""
        size, group = np.asarray(size_bytes, np.float64), groups[axis]
        if self._runs.measured is not None or group.size == 1:
            return np.zeros_like(size)
        n_gpus = _ranks(groups)
        out: F64 = self._lines_of(kind, group, n_gpus).seconds(size) / self._screening.rates.network
        if self._runs.network is None:
            out = np.maximum(out, size * host_path_s_per_byte(kind, group, self._runs.cluster, n_gpus))
        return np.where(size > 0, out, 0.0)

    def _lines_of(self, kind: Collective, group: CommGroup, n_gpus: int) -> Lines:
        runs = self._runs
        key = (kind, group if runs.network is not None else (group.nodes, group.ranks_per_node))
        if key not in self._lines:
            if runs.network is not None:
                self._lines[key] = on_topology(runs.network, runs.cluster, n_gpus).lines(kind, group)
            else:
                measured = load_profile(runs.cluster.device.cost_profile).collectives
                self._lines[key] = collective_lines(kind, group.nodes, group.ranks_per_node, runs.cluster, measured)
        return self._lines[key]

    def _exchanges_s(self, groups: Groups, of_units: Sequence[Sequence[Exchange]]) -> F64:
        """Returns the seconds of the exchanges of each unit, one after the other, by UnitKind, (n_unit_kinds,)."""
        sizes: dict[tuple[int, Collective, str], F64] = {}
        for kind, exchanges in enumerate(of_units):
            for number, each in enumerate(exchanges):
                column = sizes.setdefault((number, each.kind, each.axis), np.zeros(len(of_units)))
                column[kind] = each.size_bytes
        times = [self._collective_s(kind, groups, axis, column) for (_, kind, axis), column in sizes.items()]
        return sum(times, np.zeros(len(of_units)))

    def _around(self, plan: Plan, groups: Groups, size: UnitSizes) -> _Around:
        stack, per_byte = self._stack, self._screening.s_per_byte
        gather = load = copy = again = np.zeros(len(size.kept))
        if plan.shards_parameters:
            gather = self._exchanges_s(groups, [gathers(plan, stack, weights) for weights in size.weights])
            if plan.offload == "params":
                shard = np.array([shard_elements(plan, weights) for weights in size.weights])
                load = shard * rules.element_bytes(plan.master_dtype) * self._screening.host_s_per_byte
            if stack.fsdp == "fsdp2":
                copy = np.array([2.0 * gathered_bytes(plan, weights) * per_byte for weights in size.weights])
        if rules.accumulates(plan, stack):
            again = (size.dense + size.experts) * accumulated_bytes(plan, stack) * per_byte
        reduce = self._exchanges_s(groups, [reductions(plan, stack, weights) for weights in size.weights])
        if self._joins_ends(plan):  # the head's weights are exchanged with the embedding's, tied ones once
            for column in (gather, load, copy, reduce):
                column[HEAD] = 0.0
        return _Around(gather, load, copy, reduce, again)

    # -- passes ------------------------------------------------------------------------------------------------

    def _joins_ends(self, plan: Plan) -> bool:
        """Returns whether embedding and head are one unit, gathered before the first pass until the end of the last."""
        return bool(self._stack.joint_ends and plan.uses_fsdp and plan.pp == 1)

    def _reshards(self, plan: Plan) -> bool:
        return plan.reshards and not self._stack.parametrized  # it keeps parameters that no checkpoint gathers again

    def _end_s(
        self, plan: Plan, groups: Groups, units: UnitTimes, size: UnitSizes, pipeline: Pipeline, around: _Around
    ) -> F64:
        """Returns the seconds at which each rank's last pass ends, (pp,)."""
        border = self._border_s(plan, groups, size, pipeline)
        gathers, reshards = plan.shards_parameters, self._reshards(plan)
        opening = around.gather + around.load
        gathered = (opening.tobytes(), reshards, plan.prefetch) if gathers else ()
        key = (id(units), id(pipeline), plan.n_microbatches, border.tobytes(), around.again.tobytes(), gathered)
        if key not in self._ends:
            plain = self._stack.fsdp == "simple" or plan.prefetch != 1
            waits = np.zeros_like(opening) if plain else opening
            first = pipeline.chained_s(units.forward + around.copy, waits + around.copy, backward=False)
            once = plan.pp > 1 and not reshards
            later = pipeline.counts @ units.forward if once else first
            back = pipeline.counts @ units.backward
            if gathers and reshards:  # the last unit's parameters are still gathered
                copy = around.copy.copy()
                if self._joins_ends(plan):
                    copy[EMBEDDING] = 0.0
                    waits = np.where(np.arange(len(waits)) == EMBEDDING, 0.0, waits)
                back = pipeline.chained_s(units.backward + copy, waits + copy, backward=True)
                back[-1] -= copy[HEAD]
            times = StageTimes(
                first, later, back, pipeline.counts @ units.weights, pipeline.counts @ around.again, border
            )
            self._ends[key] = pipeline.run(times, plan.n_microbatches, not self._stack.p2p_overlap)
        return self._ends[key]

    def _beside_s(self, plan: Plan, groups: Groups, units: UnitTimes, pipeline: Pipeline) -> F64:
        """Returns the least seconds at which each rank's last pass ends, (pp,), by the turns of one rank after another.

        A rank starts when one micro batch has come through the stages before its first; after its last backward pass
        through that stage the gradients go back through the stages before.
        """
        counts = [turn_counts(plan, rank) for rank in range(plan.pp)]
        kinds = {turn: _turn_units(pipeline, turn) for count in counts for turn in count}
        every = list(dict.fromkeys(kinds.values()))
        seconds = dict(zip(every, self._runs.turns(plan, groups, every).tolist(), strict=True))
        end = np.array([sum(n * seconds[kinds[turn]] for turn, n in count.items()) for count in counts])
        if plan.stage_copies > 1:
            return end
        forward, backward = pipeline.counts @ units.forward, pipeline.counts @ units.backward
        end[1:] += np.cumsum(forward[: plan.pp - 1])
        if pipeline.split:
            return end
        end[1:] += np.cumsum(backward[: plan.pp - 1])
        end[0] = end.max()
        return end

    def _border_s(self, plan: Plan, groups: Groups, size: UnitSizes, pipeline: Pipeline) -> F64:
        """Returns the seconds of a transfer over the border after each stage, (n_stages,)."""
        out = np.zeros(pipeline.n_stages)
        if plan.pp == 1:
            return out
        here, there = pipeline.rank[:-1], pipeline.rank[1:]
        per_node = groups["pp"].ranks_per_node
        near, far = (
            float(self._collective_s(Collective.SEND_RECV, groups, axis, size.border_bytes))
            for axis in ("pp_near", "pp_far")
        )
        out[:-1] = np.where(here // per_node == there // per_node, near, far) * (here != there)
        return out

    def _stream_s(self, plan: Plan, pipeline: Pipeline, around: _Around) -> float:
        """Returns the seconds of all gathers and reductions of the first rank, which run one after the other.

        So do copies of offloaded parameters from the host, beside earlier gathers if FSDP prefetches several units.
        """
        counts = pipeline.on_ranks[0]
        reduced = float(counts @ around.reduce)
        if not plan.shards_parameters:
            return reduced
        m, reshards = plan.n_microbatches, self._reshards(plan)
        uses = counts * (1 if plan.pp > 1 and not reshards else m)
        if reshards:
            again = counts * m
            again[EMBEDDING if self._joins_ends(plan) else HEAD] -= m * pipeline.both_ends
            uses = uses + again
        gathered, loaded = float(uses @ around.gather), float(uses @ around.load)
        reduced *= m if rules.reduces_every_microbatch(plan, self._stack) else 1
        return max(gathered + reduced, loaded) if plan.prefetch > 1 else gathered + loaded + reduced

    # -- the end -----------------------------------------------------------------------------------------------

    def _after_s(self, plan: Plan, groups: Groups, dense: float, experts: float) -> float:
        """Returns the seconds of gradient clipping, the optimizer, and gathering updated parameters, on a rank with
        `dense` and `experts` elements."""
        stack, screening = self._stack, self._screening
        local = float(RankStates.of(plan, stack, np.float64(dense), np.float64(experts)).local)
        out = float(screening.optimizer_s(plan, np.float64(local)))
        if stack.clip_grad:
            out += local * sum(clipping_bytes(screening.update_gradient_bytes(plan))) * screening.s_per_byte
        if plan.gathers_updates and not stack.owner_broadcast_us:
            for expert, elements in ((False, dense), (True, experts)):
                moved = elements * rules.weight_bytes(plan)
                out += float(self._collective_s(Collective.ALL_GATHER, groups, shard_axis(plan, expert), moved))
        return out


def _turn_units(pipeline: Pipeline, turn: TurnKind) -> TurnUnits:
    """Returns the passes of `turn`, each with the units of its stage in model order."""
    starts = pipeline.starts
    return tuple((kind, tuple(pipeline.units[starts[at] : starts[at + 1]].tolist())) for kind, at in turn)


def _ranks(groups: Groups) -> int:
    """Returns the number of ranks of the whole mesh."""
    return groups["tp"].size * groups["dp_all"].size * groups["pp"].size
