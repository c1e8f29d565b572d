"""`forerun profile compare` and `memory`: a profiled step, and its memory, beside a prediction."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.answers.analysis.predict_program import predict_program, read_program
from forerun.answers.analysis.reading import Simulation
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.comparison.compare import Comparison, compare
from forerun.answers.comparison.corrections import Corrections, corrections, with_host
from forerun.answers.profile.imported import import_step
from forerun.common.errors import ForerunError
from forerun.core.cost.measured import Measured
from forerun.core.cost.measured_files import read_measured
from forerun.core.program.origin import Origin
from forerun.core.program.types import Program
from forerun.describe.cluster.types import Cluster, KernelRates
from forerun.describe.model.catalog import load_any
from forerun.describe.model.layered import LayeredModel
from forerun.describe.plan.complete import LAYERED, complete_plan
from forerun.interfaces.cli.output_option import output_option
from forerun.interfaces.cli.plan_options import parse, with_plan_options
from forerun.interfaces.cli.program_options import AsJson, Conditions, refuse
from forerun.interfaces.cli.report_option import Report, typed
from forerun.interfaces.report.comparison import (
    comparison_document,
    comparison_record,
    print_comparison,
    write_anchor,
    write_corrections,
)
from forerun.interfaces.report.figures import seconds
from forerun.interfaces.report.memory_snapshot import print_snapshot, snapshot_record
from forerun.interfaces.report.page import write_page
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.written import to_json
from forerun.sources.profile.memory_snapshot import read_memory_snapshot
from forerun.sources.profile.read import read_profiles
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits
from forerun.sources.trace.record import trace_job

_PREDICTIONS = "--model with a plan, a saved program with --program, or --script"
_WIDTH = 170
"""width of the output outside a terminal, so that names are not cut"""


@dataclass(frozen=True)
class ComparedWith:
    """Holds the options for the other side of a comparison: a model under a plan, a saved program, or a script to
    trace.
    """

    model: Annotated[
        str | None,
        typer.Option(help="Model: a preset (forerun models lists them), a config.json or its folder, or a YAML file."),
    ] = None
    program: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Saved program to compare with instead of a model and a plan.")
    ] = None
    script: Annotated[
        str | None,
        typer.Option(
            metavar="'SCRIPT ARGS'",
            help="Training script with its arguments, or '-m MODULE ARGS'. Forerun traces it as forerun trace does.",
        ),
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Cluster: a preset (forerun clusters lists them) or a YAML file. By default it is that of the"
            " profiled GPU."
        ),
    ] = None
    gpus: Annotated[
        int | None, typer.Option(help="Number of GPUs to predict for; by default those of the profile.")
    ] = None
    seq_len: Annotated[
        int | None, typer.Option(help="Number of tokens in a sequence. A model given layer by layer has its own.")
    ] = None
    global_batch: Annotated[int | None, typer.Option(help="Number of sequences in a step, over all GPUs.")] = None

    @property
    def n_given(self) -> int:
        """Returns how many of model, program and script are given."""
        return sum(one is not None for one in (self.model, self.program, self.script))


@dataclass(frozen=True)
class OfProfile:
    """Holds the options for the step of the profile and for the printed parts."""

    step: Annotated[int | None, typer.Option(min=0, help="Number of the profiler's step to compare.")] = None
    device: Annotated[str | None, typer.Option(help="Device of the profile, if its GPU's name is not recognised.")] = (
        None
    )
    top: Annotated[int, typer.Option(min=1, help="Number of rows to print, for kinds of work and for modules.")] = 20


@dataclass(frozen=True)
class CorrectingFiles:
    """Holds the options for the files that correct the next prediction."""

    anchor_out: Annotated[
        Path | None, output_option(help="Write the measured step and its rates to this file, for --anchor.")
    ] = None
    kernel_profile_out: Annotated[
        Path | None, output_option(help="Write the measured kernel times to this file, for --kernel-profile.")
    ] = None
    network_profile_out: Annotated[
        Path | None, output_option(help="Write the measured collective times to this file, for --network-profile.")
    ] = None

    @property
    def places(self) -> tuple[Path | None, ...]:
        """Returns all files."""
        return (self.anchor_out, self.kernel_profile_out, self.network_profile_out)


@dataclass(frozen=True)
class _Predictor:
    """Predicts the same step again under other rates."""

    cluster: Cluster
    under: Conditions
    stack: str
    program: Program | None = None
    setup: Setup | None = None
    gpus: int | None = None

    def __call__(self, rates: KernelRates, measured: Measured | None) -> Simulation:
        where = replace(self.cluster, rates=self.cluster.rates.times(rates))
        if self.setup is not None:
            return simulate_setup(replace(self.setup, cluster=where, measured=measured))
        assert self.program is not None
        return predict_program(
            self.program,
            where,
            n_gpus=self.gpus,
            network=self.under.topology(where),
            measured=measured,
            tokens_per_step=self.under.tokens_per_step,
            stack=self.stack or None,
            whole_timeline=True,
        )


@with_plan_options(several=False)
def compare_command(
    context: typer.Context,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Profiles, one for each rank.")],
    fields: dict[str, str | bool],
    other: ComparedWith,
    under: Conditions,
    correcting: CorrectingFiles,
    shown: OfProfile,
    plan_file: Annotated[
        Path | None, typer.Option("--plan-file", "--plan", help="YAML file of plan fields; options override it.")
    ] = None,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Show where a profiled step differs from its prediction, and write files that correct the prediction."""
    if other.n_given != 1:
        raise ForerunError(f"profile compare: give one of {_PREDICTIONS}")
    imported = import_step(read_profiles(files), shown.step, shown.device)
    named = other.cluster or imported.device
    if not named:
        raise ForerunError(f"{files[0]}: Forerun does not know its GPU; name the cluster with --cluster")
    where = under.cluster(named)
    ranks = Origin.of(imported.program).world_size
    predictor = _predictor(other, under, where, fields, plan_file, ranks)
    found = compare(imported, predictor(KernelRates(), under.measured()), where.device.name)
    told = _write(found, predictor, correcting, named)
    if report is not None:
        write_page(report, comparison_document(found, typed(context)))
    if as_json:
        print(to_json(comparison_record(found) | told))
        return
    out = console(piped_width=_WIDTH)
    print_comparison(out, found, shown.top)
    if told:
        again = told["corrected_step_s"]
        out.print(f"With the files written, the prediction is {seconds(again)} ({again / found.measured_s - 1:+.2%}).")


