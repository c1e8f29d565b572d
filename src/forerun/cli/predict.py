"""`forerun predict`: one plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.analysis.predict import simulate
from forerun.chakra.export import write_run
from forerun.cli.exit_codes import NOTHING_FITS
from forerun.cli.plan_options import parse, with_plan_options
from forerun.cluster.catalog import load_cluster
from forerun.model.catalog import load_model
from forerun.model.parameters import model_flops_per_token
from forerun.network.on_topology import network_of
from forerun.plan.complete import complete_plan
from forerun.report.console import console, print_prediction
from forerun.report.perfetto import write_trace
from forerun.report.records import prediction_record, to_json
from forerun.search.search import limited


@with_plan_options(several=False)
def predict(
    model: Annotated[str, typer.Argument(help="Preset (forerun models), config.json, its folder, or a YAML file.")],
    cluster: Annotated[str, typer.Option(help="Preset (forerun clusters) or a YAML file.")],
    fields: dict[str, str | bool],
    gpus: Annotated[int | None, typer.Option(help="GPUs of the run; the product of the degrees unless given.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences of a step over all GPUs.")] = None,
    memory_limit: Annotated[float | None, typer.Option(metavar="GIB", help="Memory of a GPU to use at most.")] = None,
    network: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Network file (or text as switch:8@450,fat-tree:16@50) to communicate over."),
    ] = None,
    plan_file: Annotated[Path | None, typer.Option(help="YAML file of plan fields; options go over it.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the step as a Perfetto / Chrome trace.")] = None,
    chakra: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the step as Chakra traces, one a rank.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show where each figure comes from.")] = False,
    must_fit: Annotated[bool, typer.Option("--must-fit", help="Exit with 3 if it does not fit in memory.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Predict one plan: time, memory, where both go."""
    values: dict[str, Any] = parse(fields, plan_file, several=False)
    if seq_len is not None:
        values["seq_len"] = seq_len
    spec, where = load_model(model), limited(load_cluster(cluster), memory_limit)
    plan = complete_plan(values, n_gpus=gpus, global_batch=global_batch)
    simulation = simulate(spec, plan, where, network=network_of(where, network))
    prediction = simulation.prediction
    if trace is not None:
        write_trace(trace, simulation.program, simulation.flat, simulation.timeline, simulation.costs.issue_ps)
    if chakra is not None:
        write_run(chakra, simulation.program, simulation.costs.duration_ps)
    if as_json:
        print(to_json(prediction_record(prediction)))
    else:
        print_prediction(console(), prediction, model_flops_per_token(spec, plan.seq_len), explain=explain)
    if must_fit and not prediction.fits:
        raise typer.Exit(NOTHING_FITS)
