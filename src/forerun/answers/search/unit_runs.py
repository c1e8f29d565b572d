"""Simulates the units of a model (embedding, layers, head) alone, for the lower bounds of a step.

Plans that differ only in data or pipeline parallelism share the same units. Their blocks are built once, and run once
for each placement of tensor, context and expert parallelism on the nodes. If many are requested at the same time, local
processes build and run them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import gcd
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from forerun.answers.search.orders import Groups
from forerun.common.processes import Processes
from forerun.common.units import PS_PER_S
from forerun.core.cost.measured import Measured
from forerun.core.cost.step_costs import Launching, StepCosts, step_costs
from forerun.core.engine.simulate import simulate
from forerun.core.memory.profile import rises
from forerun.core.network.network_file import Network
from forerun.core.program.types import F64, I64, N_CATEGORIES, Block, Program, RankClass, Stream
from forerun.core.program.unfold import unfold
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import DEFAULT_ORDER, Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.fsdp_units import UnitKind, Units, build_units, n_unit_kinds
from forerun.sources.symbolic.kernels import MODULES, TransformerKernels
from forerun.sources.symbolic.mesh import groups_of
from forerun.sources.symbolic.schedule import Pass
from forerun.sources.symbolic.segments import exchanges_tokens, in_turns, segments
from forerun.sources.symbolic.weights import Weights

if TYPE_CHECKING:
    from typing_extensions import Self

INSIDE = ("tp", "cp", "etp", "ep")
"""axes of the groups in which units communicate"""
ALONE = {
    "n_microbatches": 1,
    "dp_replicate": 1,
    "pp": 1,
    "pp_schedule": "1F1B",
    "virtual_stages": 1,
    "layers_per_stage": None,
    "balance_ends": False,
    "zero_stage": 0,
    "reshard_after_forward": "default",
    "mesh_order": DEFAULT_ORDER,
    "offload": "none",
}
"""plan fields that units don't depend on, with the values that units run with; dp_shard is as expert parallelism
needs"""
WORTH_A_POOL = 48
"""fewer units than this are built in this process"""


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """The memory of the units of one plan by UnitKind; zero for units that the model lacks."""

    kept: I64
    """bytes that a forward pass leaves allocated, (n_unit_kinds,)"""
    backward_rise: I64
    """bytes by which a backward pass rises above its start, (n_unit_kinds,)"""
    dense: I64
    """elements of the parameters outside experts, on one rank before data-parallel sharding, (n_unit_kinds,)"""
    experts: I64
    weights: tuple[Weights, ...]
    """the parameters by UnitKind"""
    tied_elements: int
    """trained elements of the matrix that embedding and head of a tied model share"""
    border_bytes: int
    """bytes of the activations that go to the next stage"""


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Seconds of single passes by UnitKind, (n_unit_kinds,); `weights` is 0 if the backward pass includes them."""

    forward: F64
    backward: F64
    weights: F64


TurnUnits = tuple[tuple[Pass, tuple[UnitKind, ...]], ...]
"""the passes of a turn, each with the units of its stage in model order"""
Key = tuple[Plan, bool]
"""a plan of units alone, and whether weight gradients are passes of their own"""
Place = tuple[object, ...]
"""where groups lie on the nodes, as far as it changes times"""

Placed = tuple[Plan, Groups]
"""a plan, and its groups at their places"""


@dataclass(slots=True)
class _Found:
    """Holds the sizes of the units of one Key, and their times at the places that were asked for."""

    sizes: UnitSizes
    times: dict[Place, UnitTimes]


@dataclass(slots=True)
class _Task:
    """Units to build, and the groups with which to run them."""

    key: Key
    groups: dict[Place, Groups] = field(default_factory=dict)


