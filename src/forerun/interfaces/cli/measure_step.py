"""`forerun measure step`: a script's step on this machine's GPU beside its prediction, or the prediction alone."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.answers.analysis.predict_program import predict_program, read_program
from forerun.common.errors import ForerunError
from forerun.core.program.types import Program
from forerun.describe.cluster.catalog import load_cluster
from forerun.evidence.measure.step import MeasuredStep, figures
from forerun.interfaces.cli.program_options import AsJson, ClusterOption
from forerun.interfaces.report.measured_step import print_step, step_record
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.written import to_json
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits
from forerun.sources.trace.record import trace_job


def step(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="Training script; it needs no changes.")],
    cluster: ClusterOption,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments of the script.")] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks if torchrun did not start this command; 1 by default.")
    ] = None,
    program: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Saved program of this script and run; without it Forerun traces the script."
        ),
    ] = None,
    warm_up: Annotated[int, typer.Option(min=1, help="Number of steps before the measured ones.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Number of measured steps.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Measure the steps of a script on this machine's GPUs, and print them beside the prediction.

    The script runs until its steps are measured. For several GPUs, start the command under torchrun:
    torchrun --nproc-per-node 8 --no-python forerun measure step SCRIPT --cluster C. On a machine without a GPU the
    command prints only the prediction.
    """
    if not script.is_file():
        raise ForerunError(f"{script}: no such script; give its path")
    where = load_cluster(cluster)
    given = None if program is None else read_program(program)
    ranks = int(os.environ.get("WORLD_SIZE", world_size or 1))
    measured = _measured(script, arguments or [], warm_up, steps) if _has_gpu() else None
    if os.environ.get("RANK", "0") != "0":
        return
    found = predict_program(given or _traced(script, arguments or [], ranks, where.node_size, where.device.name), where)
    rows = figures(found.prediction, measured)
    if as_json:
        print(to_json(step_record(found.prediction, measured, rows)))
    else:
        print_step(console(), found.prediction, measured, rows)


def _has_gpu() -> bool:
    return find_spec("torch") is not None and bool(import_module("torch").cuda.is_available())


def _measured(script: Path, arguments: list[str], warm_up: int, steps: int) -> MeasuredStep:
    # Only here is torch imported, which may be missing.
    on_gpu: Any = import_module("forerun.evidence.measure.step_on_gpu")
    measured: MeasuredStep = on_gpu.measure_step(str(script), arguments, warm_up, steps)
    return measured


def _traced(script: Path, arguments: list[str], ranks: int, node_size: int, device: str) -> Program:
    job = Job("", str(script), tuple(arguments), world_size=ranks, gpus_per_node=node_size, device=device)
    return trace_job(job, Limits())[0]
