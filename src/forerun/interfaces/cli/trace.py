"""`forerun trace`: a real training step, recorded without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.common.errors import ForerunError
from forerun.interfaces.report.console import console
from forerun.interfaces.report.progress import progress_bar
from forerun.interfaces.report.trace_summary import print_trace
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits
from forerun.sources.trace.many import read_configurations, trace_all
from forerun.sources.trace.record import trace_job, write_program
from forerun.sources.trace.titan import torchtitan_job

_DEFAULT = Job("")


def trace(
    target: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="Training script, or a module's name with --module; unmodified.")
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments of the script.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Program to write; with --plans the folder for Programs.")
    ] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks of the run, as torchrun would start.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Ranks of a node.")] = _DEFAULT.gpus_per_node,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to run; the last is recorded.")] = _DEFAULT.steps,
    rank: Annotated[int | None, typer.Option(min=0, help="Record this rank alone.")] = None,
    all_roles: Annotated[
        bool, typer.Option("--all-roles", help="Record rank 0 and all ranks that it exchanges messages with (default).")
    ] = False,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module's name, as for python -m.")
    ] = False,
    torchtitan: Annotated[
        bool,
        typer.Option(
            "--torchtitan", help="SCRIPT is a module of torchtitan's; a configuration follows: llama3 llama3_8b."
        ),
    ] = False,
    override: Annotated[
        list[str] | None,
        typer.Option("--override", metavar="SECTION.KEY=VALUE", help="A setting of torchtitan's; can be repeated."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="What the program is told that it runs on: h100, a100, ...")
    ] = _DEFAULT.device,
    expert_skew: Annotated[
        float, typer.Option(min=0, help="Routing of tokens: 0 is balanced; s: expert i in proportion to 1/(i+1)**s.")
    ] = 0.0,
    source_lines: Annotated[
        bool, typer.Option("--source-lines", help="Record the source line of each kernel.")
    ] = False,
    plans: Annotated[Path | None, typer.Option(help="YAML: name -> world_size, args, env; one Program each.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Configurations traced at once.")] = None,
    time_limit: Annotated[
        float, typer.Option(min=1, metavar="S", help="Seconds that a trace may take.")
    ] = Limits.time_s,
    host_memory_limit: Annotated[
        float, typer.Option(min=0.1, metavar="GIB", help="Memory that a traced process may use.")
    ] = Limits.memory_gib,
    show_output: Annotated[bool, typer.Option("--show-output", help="Let the script print.")] = False,
) -> None:
    """Record one optimizer step of a PyTorch training script, without a GPU, at any world size.

    The script runs unmodified, as torchrun would start it, in a process of its own where 'cuda' tensors have no data.
    What it did becomes a Program for forerun predict --program.
    """
    if rank is not None and all_roles:
        raise ForerunError("--rank and --all-roles exclude each other")
    if rank is not None and rank >= world_size:
        raise ForerunError(f"--rank {rank}: ranks of {world_size} go from 0 to {world_size - 1}")
    job = Job(
        folder="",
        target=target,
        arguments=tuple(arguments or ()),
        is_module=module,
        rank=rank or 0,
        world_size=world_size,
        gpus_per_node=gpus_per_node,
        steps=steps,
        lines=source_lines,
        expert_skew=expert_skew,
        device=device,
        alone=rank is not None,
    )
    if torchtitan:
        if module:
            raise ForerunError("--module and --torchtitan exclude each other")
        job = torchtitan_job(job, job.arguments, override or ())
    elif override:
        raise ForerunError("--override is for --torchtitan")
    limits = Limits(time_limit, host_memory_limit)
    if plans is not None:
        if output is None:
            raise ForerunError("--plans needs a folder for the Programs: -o DIR")
        configurations = read_configurations(plans, job)
        with progress_bar("tracing") as advance:
            failed = trace_all(configurations, output, limits, workers, advance)
        for name, reason in failed:
            console().print(f"{name}: {reason}", soft_wrap=True)
        if failed:
            raise ForerunError(f"{len(failed)} of {len(configurations)} configurations could not be traced")
        return
    path = output or Path(f"{Path(job.title.rpartition(' ')[2] or target).stem}.program")
    program, seconds = trace_job(job, limits, show_output)
    write_program(program, path)
    print_trace(console(), program, path, seconds)
