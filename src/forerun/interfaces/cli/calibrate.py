"""`forerun calibrate`: a device's cost profile refitted to measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.common.admission import read_text
from forerun.common.errors import ForerunError
from forerun.common.files import whole_file
from forerun.describe.cluster.catalog import load_cluster
from forerun.evidence.measure.calibrate import calibrate as fit
from forerun.evidence.measure.nccl_tests import network_csv
from forerun.evidence.measure.samples import network_times, of_source, read_samples, read_tables
from forerun.interfaces.cli.output_option import output_option
from forerun.interfaces.report.calibration_table import calibration_record, print_calibration
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.written import to_json


def calibrate(
    device: Annotated[str, typer.Argument(help="Name of a device or a cluster, or a cluster file.")],
    kernels: Annotated[
        list[Path] | None,
        typer.Option(help="CSV file of kernel times, in the format of --kernel-profile. May be repeated."),
    ] = None,
    network: Annotated[
        list[Path] | None,
        typer.Option(
            help="CSV file of collective times in the format of --network-profile, or a log of nccl-tests. May be"
            " repeated."
        ),
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(help="Folder with gemm.parquet, attention_forward.parquet and nccl.parquet.")
    ] = None,
    table_device: Annotated[str | None, typer.Option(help="Name of the device in these tables.")] = None,
    source: Annotated[str | None, typer.Option(help="Source of the measurements; the profile records it.")] = None,
    profile_out: Annotated[Path | None, output_option(help="Write the fitted profile to this YAML file.")] = None,
    network_out: Annotated[
        Path | None,
        output_option(help="Write the collective times of --network to this CSV file, for --network-profile."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Fit a device's kernel constants to measurements.

    The command prints the old and the new constants, and the errors before the fit, after it, and on held-out shapes.
    """
    cluster = load_cluster(device)
    if tables is not None and not kernels and not network and table_device is not None:
        samples = read_tables(tables, table_device)
    elif tables is None and table_device is None and (kernels or network):
        samples = read_samples(kernels or [], network or [], cluster.node_size)
    else:
        raise ForerunError("give measurements: --kernels and --network, or --tables with --table-device")
    if profile_out is not None and profile_out.suffix not in (".yaml", ".yml"):
        raise ForerunError(f"--profile-out {profile_out}: a profile's file ends in .yaml or .yml; rename it")
    found = fit(cluster, samples if source is None else of_source(samples, source))
    if profile_out is not None:
        text = found.text(read_text(profile_out) if profile_out.exists() else "")
        with whole_file(profile_out) as file:
            file.write(text.encode())
    if network_out is not None:
        text = network_csv(network_times(network or []))
        with whole_file(network_out) as file:
            file.write(text.encode())
    if as_json:
        print(to_json(calibration_record(found)))
    else:
        print_calibration(console(), found, profile_out)
