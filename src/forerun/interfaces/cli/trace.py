"""`forerun trace`: a real training step, recorded without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forerun.common.errors import ForerunError
from forerun.interfaces.cli.option_groups import grouped
from forerun.interfaces.cli.output_option import check_output
from forerun.interfaces.report.progress import progress_bar
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.trace_summary import print_trace
from forerun.sources.trace.job import Job, release
from forerun.sources.trace.launch import Limits
from forerun.sources.trace.many import read_configurations, trace_all
from forerun.sources.trace.opaque import checked_files
from forerun.sources.trace.record import trace_job, write_program
from forerun.sources.trace.titan import torchtitan_job

_DEFAULT = Job("")


@dataclass(frozen=True)
class ScriptOptions:
    """Names the program that is traced."""

    target: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT", help="Training script, or with --module the name of a module. It needs no changes."
        ),
    ]
    arguments: Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments of the script.")] = None
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module, as for python -m.")
    ] = False
    torchtitan: Annotated[
        bool,
        typer.Option(
            "--torchtitan", help="SCRIPT is a torchtitan model, followed by a configuration: llama3 llama3_8b."
        ),
    ] = False
    override: Annotated[
        list[str] | None,
        typer.Option(
            "--override",
            metavar="SECTION.KEY=VALUE",
            help="Setting that overrides torchtitan's configuration. May be repeated.",
        ),
    ] = None


@dataclass(frozen=True)
class RunOptions:
    """Holds the options for the run that the program believes to be part of, and for the recording."""

    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks that torchrun would start.")] = 1
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Number of ranks on a node.")] = _DEFAULT.gpus_per_node
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps to run; the last one is recorded.")] = (
        _DEFAULT.steps
    )
    rank: Annotated[int | None, typer.Option(min=0, help="Record only this rank.")] = None
    all_roles: Annotated[
        bool, typer.Option("--all-roles", help="Record rank 0 and all ranks that it exchanges messages with (default).")
    ] = False
    device: Annotated[str, typer.Option(help="GPU that the script sees: h100, a100, ...")] = _DEFAULT.device
    expert_skew: Annotated[
        float,
        typer.Option(
            min=0,
            help="Skew of the token routing: 0 is balanced; with s, expert i gets tokens in proportion to 1/(i+1)**s.",
        ),
    ] = 0.0
    dynamo: Annotated[
        str,
        typer.Option(metavar="RELEASE", help="Break graphs and recompute as Dynamo of this torch release does (2.9)."),
    ] = _DEFAULT.dynamo
    tokens_per_step: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of tokens in a step, over all ranks, if the trace cannot tell."),
    ] = None
    kernels: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Python file that describes custom kernels of the script. May be repeated."),
    ] = None
    allow_fallback: Annotated[
        bool,
        typer.Option(
            "--allow-fallback",
            help=(
                "Trace code eagerly if torch.compile fails on it; without this option such a failure ends the"
                " trace with code 2."
            ),
        ),
    ] = False
    source_lines: Annotated[bool, typer.Option("--source-lines", help="Record the source line of each kernel.")] = False


@dataclass(frozen=True)
class LimitOptions:
    """Holds the limits of a traced process."""

    time_limit: Annotated[float, typer.Option(min=1, metavar="S", help="Time limit of a trace in seconds.")] = (
        Limits.time_s
    )
    host_memory_limit: Annotated[
        float, typer.Option(min=0.1, metavar="GIB", help="Memory limit of a traced process in GiB.")
    ] = Limits.memory_gib


@grouped
def trace(
    script: ScriptOptions,
    run: RunOptions,
    limited: LimitOptions,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the Program; with --plans, folder for the Programs.")
    ] = None,
    plans: Annotated[
        Path | None,
        typer.Option(help="YAML file that maps names to world_size, args and env. Each entry becomes a Program."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of configurations traced at the same time.")
    ] = None,
    show_output: Annotated[bool, typer.Option("--show-output", help="Show what the script prints.")] = False,
) -> None:
    """Record one optimizer step of a PyTorch training script, without a GPU, at any world size.

    The script runs unmodified, as torchrun would start it, in a separate process where 'cuda' tensors have no data.
    Forerun writes what it ran as a Program, which forerun predict --program reads.
    """
    if plans is None:
        check_output(output)
    job, limits = _job(script, run), Limits(limited.time_limit, limited.host_memory_limit)
    if plans is not None:
        if output is None:
            raise ForerunError("--plans: give the folder for the Programs too: -o DIR")
        configurations = read_configurations(plans, job)
        with progress_bar("tracing") as advance:
            failed = trace_all(configurations, output, limits, workers, advance)
        for name, reason in failed:
            console().print(f"{name}: {reason}", soft_wrap=True)
        if failed:
            raise ForerunError(f"{len(failed)} of {len(configurations)} configurations could not be traced")
        return
    path = output or Path(f"{Path(job.title.rpartition(' ')[2] or script.target).stem}.program")
    program, seconds = trace_job(job, limits, show_output)
    write_program(program, path)
    print_trace(console(), program, path, seconds)


def _job(script: ScriptOptions, run: RunOptions) -> Job:
    """Returns the job that the options describe. Raises ForerunError for options that contradict each other."""
    if run.rank is not None and run.all_roles:
        raise ForerunError("--rank and --all-roles exclude each other; give one of them")
    if run.rank is not None and run.rank >= run.world_size:
        raise ForerunError(f"--rank {run.rank}: there is no such rank; choose one of 0 to {run.world_size - 1}")
    if run.dynamo:
        release(run.dynamo)
    job = Job(
        folder="",
        target=script.target,
        arguments=tuple(script.arguments or ()),
        is_module=script.module,
        rank=run.rank or 0,
        world_size=run.world_size,
        gpus_per_node=run.gpus_per_node,
        steps=run.steps,
        lines=run.source_lines,
        expert_skew=run.expert_skew,
        dynamo=run.dynamo,
        device=run.device,
        alone=run.rank is not None,
        kernels=checked_files(run.kernels or ()),
        tokens_per_step=run.tokens_per_step,
        allow_fallback=run.allow_fallback,
    )
    if script.torchtitan:
        if script.module:
            raise ForerunError("--module and --torchtitan exclude each other; give one of them")
        return torchtitan_job(job, job.arguments, script.override or ())
    if script.override:
        raise ForerunError("--override goes with --torchtitan; leave it out, or give --torchtitan too")
    return job
