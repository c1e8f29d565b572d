"""`forerun plan`: the best plan of all."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli.exit_codes import NOTHING_FITS
from forerun.cli.plan_options import parse, with_plan_options
from forerun.cluster.catalog import load_cluster
from forerun.errors import ForerunError
from forerun.model.catalog import load_model
from forerun.model.parameters import model_flops_per_token
from forerun.network.on_topology import network_of
from forerun.processes import available_cpus
from forerun.report.console import console, print_search
from forerun.report.progress import progress_bar
from forerun.report.records import search_record, to_json, write_csv
from forerun.search.search import search
from forerun.search.space import Limits


@with_plan_options(several=True)
def plan(
    model: Annotated[str, typer.Argument(help="Preset (forerun models), config.json, its folder, or a YAML file.")],
    cluster: Annotated[str, typer.Option(help="Preset (forerun clusters) or a YAML file.")],
    gpus: Annotated[int, typer.Option(help="GPUs of the run.")],
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.")],
    global_batch: Annotated[int, typer.Option(help="Sequences of a step over all GPUs.")],
    fields: dict[str, str | bool],
    top: Annotated[int, typer.Option(min=1, help="How many plans to list.")] = 10,
    objective: Annotated[
        str, typer.Option(metavar="time|memory|cost", help="What the best plan has least of.")
    ] = "time",
    memory_limit: Annotated[float | None, typer.Option(metavar="GIB", help="Memory of a GPU to use at most.")] = None,
    max_tp: Annotated[int | None, typer.Option(help="Largest tp to try (default: the node).")] = None,
    max_cp: Annotated[int | None, typer.Option(help="Largest cp to try (default: 4,096 tokens a rank).")] = None,
    max_pp: Annotated[int | None, typer.Option(help="Largest pp to try (default: the layers).")] = None,
    max_ep: Annotated[int | None, typer.Option(help="Largest ep to try (default: the experts).")] = None,
    max_micro_batch: Annotated[int | None, typer.Option(help="Largest micro batch to try.")] = None,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Simulate also what a bound shows to come after the best.")
    ] = False,
    workers: Annotated[int | None, typer.Option(help="Processes (default: one for each CPU).")] = None,
    network: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Network file (or text as switch:8@450,fat-tree:16@50) to communicate over."),
    ] = None,
    plan_file: Annotated[Path | None, typer.Option(help="YAML file of plan fields to fix; options go over it.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write every possible plan to this CSV file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Find the fastest parallelism plan that fits.

    Searches all valid plans. Options of the plan fix an axis (--tp 8) or give the values to try (--tp 1,2,4; --dp-shard
    -1 for the rest). Exits with 3 if nothing fits.
    """
    if csv is not None and not csv.absolute().parent.is_dir():
        raise ForerunError(f"{csv}: can't be written: there is no folder {csv.parent}")
    fixed: dict[str, Any] = parse(fields, plan_file, several=True)
    spec, where = load_model(model), load_cluster(cluster)
    topology = network_of(where, network)
    with progress_bar("simulating") as advance:
        result = search(
            spec,
            where,
            gpus,
            seq_len,
            global_batch,
            objective=objective,  # type: ignore[arg-type]
            memory_limit_gib=memory_limit,
            fixed=fixed,
            limits=Limits(max_tp, max_cp, max_pp, max_ep, max_micro_batch),
            keep=top,
            exhaustive=exhaustive,
            workers=available_cpus() if workers is None else workers,
            network=topology,
            progress=advance,
        )
    if csv is not None:
        write_csv(csv, result)
    if as_json:
        print(to_json(search_record(result, top)))
    else:
        tokens_cost = model_flops_per_token(spec, seq_len)
        print_search(console(), result, top, tokens_cost, model=model, cluster=cluster, network=network)
    if result.best is None:
        raise typer.Exit(NOTHING_FITS)
