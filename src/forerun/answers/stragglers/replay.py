"""Replays recorded steps by their dependencies, with the recorded times of operations or with others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from forerun.answers.stragglers.dependencies import Dependencies, dependencies
from forerun.answers.stragglers.kinds import COMMUNICATION
from forerun.answers.stragglers.recorded_steps import RecordedSteps, Times

_CLOCKS_S = 0.01
"""largest difference of the clocks of ranks; operations that still seem to take negative time then take none"""


@dataclass(frozen=True)
class Work:
    """Holds the times that the operations of a job need, in seconds, as arrays of [operation, step, replica].

    `busy_s` is the time of a computation, or the time of a communication after its last participant has started.
    `late_s` is the delay between the end of the last dependency of an operation and its start, for example by work of
    the host.
    """

    busy_s: Times
    late_s: Times


class Replay:
    """The dependencies of a job with the work that was recorded."""

    def __init__(self, recorded: RecordedSteps) -> None:
        self.recorded = recorded
        self.graph: Dependencies = dependencies(recorded)
        self.of_all_replicas = {i for each in self.graph.meetings if each.of_all_replicas for i in each.members}
        self.meeting = {each.members for each in self.graph.meetings}
        self.work = Work(self._busy_s(), self._late_s())

    def _busy_s(self) -> Times:
        recorded = self.recorded
        busy_s: Times = recorded.duration_s.copy()
        ends_s = recorded.start_s + recorded.duration_s
        for each in self.graph.meetings:
            members = list(each.members)
            last_s = recorded.start_s[members].max(axis=0)
            if each.of_all_replicas:
                last_s = np.broadcast_to(last_s.max(axis=1, keepdims=True), last_s.shape)
            moved_s = ends_s[members] - last_s
            busy_s[members] = np.where(moved_s <= -_CLOCKS_S, 0.0, moved_s)
        return busy_s

    def _late_s(self) -> Times:
        recorded = self.recorded
        ends_s = recorded.start_s + recorded.duration_s
        late_s = recorded.start_s.copy()
        for operation, before in enumerate(self.graph.waits_for):
            if before:
                late_s[operation] -= ends_s[list(before)].max(axis=0)
        return np.asarray(np.where(late_s <= -_CLOCKS_S, 0.0, late_s))

    def without_delays(self) -> Work:
        """Returns the recorded work, with each operation starting when it can."""
        return replace(self.work, late_s=np.zeros_like(self.work.late_s))

    def alike(self) -> Work:
        """Returns the same work for all operations of a kind: the mean of computations, the median of communications.

        The median leaves out that some of a kind waited for a link. Nothing starts late.
        """
        busy_s = np.empty_like(self.work.busy_s)
        for kind in {each.kind for each in self.recorded.operations}:
            own = self.of_kinds(kind)
            values = self.work.busy_s[own]
            busy_s[own] = np.median(values) if kind in COMMUNICATION else values.mean()
        return Work(busy_s, np.zeros_like(busy_s))

    def of_kinds(self, *kinds: str) -> list[int]:
        """Returns the operations of these kinds."""
        return [i for i, each in enumerate(self.recorded.operations) if each.kind in kinds]

    def of_stage(self, stage: int) -> list[int]:
        """Returns the operations of a stage."""
        return [i for i, each in enumerate(self.recorded.operations) if each.stage == stage]

    def step_s(self, work: Work) -> Times:
        """Returns the seconds that each step takes with this work: until the last operation ends."""
        ends_s = np.empty_like(work.busy_s)
        for unit in self.graph.order:
            starts_s = [self._start_s(operation, ends_s, work) for operation in unit]
            if unit in self.meeting:
                last_s = np.maximum.reduce(starts_s)
                if unit[0] in self.of_all_replicas:
                    last_s = last_s.max(axis=1, keepdims=True)
                ends_s[list(unit)] = last_s + work.busy_s[list(unit)]
            else:
                ends_s[unit[0]] = starts_s[0] + work.busy_s[unit[0]]
        return np.asarray(ends_s.max(axis=(0, 2)))

    def _start_s(self, operation: int, ends_s: Times, work: Work) -> Times:
        before = self.graph.waits_for[operation]
        late_s: Times = work.late_s[operation]
        return late_s + np.maximum.reduce([ends_s[i] for i in before]) if before else late_s
