"""Stepper: runs many iterations of one Setup with faster or slower GPUs, links and hosts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from forerun.answers.analysis.breakdown import breakdown_ps, pace_setter
from forerun.answers.analysis.reading import Simulation
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import prepare
from forerun.answers.analysis.slowing import of_kinds, times
from forerun.common.errors import ForerunError
from forerun.common.units import PS_PER_S
from forerun.core.engine.sharing import joined_demand
from forerun.core.engine.simulate import Timeline, simulate
from forerun.core.program.causes import EXPOSED, Cause
from forerun.core.program.types import F64, I32
from forerun.core.program.unfold import unfold

CAUSES = ("compute", "communication", "bubble", "host", "waiting")
"""the parts of an iteration's time: kernels, exposed communication, pipeline bubble, host, waiting for slower ranks"""

_CAUSE_OF = dict.fromkeys(Cause, "compute") | dict.fromkeys(EXPOSED, "communication")
_CAUSE_OF |= {Cause.BUBBLE: "bubble", Cause.HOST: "host", Cause.WAITING: "waiting"}
_COLUMN = np.array([CAUSES.index(_CAUSE_OF[cause]) for cause in Cause])
_KEPT = 4096
"""number of steps whose outcome a Stepper remembers"""


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of one iteration."""

    time_s: float
    breakdown_s: dict[str, float]
    """entry of CAUSES -> seconds on the rank class that sets the pace; the sum is time_s"""
    slowest: int
    """the rank class that sets the pace"""


def causes_s(row: F64) -> dict[str, float]:
    """Sums the seconds by Cause of `row`, (N_CAUSES,), to seconds by CAUSES."""
    sums = np.bincount(_COLUMN, weights=row, minlength=len(CAUSES))
    return dict(zip(CAUSES, sums.tolist(), strict=True))


class Stepper:
    """Runs iterations of one Setup without building its Program again.

    Ranks of one class do the same work, so a class has one time: the time of its slowest rank. The other ranks wait for
    it in the next collective that they share. With one pipeline stage this is exact. With several stages and several
    replicas of the pipeline it is an upper bound. Stages that are slow in different replicas count as slow in one
    replica, although replicas meet only to gather parameters and reduce gradients. On 8 replicas of 4 stages the bound
    is 0.5 to 0.7 % over the exact time with jitter of 5 % on every GPU, and 1 to 2 % with one GPU in ten half as fast
    again. Replicas that are kinds of their own are exact.

    Iterations run node by node, never folded: a folded run of blocks has the right time only while the host stays ahead
    and no kernel of it is slowed alone.
    """

    def __init__(self, setup: Setup) -> None:
        """Builds the Program. Raises the errors of `simulate_setup`."""
        self.setup = setup
        self._prepared = prepare(setup)
        self._flat = unfold(self._prepared.program)
        n_ops, n_classes = len(self._prepared.program.ops), len(self._prepared.program.rank_classes)
        own = np.repeat(np.arange(n_classes, dtype=np.int32), np.diff(self._flat.class_ptr))
        self._own_ops = replace(self._flat, n_ops=n_ops * n_classes, op=self._flat.op + own * np.int32(n_ops))
        """the FlatProgram with separate ops for each rank class"""
        self._kept: OrderedDict[tuple[tuple[float, ...], float, float], Step] = OrderedDict()

    @cached_property
    def simulation(self) -> Simulation:
        """Returns the unfolded iteration with all factors 1."""
        return self._prepared.run()

    @property
    def n_classes(self) -> int:
        """Returns the number of rank classes."""
        return len(self._prepared.program.rank_classes)

    @cached_property
    def class_of_rank(self) -> I32:
        """Returns the rank class of every global rank, (n_gpus,). Ranks are numbered as in torchtitan: tp innermost,
        then cp, dp_shard, dp_replicate, and pp outermost; kinds of GPUs are the last data-parallel replicas, in
        order."""
        return class_of_rank(self.setup)

    def step(self, compute: Sequence[float], network: float = 1.0, host: float = 1.0) -> Step:
        """Runs one iteration with times multiplied by factors.

        Args:
            compute: factors of kernels, one for each rank class.
            network: factor of the collectives and transfers of all ranks.
            host: factor of issuing kernels, and of the host's work between them.

        Raises ForerunError if `compute` lacks a factor for some rank class, or a factor is not a number above 0.
        """
        key = tuple(map(float, compute)), float(network), float(host)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = self._run(*key)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found

    def timeline(self, compute: Sequence[float], network: float = 1.0, host: float = 1.0) -> Timeline:
        """Returns when every node of `simulation.flat` runs in an iteration. Arguments and errors: see `step`."""
        if len(compute) != self.n_classes:
            raise ForerunError(
                f"step: expected one factor of compute for each of {self.n_classes} rank classes, got {len(compute)}"
            )
        for name, factor in (*(("compute", one) for one in compute), ("network", network), ("host", host)):
            if not 0 < factor < inf:
                raise ForerunError(f"step: factor of {name} must be above 0 and finite, got {factor}")
        program, costs = self._prepared.program, self._prepared.costs
        alike = len(set(compute)) == 1
        classes = compute[:1] if alike else compute
        duration = np.concatenate(
            [times(costs.duration_ps, of_kinds(program.ops, one, network, host)) for one in classes]
        )
        return simulate(
            self._flat if alike else self._own_ops,
            duration,
            np.tile(times(costs.issue_ps, host), len(classes)),
            np.tile(costs.slow_compute, len(classes)),
            np.tile(costs.slow_network, len(classes)),
            np.tile(costs.network_op, len(classes)),
            demand=joined_demand([costs.demand] * len(classes), [len(costs.duration_ps)] * len(classes)),
        )

    def _run(self, compute: tuple[float, ...], network: float, host: float) -> Step:
        timeline = self.timeline(compute, network, host)
        seconds = breakdown_ps(self._flat, self._prepared.program, timeline) / PS_PER_S
        slowest = pace_setter(seconds)
        return Step(timeline.end_of_step_ps / PS_PER_S, causes_s(seconds[slowest]), slowest)


def class_of_rank(setup: Setup) -> I32:
    """Returns the rank class of every global rank of `setup`, (n_gpus,), numbered as in its Program."""
    plan = setup.plan
    rank = np.arange(setup.n_gpus)
    replica = rank // (plan.tp * plan.cp) % plan.dp
    stage = rank // (plan.tp * plan.cp * plan.dp)
    sizes = [part.n_gpus * plan.dp // setup.n_gpus for part in setup.parts]
    part = np.repeat(np.arange(len(sizes)), sizes)[replica]
    return (part * plan.pp + stage).astype(np.int32)
