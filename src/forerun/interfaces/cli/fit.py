"""`forerun fit`: the constants that only whole training steps tell, refitted to published ones."""

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
        list[Path], typer.Argument(help="CSV files of measured configurations; constants are fitted to tier A.")
    ],
    models: Annotated[Path, typer.Option(help="YAML file of the architectures that the rows name.")],
    hardware: Annotated[Path, typer.Option(help="YAML file of the clusters that the rows name.")],
    leave_out: Annotated[
        Grouping | None,
        typer.Option(
            help="Also predict each family of stacks, or each source, by a fit to the others. Sources of tier B are "
            "predicted too."
        ),
    ] = None,
    out: Annotated[
        Path | None, output_option(help="Write measured and predicted times, row by row, to this CSV.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Put the fitted constants into Forerun's files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Fit stacks and unmeasured attention kernels to whole measured steps.

    Prints every constant with its prior, what it was and is, and how many rows inform it. `forerun calibrate` refits
    kernels and collectives.
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
