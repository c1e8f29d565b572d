"""The units of a model (embedding, layers, head) run by themselves: what a step's bounds are made of.

Plans that differ in data or pipeline parallelism alone share the same units, which are built and run once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from math import gcd

import numpy as np

from forerun.cluster.types import Cluster
from forerun.cost.measured import Measured
from forerun.cost.step_costs import Launching, step_costs
from forerun.engine.simulate import simulate
from forerun.memory.profile import profile
from forerun.model.spec import ModelSpec
from forerun.network.network_file import Network
from forerun.plan.plan import Plan
from forerun.plan.stack import load_stack
from forerun.program.types import I64, N_CATEGORIES, Block, OpTable, Program, RankClass
from forerun.program.unfold import unfold
from forerun.symbolic.kernels import MODULES, Kit
from forerun.symbolic.mesh import groups_of
from forerun.symbolic.schedule import SPLIT
from forerun.symbolic.units import Unit, build_units, layer_unit
from forerun.units import PS_PER_S

EMBEDDING, HEAD = -1, -2
"""numbers of the ends, where a layer's number is expected"""


class UnitRuns:
    """Runs of the units of the plans of one model on one cluster, or on a network of its GPUs.

    `measured` are times that go over the shipped constants, as in the predictions that the runs are to bound.
    """

    def __init__(
        self, model: ModelSpec, cluster: Cluster, network: Network | None = None, measured: Measured | None = None
    ) -> None:
        self.model, self.cluster, self.network, self.measured = model, cluster, network, measured
        self._known: dict[tuple[Plan, bool], UnitRun] = {}

    def of(self, plan: Plan) -> UnitRun:
        """The units of `plan`; where the schedule asks for it, with weight gradients as passes of their own."""
        key = (_alone(plan), plan.pp > 1 and plan.pp_schedule in SPLIT)
        if key not in self._known:
            self._known[key] = UnitRun(self.model, self.cluster, *key, self.network, self.measured)
        return self._known[key]


class UnitRun:
    """Time and memory of single passes of the units of one plan, without anything between them.

    On a network their groups have it to themselves, which is never slower than among all groups of a run.
    """

    def __init__(
        self,
        model: ModelSpec,
        cluster: Cluster,
        plan: Plan,
        split: bool,
        network: Network | None = None,
        measured: Measured | None = None,
    ) -> None:
        self._cluster, self._plan, self._network, self._measured = cluster, plan, network, measured
        kit = Kit(model, plan, load_stack(plan.stack), groups_of(plan, cluster.node_size))
        units = build_units(kit, split)
        self._layers = [layer_unit(units, kit, layer) for layer in range(model.n_layers)]
        self._ends = {EMBEDDING: units.embedding, HEAD: units.head}
        self._distinct = list({id(unit): unit for unit in (*self._ends.values(), *self._layers)}.values())
        self._blocks: list[Block] = []
        self._passes: dict[int, list[int]] = {}
        for unit in self._distinct:
            passes = [block for block in (unit.forward, unit.backward, unit.weight_backward) if block is not None]
            self._passes[id(unit)] = list(range(len(self._blocks), len(self._blocks) + len(passes)))
            self._blocks += passes
        self._ops: OpTable = kit.ops.build()
        self._groups = kit.groups

    def _unit(self, number: int) -> Unit:
        return self._ends[number] if number < 0 else self._layers[number]

    def _program(self, steps: Sequence[tuple[str, list[int]]], resident: I64) -> Program:
        """A Program with a rank class for each (name, blocks)."""
        classes = []
        for name, blocks in steps:
            nothing = np.zeros(len(blocks), np.int32)
            classes.append(RankClass(name, 1, np.array(blocks, np.int32), nothing, nothing, resident))
        return Program(self._ops, tuple(self._blocks), tuple(classes), self._groups, (), MODULES)

    # -- time --------------------------------------------------------------------------------------------------

    @cached_property
    def _seconds(self) -> dict[int, float]:
        """Seconds of all passes of a micro batch through each distinct unit, every unit as a rank class of its own.

        The host takes no time and nothing contends: a run with either is never faster.
        """
        steps = [(unit.name, self._passes[id(unit)]) for unit in self._distinct]
        program = self._program(steps, np.zeros(N_CATEGORIES, np.int64))
        stack = load_stack(self._plan.stack)
        launching, n_gpus = Launching.of_plan(self._plan), self._plan.world_size
        costs = step_costs(
            program.ops, program.groups, self._cluster, stack, launching, n_gpus, self._network, self._measured
        )
        free, even = np.zeros_like(costs.issue_ps), np.zeros_like(costs.slow_compute)
        timeline = simulate(unfold(program), costs.duration_ps, free, even, even, costs.network_op)
        ends = [int(end) / PS_PER_S for end in timeline.class_end_ps]
        return dict(zip(map(id, self._distinct), ends, strict=True))

    @cached_property
    def until_layer_s(self) -> tuple[float, ...]:
        """Seconds of the layers before each layer, (n_layers + 1,)."""
        return (0.0, *accumulate(self._seconds[id(unit)] for unit in self._layers))

    def end_s(self, end: int) -> float:
        """Seconds of EMBEDDING or HEAD."""
        return self._seconds[id(self._ends[end])]

    # -- memory ------------------------------------------------------------------------------------------------

    def peak(self, forwards: Sequence[int], backward: int, resident: I64) -> dict[str, int]:
        """Bytes by category at the peak of forward passes (numbers of layers or ends), then one backward pass.

        `resident` are bytes by Category that live throughout, (N_CATEGORIES,).
        """
        steps = [self._passes[id(self._unit(number))][0] for number in forwards]
        steps.append(self._passes[id(self._unit(backward))][1])
        return profile(self._program([("", steps)], resident))[0].by_category


def _alone(plan: Plan) -> Plan:
    """One micro batch of one pipeline rank, with as much data parallelism as expert parallelism needs."""
    return replace(
        plan,
        n_microbatches=1,
        dp_replicate=1,
        dp_shard=plan.ep // gcd(plan.ep, plan.cp),
        pp=1,
        pp_schedule="1F1B",
        virtual_stages=1,
        layers_per_stage=None,
        balance_ends=False,
        zero_stage=0,
        reshard_after_forward="default",
    )
