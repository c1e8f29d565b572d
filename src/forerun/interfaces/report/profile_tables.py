"""Shows the contents and the analysis of a profile: console tables, records for JSON, CSV files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from forerun.answers.profile.kernel_types import short_name
from forerun.common.files import make_folder
from forerun.common.units import GIB
from forerun.interfaces.report.console import make_table, print_table, print_title
from forerun.interfaces.report.figures import percent, seconds
from forerun.interfaces.report.written import write_table

if TYPE_CHECKING:
    from forerun.answers.profile.analyze import Analysis
    from forerun.answers.profile.facts import ProfileFacts
    from forerun.answers.profile.imported import Imported
    from forerun.answers.profile.tables import Cell

_NAME_WIDTH = 60
_TITLES = {
    "temporal_breakdown": "Time of the devices",
    "comm_comp_overlap": "Communication beside computation, as HTA sees it",
    "communication": "Communication of every library beside computation",
    "gpu_kernel_breakdown.0": "Kernels by type (us)",
    "kernels": "Kernels",
    "gpu_user_annotation": "Annotations on the device",
    "idle_time_breakdown.0": "Idle time of each stream, by cause (us)",
    "queue_length_summary": "Launches that wait on each stream",
    "memory_bw_summary": "Bandwidth of copies and fills (GB/s)",
}
"""tables of the console, in order"""


def facts_record(facts: Sequence[ProfileFacts]) -> dict[str, Any]:
    """Returns every figure of the files."""
    return {"profiles": [asdict(one) | {"mean_step_s": one.mean_step_s} for one in facts]}


def print_facts(out: Console, facts: Sequence[ProfileFacts]) -> None:
    """Prints the contents of each file and the parts that it lacks."""
    for number, one in enumerate(facts):
        if number:
            out.print()
        of_all = "" if one.world_size is None else f" of {one.world_size}"
        print_title(out, f"{one.path}: rank {one.rank}{of_all}")
        out.print(make_table("ll", (), _fact_rows(one), gap=2))
        for sentence in one.missing:
            out.print(f"  lacks: {sentence}")


def _fact_rows(one: ProfileFacts) -> list[tuple[str, str]]:
    rows = [
        ("devices", ", ".join(one.devices) or "none"),
        ("events", f"{one.events:,} ({one.operators:,} operators, {one.calls:,} calls of the runtime)"),
        ("work", f"{one.kernels:,} kernels, {one.copies:,} copies and fills on streams {_list(one.streams)}"),
        ("collectives", f"{one.collectives:,}, {one.described_collectives:,} of them with sizes and groups"),
    ]
    if one.step_times_s:
        spread = f"{seconds(min(one.step_times_s))} to {seconds(max(one.step_times_s))}"
        rows.append(("steps", f"{len(one.step_times_s)} of {seconds(one.mean_step_s or 0)} in the mean ({spread})"))
    if one.device_span_s:
        rows.append(
            ("device", f"busy {percent(one.device_busy_s / one.device_span_s)} of {seconds(one.device_span_s)}")
        )
    if one.peak_allocated_bytes is not None:
        reserved = 0 if one.peak_reserved_bytes is None else one.peak_reserved_bytes
        rows.append(
            ("memory", f"{one.peak_allocated_bytes / GIB:.2f} GiB allocated, {reserved / GIB:.2f} GiB reserved at most")
        )
    return rows


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def analysis_record(analysis: Analysis) -> dict[str, Any]:
    """Returns every table as a list of objects, under its name."""
    return {"notes": list(analysis.notes)} | {table.name: table.records() for table in analysis.tables}


def write_analysis(folder: Path, analysis: Analysis) -> None:
    """Writes a CSV file for each table into `folder`. Raises ForerunError if that fails."""
    make_folder(folder)
    for table in analysis.tables:
        write_table(folder / f"{table.name}.csv", table.columns, table.rows)


def print_analysis(out: Console, analysis: Analysis, top: int) -> None:
    """Prints the tables of all ranks, with the `top` kernels and annotations of the most time."""
    for name, title in _TITLES.items():
        table = analysis.table(name)
        if not table.rows:
            continue
        rows = table.rows
        if "name" in table.columns and len(rows) > top:
            at = next(i for i, column in enumerate(table.columns) if column in ("sum (us)", "count"))
            rows = sorted(rows, key=lambda row: -float(row[at]))[:top]
        sides = "".join("l" if isinstance(cell, str) else "r" for cell in rows[0])
        print_table(out, title, sides, table.columns, [tuple(map(_cell, row)) for row in rows])
        out.print()
    for path in analysis.paths:
        print_title(
            out,
            f"Critical path of rank {path.window.rank}, {path.annotation} {path.instance}: "
            f"{seconds(path.length_us / 1e6)}, {len(path.edges.source):,} of {path.n_edges:,} edges",
        )
        bounds = {name: time for name, time in path.bounds().items() if name}
        rows_ = [(name, f"{time:,.0f} us", percent(time / path.length_us)) for name, time in bounds.items()]
        out.print(make_table("lrr", (), rows_))
        out.print()
    for note in analysis.notes:
        out.print(f"note: {note}")


def import_record(found: Imported, path: Path) -> dict[str, Any]:
    """Returns the facts of an import and the errors of its replay."""
    program = found.program
    return {
        "program": str(path),
        "step": found.name,
        "device": found.device or None,
        "ranks": sum(one.n_ranks for one in program.rank_classes),
        "profiled_ranks": len(program.rank_classes),
        "measured_step_s": found.measured_s,
        "replayed_step_s": found.replayed_s,
        "replay_error": found.error,
        "step_times_s": list(found.step_times_s),
        "notes": list(found.notes),
    }


def print_import(out: Console, found: Imported, path: Path) -> None:
    """Prints the facts of an import and the errors of its replay."""
    record = import_record(found, path)
    times = found.step_times_s
    print_title(out, f"{path}: {found.name}, {record['profiled_ranks']} of {record['ranks']} ranks")
    rows = [
        ("device", found.device or "not known to Forerun; name it with --device to predict other GPUs"),
        ("measured", seconds(found.measured_s)),
        ("replayed", f"{seconds(found.replayed_s)} ({found.error:+.2%})"),
    ]
    if len(times) > 1:
        mean = sum(times) / len(times)
        spread = f"{seconds(min(times))} to {seconds(max(times))}"
        rows.append(("all steps", f"{len(times)} of {seconds(mean)} in the mean ({spread})"))
    out.print(make_table("ll", (), rows, gap=2))
    for note in found.notes:
        out.print(f"note: {note}")


def _cell(value: Cell) -> str:
    if isinstance(value, str):
        name = short_name(value)
        return name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 3]}..."
    if isinstance(value, int):
        return str(value)
    if value != value:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"
