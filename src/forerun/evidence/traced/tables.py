"""Prints the accuracy of traced programs (`report.py`): on a console, or as Markdown for a page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from forerun.answers.analysis.uncertainty import residuals
from forerun.evidence.traced.report import Judged, Sum, judge, quantiles, sums
from forerun.evidence.traced.run import TracedResult

_HEADINGS = ("program", "row", "GPUs", "s", "traced", "modelled", "in band", "GiB", "traced", "modelled", "in band")
_SUM_HEADINGS = ("program", "figure", "rows", "traced, mean", "largest", "modelled, mean", "in band")
_LEFT = 2
"""columns of text; the others are right-aligned"""


def print_traced(results: Sequence[TracedResult], out: Console) -> None:
    """Prints every row, the sums by repository, the rows without a prediction, and the bands of these rows."""
    rows = [judge(result) for result in results]
    out.print(_table(_HEADINGS, [_cells(row) for row in rows if not row.reason]))
    out.print()
    out.print(_table(_SUM_HEADINGS, _sum_rows(rows)))
    out.print()
    for row in rows:
        if row.reason:
            out.print(f"not predicted: {row.id}: {row.reason}", soft_wrap=True)
    out.print(
        f"{100 * residuals().share:.0f} % band of traced programs that these rows give, ln(measured / predicted):"
    )
    for name, found in quantiles(results).items():
        out.print(f"  {name}: {found.low:+.3f} to {found.high:+.3f} ({found.rows} rows)")


def markdown(results: Sequence[TracedResult]) -> str:
    """Returns the tables of rows and sums as Markdown."""
    rows = [judge(result) for result in results]
    made = [
        _markdown_table(_SUM_HEADINGS, _sum_rows(rows)),
        _markdown_table(_HEADINGS, [_cells(row) for row in rows if not row.reason]),
    ]
    return "\n\n".join(made) + "\n"


def _cells(row: Judged) -> tuple[str, ...]:
    memory = (
        "-" if row.measured_gib is None else f"{row.measured_gib:.2f}{'' if row.memory_kind == 'allocated' else ' r'}"
    )
    if row.outcome == "oom":
        memory = "out of memory"
    refused = "foreseen" if row.fits is False else "not foreseen"
    return (
        row.repository,
        row.label,
        f"{row.gpus} {row.device}",
        "-" if row.measured_s is None else f"{row.measured_s:.3f}",
        _percent(row.time_error),
        _percent(row.symbolic_time_error),
        _yes(row.time_held),
        memory,
        refused if row.outcome == "oom" else _percent(row.memory_error),
        _percent(row.symbolic_memory_error),
        _yes(row.memory_held),
    )


def _sum_rows(rows: Sequence[Judged]) -> list[tuple[str, ...]]:
    tables = {"step time": sums(rows, "time"), "memory": sums(rows, "memory")}
    return [
        (name, figure, str(one.rows), *map(_size, (one.mean, one.worst, one.symbolic_mean, one.held)))
        for figure, table in tables.items()
        for name, one in _known(table).items()
    ]


def _known(table: dict[str, Sum]) -> dict[str, Sum]:
    return {name: one for name, one in table.items() if one.rows}


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.1f} %"


def _size(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"


def _yes(held: bool | None) -> str:
    return {None: "-", True: "yes", False: "no"}[held]


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < _LEFT else "right", overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table


def _markdown_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    marks = ["---" if number < _LEFT else "---:" for number in range(len(headings))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, marks, *lines))
