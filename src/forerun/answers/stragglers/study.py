"""Computes the cost of stragglers in a job, by operation, stage and rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, nan
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from forerun.answers.stragglers.kinds import RECEIVE_BACKWARD, RECEIVE_FORWARD, SEND_BACKWARD, SEND_FORWARD
from forerun.answers.stragglers.recorded_steps import RecordedSteps, Times
from forerun.answers.stragglers.replay import Replay

Key = TypeVar("Key")
Flags: TypeAlias = npt.NDArray[np.bool_]
_TOGETHER = {
    SEND_FORWARD: "forward-pp-comm",
    RECEIVE_FORWARD: "forward-pp-comm",
    SEND_BACKWARD: "backward-pp-comm",
    RECEIVE_BACKWARD: "backward-pp-comm",
}
"""kinds that count as one"""
_SLOWEST_RANKS = 0.03
"""share of the ranks that count as the slowest (arXiv 2505.05713, equation 5)"""
_NOTHING = 1e-9
"""share of the step below which stragglers cost nothing"""


@dataclass(frozen=True)
class StragglerCosts:
    """Holds the cost of unequal operations in a job.

    A slowdown is the mean step time over that of a job whose operations are all alike. That of some operations is the
    slowdown of a job in which only these take their recorded times.
    """

    recorded: RecordedSteps
    replayed_s: Times
    """of each step, with every operation as soon as it can start"""
    alike_s: float
    """of each step with all operations of a kind alike"""
    by_operation: dict[str, float]
    by_stage: dict[int, float]
    by_replica: dict[int, float]
    by_rank: dict[int, float]
    """the lesser of the slowdowns of the rank's stage and of its replica"""
    last_stage_share: float
    """the share of the cost of unequal operations that vanishes if the last stage is like the mean; NaN if they cost
    nothing
    """
    slowest_ranks_share: float
    """the same of the slowest 3 % of the ranks"""
    slowest_ranks: tuple[int, ...]

    @property
    def slowdown(self) -> float:
        """Returns the mean step time over that of a job without stragglers."""
        return float(self.replayed_s.mean()) / self.alike_s

    @property
    def delayed(self) -> float:
        """Returns the mean recorded step time over that of a job in which the host delays no operation."""
        return float(self.recorded.step_s.mean() / self.replayed_s.mean())

    @property
    def wasted_share(self) -> float:
        """Returns the share of the GPU time that goes where all operations are alike."""
        return 1.0 - 1.0 / self.slowdown


def straggler_costs(recorded: RecordedSteps) -> StragglerCosts:
    """Returns the cost of stragglers in the recorded steps. Raises ForerunError as `dependencies` does."""
    costs = _Costs(Replay(recorded))
    operations = len(recorded.operations)
    by_stage = {stage: costs.slowdown(costs.at_stages([stage])) for stage in range(recorded.stages)}
    by_replica = {each: costs.slowdown(costs.at_replicas([each])) for each in range(recorded.replicas)}
    by_operation = {name: costs.slowdown(costs.of(kinds)) for name, kinds in _named(recorded).items()}
    by_rank = _by_rank(recorded, by_stage, by_replica)
    slowest = list(by_rank)[: ceil(_SLOWEST_RANKS * len(by_rank))]
    at_slowest = np.zeros((operations, 1, recorded.replicas), dtype=bool)
    for stage, replica in np.argwhere(np.isin(recorded.ranks, slowest)).tolist():
        at_slowest |= costs.at_stages([stage]) & costs.at_replicas([replica])
    return StragglerCosts(
        recorded=recorded,
        replayed_s=costs.replayed_s,
        alike_s=costs.alike_s,
        by_operation=_slowest_first(by_operation),
        by_stage=_slowest_first(by_stage),
        by_replica=_slowest_first(by_replica),
        by_rank=by_rank,
        last_stage_share=costs.share(costs.at_stages([recorded.stages - 1])),
        slowest_ranks_share=costs.share(at_slowest),
        slowest_ranks=tuple(slowest),
    )


class _Costs:
    """Step times where some operations take their own time and all others that of their kind.

    Operations are marked by flags that broadcast to [operation, step, replica].
    """

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.own, self.alike = replay.without_delays(), replay.alike()
        self.replayed_s = replay.step_s(self.own)
        self.alike_s = float(replay.step_s(self.alike).mean())

    def of(self, kinds: Iterable[str]) -> Flags:
        """Marks operations of these kinds."""
        return self._rows(self.replay.of_kinds(*kinds))

    def at_stages(self, stages: Iterable[int]) -> Flags:
        """Marks operations of these stages."""
        return self._rows([i for stage in stages for i in self.replay.of_stage(stage)])

    def at_replicas(self, replicas: list[int]) -> Flags:
        """Marks operations of these replicas."""
        marked = np.zeros((1, 1, self.replay.recorded.replicas), dtype=bool)
        marked[..., replicas] = True
        return marked

    def _rows(self, operations: list[int]) -> Flags:
        marked = np.zeros((len(self.replay.recorded.operations), 1, 1), dtype=bool)
        marked[operations] = True
        return marked

    def slowdown(self, marked: Flags) -> float:
        """Returns the slowdown where only the marked operations take their own time."""
        return self._mean_s(marked) / self.alike_s

    def share(self, marked: Flags) -> float:
        """Returns the share of the loss that goes where the marked operations take the time of their kind."""
        replayed_s = float(self.replayed_s.mean())
        lost_s = replayed_s - self.alike_s
        return (replayed_s - self._mean_s(~marked)) / lost_s if lost_s > _NOTHING * replayed_s else nan

    def _mean_s(self, marked: Flags) -> float:
        busy_s = np.where(marked, self.own.busy_s, self.alike.busy_s)
        return float(self.replay.step_s(replace(self.alike, busy_s=busy_s)).mean())


def _named(recorded: RecordedSteps) -> dict[str, list[str]]:
    """Returns the kinds of operations that there are, by the name under which they count."""
    named: dict[str, list[str]] = {}
    for kind in sorted({each.kind for each in recorded.operations}):
        named.setdefault(_TOGETHER.get(kind, kind), []).append(kind)
    return named


def _by_rank(recorded: RecordedSteps, by_stage: dict[int, float], by_replica: dict[int, float]) -> dict[int, float]:
    """Returns the slowdowns of ranks, the largest first; of equal ones the lower rank."""
    scores = np.minimum.outer(list(by_stage.values()), list(by_replica.values()))
    ranks = zip(recorded.ranks.ravel().tolist(), scores.ravel().tolist(), strict=True)
    return _slowest_first(dict(sorted(ranks)))


def _slowest_first(slowdowns: dict[Key, float]) -> dict[Key, float]:
    return dict(sorted(slowdowns.items(), key=lambda item: -item[1]))
