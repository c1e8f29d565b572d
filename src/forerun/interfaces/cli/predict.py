"""`forerun predict`: one plan, or a saved program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from forerun.answers.analysis.allocation import Allocation, allocation
from forerun.answers.analysis.around_step import around_plan
from forerun.answers.analysis.communication import collective_times
from forerun.answers.analysis.compression import CompressionEffect, effect_of, of_text, under_compression
from forerun.answers.analysis.outer_steps import OuterEffect, OuterSteps, outer_effect, replica_of
from forerun.answers.analysis.post_training import PostTrainingStep, post_training_step
from forerun.answers.analysis.predict_program import read_program
from forerun.answers.analysis.reading import Simulation
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.analysis.what_if import WhatIf, sensitivities, sensitivities_of_program
from forerun.astrasim.chakra.export import write_run
from forerun.common.errors import ForerunError
from forerun.core.memory.allocator_settings import AllocatorSettings
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.catalog import load_any
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.complete import LAYERED, complete_plan
from forerun.describe.plan.training_loop import TrainingLoop
from forerun.describe.recipe.read import read_recipe
from forerun.describe.stacks.catalog import load_stack
from forerun.evidence.fitting.anchor_file import with_stated_rates
from forerun.interfaces.cli import completion
from forerun.interfaces.cli.anchor_option import Anchor, with_anchor
from forerun.interfaces.cli.exit_codes import NOTHING_FITS
from forerun.interfaces.cli.launch_option import LaunchOptions
from forerun.interfaces.cli.loop_options import LoopOptions
from forerun.interfaces.cli.model_options import (
    EncoderSeqLen,
    FreezeEncoder,
    Images,
    MtpModules,
    as_asked,
    given_of_model,
)
from forerun.interfaces.cli.option_groups import given
from forerun.interfaces.cli.output_option import output_option
from forerun.interfaces.cli.plan_options import parse, with_plan_options
from forerun.interfaces.cli.post_training_options import PostTrainingOptions
from forerun.interfaces.cli.program_options import AsJson, ClusterOption, Conditions, refuse, simulate_file
from forerun.interfaces.cli.report_option import Report, typed
from forerun.interfaces.report.allocation import allocation_record, print_allocation
from forerun.interfaces.report.compression import compression_record, print_compression
from forerun.interfaces.report.console import print_prediction
from forerun.interfaces.report.documents import prediction_document
from forerun.interfaces.report.memory_viz import write_snapshot
from forerun.interfaces.report.outer_steps import outer_steps_record, print_outer_steps
from forerun.interfaces.report.page import write_page
from forerun.interfaces.report.perfetto import write_trace
from forerun.interfaces.report.post_training import post_training_record, print_post_training
from forerun.interfaces.report.records import prediction_record
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.written import to_json


@dataclass(frozen=True)
class Subject:
    """Holds the options for the subject of a prediction: a model under a plan, or a saved program."""

    model: Annotated[
        str | None,
        typer.Argument(
            help="Model: a preset (forerun models lists them), a config.json or its folder, or a YAML file.",
            autocompletion=completion.models,
        ),
    ] = None
    program: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Saved program (written by forerun trace) to predict instead of a model and a plan."
        ),
    ] = None
    recipe: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "Configuration file of a training tool: torchtitan's TOML, a script or YAML of Megatron-LM's"
                " arguments, YAML of NeMo or accelerate, or DeepSpeed's JSON. It sets everything that no"
                " option sets. Forerun reads it and runs nothing in it."
            ),
        ),
    ] = None
    gpus: Annotated[
        int | None,
        typer.Option(
            help=(
                "Number of GPUs (default: the product of the degrees, or those of the program). A program is"
                " scaled along data parallelism."
            )
        ),
    ] = None
    seq_len: Annotated[
        int | None, typer.Option(help="Number of tokens in a sequence. A model given layer by layer has its own.")
    ] = None
    global_batch: Annotated[int | None, typer.Option(help="Number of sequences in a step, over all GPUs.")] = None
    plan_file: Annotated[Path | None, typer.Option(help="YAML file of plan fields; options override it.")] = None
    compress_gradients: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help=(
                "Compress gradients before they are sent: fp16, bf16, int8, int8_sum, fp8_sum, onebit,"
                " powersgd[:RANK], topk[:SHARE]. METHOD@nodes compresses between nodes only."
            ),
        ),
    ] = None
    outer_steps: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help=(
                "Let the replicas (--dp-replicate) train alone and synchronise in outer steps: local_sgd or"
                " diloco, with settings every, fragments, delay, wire, keep, link_gb_s and link_ms, as in"
                " diloco:every=500,wire=fp8."
            ),
        ),
    ] = None
    mtp: MtpModules = None
    images: Images = None
    encoder_seq_len: EncoderSeqLen = None
    freeze_encoder: FreezeEncoder = False


@dataclass(frozen=True)
class Written:
    """Holds the options for the printed parts of a prediction, and for its files."""

    trace: Annotated[
        Path | None,
        output_option(help="Write the step as a Perfetto (Chrome) trace; a name that ends in .gz compresses it."),
    ] = None
    chakra: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write the step as Chakra execution traces, one for each rank."),
    ] = None
    memory_snapshot: Annotated[
        Path | None,
        output_option(
            help="Write the memory of the rank with the highest peak as a PyTorch snapshot (for memory_viz)."
        ),
    ] = None
    allocator: Annotated[
        str | None,
        typer.Option(
            metavar="SETTINGS",
            help=(
                "Replay PyTorch's caching allocator under these settings (as in PYTORCH_CUDA_ALLOC_CONF, or"
                " default) instead of the stack's, and show its segments and retries."
            ),
        ),
    ] = None
    report: Report = None
    explain: Annotated[
        bool, typer.Option("--explain", help="Show which model, constant and source each figure comes from.")
    ] = False
    must_fit: Annotated[
        bool, typer.Option("--must-fit", help="Exit with code 3 if the run does not fit in memory.")
    ] = False
    as_json: AsJson = False

    @property
    def own_settings(self) -> str:
        """Returns the settings of the allocator that the user wrote, empty for the default ones."""
        return "" if self.allocator in (None, "default") else str(self.allocator)

    @property
    def needs_whole_timeline(self) -> bool:
        """Returns whether a file shows every node of the step."""
        files = (self.trace, self.chakra, self.memory_snapshot, self.report, self.allocator)
        return any(each is not None for each in files)


@dataclass
class Beside:
    """Holds what options ask for beside the prediction of a step; None if none asks."""

    stages: PostTrainingStep | None = None
    allocator: Allocation | None = None
    gradients: CompressionEffect | None = None
    replicas: OuterEffect | None = None

    @property
    def fits(self) -> bool:
        """Returns whether generation, scoring and the outer steps of replicas fit in memory."""
        return all(one is None or one.fits for one in (self.stages, self.replicas))

    def record(self) -> dict[str, Any]:
        """Returns each part as plain data, under its key of the JSON."""
        found: dict[str, Any] = {}
        if self.allocator is not None:
            found["allocator"] = allocation_record(self.allocator)
        if self.stages is not None:
            found["post_training"] = post_training_record(self.stages)
        if self.gradients is not None:
            found["gradient_compression"] = compression_record(self.gradients)
        if self.replicas is not None:
            found["outer_steps"] = outer_steps_record(self.replicas)
        return found

    def print(self, out: Console) -> None:
        """Prints each part under its title."""
        if self.stages is not None:
            print_post_training(out, self.stages)
        if self.allocator is not None:
            print_allocation(out, self.allocator)
        if self.gradients is not None:
            print_compression(out, self.gradients)
        if self.replicas is not None:
            print_outer_steps(out, self.replicas)


@with_plan_options(several=False)
def predict(
    context: typer.Context,
    cluster: ClusterOption,
    fields: dict[str, str | bool],
    subject: Subject,
    under: Conditions,
    loop: LoopOptions,
    post: PostTrainingOptions,
    shown: Written,
    launch: LaunchOptions,
    anchor: Anchor = None,
) -> None:
    """Predict step time, memory and cost of one plan or of a saved program, and show where time and memory go."""
    model, program = subject.model, subject.program
    if model is not None and program is not None:
        raise ForerunError("predict: give a model or --program, not both")
    if model is None and program is None and subject.recipe is None:
        raise ForerunError("predict: give a model, a saved program with --program, or a tool's file with --recipe")
    launch.check()
    stages = post.around()
    settings = None if shown.allocator is None else AllocatorSettings.parse(shown.own_settings)
    where = under.cluster(cluster)
    gains: Callable[[], tuple[WhatIf, ...]]
    beside = Beside()
    if program is not None:
        rates_of = str(fields.pop("stack", ""))
        of_plan: dict[str, object] = {
            **fields,
            "plan_file": subject.plan_file,
            "seq_len": subject.seq_len,
            "global_batch": subject.global_batch,
            "compress_gradients": subject.compress_gradients,
            "outer_steps": subject.outer_steps,
            **{name.removeprefix("--"): value for name, value in given_of_model(subject).items()},
        }
        of_plan |= {"launch": launch.launch, "recipe": subject.recipe, **given(post)}
        refuse({name: True for name, value in of_plan.items() if value is not None}, _HAS_ITS_PLAN)
        whole = shown.needs_whole_timeline
        if anchor is not None:
            where = with_stated_rates(anchor, where)
        simulation = simulate_file(
            program, cluster, subject.gpus, under, loop, whole_timeline=whole, stack=rates_of, anchor=anchor
        )
        gains = partial(_gains_of_program, program, where, simulation, under)
    else:
        refuse({"tokens_per_step": under.tokens_per_step}, "only with --program; leave it out")
        spec, values, batch, gpus = _described(subject, parse(fields, subject.plan_file, several=False))
        if isinstance(spec, LayeredModel):
            if stages is not None:
                raise ForerunError(
                    f"--generated-tokens-per-s: {spec.name} is given layer by layer and generates nothing"
                )
            values = {**LAYERED, **values}
        where = with_anchor(anchor, spec, where, values)
        plan = complete_plan(values, n_gpus=gpus, global_batch=batch)
        launch.write(plan, spec, where)
        stack = None if settings is None else replace(load_stack(plan.stack), allocator=shown.own_settings)
        setup = Setup(spec, plan, where, under.topology(where), under.measured(), changed_stack=stack, replays=True)
        if subject.compress_gradients is not None and (how := of_text(subject.compress_gradients)) is not None:
            beside.gradients = effect_of(setup, how)
            setup = under_compression(setup, how)
        outer, whole_setup = None, setup
        if subject.outer_steps is not None:
            outer = OuterSteps.of_text(subject.outer_steps)
            setup = replica_of(setup, outer)
        around = loop.loop(TrainingLoop())
        simulation = around_plan(simulate_setup(setup), setup, around, loop.where())
        if outer is not None:
            beside.replicas = outer_effect(whole_setup, outer, simulation.prediction)
        if stages is not None:
            beside.stages = post_training_step(setup, simulation, stages)
        gains = partial(sensitivities, setup, simulation)
    if shown.report is not None:
        talk = () if under.topology(where) is not None else collective_times(simulation, where)
        write_page(shown.report, prediction_document(simulation, gains(), typed(context), talk))
    _write(simulation, shown)
    if settings is not None:
        beside.allocator = allocation(simulation.program, under.cluster(cluster), simulation.subject.stack, settings)
    _show(simulation, beside, shown)
    if shown.must_fit and not simulation.prediction.memory_recorded:
        raise ForerunError(f"--must-fit: {program}: the profile does not record memory (profile_memory=True does)")
    if shown.must_fit and not (simulation.prediction.fits and beside.fits):
        raise typer.Exit(NOTHING_FITS)


def _described(
    subject: Subject, options: dict[str, Any]
) -> tuple[ModelSpec | LayeredModel, dict[str, Any], int | None, int | None]:
    """Returns the model, the fields of the plan, the global batch and the GPUs; options override a recipe."""
    values, batch, gpus = options, subject.global_batch, subject.gpus
    if subject.seq_len is not None:
        values["seq_len"] = subject.seq_len
    if subject.recipe is None:
        assert subject.model is not None
        return as_asked(load_any(subject.model), subject), values, batch, gpus
    recipe = read_recipe(subject.recipe)
    spec = recipe.named_model() if subject.model is None else load_any(subject.model)
    if isinstance(spec, LayeredModel):
        raise ForerunError(f"--recipe {recipe.place}: {spec.name} is given layer by layer; choose a transformer")
    values, batch, gpus = recipe.under(values, batch, gpus)
    return as_asked(recipe.noted(spec) if subject.model else spec, subject), values, batch, gpus


def _gains_of_program(program: Path, where: Cluster, simulation: Simulation, under: Conditions) -> tuple[WhatIf, ...]:
    network, measured = under.topology(where), under.measured()
    return sensitivities_of_program(read_program(program), where, simulation, network=network, measured=measured)


_HAS_ITS_PLAN = "a saved program has its own plan; leave it out"


def _show(simulation: Simulation, beside: Beside, shown: Written) -> None:
    """Prints the prediction and the further parts that the user asks for."""
    if shown.as_json:
        print(to_json(prediction_record(simulation.prediction) | beside.record()))
        return
    print_prediction(console(), simulation.prediction, simulation.model_flops_per_token, explain=shown.explain)
    beside.print(console())


def _write(simulation: Simulation, shown: Written) -> None:
    """Writes the files that the options name."""
    program, flat, timeline = simulation.program, simulation.flat, simulation.timeline
    if shown.trace is not None:
        write_trace(shown.trace, program, flat, timeline, simulation.costs.issue_ps)
    if shown.chakra is not None:
        write_run(shown.chakra, program, simulation.costs.duration_ps)
    if shown.memory_snapshot is not None:
        memory = simulation.memory
        fullest = max(range(len(memory)), key=lambda i: memory[i].peak_bytes)
        write_snapshot(shown.memory_snapshot, program, flat, timeline, fullest)
