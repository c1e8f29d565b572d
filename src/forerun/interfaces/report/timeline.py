"""The timeline of a simulated rank as tables: kernels, streams and modules by time."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from forerun.answers.analysis.tables import kernel_times, module_times, stream_times
from forerun.core.program.types import Phase
from forerun.interfaces.report.console import print_heading, print_missing, print_table
from forerun.interfaces.report.figures import percent, seconds
from forerun.interfaces.report.records import prediction_record

if TYPE_CHECKING:
    from forerun.answers.analysis.reading import Simulation


def timeline_record(simulation: Simulation, rank_class: int, depth: int) -> dict[str, Any]:
    """Returns all rows of the tables of one rank class, and the prediction."""
    cls = simulation.program.rank_classes[rank_class]
    return {
        "prediction": prediction_record(simulation.prediction),
        "rank_class": cls.name,
        "n_ranks": cls.n_ranks,
        "kernels": [asdict(row) for row in kernel_times(simulation, rank_class)],
        "streams": [asdict(row) for row in stream_times(simulation, rank_class)],
        "modules": [asdict(row) for row in module_times(simulation, rank_class, depth)],
    }


def print_timeline(out: Console, simulation: Simulation, rank_class: int, top: int, depth: int) -> None:
    """Prints the `top` kernels and modules of one rank class, and its streams."""
    cls, prediction = simulation.program.rank_classes[rank_class], simulation.prediction
    print_heading(out, prediction)
    out.print(f"step time {seconds(prediction.step_time_s)}; shown: {cls.name} ({cls.n_ranks} ranks)")
    out.print()
    _print_kernels(out, simulation, rank_class, top)
    out.print()
    _print_streams(out, simulation, rank_class)
    out.print()
    _print_modules(out, simulation, rank_class, top, depth)
    print_missing(out, prediction)


def _print_kernels(out: Console, simulation: Simulation, rank_class: int, top: int) -> None:
    rows = kernel_times(simulation, rank_class)
    where = any(row.lines for row in rows)
    cells = (
        (row.name, row.kind, f"{row.count:,}", seconds(row.total_s), percent(row.share), *[_place(row.lines)] * where)
        for row in rows[:top]
    )
    headings = ("kernel", "kind", "count", "total", "of step", *["launched at"] * where)
    title = f"Kernels by time ({min(top, len(rows))} of {len(rows)})"
    print_table(out, title, "llrrr" + "l" * where, headings, cells)


def _place(lines: tuple[str, ...]) -> str:
    """Returns the most frequent source line, and the number of others."""
    if not lines:
        return ""
    more = f" +{len(lines) - 1}" if len(lines) > 1 else ""
    return lines[0].rpartition("/")[2] + more


def _print_streams(out: Console, simulation: Simulation, rank_class: int) -> None:
    cells = (
        (row.name, f"{row.count:,}", seconds(row.busy_s), percent(row.share))
        for row in stream_times(simulation, rank_class)
    )
    print_table(out, "Streams", "lrrr", ("stream", "nodes", "busy", "of step"), cells)


def _print_modules(out: Console, simulation: Simulation, rank_class: int, top: int, depth: int) -> None:
    rows = module_times(simulation, rank_class, depth)
    phases = [phase.name.lower() for phase in Phase]
    cells = (
        (row.name, f"{row.count:,}", seconds(row.total_s), percent(row.share), *map(_known, row.by_phase_s.values()))
        for row in rows[:top]
    )
    title = f"Modules by device time ({min(top, len(rows))} of {len(rows)}, {depth} deep)"
    print_table(out, title, "lrrr" + "r" * len(phases), ("module", "nodes", "total", "share", *phases), cells)


def _known(time_s: float) -> str:
    return seconds(time_s) if time_s else ""
