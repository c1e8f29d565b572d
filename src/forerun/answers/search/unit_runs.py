"""Simulates the units of a model (embedding, layers, head) alone, for the lower bounds of a step.

Plans that differ only in data or pipeline parallelism share the same units, and those that differ only in how they run
experts share all units without experts. Units are built once, and run once for each placement of tensor, context and
expert parallelism on the nodes. If many are requested at the same time, local processes build and run them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from types import TracebackType
from typing import TYPE_CHECKING, Any

from forerun.answers.search.built_units import (
    BuiltUnits,
    Key,
    Machine,
    TurnUnits,
    UnitSizes,
    UnitTimes,
    launching_of,
)
from forerun.answers.search.orders import Groups
from forerun.answers.search.other_fields import OtherFields
from forerun.common.processes import Processes
from forerun.core.cost.measured import Measured
from forerun.core.network.network_file import Network
from forerun.core.program.types import F64
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import DEFAULT_ORDER, Plan

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
WITHOUT_EXPERTS: dict[str, Any] = {
    "dp_shard": 1,
    "ep": 1,
    "etp": 1,
    "expert_imbalance": 1.0,
    "expert_routing": "balanced",
    "dispatcher": "auto",
    "shared_expert_overlap": False,
}
"""plan fields that units without experts don't depend on either, with the values that they run with"""
BATCH = 16
"""most units that are built and run as one Program"""
WORTH_A_POOL = 3
"""fewer Programs of units than this are run in this process"""


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
    n_gpus: int
    """GPUs that they run on at least; 0 to build them only"""
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
        self.model, self._machine = model, Machine(cluster, network, measured, n_gpus)
        self._has_experts = any(layer.moe is not None for layer in model.kinds)
        self._alone = OtherFields(*ALONE, "dp_shard")
        self._keys: dict[Plan, Key] = {}
        self._parts: dict[Key, tuple[Key, ...]] = {}
        self._found: dict[Key, _Found] = {}
        """what is known of the parts of plans"""
        self._sizes: dict[Key, UnitSizes] = {}
        self._times: dict[tuple[Key, Place], UnitTimes] = {}
        self._built: dict[Key, BuiltUnits] = {}
        self._turns: dict[tuple[Key, Place, tuple[TurnUnits, ...]], F64] = {}
        self._processes = Processes(self._find, workers, WORTH_A_POOL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processes.__exit__(kind, error, trace)

    @property
    def cluster(self) -> Cluster:
        return self._machine.cluster

    @property
    def network(self) -> Network | None:
        return self._machine.network

    @property
    def measured(self) -> Measured | None:
        return self._machine.measured

    def sizes(self, plan: Plan) -> UnitSizes:
        """Returns the memory of the units of `plan`."""
        key = self.key(plan)
        if key not in self._sizes:
            parts = self._parts_of(key)
            if any(part not in self._found for part in parts):
                self.prepare([(plan, None)])
            first, *others = [self._found[part].sizes for part in parts]
            self._sizes[key] = first.beside(others[0]) if others else first
        return self._sizes[key]

    def times(self, plan: Plan, groups: Groups) -> UnitTimes:
        """Returns the seconds of the units of `plan` with its groups at the places of `groups`."""
        known = (self.key(plan), self.place(groups))
        if known not in self._times:
            parts = [(part, self._place_of(part, groups)) for part in self._parts_of(known[0])]
            if any(part not in self._found or place not in self._found[part].times for part, place in parts):
                self.prepare([(plan, groups)])
            first, *others = [self._found[part].times[place] for part, place in parts]
            self._times[known] = first.beside(others[0]) if others else first
        return self._times[known]

    def prepare(self, wanted: Iterable[tuple[Plan, Groups | None]]) -> None:
        """Finds out the sizes of the units of many plans, and with groups their times, unless they are known."""
        tasks: dict[tuple[Key, int], _Task] = {}
        for plan, groups in wanted:
            for part in self._parts_of(self.key(plan)):
                found = self._found.get(part)
                inside = None if groups is None else {axis: groups[axis] for axis in _axes_of(part)}
                place = None if groups is None else self._place_of(part, groups)
                if found is None or not (place is None or place in found.times):
                    n_gpus = 0 if inside is None else self._machine.gpus(part.plan, inside)
                    task = tasks.setdefault((part, n_gpus), _Task(part, n_gpus))
                    if place is not None and inside is not None:
                        task.groups[place] = inside
        todo = list(self._batches(list(tasks.values())))
        for batch, answers in zip(todo, self._processes.run(todo), strict=True):
            for task, answer in zip(batch, answers, strict=True):
                self._found.setdefault(task.key, answer).times.update(answer.times)

    def turns(self, plan: Plan, groups: Groups, turns: Sequence[TurnUnits]) -> F64:
        """Returns the seconds of `turns` of the units of `plan` with its groups at the places of `groups`, (turns,)."""
        key = (self.key(plan), self.place(groups), tuple(turns))
        if key not in self._turns:
            built = self._built.get(key[0])
            if built is None:
                built = self._built[key[0]] = BuiltUnits(self.model, self.cluster, [key[0]])
            self._turns[key] = built.turns(self._machine, {axis: groups[axis] for axis in INSIDE}, turns)
        return self._turns[key]

    def place(self, groups: Groups) -> Place:
        """Returns the place of the units' groups as far as it changes their time."""
        return self._placed(groups, INSIDE)

    def key(self, plan: Plan) -> Key:
        """Returns the part of `plan` that determines its units."""
        if plan not in self._keys:
            needed = plan.ep * plan.etp
            alone = self._alone(plan, *ALONE.values(), needed // gcd(needed, plan.cp * plan.tp))
            self._keys[plan] = Key(alone, plan.splits_backward)
        return self._keys[plan]

    def _parts_of(self, key: Key) -> tuple[Key, ...]:
        """Returns the keys of the parts that are built on their own: layers with experts, and all other units.

        Under `expert_overlap` the time of layers with experts depends on what the other units do.
        """
        if not self._has_experts or key.plan.expert_overlap:
            return (key,)
        if key not in self._parts:
            others = Key(replace(key.plan, **WITHOUT_EXPERTS), key.split, "others")
            self._parts[key] = (others, key._replace(part="experts"))
        return self._parts[key]

    def _place_of(self, part: Key, groups: Groups) -> Place:
        return self._placed(groups, _axes_of(part))

    def _placed(self, groups: Groups, axes: Sequence[str]) -> Place:
        """Returns the place of the groups of `axes`: the ranks themselves matter only on a network."""
        inside = [groups[axis] for axis in axes]
        if self._machine.network is not None:
            return tuple(inside)
        return tuple([(group.nodes, group.ranks_per_node) for group in inside])

    def _batches(self, tasks: Sequence[_Task]) -> Iterable[tuple[_Task, ...]]:
        """Yields `tasks` in batches that can run as one Program. They don't depend on the number of processes."""
        alike: dict[object, list[_Task]] = {}
        for task in tasks:
            plan = task.key.plan
            alike.setdefault((plan.stack, launching_of(self.model, plan), task.n_gpus), []).append(task)
        for some in alike.values():
            for first in range(0, len(some), BATCH):
                yield tuple(some[first : first + BATCH])

    def _find(self, batch: Sequence[_Task]) -> list[_Found]:
        units = BuiltUnits(self.model, self.cluster, [task.key for task in batch])
        found = [_Found(sizes, {}) for sizes in units.sizes]
        places = [list(task.groups.items()) for task in batch]
        for turn in range(max(map(len, places))):
            here = [some[min(turn, len(some) - 1)] for some in places]
            times = units.times(self._machine, [groups for _, groups in here])
            for one, (place, _), seconds in zip(found, here, times, strict=True):
                one.times[place] = seconds
        return found


def _axes_of(part: Key) -> tuple[str, ...]:
    """Returns the axes of the groups in which the units of `part` communicate."""
    return ("tp", "cp") if part.part == "others" else INSIDE
