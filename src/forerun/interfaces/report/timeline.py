"""The timeline of a simulated rank as tables: kernels, streams and modules by time."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from forerun.answers.analysis.reading import Simulation
from forerun.answers.analysis.tables import kernel_times, module_times, stream_times
from forerun.core.program.types import Phase
from forerun.interfaces.report.console import make_table, print_heading, print_missing
from forerun.interfaces.report.records import prediction_record
from forerun.interfaces.report.wording import percent, seconds


def timeline_record(simulation: Simulation, rank_class: int, depth: int) -> dict[str, Any]:
    """All rows of the tables of one rank class, and the prediction."""
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
    """The `top` kernels and modules of one rank class, and its streams."""
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
    out.print(Text(f"Kernels by time ({min(top, len(rows))} of {len(rows)})", style="bold"))
    where = [("launched at", "left")] if any(row.lines for row in rows) else []
    shown = make_table(
        ("kernel", "left"), ("kind", "left"), ("count", "right"), ("total", "right"), ("of step", "right"), *where
    )
    for row in rows[:top]:
        place = [_place(row.lines)] if where else []
        shown.add_row(row.name, row.kind, f"{row.count:,}", seconds(row.total_s), percent(row.share), *place)
    out.print(shown)


def _place(lines: tuple[str, ...]) -> str:
    """The most frequent source line, and the number of others."""
    if not lines:
        return ""
    more = f" +{len(lines) - 1}" if len(lines) > 1 else ""
    return lines[0].rpartition("/")[2] + more


def _print_streams(out: Console, simulation: Simulation, rank_class: int) -> None:
    out.print(Text("Streams", style="bold"))
    shown = make_table(("stream", "left"), ("nodes", "right"), ("busy", "right"), ("of step", "right"))
    for row in stream_times(simulation, rank_class):
        shown.add_row(row.name, f"{row.count:,}", seconds(row.busy_s), percent(row.share))
    out.print(shown)


def _print_modules(out: Console, simulation: Simulation, rank_class: int, top: int, depth: int) -> None:
    rows = module_times(simulation, rank_class, depth)
    out.print(Text(f"Modules by device time ({min(top, len(rows))} of {len(rows)}, {depth} deep)", style="bold"))
    phases = [(phase.name.lower(), "right") for phase in Phase]
    shown = make_table(("module", "left"), ("nodes", "right"), ("total", "right"), ("share", "right"), *phases)
    for row in rows[:top]:
        by_phase = [seconds(time_s) if time_s else "" for time_s in row.by_phase_s.values()]
        shown.add_row(row.name, f"{row.count:,}", seconds(row.total_s), percent(row.share), *by_phase)
    out.print(shown)
