"""`forerun predict`: one plan, or a saved program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.answers.analysis.allocation import allocation
from forerun.answers.analysis.around_step import around_plan
from forerun.answers.analysis.predict_program import read_program
from forerun.answers.analysis.reading import Simulation
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.analysis.what_if import sensitivities, sensitivities_of_program
from forerun.answers.search.search import limited
from forerun.astrasim.chakra.export import write_run
from forerun.common.errors import ForerunError
from forerun.core.cost.measured_files import read_measured
from forerun.core.memory.allocator_settings import AllocatorSettings
from forerun.core.network.on_topology import network_of
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_any
from forerun.describe.model.layered import LayeredModel
from forerun.describe.plan.complete import LAYERED, complete_plan
from forerun.describe.plan.stack import load_stack
from forerun.describe.plan.training_loop import TrainingLoop
from forerun.interfaces.cli.anchor_option import Anchor, with_anchor
from forerun.interfaces.cli.exit_codes import NOTHING_FITS
from forerun.interfaces.cli.launch_option import Launch, LaunchOut, check_launch, write_launch_files
from forerun.interfaces.cli.loop_options import CheckpointModeOption, Every, StorageOption, loop_of, storage_of
from forerun.interfaces.cli.plan_options import parse, with_plan_options
from forerun.interfaces.cli.program_options import (
    KernelProfile,
    MemoryLimit,
    Network,
    NetworkProfile,
    TokensPerStep,
    refuse,
    simulate_file,
)
from forerun.interfaces.cli.report_option import Report, check_report, typed
from forerun.interfaces.report.allocation import allocation_record, print_allocation
from forerun.interfaces.report.console import console, print_prediction
from forerun.interfaces.report.documents import prediction_document
from forerun.interfaces.report.memory_viz import write_snapshot
from forerun.interfaces.report.page import write_page
from forerun.interfaces.report.perfetto import write_trace
from forerun.interfaces.report.records import prediction_record, to_json


@with_plan_options(several=False)
def predict(
    context: typer.Context,
    cluster: Annotated[str, typer.Option(help="Preset (forerun clusters) or a YAML file.")],
    fields: dict[str, str | bool],
    model: Annotated[
        str | None, typer.Argument(help="Preset (forerun models), config.json, its folder, or a YAML file.")
    ] = None,
    program: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A saved program (forerun trace) in place of a model and a plan."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            help="GPUs of the run; the product of the degrees, or those of the program, unless given."
            " A program is scaled along data parallelism."
        ),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens of a sequence; not for a model given layer by layer.")
    ] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences of a step over all GPUs.")] = None,
    memory_limit: MemoryLimit = None,
    network: Network = None,
    kernel_profile: KernelProfile = None,
    network_profile: NetworkProfile = None,
    tokens_per_step: TokensPerStep = None,
    anchor: Anchor = None,
    every: Every = None,
    checkpoint_mode: CheckpointModeOption = None,
    storage: StorageOption = None,
    plan_file: Annotated[Path | None, typer.Option(help="YAML file of plan fields; options go over it.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the step as a Perfetto / Chrome trace.")] = None,
    chakra: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the step as Chakra traces, one a rank.")
    ] = None,
    memory_snapshot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the fullest rank's memory as a PyTorch snapshot (memory_viz)."),
    ] = None,
    allocator: Annotated[
        str | None,
        typer.Option(
            metavar="SETTINGS",
            help="Settings of PyTorch's caching allocator, as in PYTORCH_CUDA_ALLOC_CONF, or default, in place of the"
            " stack's; and what it does.",
        ),
    ] = None,
    report: Report = None,
    launch: Launch = None,
    launch_out: LaunchOut = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show where each figure comes from.")] = False,
    must_fit: Annotated[bool, typer.Option("--must-fit", help="Exit with 3 if it does not fit in memory.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Predict one plan, or a saved program: time, memory, where both go."""
    if (model is None) == (program is None):
        given = "give a model or --program, not both" if model else "give a model, or a saved program with --program"
        raise ForerunError(f"predict: {given}")
    check_report(report)
    check_launch(launch, launch_out)
    own_settings = "" if allocator in (None, "default") else str(allocator)
    settings = None if allocator is None else AllocatorSettings.parse(own_settings)
    if program is not None:
        own = {**fields, "plan_file": plan_file, "seq_len": seq_len, "global_batch": global_batch, "launch": launch}
        own["anchor"] = anchor
        refuse({name: True for name, value in own.items() if value is not None}, "a program has its plan; leave it out")
        simulation = simulate_file(
            program,
            cluster,
            gpus=gpus,
            memory_limit=memory_limit,
            network=network,
            kernel_profile=kernel_profile,
            network_profile=network_profile,
            tokens_per_step=tokens_per_step,
            every=every,
            checkpoint_mode=checkpoint_mode,
            storage=storage,
            whole_timeline=any(asked is not None for asked in (trace, chakra, memory_snapshot, report, allocator)),
        )
        if report is not None:
            where, measured = (
                limited(load_cluster(cluster), memory_limit),
                read_measured(kernel_profile, network_profile),
            )
            gains = sensitivities_of_program(
                read_program(program), where, simulation, network=network_of(where, network), measured=measured
            )
            write_page(report, prediction_document(simulation, gains, typed(context)))
    else:
        refuse({"tokens_per_step": tokens_per_step}, "only with --program; a plan has its tokens")
        values: dict[str, Any] = parse(fields, plan_file, several=False)
        if seq_len is not None:
            values["seq_len"] = seq_len
        assert model is not None
        spec, where = load_any(model), limited(load_cluster(cluster), memory_limit)
        if isinstance(spec, LayeredModel):
            values = {**LAYERED, **values}
        where = with_anchor(anchor, spec, where, values)
        plan = complete_plan(values, n_gpus=gpus, global_batch=global_batch)
        measured = read_measured(kernel_profile, network_profile)
        write_launch_files(launch, launch_out, plan, spec, where)
        habits = None if settings is None else replace(load_stack(plan.stack), allocator=own_settings)
        setup = Setup(spec, plan, where, network_of(where, network), measured, habits=habits, replays=True)
        loop = loop_of(TrainingLoop(), every, checkpoint_mode)
        simulation = around_plan(simulate_setup(setup), setup, loop, storage_of(storage, loop))
        if report is not None:
            write_page(report, prediction_document(simulation, sensitivities(setup, simulation), typed(context)))
    _write(simulation, trace, chakra, memory_snapshot)
    prediction = simulation.prediction
    found = None
    if settings is not None:
        where = limited(load_cluster(cluster), memory_limit)
        found = allocation(simulation.program, where, simulation.subject.stack, settings)
    if as_json:
        held = {} if found is None else {"allocator": allocation_record(found)}
        print(to_json(prediction_record(prediction) | held))
    else:
        print_prediction(console(), prediction, simulation.model_flops_per_token, explain=explain)
        if found is not None:
            print_allocation(console(), found)
    if must_fit and not prediction.fits:
        raise typer.Exit(NOTHING_FITS)


def _write(simulation: Simulation, trace: Path | None, chakra: Path | None, memory_snapshot: Path | None) -> None:
    program, flat, timeline = simulation.program, simulation.flat, simulation.timeline
    if trace is not None:
        write_trace(trace, program, flat, timeline, simulation.costs.issue_ps)
    if chakra is not None:
        write_run(chakra, program, simulation.costs.duration_ps)
    if memory_snapshot is not None:
        memory = simulation.memory
        fullest = max(range(len(memory)), key=lambda i: memory[i].peak_bytes)
        write_snapshot(memory_snapshot, program, flat, timeline, fullest)
