"""The waiting jobs of each size, in a policy's order. Thousands may wait, and most never come to the head."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from forerun.answers.jobs.policies import Numbers
from forerun.common.jit import kernel

NO_PLACE = np.iinfo(np.int64).max
"""the first place of a line that is empty"""


class Lines:
    """Sorts the jobs of an order into lines: one for each size, and one for those that run."""

    def __init__(self, gpus: Numbers) -> None:
        """`gpus`: that each job needs, by its number."""
        self.sizes, self.of_job = np.unique(gpus, return_inverse=True)
        """the numbers of GPUs that jobs need, ascending, and which of them each job needs"""
        self._begin = np.zeros(len(self.sizes) + 2, dtype=np.int64)
        self._places = np.zeros(len(gpus), dtype=np.int64)

    def look(self, order: Numbers, runs: npt.NDArray[np.bool_]) -> None:
        """Takes note of an order of jobs: their numbers, and by number whether each runs."""
        _line_up(order, runs, self.of_job, self._begin, self._places)

    @property
    def running(self) -> Numbers:
        """Returns the places of the jobs that run."""
        return self._places[self._begin[-2] : self._begin[-1]]

    @property
    def first(self) -> Numbers:
        """Returns the first place of each size."""
        begin = self._begin[:-1]
        return np.where(begin[1:] > begin[:-1], self._places[np.minimum(begin[:-1], len(self._places) - 1)], NO_PLACE)

    def line(self, size: int) -> Line:
        """Returns the jobs that wait for as many GPUs as the size of that index."""
        return Line(self._places[self._begin[size] : self._begin[size + 1]])


class Line:
    """The waiting jobs of one size, by their places in the order."""

    def __init__(self, waiting: Numbers) -> None:
        self._waiting, self._gone = waiting, 0
        self._stopped: list[int] = []
        """those that were stopped since, as a heap"""
        self._find_first()

    def _find_first(self) -> None:
        waiting = int(self._waiting[self._gone]) if self._gone < len(self._waiting) else NO_PLACE
        self.first = min(waiting, self._stopped[0]) if self._stopped else waiting

    def go_on(self) -> None:
        """Takes the first one out."""
        if self._stopped and self._stopped[0] == self.first:
            heappop(self._stopped)
        else:
            self._gone += 1
        self._find_first()

    def insert(self, place: int) -> None:
        """Puts a job that was stopped at its place."""
        heappush(self._stopped, place)
        self.first = min(self.first, place)


@kernel
def _line_up(order: Numbers, runs: npt.NDArray[np.bool_], of_job: Numbers, begin: Numbers, places: Numbers) -> None:
    """Writes the places of the jobs of each size that wait, then those that run, and where each line begins."""
    begin[:] = 0
    running = len(begin) - 2
    for number in order:
        begin[(running if runs[number] else of_job[number]) + 1] += 1
    for size in range(running + 1):
        begin[size + 1] += begin[size]
    for place in range(len(order)):
        number = order[place]
        size = running if runs[number] else of_job[number]
        places[begin[size]] = place
        begin[size] += 1
    for size in range(running + 1, 0, -1):
        begin[size] = begin[size - 1]
    begin[0] = 0
