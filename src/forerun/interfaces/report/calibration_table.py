"""Shows the changes of a calibration and its errors against the measurements, as tables and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from forerun.describe.cluster.catalog import device_names
from forerun.interfaces.report.console import print_table, print_title

if TYPE_CHECKING:
    from forerun.evidence.measure.calibrate import Calibration, Change


def print_calibration(out: Console, found: Calibration, written: Path | None) -> None:
    """Prints constants old and new, errors before and after, notes, and how to use the profile."""
    title = f"Cost profile of {found.profile.name}"
    if found.changes:
        changes = ((each.path, _number(each.old), _number(each.new), _change(each)) for each in found.changes)
        print_table(out, title, "lrrr", ("constant", "old", "new", "change"), changes)
    else:
        print_title(out, title)
        out.print("No constant changed.")
    out.print()
    errors = (
        (
            row.section if row.kept else f"{row.section} *",
            row.rows_class,
            f"{row.rows:,}",
            f"{row.before:.1f}",
            f"{row.after:.1f}",
            "-" if row.left_out is None else f"{row.left_out:.1f}",
        )
        for row in found.errors
    )
    headings = ("part", "of", "rows", "before", "after", "left out")
    print_table(out, "Mean absolute error of the measured time, %", "llrrrr", headings, errors)
    out.print("left out: on shapes that the fit did not see, five fits")
    if not all(row.kept for row in found.errors):
        out.print("*: fitted, but not taken into the profile")
    for note in found.notes:
        out.print(f"- {note}")
    out.print()
    if written is None:
        out.print("Not written; --profile-out FILE.yaml writes the profile.")
        return
    like = f"like: {found.profile.name}, " if found.profile.name in device_names() else ""
    out.print(f"To use it, name it in a cluster file: device: {{{like}cost_profile: {written}}}", soft_wrap=True)


def calibration_record(found: Calibration) -> dict[str, Any]:
    """Returns the same figures as one object."""
    return {
        "device": found.profile.name,
        "changes": [asdict(change) for change in found.changes],
        "errors": [asdict(row) for row in found.errors],
        "notes": list(found.notes),
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _change(change: Change) -> str:
    if change.old is None:
        return "new"
    return f"{(change.new / change.old - 1) * 100:+.1f} %" if change.old else ""
