"""`forerun stragglers`: the cost of slow ranks in a real job, from a trace of its operations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.answers.stragglers.recorded_steps import read_steps
from forerun.answers.stragglers.study import straggler_costs
from forerun.interfaces.cli.output_option import output_option
from forerun.interfaces.cli.program_options import AsJson
from forerun.interfaces.cli.report_option import Report, typed
from forerun.interfaces.report.page import write_page
from forerun.interfaces.report.straggler_costs import costs_document, costs_record, print_costs, step_rows
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.written import to_json, write_rows


def stragglers(
    context: typer.Context,
    trace: Annotated[
        Path, typer.Argument(metavar="FILE", help="Parquet file with a row for each operation of each rank and step.")
    ],
    csv: Annotated[Path | None, output_option(help="Write a row for each step to this CSV file.")] = None,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Replay recorded steps of a pipelined job, and show which operations, stages and ranks slow it down, and by how
    much.
    """
    costs = straggler_costs(read_steps(trace))
    if csv is not None:
        write_rows(csv, step_rows(costs))
    if report is not None:
        write_page(report, costs_document(costs, typed(context)))
    if as_json:
        print(to_json(costs_record(costs)))
    else:
        print_costs(console(), costs)
