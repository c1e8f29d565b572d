"""`forerun plan`: the best plan of all, or the best of many saved programs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.analysis.reading import Simulation
from forerun.analysis.setup import Setup
from forerun.analysis.simulate_setup import simulate_setup
from forerun.analysis.what_if import WhatIf, sensitivities
from forerun.cli.anchor_option import Anchor, with_anchor
from forerun.cli.exit_codes import NOTHING_FITS
from forerun.cli.launch_option import Launch, LaunchOut, check_launch, write_launch_files
from forerun.cli.plan_options import parse, with_plan_options
from forerun.cli.program_options import KernelProfile, MemoryLimit, Network, NetworkProfile, refuse
from forerun.cli.report_option import Report, check_report, typed
from forerun.cluster.catalog import load_cluster
from forerun.cluster.types import Cluster
from forerun.cost.measured import Measured
from forerun.cost.measured_files import read_measured
from forerun.errors import ForerunError
from forerun.model.catalog import load_model
from forerun.model.parameters import model_flops_per_token
from forerun.model.spec import ModelSpec
from forerun.network.network_file import Network as NetworkFile
from forerun.network.on_topology import network_of
from forerun.processes import available_cpus
from forerun.report.console import console
from forerun.report.documents import search_document
from forerun.report.page import write_page
from forerun.report.programs import print_programs, programs_record, write_programs_csv
from forerun.report.progress import progress_bar
from forerun.report.records import search_record, to_json, write_csv
from forerun.report.search_console import print_search
from forerun.report.wording import command_line
from forerun.search.programs import rank_programs
from forerun.search.result import SearchResult
from forerun.search.search import limited, search
from forerun.search.space import Limits


@with_plan_options(several=True)
def plan(
    context: typer.Context,
    fields: dict[str, str | bool],
    model: Annotated[
        str | None, typer.Argument(help="Preset (forerun models), config.json, its folder, or a YAML file.")
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="Preset (forerun clusters) or a YAML file.")] = None,
    programs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Saved programs (forerun trace) to rank in place of plans.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of the run; of programs, theirs unless given.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences of a step over all GPUs.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many plans to list.")] = 10,
    objective: Annotated[
        str, typer.Option(metavar="time|memory|cost", help="What the best plan has least of.")
    ] = "time",
    memory_limit: MemoryLimit = None,
    max_tp: Annotated[int | None, typer.Option(help="Largest tp to try (default: the node).")] = None,
    max_cp: Annotated[int | None, typer.Option(help="Largest cp to try (default: 4,096 tokens a rank).")] = None,
    max_pp: Annotated[int | None, typer.Option(help="Largest pp to try (default: the layers).")] = None,
    max_ep: Annotated[int | None, typer.Option(help="Largest ep to try (default: the experts).")] = None,
    max_micro_batch: Annotated[int | None, typer.Option(help="Largest micro batch to try.")] = None,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Simulate also what a bound shows to come after the best.")
    ] = False,
    workers: Annotated[int | None, typer.Option(help="Processes (default: one for each CPU).")] = None,
    executor: Annotated[
        str, typer.Option(metavar="local|ray", help="What simulates: processes here, or Ray.")
    ] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Of a Ray cluster (default: RAY_ADDRESS, or one on this machine)."),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep what is simulated here; a search that was broken off goes on from it."),
    ] = None,
    network: Network = None,
    kernel_profile: KernelProfile = None,
    network_profile: NetworkProfile = None,
    anchor: Anchor = None,
    plan_file: Annotated[Path | None, typer.Option(help="YAML file of plan fields to fix; options go over it.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write every possible plan to this CSV file.")] = None,
    report: Report = None,
    launch: Launch = None,
    launch_out: LaunchOut = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Find the fastest parallelism plan that fits.

    Searches all valid plans. Options of the plan fix an axis (--tp 8) or give the values to try (--tp 1,2,4; --dp-shard
    -1 for the rest). With --programs, ranks saved programs instead. Exits with 3 if nothing fits.
    """
    for file in (csv, store):
        if file is not None and not file.absolute().parent.is_dir():
            raise ForerunError(f"{file}: can't be written: there is no folder {file.parent}")
    if (model is None) == (programs is None):
        both = "give a model or --programs, not both"
        raise ForerunError(f"plan: {both if model else 'give a model, or saved programs with --programs'}")
    if cluster is None:
        raise ForerunError("plan: --cluster is missing; forerun clusters lists the presets")
    check_report(report)
    check_launch(launch, launch_out)
    measured = read_measured(kernel_profile, network_profile)
    if programs is not None:
        limits = {"max_tp": max_tp, "max_cp": max_cp, "max_pp": max_pp, "max_ep": max_ep}
        own = {**fields, **limits, "max_micro_batch": max_micro_batch, "plan_file": plan_file}
        own |= {"seq_len": seq_len, "global_batch": global_batch, "exhaustive": exhaustive or None}
        own |= {"store": store, "executor": None if executor == "local" else executor, "ray_address": ray_address}
        own |= {"objective": None if objective == "time" else objective, "report": report, "launch": launch}
        own["anchor"] = anchor
        refuse({name: True for name, value in own.items() if value is not None}, "not with --programs; leave it out")
        _rank(programs, cluster, gpus, memory_limit, network, measured, workers, top, csv, as_json)
        return
    missing = {"gpus": gpus, "seq-len": seq_len, "global-batch": global_batch}
    if model is None or gpus is None or seq_len is None or global_batch is None:
        names = ", ".join(f"--{name}" for name, value in missing.items() if value is None)
        raise ForerunError(f"plan: {names} missing; give it beside the model")
    fixed: dict[str, Any] = parse(fields, plan_file, several=True)
    spec = load_model(model)
    where = with_anchor(anchor, spec, load_cluster(cluster), fixed)
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
            workers=available_cpus() if workers is None and executor == "local" else workers,
            executor=executor,  # type: ignore[arg-type]
            ray_address=ray_address,
            network=topology,
            measured=measured,
            store=store,
            progress=advance,
        )
    if csv is not None:
        write_csv(csv, result)
    if report is not None:
        place = f" --network {shlex.quote(network)}" if network else ""
        place += f" --anchor {shlex.quote(str(anchor))}" if anchor else ""
        again = f"{command_line(result.best.own_plan(), model, cluster)}{place}" if result.best else ""
        found = _best(result, spec, limited(where, memory_limit), topology, measured)
        write_page(report, search_document(result, top, found, typed(context), again))
    if as_json:
        print(to_json(search_record(result, top)))
    else:
        tokens_cost = model_flops_per_token(spec, seq_len)
        print_search(console(), result, top, tokens_cost, model=model, cluster=cluster, network=network)
    if result.best is None:
        raise typer.Exit(NOTHING_FITS)
    write_launch_files(launch, launch_out, result.best.own_plan(), spec, where)


