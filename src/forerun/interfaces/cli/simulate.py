"""`forerun simulate`: the timeline of a saved program in tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.common.errors import ForerunError
from forerun.core.program.types import Program
from forerun.interfaces.cli.loop_options import LoopOptions
from forerun.interfaces.cli.option_groups import grouped
from forerun.interfaces.cli.output_option import output_option
from forerun.interfaces.cli.program_options import AsJson, ClusterOption, Conditions, simulate_file
from forerun.interfaces.report.perfetto import write_trace
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.timeline import print_timeline, timeline_record
from forerun.interfaces.report.written import to_json


@grouped
def simulate(
    under: Conditions,
    program: Annotated[Path, typer.Option(metavar="FILE", help="Saved program (written by forerun trace).")],
    cluster: ClusterOption,
    gpus: Annotated[
        int | None, typer.Option(help="Number of GPUs; by default those of the program. Data parallelism is scaled.")
    ] = None,
    stack: Annotated[
        str | None,
        typer.Option(
            help=(
                "Software stack whose host times and kernel rates apply (forerun stacks lists them). By"
                " default the program's imports decide; without a known import it is pytorch."
            )
        ),
    ] = None,
    rank_class: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Rank class to show, by name or number (default: the slowest)."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of kernels and modules to list.")] = 20,
    depth: Annotated[int, typer.Option(min=1, help="Depth of module paths in the tables.")] = 2,
    trace: Annotated[Path | None, output_option(help="Write the step as a Perfetto (Chrome) trace.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a saved program, and list its kernels, streams and modules by time."""
    simulation = simulate_file(program, cluster, gpus, under, LoopOptions(), whole_timeline=True, stack=stack or "")
    number = simulation.slowest if rank_class is None else _number(simulation.program, rank_class)
    if trace is not None:
        write_trace(trace, simulation.program, simulation.flat, simulation.timeline, simulation.costs.issue_ps)
    if as_json:
        print(to_json(timeline_record(simulation, number, depth)))
    else:
        print_timeline(console(), simulation, number, top, depth)


def _number(program: Program, asked: str) -> int:
    names = [cls.name for cls in program.rank_classes]
    if asked in names:
        return names.index(asked)
    if asked.isdecimal() and int(asked) < len(names):
        return int(asked)
    raise ForerunError(
        f"--rank-class: there is no rank class {asked!r}; give a number below {len(names)} or one of {', '.join(names)}"
    )
