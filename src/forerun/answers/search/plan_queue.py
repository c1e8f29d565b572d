"""Orders the plans of a search by their bounds, which get closer for the plans that come first."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np

from forerun.answers.search.outcome import Rows
from forerun.core.program.types import F64

_REFINED = 128
"""rows whose coarse bounds are refined together"""


class Queue:
    """A queue of rows in the order of their bounds. Rows that come first get closer bounds.

    `refined` bounds many rows and returns those that may fit, `closer` bounds one row.
    """

    def __init__(
        self,
        rows: Rows,
        bound: F64,
        refined: Callable[[Rows], Rows] | None,
        closer: Callable[[int], float] | None,
    ) -> None:
        order = np.argsort(bound[rows], kind="stable")
        self._rows, self._order, self._bound = rows[order], bound[rows][order], bound
        self._refined, self._closer, self._next = refined, closer, 0
        self._heap: list[tuple[float, bool, int]] = []
        """(bound, whether it is the closest, row)"""

    def next(self, most: int, last_place: float) -> list[int]:
        """Returns up to `most` rows that may have a place, the least bound first."""
        batch: list[int] = []
        while len(batch) < most:
            while self._next < len(self._rows) and (not self._heap or self._order[self._next] <= self._heap[0][0]):
                if self._order[self._next] > last_place:
                    break
                self._open(last_place)
            if not self._heap or self._heap[0][0] > last_place:
                break
            bound, is_closest, row = heappop(self._heap)
            if is_closest or self._closer is None:
                batch.append(row)
            else:
                heappush(self._heap, (max(bound, self._closer(row)), True, row))
        return batch

    def look_ahead(self, most: int, last_place: float) -> None:
        """Computes the closer bounds that the next call of `next` needs for up to `most` rows.

        Worker processes simulate other rows meanwhile.
        """
        for row in self.next(most, last_place):
            heappush(self._heap, (float(self._bound[row]), True, row))

    def _open(self, last_place: float) -> None:
        """Takes the next rows into the heap."""
        end = min(self._next + (_REFINED if self._refined else 1), len(self._rows))
        end = int(np.searchsorted(self._order[:end], last_place, side="right"))
        rows = self._rows[self._next : end]
        for row in (self._refined(rows) if self._refined else rows).tolist():
            heappush(self._heap, (float(self._bound[row]), False, row))
        self._next = end