def _best(
    result: SearchResult, spec: ModelSpec, where: Cluster, topology: NetworkFile | None, measured: Measured | None
) -> tuple[Simulation, tuple[WhatIf, ...]] | None:
    """The best plan simulated whole, and what a better machine would gain; None where nothing fits."""
    if result.best is None:
        return None
    setup = Setup(spec, result.best.own_plan(), where, topology, measured)
    simulation = simulate_setup(setup)
    return simulation, sensitivities(setup, simulation)


def _rank(
    folder: Path,
    cluster: str,
    gpus: int | None,
    memory_limit: float | None,
    network: str | None,
    measured: Measured | None,
    workers: int | None,
    top: int,
    csv: Path | None,
    as_json: bool,
) -> None:
    where = load_cluster(cluster)
    with progress_bar("simulating") as advance:
        ranking = rank_programs(
            folder,
            where,
            n_gpus=gpus,
            memory_limit_gib=memory_limit,
            network=network_of(where, network),
            measured=measured,
            workers=workers,
            progress=advance,
        )
    if csv is not None:
        write_programs_csv(csv, ranking)
    if as_json:
        print(to_json(programs_record(ranking, top)))
    else:
        print_programs(console(), ranking, top)
    if ranking.best is None:
        raise typer.Exit(NOTHING_FITS)
