"""`forerun validate`: predictions against published measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forerun.answers.analysis.predict import predict
from forerun.common.errors import ForerunError
from forerun.describe.model.architecture_table import load_architectures
from forerun.describe.model.spec import ModelSpec
from forerun.evidence.fitting.own_runs import CHOICES, Choice, run_with_anchors
from forerun.evidence.validation.hardware import Hardware, read_hardware
from forerun.evidence.validation.left_out import left_out as judge_left_out
from forerun.evidence.validation.left_out import read_left_out
from forerun.evidence.validation.rank_table import print_ranks, ranks_record
from forerun.evidence.validation.ranks import JUDGED, published_ranks
from forerun.evidence.validation.report import Report, build_report
from forerun.evidence.validation.rows import TIERS, Measurement, read_measurements
from forerun.evidence.validation.run import RowResult, run, write_predictions
from forerun.evidence.validation.tables import print_report
from forerun.interfaces.cli.exit_codes import FOUND_ERRORS
from forerun.interfaces.cli.option_groups import grouped
from forerun.interfaces.cli.output_option import output_option
from forerun.interfaces.cli.traced_options import TracedOptions
from forerun.interfaces.report.pictures_of_validation import write_validation_pictures
from forerun.interfaces.report.progress import counting_bar
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.written import to_json

PIPED_WIDTH = 160
"""width of the output outside a terminal, so that names are not cut"""


@dataclass(frozen=True)
class OutputOptions:
    """Holds the options for the files and the printed form of `validate`."""

    out: Annotated[Path | None, output_option(help="Write the prediction of each row to this CSV file.")] = None
    plots: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder for PNG plots of predicted against measured values, and of the errors."
        ),
    ] = None
    worst: Annotated[int, typer.Option(min=0, help="Number of largest errors to list.")] = 0
    verbose: Annotated[
        bool, typer.Option("--verbose", help="List every assumption about what a source does not state.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False

    def write(self, results: Sequence[RowResult]) -> None:
        """Writes the files that were asked for."""
        if self.out is not None:
            write_predictions(self.out, results)
        if self.plots is not None:
            write_validation_pictures(self.plots, results)

    def show(self, report: Report, choice: Choice | None) -> None:
        """Prints the report. `choice` says which row of each group was measured and left out."""
        if self.as_json:
            print(to_json(report))
            return
        if choice is not None:
            print(f"Judged after one measured step of the same source, device and model ({choice}), which is left out:")
        print_report(report, console(piped_width=PIPED_WIDTH), worst=self.worst, verbose=self.verbose)


@grouped
def validate(
    measurements: Annotated[list[Path], typer.Argument(help="CSV files of measured configurations.")],
    models: Annotated[Path, typer.Option(help="YAML file of the model architectures that the rows name.")],
    hardware: Annotated[Path, typer.Option(help="YAML file of the clusters that the rows name.")],
    output: OutputOptions,
    traced: TracedOptions,
    left_out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also evaluate the cross-validated times that forerun fit --leave-out source --out writes.",
        ),
    ] = None,
    with_anchor: Annotated[
        str | None,
        typer.Option(
            metavar="first|best",
            help=(
                "Correct each group of rows (source, device, model) by one of its measured steps, and"
                " evaluate the other rows. The step is the first in the file, or the one that corrects the"
                " others best."
            ),
        ),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Evaluate only the rows of this split.")] = None,
    rank: Annotated[
        bool,
        typer.Option("--rank", help="Report the rank of each measured plan in the list of plans that a search finds."),
    ] = False,
    rank_rows: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help=(
                "With --rank: use only rows whose id or model contains this text, of all tiers. Otherwise rows of"
                " tier C are left out."
            ),
        ),
    ] = None,
) -> None:
    """Predict every measured configuration, and print the errors of the predictions."""
    rows, tables = [row for path in measurements for row in read_measurements(path)], ", ".join(map(str, measurements))
    if split is not None:
        rows = [row for row in rows if row.split == split]
        if not rows:
            raise ForerunError(f"--split {split}: {tables} has no row of this split; choose another")
    if with_anchor is not None and left_out is not None:
        raise ForerunError("--left-out: its times were predicted without anchors; leave it out beside --with-anchor")
    choice = None if with_anchor is None else _choice(with_anchor)
    apart = None if left_out is None else read_left_out(left_out)
    architectures, hosts = load_architectures(models), read_hardware(hardware)
    if rank:
        _rank(rows, architectures, hosts, rank_rows, output)
        return
    if traced.traced:
        traced.judge(rows, architectures, hosts, output.as_json)
        return
    with counting_bar("predicting", len(rows)) as advance:
        if choice is None:
            results = run(rows, architectures, hosts, predict, advance)
        else:
            results = run_with_anchors(rows, architectures, hosts, predict, choice, advance)
    if not results:
        raise ForerunError(
            f"--with-anchor: {tables} has no two rows of the same source, device and model; leave it out"
        )
    output.write(results)
    report = build_report(results, None if apart is None else judge_left_out(results, apart))
    if choice is not None:
        report["anchors"] = choice
    output.show(report, choice)
    if report["rows"]["faults"]:
        raise typer.Exit(FOUND_ERRORS)


def _rank(
    rows: Sequence[Measurement],
    architectures: Mapping[str, ModelSpec],
    hosts: Hardware,
    only: str | None,
    output: OutputOptions,
) -> None:
    """Finds and prints the ranks of measured plans."""
    chosen = [row for row in rows if only is None or only in row.id or only in row.model]
    tiers = JUDGED if only is None else TIERS
    with counting_bar("searching") as advance:
        ranks = published_ranks(chosen, architectures, hosts, predict, advance, tiers)
    if output.as_json:
        print(to_json(ranks_record(ranks)))
        return
    print_ranks(ranks, console(piped_width=PIPED_WIDTH))


def _choice(name: str) -> Choice:
    for choice in CHOICES:
        if name == choice:
            return choice
    raise ForerunError(f"--with-anchor {name}: expected {' or '.join(CHOICES)}")
