"""The spaces of several software stacks as one table, and the bounds of its plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from forerun.answers.search.names import Renamed
from forerun.answers.search.orders import Groups
from forerun.answers.search.outcome import Rows
from forerun.answers.search.screening import Screened, Screening
from forerun.answers.search.space import Space, Tally
from forerun.answers.search.space_table import SpaceTable
from forerun.answers.search.time_bound import TimeBound
from forerun.answers.search.unit_runs import UnitRuns


@dataclass(frozen=True)
class Spaces:
    """The possible plans of several spaces, which differ in the software stack, one space after the other."""

    parts: tuple[Space, ...]
    table: SpaceTable
    renamed: Renamed
    starts: tuple[int, ...]
    """the first row of each part, and the number of all rows"""

    @classmethod
    def of(cls, spaces: Sequence[Space], tally: Tally) -> Spaces:
        """Returns the plans of `spaces`, counted in `tally`; spaces without a possible plan are left out."""
        parts: list[Space] = []
        tables: list[SpaceTable] = []
        renamed: list[Renamed] = []
        for space in spaces:
            table = space.table(tally)
            assert tally.renamed is not None  # `Space.table` sets it
            if len(table) or (space is spaces[-1] and not parts):
                parts.append(space)
                tables.append(table)
                renamed.append(tally.renamed)
        lengths = [len(table) for table in tables]
        starts = (0, *np.cumsum(lengths).tolist())
        return cls(tuple(parts), SpaceTable.joined(tables), Renamed.joined(renamed, lengths), starts)

    def part_of(self, row: int) -> int:
        """Returns the number of the part that has `row`."""
        return int(np.searchsorted(self.starts, row, side="right")) - 1


class Bounds:
    """Computes lower bounds of the plans of spaces: coarse ones of all, closer ones of those that come first."""

    def __init__(self, spaces: Spaces, runs: UnitRuns) -> None:
        self._spaces = spaces
        self._screenings = [Screening(runs, space.stack) for space in spaces.parts]
        self._close = [TimeBound(screening) for screening in self._screenings]

    def all(self) -> Screened:
        """Returns the bounds of all plans."""
        return self._each(lambda screening, table: screening.run(table))

    def coarse(self) -> Screened:
        """Returns lower bounds of these bounds, for which few units are built."""
        return self._each(lambda screening, table: screening.coarse(table))

    def _each(self, screen: Callable[[Screening, SpaceTable], Screened]) -> Screened:
        table, starts = self._spaces.table, self._spaces.starts
        parts = [
            screen(screening, table.take(np.arange(first, end)))
            for screening, first, end in zip(self._screenings, starts[:-1], starts[1:], strict=True)
        ]
        return Screened(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(Screened)))

    def refine(self, screened: Screened, rows: Rows) -> None:
        """Replaces the bounds of `rows` in `screened`, which are coarse, by those of `all`."""
        numbers = np.searchsorted(self._spaces.starts, rows, side="right") - 1
        for number, screening in enumerate(self._screenings):
            own = rows[numbers == number]
            if len(own):
                found = screening.run(self._spaces.table.take(own))
                for each in fields(Screened):
                    getattr(screened, each.name)[own] = getattr(found, each.name)

    def groups(self, row: int) -> Groups:
        """Returns the communication groups of the plan in `row`."""
        return self._spaces.table.groups_of(row)

    def closer(self, row: int) -> float:
        """Returns a closer bound of the time of the plan in `row`, in seconds."""
        close = self._close[self._spaces.part_of(row)]
        return close.least_step_s(self._spaces.table.plan(row), self.groups(row))
