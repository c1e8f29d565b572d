"""Builds the units of many plans (embedding, layers, head) and runs each of them alone.

The units of many plans are one Program, as most of the work on a small Program is the same as on a large one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from forerun.answers.search.orders import Groups
from forerun.common.units import PS_PER_S
from forerun.core.cost.measured import Measured
from forerun.core.cost.step_costs import Launching, StepCosts, step_costs
from forerun.core.engine.simulate import simulate
from forerun.core.memory.profile import rises_and_falls
from forerun.core.network.network_file import Network
from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import F64, I64, N_CATEGORIES, Block, Mask, Program, RankClass, Stream
from forerun.core.program.unfold import unfold
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.fsdp_units import Unit, UnitKind, UnitPart, Units, build_units, n_unit_kinds
from forerun.sources.symbolic.kernels import MODULES, TransformerKernels
from forerun.sources.symbolic.mesh import groups_of
from forerun.sources.symbolic.schedule import Pass
from forerun.sources.symbolic.segments import exchanges_tokens, in_turns, segments
from forerun.sources.symbolic.weights import Weights


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

    def beside(self, other: UnitSizes) -> UnitSizes:
        """Returns the sizes of these units and of `other` units of the same plan."""
        return UnitSizes(
            self.kept + other.kept,
            self.backward_rise + other.backward_rise,
            self.dense + other.dense,
            self.experts + other.experts,
            tuple(more if mine == Weights() else mine for mine, more in zip(self.weights, other.weights, strict=True)),
            self.tied_elements,
            self.border_bytes,
        )


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Seconds of single passes by UnitKind, (n_unit_kinds,); `weights` is 0 if the backward pass includes them."""

    forward: F64
    backward: F64
    weights: F64

    def beside(self, other: UnitTimes) -> UnitTimes:
        """Returns the times of these units and of `other` units of the same plan."""
        return UnitTimes(self.forward + other.forward, self.backward + other.backward, self.weights + other.weights)


TurnUnits = tuple[tuple[Pass, tuple[UnitKind, ...]], ...]
"""the passes of a turn, each with the units of its stage in model order"""