@with_plan_options(several=False)
def memory_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Memory snapshot of PyTorch (pickle).")],
    fields: dict[str, str | bool],
    other: ComparedWith,
    under: Conditions,
    plan_file: Annotated[
        Path | None, typer.Option("--plan-file", "--plan", help="YAML file of plan fields; options override it.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of code places and tensors to print.")] = 15,
    as_json: AsJson = False,
) -> None:
    """Show which tensors a memory snapshot has at its peak, beside a prediction if you name a model or a program."""
    if other.n_given > 1:
        raise ForerunError(f"profile memory: give only one of {_PREDICTIONS}")
    given = other.n_given > 0
    if given and other.cluster is None:
        raise ForerunError("profile memory: name the cluster of the prediction with --cluster")
    if not given:
        sizes = {"gpus": other.gpus, "seq_len": other.seq_len, "global_batch": other.global_batch}
        asked = {**fields, "plan_file": plan_file, "cluster": other.cluster, **sizes}
        refuse(asked, "only with --model, --program or --script")
    found = read_memory_snapshot(file)
    prediction = None
    if other.cluster is not None:
        predictor = _predictor(other, under, under.cluster(other.cluster), fields, plan_file, None)
        prediction = predictor(KernelRates(), under.measured()).prediction
    if as_json:
        print(to_json(snapshot_record(found, prediction, top)))
    else:
        out = console(piped_width=_WIDTH)
        print_snapshot(out, found, prediction, top)


def _predictor(
    other: ComparedWith,
    under: Conditions,
    where: Cluster,
    fields: dict[str, str | bool],
    plan_file: Path | None,
    ranks: int | None,
) -> _Predictor:
    if other.program is not None or other.script is not None:
        stack = str(fields.pop("stack", ""))
        of_plan = {**fields, "plan_file": plan_file, "seq_len": other.seq_len, "global_batch": other.global_batch}
        kind = "a saved program" if other.script is None else "a script"
        refuse({name: True for name, value in of_plan.items() if value is not None}, f"{kind} has its own plan")
        if other.script is not None:
            world_size = other.gpus or ranks
            if world_size is None:
                raise ForerunError("profile memory: say with --gpus how many ranks the script runs on")
            return _Predictor(where, under, stack, program=_traced(other.script, world_size, where, under))
        assert other.program is not None
        return _Predictor(where, under, stack, program=read_program(other.program), gpus=other.gpus)
    assert other.model is not None
    values: dict[str, Any] = parse(fields, plan_file, several=False)
    if other.seq_len is not None:
        values["seq_len"] = other.seq_len
    spec = load_any(other.model)
    if isinstance(spec, LayeredModel):
        values = {**LAYERED, **values}
    plan = complete_plan(values, n_gpus=other.gpus or ranks, global_batch=other.global_batch)
    setup = Setup(spec, plan, where, under.topology(where), replays=True)
    return _Predictor(where, under, "", setup=setup)


def _traced(script: str, world_size: int, where: Cluster, under: Conditions) -> Program:
    """Returns the Program of a script that runs on `world_size` GPUs of a cluster."""
    try:
        words = shlex.split(script)
    except ValueError as error:
        raise ForerunError(f"--script {script}: {error}") from None
    is_module = words[:1] == ["-m"]
    words = words[is_module:]
    if not words:
        raise ForerunError(f"--script {script!r}: name a script, or a module after -m")
    job = Job(
        folder="",
        target=words[0],
        arguments=tuple(words[1:]),
        is_module=is_module,
        world_size=world_size,
        gpus_per_node=where.node_size,
        device=where.device.name,
        tokens_per_step=under.tokens_per_step,
    )
    return trace_job(job, Limits())[0]


def _write(found: Comparison, predictor: _Predictor, files: CorrectingFiles, cluster: str) -> dict[str, Any]:
    """Writes the files that the options name. Returns the step that the prediction takes with them."""
    if not any(files.places):
        return {}
    made: Corrections = corrections(found)
    write_corrections(made, files.kernel_profile_out, files.network_profile_out)
    measured = read_measured(files.kernel_profile_out, files.network_profile_out) or predictor.under.measured()
    rates = KernelRates()
    if files.anchor_out is not None:
        rates = with_host(lambda one: predictor(one, measured).prediction.step_time_s, made.rates, found)
        write_anchor(files.anchor_out, found, rates, cluster)
    return {"corrected_step_s": predictor(rates, measured).prediction.step_time_s}
