"""`forerun validate --traced`: its options, and the evaluation of rows whose program is public."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forerun.answers.analysis.predict import predict
from forerun.common.errors import ForerunError
from forerun.describe.model.spec import ModelSpec
from forerun.evidence.traced.programs import programs
from forerun.evidence.traced.report import build_traced_report
from forerun.evidence.traced.run import Folders, run_of_row, trace_rows
from forerun.evidence.traced.tables import markdown, print_traced
from forerun.evidence.validation.hardware import Hardware
from forerun.evidence.validation.rows import Measurement
from forerun.evidence.validation.run import run
from forerun.interfaces.report.progress import progress_bar
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.written import to_json
from forerun.sources.trace.launch import Limits

_WIDTH = 180


@dataclass(frozen=True)
class TracedOptions:
    """Holds the options for an evaluation of traced programs in place of modelled ones."""

    traced: Annotated[
        bool,
        typer.Option(
            "--traced", help="Trace the public program of each row, and evaluate the predictions of these traces."
        ),
    ] = False
    programs: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="With --traced: folder with a clone of each repository, under its name."),
    ] = None
    traces: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="With --traced: folder for saved Programs. Existing ones are used again."),
    ] = Path("traces")
    trace_workers: Annotated[
        int, typer.Option(min=1, help="With --traced: number of programs traced at the same time.")
    ] = 1
    trace_limit: Annotated[
        float, typer.Option(min=1, metavar="S", help="With --traced: time limit for one program in seconds.")
    ] = Limits.time_s
    only: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --traced: evaluate only the rows of this repository.")
    ] = None
    markdown: Annotated[bool, typer.Option("--markdown", help="With --traced: print the tables as Markdown.")] = False

    def judge(
        self, rows: Sequence[Measurement], models: Mapping[str, ModelSpec], hosts: Hardware, as_json: bool
    ) -> None:
        """Traces, predicts and prints. Raises ForerunError if no row has a program."""
        if self.programs is None:
            raise ForerunError("--traced: give the folder with your clones of the repositories: --programs FOLDER")
        known = programs()
        runs = run_of_row(known)
        chosen = [row for row in rows if row.id in runs and self.only in (None, runs[row.id].repository)]
        if not chosen:
            raise ForerunError(f"--traced: no row has a program; known: {', '.join(known.repositories)}")
        modelled = run(chosen, models, hosts, predict)
        folders, limits = Folders(self.programs, self.traces), Limits(self.trace_limit)
        with progress_bar("tracing") as advance:
            results = trace_rows(modelled, known, hosts, folders, limits, self.trace_workers, advance)
        if as_json:
            print(to_json(build_traced_report(results)))
        elif self.markdown:
            print(markdown(results), end="")
        else:
            print_traced(results, console(piped_width=_WIDTH))
