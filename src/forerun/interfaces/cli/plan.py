"""`forerun plan`: the best plan of all, of a range of GPUs and batches, or of many saved programs."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.answers.search.choices import unmeasured_stacks, with_open_stacks
from forerun.answers.search.front import MOST_SIMULATED
from forerun.answers.search.programs import rank_programs
from forerun.answers.search.space import Limits
from forerun.common.errors import ForerunError
from forerun.common.processes import available_cpus
from forerun.common.units import GIB
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.memory_limit import limited
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.interfaces.cli import completion
from forerun.interfaces.cli.anchor_option import Anchor, with_anchor
from forerun.interfaces.cli.exit_codes import NOTHING_FITS
from forerun.interfaces.cli.launch_option import LaunchOptions
from forerun.interfaces.cli.model_options import (
    EncoderSeqLen,
    FreezeEncoder,
    Images,
    MtpModules,
    as_asked,
    given_of_model,
)
from forerun.interfaces.cli.numbers import memory_left, whole_numbers
from forerun.interfaces.cli.option_groups import given
from forerun.interfaces.cli.output_option import output_option
from forerun.interfaces.cli.plan_options import parse, with_plan_options
from forerun.interfaces.cli.plan_search import TOP, Question, Shown, range_of_searches, single_search
from forerun.interfaces.cli.program_options import Conditions, refuse
from forerun.interfaces.cli.recipe_question import recipe_question
from forerun.interfaces.cli.report_option import typed
from forerun.interfaces.report.programs import print_programs, programs_record, write_programs_csv
from forerun.interfaces.report.progress import progress_bar
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.written import to_json


@dataclass(frozen=True)
class Subject:
    """Holds the options for the subject of a search: the plans of a model on a cluster, or saved programs."""

    model: Annotated[
        str | None,
        typer.Argument(
            help="Model: a preset (forerun models lists them), a config.json or its folder, or a YAML file.",
            autocompletion=completion.models,
        ),
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Cluster: a preset (forerun clusters lists them) or a YAML file.", autocompletion=completion.clusters
        ),
    ] = None
    programs: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Rank the saved programs of this folder (written by forerun trace) instead of plans."
        ),
    ] = None
    recipe: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "Configuration file of a training tool (see predict --recipe). It sets the model, the GPUs,"
                " the batch and every setting that a search does not choose. Its own plan is listed beside"
                " the best ones."
            ),
        ),
    ] = None
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help=(
                "Number of GPUs (default for programs: their own). Give several as a list (64,96), as"
                " doublings (64..1024) or in steps (64..1024:64)."
            ),
        ),
    ] = None
    seq_len: Annotated[int | None, typer.Option(help="Number of tokens in a sequence.")] = None
    global_batch: Annotated[
        str | None,
        typer.Option(metavar="N", help="Number of sequences in a step, over all GPUs. Give several as with --gpus."),
    ] = None
    mtp: MtpModules = None
    images: Images = None
    encoder_seq_len: EncoderSeqLen = None
    freeze_encoder: FreezeEncoder = False


@dataclass(frozen=True)
class SearchOptions:
    """Holds the options for the objective and for the plans of a search."""

    objective: Annotated[
        str | None,
        typer.Option(
            metavar="time|tokens|cost|memory",
            help=(
                "How plans are ranked: by least step time, most tokens/s, least cost of a token, or least"
                " memory (default: time; tokens with several batches, and for programs whose tokens or GPUs"
                " differ)."
            ),
        ),
    ] = None
    pareto: Annotated[bool, typer.Option("--pareto", help="Also list the Pareto front of step time and memory.")] = (
        False
    )
    pareto_plans: Annotated[
        int, typer.Option(min=0, metavar="N", help="Simulate at most this many additional plans for the Pareto front.")
    ] = MOST_SIMULATED
    headroom: Annotated[
        str | None,
        typer.Option(metavar="GIB|SIZE|PERCENT", help="GPU memory that a plan must leave free: 8 (GiB), 8GB, or 10%."),
    ] = None
    space: Annotated[
        str,
        typer.Option(
            metavar="default|whole",
            help=(
                "default searches what the stack usually runs; whole searches all that it could run, in any"
                " order of the mesh axes."
            ),
        ),
    ] = "default"
    max_tp: Annotated[int | None, typer.Option(help="Largest tensor-parallel degree to try (default: the node).")] = (
        None
    )
    max_cp: Annotated[
        int | None, typer.Option(help="Largest context-parallel degree to try (default: 4,096 tokens a rank).")
    ] = None
    max_pp: Annotated[
        int | None, typer.Option(help="Largest pipeline-parallel degree to try (default: the layers).")
    ] = None
    max_ep: Annotated[
        int | None, typer.Option(help="Largest expert-parallel degree to try (default: the experts).")
    ] = None
    max_micro_batch: Annotated[int | None, typer.Option(help="Largest micro batch to try.")] = None
    exhaustive: Annotated[
        bool,
        typer.Option("--exhaustive", help="Simulate every plan, also those that a lower bound proves to be slower."),
    ] = False

    def limits(self) -> Limits:
        """Returns the upper ends of the axes."""
        return Limits(self.max_tp, self.max_cp, self.max_pp, self.max_ep, self.max_micro_batch)

    def memory_limit_gib(self, where: Cluster, most: float | None) -> float | None:
        """Returns the GiB of a GPU to use at most; None for all. `most` is the value of --memory-limit."""
        if self.headroom is None:
            return most
        return memory_left(self.headroom, limited(where, most).device.memory_bytes / GIB)


@dataclass(frozen=True)
class WorkOptions:
    """Holds the options for the workers of a search and for the store of its results."""

    workers: Annotated[int | None, typer.Option(help="Number of worker processes (default: one for each CPU).")] = None
    executor: Annotated[
        str,
        typer.Option(
            metavar="local|ray", help="Simulate in processes of this machine (local) or on a Ray cluster (ray)."
        ),
    ] = "local"
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Address of the Ray cluster (default: RAY_ADDRESS, or a new one on this machine)."
        ),
    ] = None
    store: Annotated[
        Path | None,
        output_option(help="Keep every simulated plan in this file; the same command later continues from it."),
    ] = None

    def n_workers(self) -> int | None:
        """Returns processes to start; None leaves it to Ray."""
        return available_cpus() if self.workers is None and self.executor == "local" else self.workers


@with_plan_options(several=True)
def plan(
    context: typer.Context,
    fields: dict[str, str | bool],
    subject: Subject,
    options: SearchOptions,
    under: Conditions,
    work: WorkOptions,
    shown: Shown,
    launch: LaunchOptions,
    anchor: Anchor = None,
    plan_file: Annotated[
        Path | None, typer.Option(help="YAML file of plan fields that the search keeps fixed; options override it.")
    ] = None,
) -> None:
    """Find the fastest parallelism plan that fits.

    The command searches all valid plans. An option of the plan fixes a value (--tp 8) or lists the values to try (--tp
    1,2,4 or --compile true,false); --dp-shard -1 uses all remaining GPUs. The search also tries compilation and the
    frameworks unless an option fixes them. With --programs the command ranks saved programs instead. It exits with
    code 3 if nothing fits in memory.
    """
    described = subject.model is not None or subject.recipe is not None
    if described == (subject.programs is not None):
        both = f"give {'a model' if subject.model else '--recipe'} or --programs, not both"
        neither = "give a model, a tool's file with --recipe, or saved programs with --programs"
        raise ForerunError(f"plan: {both if described else neither}")
    if subject.cluster is None:
        raise ForerunError("plan: --cluster is missing; forerun clusters lists the presets")
    launch.check()
    shown.check()
    where = load_cluster(subject.cluster)
    if subject.programs is not None:
        own: dict[str, object] = {**fields, "plan_file": plan_file, "anchor": anchor}
        own |= given(subject, "cluster", "programs", "gpus") | given(options, "objective", "headroom", "pareto_plans")
        own |= given(work, "workers") | given(shown, "top", "csv", "as_json") | given(launch, "launch_out")
        refuse({name: True for name, value in own.items() if value is not None}, "not with --programs; leave it out")
        _rank(subject, where, options, under, work, shown)
        return
    refuse({"tokens_per_step": under.tokens_per_step}, "only with --programs; leave it out")
    given_fields: dict[str, Any] = parse(fields, plan_file, several=True)
    shown.check_heat(given_fields)
    asked = _asked(subject, given_fields)
    model, given_fields = asked.model, asked.fixed
    is_open = "stack" not in given_fields and anchor is None and options.space == "default"
    fixed = with_open_stacks(given_fields, launch.launch) if is_open else given_fields
    changed = {**given_of_model(subject), "--network": under.network, "--anchor": anchor}
    question = Question(
        model,
        where=with_anchor(anchor, model, where, fixed),
        gpus=asked.gpus,
        seq_len=asked.seq_len,
        batches=asked.batches,
        options={
            "objective": options.objective or ("time" if len(asked.batches) == 1 else "tokens"),
            "memory_limit_gib": options.memory_limit_gib(where, under.memory_limit),
            "fixed": fixed,
            "limits": options.limits(),
            "space": options.space,
            "exhaustive": options.exhaustive,
            "workers": work.n_workers(),
            "executor": work.executor,
            "ray_address": work.ray_address,
            "network": under.topology(where),
            "measured": under.measured(),
            "store": work.store,
            "pareto": options.pareto_plans if options.pareto else None,
        },
        choices=unmeasured_stacks() if is_open and launch.launch is None else (),
        names=(subject.model or model.name, subject.cluster),
        own_plan=asked.own_plan,
        place="".join(
            f" {name}" + (f" {shlex.quote(str(value))}" if value is not True else "")
            for name, value in changed.items()
            if value
        ),
        command=typed(context),
    )
    fits = (range_of_searches if question.is_range else single_search)(question, shown, launch)
    if not fits:
        raise typer.Exit(NOTHING_FITS)


@dataclass(frozen=True)
class _Asked:
    """Holds the question of a search: model, runs, and fixed values."""

    model: ModelSpec
    seq_len: int
    gpus: tuple[int, ...]
    batches: tuple[int, ...]
    fixed: dict[str, Any]
    own_plan: Plan | None = None
    """the plan of a recipe"""


def _asked(subject: Subject, fields: dict[str, Any]) -> _Asked:
    """Returns the question of the command. Raises ForerunError for a missing or wrong option."""
    gpus = () if subject.gpus is None else whole_numbers(subject.gpus, "--gpus")
    batches = () if subject.global_batch is None else whole_numbers(subject.global_batch, "--global-batch")
    if subject.recipe is not None:
        first = (gpus[0] if gpus else None, batches[0] if batches else None)
        of = recipe_question(subject.recipe, subject.model, fields, subject.seq_len, *first)
        return _Asked(
            as_asked(of.model, subject),
            of.seq_len,
            gpus or (of.gpus,),
            batches or (of.batch,),
            of.fixed,
            of.plan,
        )
    required = {"gpus": subject.gpus, "seq-len": subject.seq_len, "global-batch": subject.global_batch}
    absent = ", ".join(f"--{name}" for name, value in required.items() if value is None)
    if subject.model is None or subject.seq_len is None or absent:
        raise ForerunError(f"plan: {absent} missing; a search for a model needs --gpus, --seq-len and --global-batch")
    model = as_asked(load_model(subject.model), subject)
    return _Asked(model, subject.seq_len, gpus, batches, fields)


def _rank(
    subject: Subject, where: Cluster, options: SearchOptions, under: Conditions, work: WorkOptions, shown: Shown
) -> None:
    """Ranks saved programs and shows the ranking."""
    n_gpus = (None,) if subject.gpus is None else whole_numbers(subject.gpus, "--gpus")
    if len(n_gpus) > 1:
        raise ForerunError(f"--gpus {subject.gpus}: with --programs expected one number of GPUs")
    assert subject.programs is not None
    with progress_bar("simulating") as advance:
        ranking = rank_programs(
            subject.programs,
            where,
            n_gpus=n_gpus[0],
            objective=options.objective,  # type: ignore[arg-type]
            tokens_per_step=under.tokens_per_step,
            memory_limit_gib=options.memory_limit_gib(where, under.memory_limit),
            network=under.topology(where),
            measured=under.measured(),
            workers=work.workers,
            progress=advance,
        )
    if shown.csv is not None:
        write_programs_csv(shown.csv, ranking)
    if shown.as_json:
        print(to_json(programs_record(ranking, shown.top or TOP)))
    else:
        print_programs(console(), ranking, shown.top or TOP)
    if not ranking.fitting:
        raise typer.Exit(NOTHING_FITS)
