"""`forerun diff`: the effect of a program's change on its step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forerun.answers.diff.changes import StepDiff, diff_steps
from forerun.common.errors import ForerunError
from forerun.interfaces.cli.exit_codes import NOTHING_FITS, WORSE
from forerun.interfaces.cli.loop_options import LoopOptions
from forerun.interfaces.cli.numbers import share
from forerun.interfaces.cli.option_groups import grouped
from forerun.interfaces.cli.program_options import AsJson, ClusterOption, Conditions, simulate_file
from forerun.interfaces.report.step_diff import diff_record, print_diff
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.written import to_json

_WIDTH = 150
"""width of the output outside a terminal, so that names are not cut"""


@dataclass(frozen=True)
class Bounds:
    """Holds the limits for the cost of a change. The exit code reports a change beyond them."""

    max_slowdown: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Exit with code 4 if step time grows by more than this: 2% or 0.02."),
    ] = None
    max_growth: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="Exit with code 4 if peak allocated memory grows by more than this: 2% or 0.02."
        ),
    ] = None
    must_fit: Annotated[
        bool, typer.Option("--must-fit", help="Exit with code 3 if the second program does not fit in memory.")
    ] = False

    def code(self, found: StepDiff) -> int:
        """Returns the exit code. Raises ForerunError for a share that is not a number."""
        if self.must_fit and not found.after.fits:
            return NOTHING_FITS
        limits = (
            ("--max-slowdown", self.max_slowdown, found.slowdown),
            ("--max-growth", self.max_growth, found.growth),
        )
        if self.max_growth is not None and found.growth is None:
            raise ForerunError("--max-growth: the program before says no memory (a profile without memory events)")
        given = [(option, limit, value) for option, limit, value in limits if limit is not None and value is not None]
        broken = [value > share(limit, option) for option, limit, value in given]
        return WORSE if any(broken) else 0


@grouped
def diff(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="Saved program (written by forerun trace).")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="Saved program of the changed script.")],
    cluster: ClusterOption,
    under: Conditions,
    bounds: Bounds,
    gpus: Annotated[
        int | None,
        typer.Option(help="Number of GPUs of both runs; by default those of each program. Data parallelism is scaled."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of changes to list.")] = 20,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Depth of module paths in the table (default: full paths).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a change of a script does to step time and peak memory, and why.

    Forerun simulates both programs under the same conditions. It lists by module the kernels, collectives, copies and
    tensors that are new, gone, larger or smaller, with the largest loss of time first.
    """
    for path in (before, after):
        if not path.is_file():
            raise ForerunError(f"{path}: no such file; write one with forerun trace SCRIPT -o {path}")
    old, new = (
        simulate_file(path, cluster, gpus, under, LoopOptions(), whole_timeline=True) for path in (before, after)
    )
    found = diff_steps(old, new, depth)
    code = bounds.code(found)
    if as_json:
        print(to_json(diff_record(found)))
    else:
        print_diff(console(piped_width=_WIDTH), found, top)
    if code:
        raise typer.Exit(code)
