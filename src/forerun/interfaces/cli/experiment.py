"""`forerun experiment`: one file that describes a run, and studies of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.answers.experiment.answers import answers_of
from forerun.answers.experiment.comparison import compare
from forerun.answers.experiment.description.examples import examples
from forerun.answers.experiment.description.key_table import key_table
from forerun.answers.experiment.description.read import changed, preset_table, read_experiment
from forerun.answers.experiment.other_reading import other_reading
from forerun.answers.experiment.records import study_record
from forerun.answers.experiment.request import Request
from forerun.answers.experiment.run import run
from forerun.answers.experiment.scaling import scale
from forerun.answers.experiment.stragglers import study
from forerun.common.errors import ForerunError
from forerun.describe.cluster.files import parse_yaml
from forerun.interfaces.cli.exit_codes import NOTHING_FITS
from forerun.interfaces.cli.experiment_source import chosen
from forerun.interfaces.cli.report_option import typed
from forerun.interfaces.cli.spread import SpreadCommand
from forerun.interfaces.report.console import console, make_table
from forerun.interfaces.report.experiment_console import print_comparison, print_run, print_scaling, print_stragglers
from forerun.interfaces.report.experiment_files import Exported, Result, answers_record, export
from forerun.interfaces.report.progress import progress_bar
from forerun.interfaces.report.records import to_json

experiment = typer.Typer(help="Study a cluster from one experiment file.", no_args_is_help=True)

Source = Annotated[str, typer.Argument(metavar="FILE|PRESET", help="YAML or JSON file, or a preset's name.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Another value of a key, as YAML; several may follow."),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Write configuration, results, pictures and report.html here."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
EXAMPLES = examples()
_EXAMPLE_WORDS = ", ".join(f"{each.number} {each.title}" for each in EXAMPLES.values())
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes (default: one for each CPU).")]


@experiment.command("run", cls=SpreadCommand)
def run_command(
    context: typer.Context,
    source: Annotated[
        str | None, typer.Argument(metavar="FILE|PRESET", help="YAML or JSON file, or a preset's name.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="A preset: small, medium, large or another one.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML or JSON file.")] = None,
    example: Annotated[
        int | None,
        typer.Option(min=1, max=len(EXAMPLES), help=f"A shipped example: {_EXAMPLE_WORDS}."),
    ] = None,
    scaling: Annotated[bool, typer.Option("--scaling", help="A scaling study, as `forerun experiment scale`.")] = False,
    nodes: Annotated[
        list[int] | None, typer.Option(min=1, help="With --scaling: numbers of nodes, 1 2 4 8 16 unless given.")
    ] = None,
    settings: Settings = None,
    out: Out = None,
    history: Annotated[
        bool, typer.Option("--history", help="With --out: every event, as a table and as a Perfetto trace.")
    ] = False,
    analysis: Annotated[
        bool, typer.Option("--analysis/--no-analysis", help="Bottlenecks, what-if and recommendations.")
    ] = True,
    must_fit: Annotated[bool, typer.Option("--must-fit", help="Exit with 3 if it does not fit in memory.")] = False,
    as_json: AsJson = False,
) -> None:
    """Simulate a run: time, memory, bottlenecks, what would help, cost."""
    choice = chosen(source, preset, config, example, scaling, nodes)
    is_study = bool(choice.nodes or choice.patterns)
    if history and is_study:
        raise ForerunError("--history: goes with a run, not with a scaling study or a comparison")
    if history and out is None:
        raise ForerunError("--history: give --out, the folder to write it to")
    request = _request(choice.source, settings)
    if choice.shipped is not None and not as_json:
        console().print(f"experiment file: {choice.shipped} (copy it to make it your own)\n", soft_wrap=True)
    if choice.patterns:
        _compare(context, request, {"patterns": choice.patterns}, False, out, None, as_json)
        return
    if choice.nodes:
        _scale(context, request, choice.nodes, False, out, None, as_json)
        return
    result = run(request)
    answers = answers_of(result) if analysis else None
    files = None if out is None else export(result, out, answers, history=history, command=typed(context))
    more = {} if answers is None else {"analysis": answers_record(answers)}
    _show(as_json, result, lambda: print_run(console(), result, answers), files, more)
    if must_fit and not result.prediction.fits:
        raise typer.Exit(NOTHING_FITS)


@experiment.command("scale", cls=SpreadCommand)
def scale_command(
    context: typer.Context,
    source: Source,
    nodes: Annotated[list[int], typer.Option(min=1, help="Numbers of nodes: --nodes 1 2 4 8.")],
    strong: Annotated[
        bool, typer.Option("--strong/--weak", help="Keep the batch of all GPUs, or that of each GPU.")
    ] = False,
    settings: Settings = None,
    out: Out = None,
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """The experiment on more and more nodes: efficiency, where it breaks down and why, the best scale.

    With --out a study that was broken off goes on from where it was.
    """
    _scale(context, _request(source, settings), nodes, strong, out, jobs, as_json)


def _scale(
    context: typer.Context,
    request: Request,
    nodes: Sequence[int],
    strong: bool,
    out: Path | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    with progress_bar("simulating") as advance:
        result = scale(request, nodes, strong, folder=out, progress=advance, workers=jobs)
    files = None if out is None else export(result, out, command=typed(context))
    _show(as_json, result, lambda: print_scaling(console(), result), files)
    if not any(point.fits for point in result.points):
        raise typer.Exit(NOTHING_FITS)


@experiment.command("compare", cls=SpreadCommand)
def compare_command(
    context: typer.Context,
    source: Source,
    patterns: Annotated[list[str] | None, typer.Option(help="Communication patterns to try.")] = None,
    topologies: Annotated[list[str] | None, typer.Option(help="Topologies to try.")] = None,
    devices: Annotated[list[str] | None, typer.Option(help="GPUs to try.")] = None,
    precisions: Annotated[list[str] | None, typer.Option(help="Precisions to try.")] = None,
    grid: Annotated[bool, typer.Option("--grid", help="All combinations, not one change at a time.")] = False,
    settings: Settings = None,
    out: Out = None,
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Patterns, topologies, devices and precisions side by side.

    With --out a comparison that was broken off goes on from where it was.
    """
    request = _request(source, settings)
    axes = {"patterns": patterns, "topologies": topologies, "devices": devices, "precisions": precisions}
    if not any(axes.values()):
        raise ForerunError(f"nothing to compare: give one of {', '.join('--' + name for name in axes)}")
    given = {name: tuple(values or ()) for name, values in axes.items()}
    _compare(context, request, given, grid, out, jobs, as_json)


