"""`forerun plan`: the best plan of all, of a range of GPUs and batches, or of many saved programs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.answers.search.front import MOST_SIMULATED
from forerun.answers.search.programs import rank_programs
from forerun.answers.search.search import limited
from forerun.answers.search.space import Limits
from forerun.common.errors import ForerunError
from forerun.common.processes import available_cpus
from forerun.common.units import GIB
from forerun.core.cost.measured_files import read_measured
from forerun.core.network.on_topology import network_of
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.catalog import load_model
from forerun.interfaces.cli.anchor_option import Anchor, SuggestAnchor, with_anchor
from forerun.interfaces.cli.exit_codes import NOTHING_FITS
from forerun.interfaces.cli.launch_option import Launch, LaunchOut, check_launch
from forerun.interfaces.cli.numbers import memory_left, whole_numbers
from forerun.interfaces.cli.plan_options import parse, with_plan_options
from forerun.interfaces.cli.plan_search import (
    TOP,
    Question,
    Shown,
    check_heat,
    check_shown,
    range_of_searches,
    single_search,
)
from forerun.interfaces.cli.program_options import (
    KernelProfile,
    MemoryLimit,
    Network,
    NetworkProfile,
    TokensPerStep,
    refuse,
)
from forerun.interfaces.cli.report_option import Report, check_report, typed
from forerun.interfaces.report.console import console
from forerun.interfaces.report.programs import print_programs, programs_record, write_programs_csv
from forerun.interfaces.report.progress import progress_bar
from forerun.interfaces.report.records import to_json


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
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="GPUs of the run; of programs, theirs unless given. Several: 64,96, doublings 64..1024, steps"
            " 64..1024:64.",
        ),
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    global_batch: Annotated[
        str | None, typer.Option(metavar="N", help="Sequences of a step over all GPUs; several as with --gpus.")
    ] = None,
    top: Annotated[int | None, typer.Option(min=1, help="How many plans to list (default 10).")] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            metavar="time|tokens|cost|memory",
            help="What the best plan has: least time of a step, most tokens/s, cheapest tokens, least memory (default:"
            " time; tokens with several batches, and for programs whose tokens or GPUs differ).",
        ),
    ] = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Find the Pareto front of step time and memory too.")
    ] = False,
    pareto_plans: Annotated[
        int, typer.Option(min=0, metavar="N", help="Simulate at most so many plans more for the front.")
    ] = MOST_SIMULATED,
    memory_limit: MemoryLimit = None,
    headroom: Annotated[
        str | None, typer.Option(metavar="GIB|SIZE|PERCENT", help="Memory of a GPU to keep free: 8 (GiB), 8GB, or 10%.")
    ] = None,
    space: Annotated[
        str,
        typer.Option(
            metavar="default|whole", help="What stacks offer, or all they could run in any order of mesh axes."
        ),
    ] = "default",
    max_tp: Annotated[int | None, typer.Option(help="Largest tp to try (default: the node).")] = None,
    max_cp: Annotated[int | None, typer.Option(help="Largest cp to try (default: 4,096 tokens a rank).")] = None,
    max_pp: Annotated[int | None, typer.Option(help="Largest pp to try (default: the layers).")] = None,
    max_ep: Annotated[int | None, typer.Option(help="Largest ep to try (default: the experts).")] = None,
    max_micro_batch: Annotated[int | None, typer.Option(help="Largest micro batch to try.")] = None,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Simulate also what a bound shows to come after the best.")
    ] = False,
    asked: Annotated[
        str | None,
        typer.Option(
            "--why", metavar="FIELDS|FILE", help="Say what became of such plans: tp=16,pp=3, or a YAML file of a plan."
        ),
    ] = None,
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
    tokens_per_step: TokensPerStep = None,
    network: Network = None,
    kernel_profile: KernelProfile = None,
    network_profile: NetworkProfile = None,
    anchor: Anchor = None,
    suggest_anchor: SuggestAnchor = False,
    plan_file: Annotated[Path | None, typer.Option(help="YAML file of plan fields to fix; options go over it.")] = None,
    csv: Annotated[
        Path | None,
        typer.Option(help="Write every possible plan to this CSV file; of a range, the best of each search."),
    ] = None,
    report: Report = None,
    pictures: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write heat maps and other plots to this folder, as PNG files."),
    ] = None,
    heat: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXIS,AXIS",
            help="A heat map of the page and the pictures (tp,pp; several times), not those that say most.",
        ),
    ] = None,
    launch: Launch = None,
    launch_out: LaunchOut = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Find the fastest parallelism plan that fits.

    Searches all valid plans. Options of the plan fix an axis (--tp 8) or give the values to try (--tp 1,2,4; --dp-shard
    -1 for the rest). With --programs, ranks saved programs instead. Exits with 3 if nothing fits.
    """
    for file in (csv, store, pictures):
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
    where = load_cluster(cluster)
    limit = _memory_limit(where, memory_limit, headroom)
    files = (csv, report, pictures, tuple(heat or ()))
    shown = Shown(top, typed(context), *files, asked, suggest_anchor, launch, launch_out, as_json)
    check_shown(shown)
    if programs is not None:
        limits = {"max_tp": max_tp, "max_cp": max_cp, "max_pp": max_pp, "max_ep": max_ep}
        own: dict[str, object] = {**fields, **limits, "max_micro_batch": max_micro_batch, "plan_file": plan_file}
        own |= {"seq_len": seq_len, "global_batch": global_batch, "exhaustive": exhaustive or None}
        own |= {"store": store, "executor": None if executor == "local" else executor, "ray_address": ray_address}
        own |= {"report": report, "launch": launch, "pareto": pareto or None, "why": asked}
        own |= {
            "space": None if space == "default" else space,
            "pictures": pictures,
            "heat": heat or None,
            "anchor": anchor,
            "suggest_anchor": suggest_anchor or None,
        }
        refuse({name: True for name, value in own.items() if value is not None}, "not with --programs; leave it out")
        ranked: dict[str, Any] = {
            "objective": objective,
            "tokens_per_step": tokens_per_step,
            "memory_limit_gib": limit,
            "network": network_of(where, network),
            "measured": measured,
            "workers": workers,
        }
        _rank(programs, where, gpus, ranked, top or TOP, csv, as_json)
        return
    refuse({"tokens_per_step": tokens_per_step}, "only with --programs")
    if model is None or gpus is None or seq_len is None or global_batch is None:
        missing = {"gpus": gpus, "seq-len": seq_len, "global-batch": global_batch}
        absent = ", ".join(f"--{name}" for name, value in missing.items() if value is None)
        raise ForerunError(f"plan: {absent} missing; give it beside the model")
    n_gpus, batches = whole_numbers(gpus, "--gpus"), whole_numbers(global_batch, "--global-batch")
    fixed: dict[str, Any] = parse(fields, plan_file, several=True)
    check_heat(shown, fixed)
    spec = load_model(model)
    where = with_anchor(anchor, spec, where, fixed)
    place = f" --network {shlex.quote(network)}" if network else ""
    place += f" --anchor {shlex.quote(str(anchor))}" if anchor else ""
    options = {
        "objective": objective or ("time" if len(batches) == 1 else "tokens"),
        "memory_limit_gib": limit,
        "fixed": fixed,
        "limits": Limits(max_tp, max_cp, max_pp, max_ep, max_micro_batch),
        "space": space,
        "exhaustive": exhaustive,
        "workers": available_cpus() if workers is None and executor == "local" else workers,
        "executor": executor,
        "ray_address": ray_address,
        "network": network_of(where, network),
        "measured": measured,
        "store": store,
        "pareto": pareto_plans if pareto else None,
    }
    question = Question(spec, where, n_gpus, seq_len, batches, options, (model, cluster), place)
    fits = range_of_searches(question, shown) if question.is_range else single_search(question, shown)
    if not fits:
        raise typer.Exit(NOTHING_FITS)


def _memory_limit(where: Cluster, memory_limit: float | None, headroom: str | None) -> float | None:
    """GiB of a GPU to use at most, None for all."""
    if headroom is None:
        return memory_limit
    return memory_left(headroom, limited(where, memory_limit).device.memory_bytes / GIB)


def _rank(
    folder: Path, where: Cluster, gpus: str | None, options: dict[str, Any], top: int, csv: Path | None, as_json: bool
) -> None:
    """Rank the programs of `folder` and show the ranking; `options` are those of `rank_programs`."""
    n_gpus = None if gpus is None else whole_numbers(gpus, "--gpus")
    if n_gpus is not None and len(n_gpus) > 1:
        raise ForerunError(f"--gpus {gpus}: saved programs are ranked for one number of GPUs")
    with progress_bar("simulating") as advance:
        ranking = rank_programs(
            folder, where, n_gpus=None if n_gpus is None else n_gpus[0], progress=advance, **options
        )
    if csv is not None:
        write_programs_csv(csv, ranking)
    if as_json:
        print(to_json(programs_record(ranking, top)))
    else:
        print_programs(console(), ranking, top)
    if not ranking.fitting:
        raise typer.Exit(NOTHING_FITS)
