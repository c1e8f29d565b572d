"""Simulates one run from event to event: saves, failures, recoveries, slow periods, missing nodes.

Between two events the saves of a run are periodic. The simulation processes two periods save by save. If both take the
same time, it skips to the next event at once, with the same result.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, pairwise
from math import floor, inf, isclose
from operator import mul
from typing import NamedTuple

from forerun.answers.goodput.arrivals import Failure, Slow, failures, slow_periods
from forerun.answers.goodput.outcome import Event, Outcome, Spent
from forerun.answers.goodput.pool import Pool
from forerun.answers.goodput.request import SCOPES, RunRequest
from forerun.answers.goodput.saves import Saves


def walk(request: RunRequest, seed: int = 0, run: int = 0, record: bool = False) -> Outcome:
    """Returns the outcome of run number `run` under `seed`. With `record` the outcome has its events."""
    return _Walk(request, seed, run, record).outcome()


class _Mark(NamedTuple):
    """The state of a run at the end of a period of saves."""

    now_s: float
    step: float
    behind_s: tuple[float, ...]
    """for each level the seconds until its last checkpoint is complete"""
    spent: dict[Spent, float]


class _Walk:
    def __init__(self, request: RunRequest, seed: int, run: int, record: bool) -> None:
        self.request, self.record = request, record
        self.now_s, self.step, self.last_save_step, self.n_saves = 0.0, 0.0, 0.0, 0
        self.spent = dict.fromkeys(Spent, 0.0)
        self.failed: Counter[str] = Counter()
        self.lost_tokens, self.longest_stop_s = 0.0, 0.0
        self.events: list[Event] = []
        self.wall_s = inf if request.wall_s is None else request.wall_s
        self.phase_ends = list(accumulate(phase.steps for phase in request.phases))
        self.maintenance_s = inf if request.maintenance is None else request.maintenance.every_s
        self.pool = Pool(request)
        self.stopped = True
        """whether the whole run has stopped, so that it has to start again even if replicas could go on alone"""
        self.started = False
        """whether the run has trained at all; until then a failure lets the whole start begin again"""
        self.saves = [Saves() for _ in request.levels]
        self.busy_until_s = [0.0] * len(request.levels)
        self.cycles = list(accumulate((level.every for level in request.levels), mul))
        self.drags = any(level.drag for level in request.levels)
        self._arriving = failures(request, seed, run)
        self.failure: Failure | None = next(self._arriving, None)
        self._slowing = slow_periods(request.slowdowns, seed, run)
        self._next_slow: Slow | None = next(self._slowing, None)
        self._slow: list[tuple[float, float]] = []

    def outcome(self) -> Outcome:
        """Walks to the end of the run and returns it."""
        recovery = self.request.recovery
        if not self._spend(Spent.START, recovery.start_s + recovery.warmup_s):
            self._recover()
        self.stopped, self.started = False, True
        while self.step < self.phase_ends[-1] and self.now_s < self.wall_s:
            self._change()
            self._train(min(self._failure_s, self.wall_s, self.maintenance_s, self._change_s))
            if self.now_s >= self._failure_s:
                self._recover()
            elif self.now_s >= self.maintenance_s:
                self._maintain()
        self._lose(float(floor(self.step)))
        return Outcome(
            wall_s=self.now_s,
            productive_s=self._ideal_s(0.0, self.step),
            spent_s={what: self.spent[what] for what in Spent if self.spent[what] > 0.0},
            steps=int(self.step),
            tokens=self._tokens(0.0, self.step),
            finished=self.step >= self.phase_ends[-1],
            failures=dict(self.failed),
            lost_tokens=self.lost_tokens,
            longest_stop_s=self.longest_stop_s,
            events=tuple(self.events),
        )

    @property
    def _failure_s(self) -> float:
        return inf if self.failure is None else self.failure.at_s

    # training and saving

    def _train(self, until_s: float) -> None:
        """Trains until a time or the last step. A save that has begun by then ends later, unless something fails."""
        marks: list[_Mark] = []
        while self.now_s < until_s and self.step < self.phase_ends[-1]:
            phase = bisect_right(self.phase_ends, self.step)
            usual_s, end = self.request.phases[phase].step_s, float(self.phase_ends[phase])
            due = inf
            if self.request.levels and self.request.save_every_s < inf:
                due = self.last_save_step + max(1.0, float(round(self.request.save_every_s / usual_s)))
            if not self._advance(min(max(due, self.step), end), usual_s, until_s):
                return
            if self.step < due:
                marks.clear()
            elif not self._save():
                return
            elif self.n_saves % self.cycles[-1] == 0:
                marks.append(self._mark())
                if self._skip(marks, until_s, end):
                    marks.clear()

    def _advance(self, target: float, usual_s: float, until_s: float) -> bool:
        """Trains to the step `target`; returns whether that is reached by `until_s`."""
        factor, missing = self._factor, self.pool.factor
        for end_s, drag in self._drags():
            step_s = usual_s * factor * drag
            stop_s = min(end_s, until_s)
            reached = self.now_s + (target - self.step) * step_s <= stop_s
            steps = target - self.step if reached else (stop_s - self.now_s) / step_s
            if step_s != usual_s:
                self.spent[Spent.FEWER] += steps * usual_s * (missing - 1.0)
                self.spent[Spent.SLOW] += steps * (step_s - usual_s * missing)
            self.now_s = self.now_s + steps * step_s if reached else stop_s
            self.step = target if reached else self.step + steps
            if reached or stop_s == until_s:
                return reached
        raise AssertionError("the last drag has no end")

    def _drags(self) -> Iterator[tuple[float, float]]:
        """Yields (time until which it holds, factor on steps) while checkpoints are persisted, and after that."""
        if not self.drags:
            yield inf, 1.0
            return
        busy = [
            (until_s, level.drag)
            for until_s, level in zip(self.busy_until_s, self.request.levels, strict=True)
            if level.drag and until_s > self.now_s
        ]
        for end_s, _ in sorted(busy):
            yield end_s, 1.0 + sum(drag for until_s, drag in busy if until_s >= end_s)
        yield inf, 1.0

    def _save(self) -> bool:
        """Saves on every level that is due; returns whether that ends before something fails."""
        begin_s = self.now_s
        due = [i for i, cycle in enumerate(self.cycles) if (self.n_saves + 1) % cycle == 0]
        waits_s = [max(0.0, self.busy_until_s[i] - begin_s) for i in due]
        blocking_s = max(waits_s) + max(self.request.levels[i].blocking_s for i in due)
        if not self._spend(Spent.SAVE, blocking_s):
            return False
        for i in due:
            self.busy_until_s[i] = self.now_s + self.request.levels[i].persist_s
            self.saves[i].add(begin_s, self.busy_until_s[i], self.step)
        self.n_saves, self.last_save_step = self.n_saves + 1, self.step
        return True

    def _mark(self) -> _Mark:
        behind_s = tuple(max(0.0, until_s - self.now_s) for until_s in self.busy_until_s)
        return _Mark(self.now_s, self.step, behind_s, self.spent.copy())

    def _skip(self, marks: list[_Mark], until_s: float, end_step: float) -> bool:
        """Takes the periods up to `until_s` and `end_step` at once if the last two were equal."""
        if len(marks) < 3:
            return False
        (first_s, first), (second_s, second) = ((b.now_s - a.now_s, b.step - a.step) for a, b in pairwise(marks[-3:]))
        same = zip((first_s, first, *marks[-2].behind_s), (second_s, second, *marks[-1].behind_s), strict=True)
        if not all(isclose(a, b, rel_tol=1e-9, abs_tol=1e-6) for a, b in same):
            return False
        times = floor(min((until_s - self.now_s) / second_s, (end_step - self.step) / second)) - 1
        if times < 1:
            return False
        for saves in self.saves:
            saves.repeat(marks[-2].now_s, second_s, second, times)
        for what in Spent:
            self.spent[what] += (marks[-1].spent[what] - marks[-2].spent[what]) * times
        self.now_s += times * second_s
        self.step += times * second
        self.last_save_step += times * second
        self.n_saves += times * self.cycles[-1]
        self.busy_until_s = [self.now_s + behind_s for behind_s in marks[-1].behind_s]
        return True

    # what changes the pace

    @property
    def _factor(self) -> float:
        return self.pool.factor * max((factor for _, factor in self._slow), default=1.0)

    @property
    def _change_s(self) -> float:
        begins_s = inf if self._next_slow is None else self._next_slow.at_s
        return min(begins_s, self._slow[0][0] if self._slow else inf, self.pool.next_return_s)

    def _change(self) -> None:
        """Applies changes up to the present time: starts and ends of slow periods, and returned replicas."""
        while self._next_slow is not None and self._next_slow.at_s <= self.now_s:
            one = self._next_slow
            heapq.heappush(self._slow, (one.end_s, one.factor))
            self._note(one.at_s, one.end_s, "slow", f"steps take {one.factor:g} times as long")
            self._next_slow = next(self._slowing, None)
        while self._slow and self._slow[0][0] <= self.now_s:
            heapq.heappop(self._slow)
        while self.pool.next_return_s <= self.now_s:
            self.pool.grow()
            begin_s = self.now_s
            grown = self._spend(Spent.RESIZE, self._resize_s)
            self._note(begin_s, self.now_s, "resize", "a replica is back")
            if not grown:
                self._recover()

    @property
    def _resize_s(self) -> float:
        return 0.0 if self.request.elastic is None else self.request.elastic.resize_s

    # failures

    def _spend(self, what: Spent, seconds: float) -> bool:
        """Waits `seconds`. Returns whether the wait ended without a failure and before the end of the run."""
        stop_s = min(self._failure_s, self.wall_s)
        whole = self.now_s + seconds <= stop_s
        end_s = self.now_s + seconds if whole else max(stop_s, self.now_s)
        self.spent[what] += end_s - self.now_s
        self.now_s = end_s
        return whole

    def _recover(self) -> None:
        """Brings the run back to training after a failure, and after those that hit the recovery."""
        begin_s, causes = self.now_s, list[str]()
        while self.failure is not None and self.failure.at_s <= self.now_s < self.wall_s:
            failure, self.failure = self.failure, next(self._arriving, None)
            self.failed[failure.kind.name] += 1
            causes.append(failure.kind.name)
            stages = self._stages(failure)
            if all(self._spend(what, seconds) for what, seconds in stages):
                if self.stopped:
                    self.pool.start(self.now_s)
                self.stopped = False
                break
        self.longest_stop_s = max(self.longest_stop_s, self.now_s - begin_s)
        if causes:
            self._note(begin_s, self.now_s, "failure", ", ".join(causes))

    def _stages(self, failure: Failure) -> list[tuple[Spent, float]]:
        """Discards the progress that a failure destroys, and returns the stages of the recovery."""
        recovery, kind = self.request.recovery, failure.kind
        detect_s = recovery.hang_detect_s if failure.luck < kind.hang_share else recovery.crash_detect_s
        detected_s = self.now_s + detect_s
        replace_s = self.pool.replace_s(kind, detected_s)
        restart_s = recovery.restart_s + recovery.communicators_s
        back_s = detected_s + replace_s + restart_s
        if not self.stopped and failure.since_s == failure.at_s and self.pool.lose_replica(back_s):
            stages = [(Spent.DETECT, detect_s), (Spent.RESIZE, self._resize_s)]
            if self.request.elastic is not None and self.request.elastic.shards:
                return [*stages, (Spent.RESTORE, self._roll_back(failure))]
            self._lose(float(floor(self.step)))
            return stages
        self.stopped = True
        return [
            (Spent.DETECT, detect_s),
            (Spent.REPLACE, max(0.0, self.pool.stop(detected_s + replace_s) - detected_s)),
            (Spent.RESTART, restart_s if self.started else max(restart_s, recovery.start_s)),
            (Spent.RESTORE, self._roll_back(failure)),
            (Spent.RESTART, recovery.warmup_s),
        ]

    def _roll_back(self, failure: Failure) -> float:
        """Goes back to the last checkpoint that a failure leaves, and returns the seconds to load it."""
        scope, best, load_s = SCOPES.index(failure.kind.scope), 0.0, 0.0
        for level, saves in zip(self.request.levels, self.saves, strict=True):
            if SCOPES.index(level.survives) < scope:
                saves.clear()
                continue
            step = saves.latest(self.now_s, failure.since_s)
            if step is not None and (step > best or not load_s):
                best, load_s = step, level.load_s
        for saves in self.saves:
            saves.forget_after(best)
        self.busy_until_s = [self.now_s] * len(self.saves)
        self._lose(best)
        self.last_save_step = best
        return load_s

    def _lose(self, step: float) -> None:
        """Goes back to a step; the work since then is wasted."""
        self.spent[Spent.WASTED] += self._ideal_s(step, self.step)
        self.lost_tokens += self._tokens(step, self.step)
        self.step = step

    def _maintain(self) -> None:
        """Stops the whole run for planned work, after a save."""
        maintenance = self.request.maintenance
        assert maintenance is not None
        begin_s, recovery = self.now_s, self.request.recovery
        self.maintenance_s += maintenance.every_s
        self._lose(float(floor(self.step)))
        if self.request.levels:
            save_s = max(level.blocking_s + level.persist_s for level in self.request.levels)
            if not self._spend(Spent.MAINTENANCE, save_s):
                self._recover()
                return
            for saves in self.saves:
                saves.add(begin_s, self.now_s, self.step)
            self.last_save_step, self.n_saves = self.step, 0
        self.pool.all_return()
        load_s = max((level.load_s for level in self.request.levels), default=0.0)
        if not self.request.levels:
            self._lose(0.0)
        start_s = recovery.restart_s + recovery.communicators_s + load_s + recovery.warmup_s
        self.stopped = True
        if not self._spend(Spent.MAINTENANCE, maintenance.down_s + start_s):
            self._recover()
        self.stopped = False
        self._note(begin_s, self.now_s, "maintenance", "planned")

    # sums over steps

    def _ideal_s(self, first: float, last: float) -> float:
        """Returns the undisturbed time of the steps from one to another."""
        return self._sum(first, last, [phase.step_s for phase in self.request.phases])

    def _tokens(self, first: float, last: float) -> float:
        return self._sum(first, last, [phase.tokens_per_step for phase in self.request.phases])

    def _sum(self, first: float, last: float, values: list[float]) -> float:
        bounds = pairwise((0, *self.phase_ends))
        parts = (max(0.0, min(last, end) - max(first, begin)) for begin, end in bounds)
        return sum(part * value for part, value in zip(parts, values, strict=True))

    def _note(self, start_s: float, end_s: float, what: str, detail: str) -> None:
        if self.record:
            self.events.append(Event(start_s, end_s, what, detail))