class UnitRuns:
    """Runs the units of the plans of one model on one cluster, or on a network of its GPUs. A context manager.

    `measured` holds times that replace those of the shipped model, as in the predictions that the bounds are for. No
    plan has fewer than `n_gpus` GPUs, which wait for the slowest of them. `prepare` uses `workers` processes.
    """

    def __init__(
        self,
        model: ModelSpec,
        cluster: Cluster,
        network: Network | None = None,
        measured: Measured | None = None,
        n_gpus: int = 1,
        workers: int = 1,
    ) -> None:
        self.model, self.cluster, self.network, self.measured = model, cluster, network, measured
        self.n_gpus = n_gpus
        self._keys: dict[Plan, Key] = {}
        self._built: dict[Key, BuiltUnits] = {}
        self._found: dict[Key, _Found] = {}
        self._turns: dict[tuple[Key, Place, tuple[TurnUnits, ...]], F64] = {}
        self._processes = Processes(self._find, workers, WORTH_A_POOL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processes.__exit__(kind, error, trace)

    def sizes(self, plan: Plan) -> UnitSizes:
        """Returns the memory of the units of `plan`."""
        key = self.key(plan)
        if key not in self._found:
            self.prepare([(plan, None)])
        return self._found[key].sizes

    def times(self, plan: Plan, groups: Groups) -> UnitTimes:
        """Returns the seconds of the units of `plan` with its groups at the places of `groups`."""
        key, place = self.key(plan), self.place(groups)
        if key not in self._found or place not in self._found[key].times:
            self.prepare([(plan, groups)])
        return self._found[key].times[place]

    def prepare(self, wanted: Iterable[tuple[Plan, Groups | None]]) -> None:
        """Finds out the sizes of the units of many plans, and with groups their times, unless they are known."""
        tasks: dict[Key, _Task] = {}
        for plan, groups in wanted:
            key = self.key(plan)
            found = self._found.get(key)
            place = None if groups is None else self.place(groups)
            if found is None or not (place is None or place in found.times):
                task = tasks.setdefault(key, _Task(key))
                if place is not None and groups is not None:
                    task.groups[place] = groups
        todo = list(tasks.values())
        for task, answer in zip(todo, self._processes.run(todo), strict=True):
            self._found.setdefault(task.key, answer).times.update(answer.times)

    def turns(self, plan: Plan, groups: Groups, turns: Sequence[TurnUnits]) -> F64:
        """Returns the seconds of `turns` of the units of `plan` with its groups at the places of `groups`, (turns,)."""
        key = (self.key(plan), self.place(groups), tuple(turns))
        if key not in self._turns:
            built = self._built.get(key[0])
            if built is None:
                built = self._built[key[0]] = BuiltUnits(self.model, self.cluster, *key[0])
            self._turns[key] = built.turns(self, {axis: groups[axis] for axis in INSIDE}, turns)
        return self._turns[key]

    def place(self, groups: Groups) -> Place:
        """Returns the place of the units' groups as far as it changes their time: the ranks themselves matter only on a
        network."""
        inside = (groups[axis] for axis in INSIDE)
        if self.network is not None:
            return tuple(inside)
        return tuple((group.nodes, group.ranks_per_node) for group in inside)

    def key(self, plan: Plan) -> Key:
        """Returns the part of `plan` that determines its units."""
        if plan not in self._keys:
            needed = plan.ep * plan.etp
            alone = replace(plan, **ALONE, dp_shard=needed // gcd(needed, plan.cp * plan.tp))  # type: ignore[arg-type]
            self._keys[plan] = (alone, plan.splits_backward)
        return self._keys[plan]

    def _find(self, task: _Task) -> _Found:
        if task.key not in self._built:
            self._built[task.key] = BuiltUnits(self.model, self.cluster, *task.key)
        units = self._built[task.key]
        inside = {place: {axis: groups[axis] for axis in INSIDE} for place, groups in task.groups.items()}
        return _Found(units.sizes, {place: units.times(self, groups) for place, groups in inside.items()})


class BuiltUnits:
    """The units of one plan as a Program in which each pass is a rank class that runs alone."""

    def __init__(self, model: ModelSpec, cluster: Cluster, plan: Plan, split: bool) -> None:
        self._model, self._plan = model, plan
        groups = groups_of(plan, cluster.node_size)
        kernels = TransformerKernels(model, plan, load_stack(plan.stack), groups, cluster.device.architecture)
        found = self._units = build_units(kernels, split)
        blocks: list[Block] = []
        self._passes: dict[tuple[UnitKind, int], int] = {}
        for kind, unit in found.items():
            for number, block in enumerate((unit.forward, unit.backward, unit.weight_backward)):
                if block is not None:
                    self._passes[kind, number] = len(blocks)
                    blocks.append(block)
        nothing, resident = np.zeros(1, np.int32), np.zeros(N_CATEGORIES, np.int64)
        classes = [RankClass("", 1, np.array([n], np.int32), nothing, nothing, resident) for n in range(len(blocks))]
        self._program = Program(kernels.ops.build(), tuple(blocks), tuple(classes), kernels.groups, (), MODULES)
        self._flat = unfold(self._program)
        self._axes = tuple(kernels.group_index)
        self._border_bytes = kernels.border_bytes
        self._tied_elements = 0 if plan.lora_rank else kernels.tied_elements  # adapters leave it frozen
        self.sizes = self._sizes(found)

    def _sizes(self, found: Units) -> UnitSizes:
        n_kinds = n_unit_kinds(self._model)
        kept, rise, dense, experts = (np.zeros(n_kinds, np.int64) for _ in range(4))
        weights = [Weights() for _ in range(n_kinds)]
        most = rises(self._program.blocks)
        for kind, unit in found.items():
            kept[kind], rise[kind] = _left(unit.forward), most[self._passes[kind, 1]]
            if unit.returning is not None:  # offloaded activations return in the pass that needs them
                kept[kind] -= _left(unit.returning)
                rise[kind] += _left(unit.returning)
            weights[kind] = unit.weights
            dense[kind], experts[kind] = unit.weights.dense, unit.weights.expert
        return UnitSizes(kept, rise, dense, experts, tuple(weights), self._tied_elements, self._border_bytes)

    def times(self, runs: UnitRuns, inside: Groups) -> UnitTimes:
        """Returns the seconds of every pass with these groups. The host takes no time, so they are lower bounds."""
        plan, costs = self._plan, self._costs(runs, inside)
        free = np.zeros_like(costs.issue_ps)
        # copies to and from the host, and with expert_overlap exchanges of tokens, run beside other units
        duration_ps = np.where(self._program.ops.is_host_copy, 0, costs.duration_ps)
        if plan.expert_overlap:
            of_experts = [place for place, axis in enumerate(self._axes) if axis in ("ep", "etp")]
            exchanges = self._program.ops.is_collective & np.isin(self._program.ops.group, of_experts)
            others = self._program.ops.is_collective & ~exchanges & (duration_ps > 0)
            # beside other collectives, for which kernels wait, an exchange slows nothing
            share = 0.0 if others.any() else _hidden_share(costs)
            duration_ps = np.where(exchanges, duration_ps * share, duration_ps).astype(np.int64)
        timeline = simulate(self._flat, duration_ps, free, costs.slow_compute, costs.slow_network, costs.network_op)
        out = np.zeros((3, n_unit_kinds(self._model)))
        for (kind, number), place in self._passes.items():
            out[number, kind] = int(timeline.class_end_ps[place]) / PS_PER_S
        return UnitTimes(*out)

    def turns(self, runs: UnitRuns, inside: Groups, turns: Sequence[TurnUnits]) -> F64:
        """Returns the least seconds from the first to the last kernel of each of `turns` with these groups, (turns,).

        Each turn runs alone, and the host takes no time. Its exchanges start after a kernel of the turn and end before
        its last one, so turns follow each other.
        """
        blocks: list[Block] = []
        classes, empty = [], np.zeros(N_CATEGORIES, np.int64)
        for turn in turns:
            some = self._blocks_of(turn)
            numbers = np.arange(len(blocks), len(blocks) + len(some), dtype=np.int32)
            nothing = np.zeros(len(some), np.int32)
            classes.append(RankClass("", 1, numbers, nothing, nothing, empty))
            blocks += some
        flat = unfold(replace(self._program, blocks=tuple(blocks), rank_classes=tuple(classes)))
        costs = self._costs(runs, inside)
        duration_ps = np.where(self._program.ops.is_host_copy, 0, costs.duration_ps)
        free = np.zeros_like(costs.issue_ps)
        ran = simulate(flat, duration_ps, free, costs.slow_compute, costs.slow_network, costs.network_op)
        ends_ps = np.where(flat.stream == Stream.COMPUTE, ran.end_ps, 0)
        of_turns = (ends_ps[first:last].max(initial=0) for first, last in pairwise(flat.class_ptr.tolist()))
        return np.array(list(of_turns)) / PS_PER_S

    def _blocks_of(self, turn: TurnUnits) -> list[Block]:
        """Returns the blocks of `turn` in the order in which the host issues them."""
        if len(turn) == 1:
            ((kind, units),) = turn
            if kind == "F":
                return [self._units[unit].forward for unit in units]
            own = [self._units[unit] for unit in reversed(units)]
            return [block for unit in own if (block := unit.backward if kind == "B" else unit.weight_backward)]
        (_, ahead), (_, back) = turn[:2]
        there = [piece for unit in ahead for piece in self._units[unit].forward_pieces]
        home = [piece for unit in reversed(back) for piece in self._units[unit].backward_pieces]
        return in_turns(segments(there, exchanges_tokens), segments(home, exchanges_tokens))

    def _costs(self, runs: UnitRuns, inside: Groups) -> StepCosts:
        plan, stack = self._plan, load_stack(self._plan.stack)
        groups = tuple(inside.get(axis, group) for axis, group in zip(self._axes, self._program.groups, strict=True))
        n_gpus = max(runs.n_gpus, plan.world_size, *(group.size * group.inner for group in inside.values()))
        return step_costs(
            self._program.ops,
            groups,
            runs.cluster,
            stack,
            Launching.of_plan(self._model, plan, stack),
            n_gpus,
            runs.network,
            runs.measured,
        )


def _hidden_share(costs: StepCosts) -> float:
    """Returns the least part of an exchange that lengthens a step: beside it every kernel runs slower."""
    slow = costs.slow_compute[~costs.network_op & (costs.duration_ps > 0)].min(initial=1.0)
    return float(slow / (1.0 + slow))


def _left(block: Block) -> int:
    """Returns the bytes that a block leaves allocated."""
    kept = (block.tensor_alloc >= 0) & (block.tensor_free < 0)
    gone = (block.tensor_alloc < 0) & (block.tensor_free >= 0)
    return int(block.tensor_bytes[kept].sum() - block.tensor_bytes[gone].sum())
