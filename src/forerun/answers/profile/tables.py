"""Tables of figures under the names that HTA gives to its files and columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.sources.profile.profile import F64

Cell = str | int | float
QUARTILES = ("count", "mean", "std", "min", "25%", "50%", "75%", "max")


class Table(NamedTuple):
    """One table of an analysis."""

    name: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    note: str = ""
    """notes on how to read it"""

    def records(self) -> list[dict[str, Cell | None]]:
        """Returns the rows as dicts; a figure that does not exist is None."""
        return [
            {name: None if value != value else value for name, value in zip(self.columns, row, strict=True)}
            for row in self.rows
        ]


def describe(values: F64) -> tuple[float, ...]:
    """Returns the figures of QUARTILES; quartiles are interpolated, the spread is that of a sample."""
    if len(values) == 0:
        return (0.0, *(float("nan"),) * (len(QUARTILES) - 1))
    spread = float(values.std(ddof=1)) if len(values) > 1 else float("nan")
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return (
        float(len(values)),
        float(values.mean()),
        spread,
        float(values.min()),
        low,
        middle,
        high,
        float(values.max()),
    )