def _compare(
    context: typer.Context,
    request: Request,
    axes: Mapping[str, Sequence[str]],
    grid: bool,
    out: Path | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    with progress_bar("simulating") as advance:
        result = compare(request, **axes, grid=grid, folder=out, progress=advance, workers=jobs)
    files = None if out is None else export(result, out, command=typed(context))
    _show(as_json, result, lambda: print_comparison(console(), result), files)


@experiment.command("stragglers", cls=SpreadCommand)
def stragglers_command(
    context: typer.Context,
    source: Source,
    settings: Settings = None,
    out: Out = None,
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Step times under jitter and stragglers, and what the slowest rank costs.

    What disturbs the run stands in its file, or is set: --set training.straggler_probability=0.01.
    """
    request = _request(source, settings)
    with progress_bar("simulating") as advance:
        result = study(request, folder=out, progress=advance, workers=jobs)
    files = None if out is None else export(result, out, command=typed(context))
    _show(as_json, result, lambda: print_stragglers(console(), result), files)


@experiment.command("presets")
def presets_command() -> None:
    """List the experiments that come with Forerun."""
    table = make_table(("experiment", "left"), ("model", "left"), ("GPUs", "left"), ("", "left"))
    for row in preset_table():
        table.add_row(row.name, row.model, row.gpus, row.description)
    console().print(table)


_DEFAULT_WIDTH, _LEAST_MEANING_WIDTH = 14, 20
"""columns of the terminal; both wrap, names of keys are to be read in one piece"""


@experiment.command("keys")
def keys_command() -> None:
    """List the keys of an experiment file, with their units."""
    table, rows = make_table(("key", "left"), ("meaning", "left"), ("default", "left")), key_table()
    key, meaning, default = table.columns
    key.width, default.width = max(len(row.path) for row in rows), _DEFAULT_WIDTH
    meaning.width = max(_LEAST_MEANING_WIDTH, console().width - key.width - default.width - len(table.columns))
    meaning.overflow = default.overflow = "fold"
    for row in rows:
        table.add_row(row.path, row.meaning, row.default)
    console().print(table)


def _request(source: str, settings: Sequence[str] | None) -> Request:
    """The experiment, with what --set says."""
    request = read_experiment(source)
    changes: dict[str, Any] = {}
    for setting in settings or ():
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise ForerunError(f"--set {setting}: expected SECTION.KEY=VALUE")
        changes[name.strip()] = parse_yaml(f"value: {text}", f"--set {name.strip()}")["value"]
    return changed(request, changes) if changes else request


def _show(
    as_json: bool,
    result: Result,
    print_text: Callable[[], None],
    files: Exported | None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Print a result, how else its bandwidth may be read, and what was written; with `more` in the JSON object."""
    reading = other_reading(result.request)
    if as_json:
        others = {} if reading is None else {"other_reading": reading.text}
        print(to_json(study_record(result) | dict(more or {}) | others))
        return
    if reading is not None:
        console().print(reading.text, soft_wrap=True)
        console().print()
    print_text()
    if files is not None:
        out = console()
        out.print()
        out.print(f"{files.folder}: {', '.join(path.name for path in files.paths)}", soft_wrap=True)
        for note in files.notes:
            out.print(note, soft_wrap=True)