class Key(NamedTuple):
    """Determines units: everything about a plan that they depend on."""

    plan: Plan
    """a plan of units alone"""
    split: bool
    """whether weight gradients are passes of their own"""
    part: UnitPart = "all"


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware that units run on. `measured` holds times that replace those of the shipped model."""

    cluster: Cluster
    network: Network | None = None
    measured: Measured | None = None
    n_gpus: int = 1
    """the fewest GPUs of a plan, which wait for the slowest of them"""

    def gpus(self, plan: Plan, groups: Groups) -> int:
        """Returns the number of GPUs that units of `plan` with `groups` run on at least."""
        return max(self.n_gpus, plan.world_size, *(group.size * group.inner for group in groups.values()))


@dataclass(frozen=True, slots=True)
class _Own:
    """The part of a Program that belongs to one Key."""

    key: Key
    units: Units
    passes: dict[tuple[UnitKind, int], int]
    """the block of each pass: forward, backward, and weight gradients where they are separate"""
    groups: dict[str, CommGroup]
    first_group: int

    def group_numbers(self, *axes: str) -> list[int]:
        """Returns the numbers of the groups of `axes` in the Program."""
        return [self.first_group + place for place, axis in enumerate(self.groups) if axis in axes]


class BuiltUnits:
    """The units of plans of one stack as a Program in which each pass is a rank class that runs alone."""

    def __init__(self, model: ModelSpec, cluster: Cluster, keys: Sequence[Key]) -> None:
        self._model = model
        self._stack = load_stack(keys[0].plan.stack)
        table, blocks = OpTableBuilder(), list[Block]()
        groups: list[CommGroup] = []
        self._own: list[_Own] = []
        every: list[TransformerKernels] = []
        for key in keys:
            own_groups = groups_of(key.plan, cluster.node_size)
            kernels = TransformerKernels(
                model, key.plan, self._stack, own_groups, cluster.device.architecture, table, len(groups)
            )
            units, passes = build_units(kernels, key.split, key.part), dict[tuple[UnitKind, int], int]()
            for kind, unit in units.items():
                for number, block in enumerate((unit.forward, unit.backward, unit.weight_backward)):
                    if block is not None:
                        passes[kind, number] = len(blocks)
                        blocks.append(block)
            self._own.append(_Own(key, units, passes, own_groups, len(groups)))
            groups += kernels.groups
            every.append(kernels)
        nothing, resident = np.zeros(1, np.int32), np.zeros(N_CATEGORIES, np.int64)
        classes = [RankClass("", 1, np.array([n], np.int32), nothing, nothing, resident) for n in range(len(blocks))]
        self._program = Program(table.build(), tuple(blocks), tuple(classes), tuple(groups), (), MODULES)
        self._flat = unfold(self._program)
        self.sizes = list(self._sizes(every))
        """sizes of the units of each key"""

    def _sizes(self, every: Sequence[TransformerKernels]) -> Iterator[UnitSizes]:
        n_kinds = n_unit_kinds(self._model)
        rises, left = rises_and_falls(self._program.blocks)
        for own, kernels in zip(self._own, every, strict=True):
            kept, rise, dense, experts = (np.zeros(n_kinds, np.int64) for _ in range(4))
            weights = [Weights() for _ in range(n_kinds)]
            for kind, unit in own.units.items():
                returned = _returned_bytes(unit)
                kept[kind] = left[own.passes[kind, 0]] - returned
                rise[kind] = rises[own.passes[kind, 1]] + returned
                weights[kind] = unit.weights
                dense[kind], experts[kind] = unit.weights.dense, unit.weights.expert
            tied = 0 if own.key.plan.lora_rank else kernels.tied_elements  # with adapters the tied table is frozen
            yield UnitSizes(kept, rise, dense, experts, tuple(weights), tied, kernels.border_bytes)

    def times(self, machine: Machine, inside: Sequence[Groups]) -> list[UnitTimes]:
        """Returns the seconds of every pass of the units of each key, with the groups that `inside` has for it.

        The host takes no time, so they are lower bounds.
        """
        ops, costs = self._program.ops, self._costs(machine, inside)
        # copies to and from the host, and with expert_overlap exchanges of tokens, run beside other units
        duration_ps = np.where(ops.is_host_copy, 0, costs.duration_ps)
        for own in self._own:
            if own.key.plan.expert_overlap:
                exchanges = ops.is_collective & np.isin(ops.group, own.group_numbers("ep", "etp"))
                share = self._hidden_share(own, costs, exchanges)
                duration_ps[exchanges] = (duration_ps[exchanges] * share).astype(np.int64)
        free = np.zeros_like(costs.issue_ps)
        timeline = simulate(self._flat, duration_ps, free, costs.slow_compute, costs.slow_network, costs.network_op)
        return [self._times_of(own, timeline.class_end_ps) for own in self._own]

    def _times_of(self, own: _Own, end_ps: I64) -> UnitTimes:
        out = np.zeros((3, n_unit_kinds(self._model)))
        for (kind, number), place in own.passes.items():
            out[number, kind] = int(end_ps[place]) / PS_PER_S
        return UnitTimes(*out)

    def _hidden_share(self, own: _Own, costs: StepCosts, exchanges: Mask) -> float:
        """Returns the least part of an exchange of tokens that lengthens a step: beside it every kernel runs slower.

        Beside other collectives, for which kernels wait, an exchange slows nothing.
        """
        ops = self._program.ops
        mine = np.zeros(len(ops), np.bool_)
        for place in own.passes.values():
            mine[self._program.blocks[place].op] = True
        takes = mine & (costs.duration_ps > 0)
        if (takes & ops.is_collective & ~exchanges).any():
            return 0.0
        slow = costs.slow_compute[takes & ~costs.network_op].min(initial=1.0)
        return float(slow / (1.0 + slow))

    def turns(self, machine: Machine, inside: Groups, turns: Sequence[TurnUnits]) -> F64:
        """Returns the least seconds from the first to the last kernel of each of `turns` of the first key, (turns,).

        The groups are those of `inside`. Each turn runs alone, and the host takes no time. Its exchanges start after a
        kernel of the turn and end before its last one, so turns follow each other.
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
        costs = self._costs(machine, [inside])
        duration_ps = np.where(self._program.ops.is_host_copy, 0, costs.duration_ps)
        free = np.zeros_like(costs.issue_ps)
        ran = simulate(flat, duration_ps, free, costs.slow_compute, costs.slow_network, costs.network_op)
        ends_ps = np.where(flat.stream == Stream.COMPUTE, ran.end_ps, 0)
        of_turns = (ends_ps[first:last].max(initial=0) for first, last in pairwise(flat.class_ptr.tolist()))
        return np.array(list(of_turns)) / PS_PER_S

    def _blocks_of(self, turn: TurnUnits) -> list[Block]:
        """Returns the blocks of `turn` in the order in which the host issues them."""
        every = self._own[0].units
        if len(turn) == 1:
            ((kind, units),) = turn
            if kind == "F":
                return [every[unit].forward for unit in units]
            own = [every[unit] for unit in reversed(units)]
            return [block for unit in own if (block := unit.backward if kind == "B" else unit.weight_backward)]
        (_, ahead), (_, back) = turn[:2]
        there = [piece for unit in ahead for piece in every[unit].forward_pieces]
        home = [piece for unit in reversed(back) for piece in every[unit].backward_pieces]
        return in_turns(segments(there, exchanges_tokens), segments(home, exchanges_tokens))

    def _costs(self, machine: Machine, inside: Sequence[Groups]) -> StepCosts:
        groups: list[CommGroup] = []
        for own, placed in zip(self._own, inside, strict=True):
            groups += [placed.get(axis, group) for axis, group in own.groups.items()]
        n_gpus = max(machine.gpus(own.key.plan, placed) for own, placed in zip(self._own, inside, strict=True))
        return step_costs(
            self._program.ops,
            tuple(groups),
            machine.cluster,
            self._stack,
            launching_of(self._model, self._own[0].key.plan),
            n_gpus,
            machine.network,
            machine.measured,
        )


def launching_of(model: ModelSpec, plan: Plan) -> Launching:
    """Returns how the kernels of units of `plan` are launched. Units of one BuiltUnits are launched alike."""
    return Launching.of_plan(model, plan, load_stack(plan.stack))


def _returned_bytes(unit: Unit) -> int:
    """Returns the bytes of offloaded activations, which return in the pass that needs them."""
    return 0 if unit.returning is None else int(rises_and_falls([unit.returning])[1][0])
