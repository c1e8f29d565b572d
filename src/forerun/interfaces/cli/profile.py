"""`forerun profile`: the records of PyTorch's profiler of a real step."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Annotated

import typer

from forerun.answers.profile.analyze import analyze as analyze_profiles
from forerun.answers.profile.breakdown import NAMED_KERNELS
from forerun.answers.profile.facts import facts_of
from forerun.answers.profile.imported import import_step
from forerun.common.files import whole_file
from forerun.core.program.storage import save
from forerun.interfaces.cli.output_option import output_option
from forerun.interfaces.cli.profile_compare import compare_command, memory_command
from forerun.interfaces.report.profile_tables import (
    analysis_record,
    facts_record,
    import_record,
    print_analysis,
    print_facts,
    print_import,
    write_analysis,
)
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.written import to_json
from forerun.sources.profile.link import link, read_packed_json
from forerun.sources.profile.profile import STEP
from forerun.sources.profile.read import read_profiles

_WIDTH = 160
"""width of the output outside a terminal, so that names are not cut"""

profile = typer.Typer(help="Read PyTorch profiles (Kineto JSON, plain or gzip).", rich_markup_mode=None)

Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files of PyTorch's profiler, one for each rank.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@profile.command("info")
def info(files: Files, as_json: AsJson = False) -> None:
    """List what each file contains (steps, kernels, streams, memory) and what it lacks."""
    facts = [facts_of(one) for one in read_profiles(files)]
    if as_json:
        print(to_json(facts_record(facts)))
    else:
        print_facts(console(piped_width=_WIDTH), facts)


@profile.command("analyze")
def analyze(
    files: Files,
    annotation: Annotated[
        str, typer.Option(help="Find the critical path of the event whose name contains this text; '' uses all events.")
    ] = STEP,
    instance: Annotated[
        int, typer.Option(min=0, help="Number of this event if there are several; the first one is 0.")
    ] = 0,
    kernels: Annotated[
        int,
        typer.Option(
            min=1, help="Number of kernels of each type that gpu_kernel_breakdown.1 names; it adds up the others."
        ),
    ] = NAMED_KERNELS,
    top: Annotated[int, typer.Option(min=1, help="Number of kernels and annotations to print.")] = 15,
    csv: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write every table as a CSV file to this folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where the time goes: busy and idle time, overlap, kernels, launches, copies and the critical path.

    Figures, names and definitions are those of HolisticTraceAnalysis 0.5.0.
    """
    found = analyze_profiles(read_profiles(files), annotation, instance, kernels)
    if csv is not None:
        write_analysis(csv, found)
    if as_json:
        print(to_json(analysis_record(found)))
    else:
        print_analysis(console(piped_width=_WIDTH), found, top)


@profile.command("import")
def import_(
    files: Files,
    out: Annotated[Path, output_option("--out", "-o", help="File for the program.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Number of the profiler's step; by default the step of median time.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device of the profile, if the GPU's name is not recognised.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert one profiled step to a program with its measured times, for predict and simulate."""
    found = import_step(read_profiles(files), step, device)
    save(found.program, out)
    if as_json:
        print(to_json(import_record(found, out)))
    else:
        print_import(console(piped_width=_WIDTH), found, out)


@profile.command("link")
def link_(
    file: Annotated[Path, typer.Argument(metavar="PROFILE", help="File that PyTorch's profiler wrote.")],
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="PyTorch execution trace of the same run (JSON).")],
    out: Annotated[Path, output_option("--out", "-o", help="JSON file for the linked profile.")],
) -> None:
    """Add the operators and collectives of a PyTorch execution trace to a profile, for import and compare."""
    linked = link(read_packed_json(file), read_packed_json(trace), f"{file}, {trace}")
    with whole_file(out) as target:
        content = json.dumps(linked.profile).encode()
        target.write(gzip.compress(content, 5) if out.suffix == ".gz" else content)
    print(f"{linked.matched:,} of {linked.operators:,} operators of the profile are in the trace; {out} says both")


profile.command("compare")(compare_command)
profile.command("memory")(memory_command)
