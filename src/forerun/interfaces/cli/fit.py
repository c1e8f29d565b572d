"""`forerun fit`: fits the constants that only whole training steps determine to published steps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.common.files import whole_file
from forerun.describe.model.architecture_table import load_architectures
from forerun.evidence.fitting.constants import load_registry
from forerun.evidence.fitting.fit import Grouping, StepFit
from forerun.evidence.fitting.left_out import fitted_errors, left_out_errors
from forerun.evidence.fitting.steps import StepTimes, steps_of
from forerun.evidence.fitting.write import write_constants
from forerun.evidence.validation.hardware import read_hardware
from forerun.evidence.validation.rows import read_measurements
from forerun.interfaces.cli.output_option import output_option
from forerun.interfaces.report.progress import counting_bar
from forerun.interfaces.report.step_fit_table import Anchored, print_step_fit, step_fit_csv, step_fit_record
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.written import finite, to_json

PREDICTED_TIERS = "B"
"""tiers of rows that a fit without their source predicts, beside those that constants are fitted to"""


def fit(
    measurements: Annotated[
        list[Path],
        typer.Argument(help="CSV files of measured configurations. Constants are fitted to the rows of tier A."),
    ],
    models: Annotated[Path, typer.Option(help="YAML file of the model architectures that the rows name.")],
    hardware: Annotated[Path, typer.Option(help="YAML file of the clusters that the rows name.")],
    leave_out: Annotated[
        Grouping | None,
        typer.Option(
            help=(
                "Cross-validate: predict each family of stacks, or each source, with constants fitted to the"
                " others. This includes sources of tier B."
            )
        ),
    ] = None,
    out: Annotated[
        Path | None, output_option(help="Write the measured and the predicted time of each row to this CSV file.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the fitted constants into Forerun's data files.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Fit the constants of stacks and of unmeasured attention kernels to whole measured steps.

    The command prints each constant with its prior, its old and new value, and the number of rows that inform it.
    `forerun calibrate` fits kernels and collectives.
    """
    registry = load_registry()
    sources = leave_out == "source"
    rows = [row for path in measurements for row in read_measurements(path)]
    further = PREDICTED_TIERS if sources else ""
    steps = steps_of(rows, load_architectures(models), read_hardware(hardware), registry, further)
    with counting_bar(f"predicting {len(steps)} steps under many constants") as advance:
        times = StepTimes(steps, registry, advance)
        found = StepFit(times)
        anchored, by_source = None, None
        if leave_out == "family":
            anchored = Anchored(fitted_errors(found, times), left_out_errors(found, times))
        elif sources:
            by_source = left_out_errors(found, times, "source").errors
    if out is not None:
        with whole_file(out) as file:
            file.write(step_fit_csv(found.fit, anchored, by_source).encode())
    written = write_constants(found.fit.constants, found.fit.posterior) if write else None
    if as_json:
        print(to_json(finite(step_fit_record(found.fit, anchored, by_source))))
    else:
        print_step_fit(console(), found.fit, anchored, written, by_source)
