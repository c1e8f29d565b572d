"""The checkpoints that a run has written and can still restore."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, replace
from itertools import takewhile
from math import floor, inf


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint, or several that follow each other at equal distances."""

    at_s: float
    """time at which training stopped for it"""
    done_s: float
    """time from which it can be restored"""
    step: float
    period_s: float = inf
    period_steps: float = 0.0
    count: int = 1

    def latest(self, now_s: float, before_s: float) -> float | None:
        """Returns the last step that was complete at `now_s` and began by `before_s`; None if there is none."""
        room_s = min(now_s - self.done_s, before_s - self.at_s)
        if room_s < 0.0:
            return None
        return self.step + min(floor(room_s / self.period_s), self.count - 1) * self.period_steps

    @property
    def last_step(self) -> float:
        """Returns the step of the last one."""
        return self.step + (self.count - 1) * self.period_steps

    def until(self, step: float) -> Saved:
        """Returns the checkpoints that end at `step` or before it. The first one does."""
        return replace(self, count=floor((step - self.step) / self.period_steps) + 1)


class Saves:
    """The checkpoints of one level, in the order of the last steps of those that follow each other."""

    def __init__(self) -> None:
        self._written: list[Saved] = []

    def add(self, at_s: float, done_s: float, step: float) -> None:
        """Adds one checkpoint."""
        self._written.append(Saved(at_s, done_s, step))

    def repeat(self, since_s: float, period_s: float, period_steps: float, times: int) -> None:
        """Adds the checkpoints begun after `since_s` another `times` times, each time `period_s` later."""
        latest = list(takewhile(lambda one: one.at_s > since_s, reversed(self._written)))
        for one in reversed(latest):
            at_s, done_s, step = one.at_s + period_s, one.done_s + period_s, one.step + period_steps
            self._written.append(Saved(at_s, done_s, step, period_s, period_steps, times))

    def latest(self, now_s: float, before_s: float) -> float | None:
        """Returns the furthest step that was complete at `now_s` and whose save began by `before_s`."""
        best: float | None = None
        for one in reversed(self._written):
            if best is not None and one.last_step < best:
                break
            step = one.latest(now_s, before_s)
            if step is not None and (best is None or step > best):
                best = step
        return best

    def forget_after(self, step: float) -> None:
        """Drops the checkpoints of later steps, from which no run goes on."""
        later = []
        while self._written and self._written[-1].last_step > step:
            later.append(self._written.pop())
        for one in later:
            if one.step <= step:
                insort(self._written, one.until(step), key=lambda one: one.last_step)

    def clear(self) -> None:
        """Drops all checkpoints, because their storage is lost."""
        self._written.clear()
