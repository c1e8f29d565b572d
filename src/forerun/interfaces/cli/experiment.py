"""`forerun experiment`: one file that describes a run, and studies of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from forerun.answers.experiment.answers import answers_of
from forerun.answers.experiment.comparison import compare
from forerun.answers.experiment.description.key_table import key_table
from forerun.answers.experiment.description.read import changed, preset_table, read_experiment
from forerun.answers.experiment.other_reading import other_reading
from forerun.answers.experiment.records import study_record
from forerun.answers.experiment.request import Request
from forerun.answers.experiment.run import run
from forerun.answers.experiment.scaling import scale
from forerun.answers.experiment.stragglers import study
from forerun.common.errors import ForerunError
from forerun.common.yaml_files import parse_yaml
from forerun.interfaces.cli.code_option import executes_code
from forerun.interfaces.cli.exit_codes import NOTHING_FITS
from forerun.interfaces.cli.experiment_source import SourceOptions
from forerun.interfaces.cli.option_groups import grouped
from forerun.interfaces.cli.program_options import AsJson
from forerun.interfaces.cli.report_option import typed
from forerun.interfaces.cli.work_options import WorkOptions
from forerun.interfaces.report.console import make_table
from forerun.interfaces.report.experiment_console import print_comparison, print_run, print_scaling, print_stragglers
from forerun.interfaces.report.experiment_files import Exported, Result, answers_record, export
from forerun.interfaces.report.progress import progress_bar
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.written import to_json


def spread(arguments: Sequence[str], several: Collection[str]) -> list[str]:
    """Returns `arguments` with the name repeated before each further value of the options in `several`.

    Values continue until the next option. Arguments of the command itself come first.
    """
    out: list[str] = []
    name = ""
    for argument in arguments:
        if argument.startswith("-"):
            name = argument if argument in several else ""
            out.append(argument)
        elif name and out[-1] != name:
            out += [name, argument]
        else:
            out.append(argument)
    return out


class SpreadCommand(TyperCommand):
    """Runs a command whose list options take several values after one name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses arguments after repeating the name of such options."""
        several = {name for option in self.params if getattr(option, "multiple", False) for name in option.opts}
        return super().parse_args(ctx, spread(args, several))


experiment = typer.Typer(help="Study a cluster from one experiment file.", no_args_is_help=True)

Source = Annotated[str, typer.Argument(metavar="FILE|PRESET", help="YAML or JSON file, or the name of a preset.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Set a key of the file to this YAML value. Several may follow."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Write configuration, results, pictures and report.html to this folder."),
]


@dataclass(frozen=True)
class StudyOptions(WorkOptions):
    """Holds the options of a study: changes of the experiment, workers, and output."""

    settings: Settings = None
    out: Out = None
    as_json: AsJson = False


@experiment.command("run", cls=SpreadCommand)
@executes_code
@grouped
def run_command(
    context: typer.Context,
    source: SourceOptions,
    settings: Settings = None,
    out: Out = None,
    history: Annotated[
        bool, typer.Option("--history", help="With --out: also write every event as a table and as a Perfetto trace.")
    ] = False,
    analysis: Annotated[
        bool, typer.Option("--analysis/--no-analysis", help="Show bottlenecks, what-if results and recommendations.")
    ] = True,
    must_fit: Annotated[
        bool, typer.Option("--must-fit", help="Exit with code 3 if the run does not fit in memory.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Simulate the run that one file describes: time, memory, cost, bottlenecks and recommendations."""
    choice = source.chosen()
    if (history or must_fit) and (choice.nodes or choice.patterns):
        name = "--history" if history else "--must-fit"
        raise ForerunError(f"{name}: it goes with a run only; leave it out of a scaling study or a comparison")
    if history and out is None:
        raise ForerunError("--history: give --out too, the folder to write it to")
    request = _request(choice.source, settings)
    if choice.shipped is not None and not as_json:
        console().print(f"experiment file: {choice.shipped} (copy it to make it your own)\n", soft_wrap=True)
    of_study = StudyOptions(settings=settings, out=out, as_json=as_json)
    if choice.patterns:
        _compare(context, request, {"patterns": choice.patterns}, False, of_study)
        return
    if choice.nodes:
        _scale(context, request, choice.nodes, False, of_study)
        return
    result = run(request)
    answers = answers_of(result) if analysis else None
    files = None if out is None else export(result, out, answers, history=history, command=typed(context))
    more = {} if answers is None else {"analysis": answers_record(answers)}
    _show(as_json, result, lambda: print_run(console(), result, answers), files, more)
    if must_fit and not result.prediction.fits:
        raise typer.Exit(NOTHING_FITS)


@experiment.command("scale", cls=SpreadCommand)
@executes_code
@grouped
def scale_command(
    context: typer.Context,
    source: Source,
    nodes: Annotated[list[int], typer.Option(min=1, help="Node counts to simulate: --nodes 1 2 4 8.")],
    options: StudyOptions,
    strong: Annotated[
        bool,
        typer.Option(
            "--strong/--weak",
            help="Keep the global batch constant (strong scaling), or the batch of each GPU (weak scaling).",
        ),
    ] = False,
) -> None:
    """Simulate the run on several node counts: efficiency, the best scale, and why efficiency falls.

    With --out an interrupted study continues where it stopped.
    """
    _scale(context, _request(source, options.settings), nodes, strong, options)


def _scale(context: typer.Context, request: Request, nodes: Sequence[int], strong: bool, options: StudyOptions) -> None:
    with progress_bar("simulating") as advance:
        result = scale(request, nodes, strong, folder=options.out, progress=advance, workers=options.workers)
    _finish(context, result, lambda: print_scaling(console(), result), options)
    if not any(point.fits for point in result.points):
        raise typer.Exit(NOTHING_FITS)


@experiment.command("compare", cls=SpreadCommand)
@executes_code
@grouped
def compare_command(
    context: typer.Context,
    source: Source,
    options: StudyOptions,
    patterns: Annotated[list[str] | None, typer.Option(help="Communication patterns to compare.")] = None,
    topologies: Annotated[list[str] | None, typer.Option(help="Topologies to compare.")] = None,
    devices: Annotated[list[str] | None, typer.Option(help="GPUs to compare.")] = None,
    precisions: Annotated[list[str] | None, typer.Option(help="Precisions to compare.")] = None,
    grid: Annotated[
        bool, typer.Option("--grid", help="Compare all combinations instead of one change at a time.")
    ] = False,
) -> None:
    """Compare patterns, topologies, devices and precisions side by side.

    With --out an interrupted comparison continues where it stopped.
    """
    axes = {"patterns": patterns, "topologies": topologies, "devices": devices, "precisions": precisions}
    if not any(axes.values()):
        raise ForerunError(f"nothing to compare; give one of {', '.join('--' + name for name in axes)}")
    given = {name: tuple(values or ()) for name, values in axes.items()}
    _compare(context, _request(source, options.settings), given, grid, options)


def _compare(
    context: typer.Context, request: Request, axes: Mapping[str, Sequence[str]], grid: bool, options: StudyOptions
) -> None:
    with progress_bar("simulating") as advance:
        result = compare(request, **axes, grid=grid, folder=options.out, progress=advance, workers=options.workers)
    _finish(context, result, lambda: print_comparison(console(), result), options)


@experiment.command("stragglers", cls=SpreadCommand)
@executes_code
@grouped
def stragglers_command(context: typer.Context, source: Source, options: StudyOptions) -> None:
    """Simulate step times under jitter and stragglers, and show what the slowest rank costs.

    The file describes the disturbances. An option can change them: --set training.straggler_probability=0.01.
    """
    request = _request(source, options.settings)
    with progress_bar("simulating") as advance:
        result = study(request, folder=options.out, progress=advance, workers=options.workers)
    _finish(context, result, lambda: print_stragglers(console(), result), options)


def _finish(context: typer.Context, result: Result, print_text: Callable[[], None], options: StudyOptions) -> None:
    """Writes the files of a study, and prints it."""
    files = None if options.out is None else export(result, options.out, command=typed(context))
    _show(options.as_json, result, print_text, files)


@experiment.command("presets")
def presets_command() -> None:
    """List the experiments that come with Forerun."""
    rows = ((row.name, row.model, row.gpus, row.description) for row in preset_table())
    console().print(make_table("llll", ("experiment", "model", "GPUs", ""), rows))


_DEFAULT_WIDTH, _LEAST_MEANING_WIDTH = 14, 20
"""widths in columns of the terminal; these two columns wrap, names of keys do not"""


@experiment.command("keys")
def keys_command() -> None:
    """List the keys of an experiment file, with their units."""
    rows = key_table()
    table = make_table("lll", ("key", "meaning", "default"), ((row.path, row.meaning, row.default) for row in rows))
    key, meaning, default = table.columns
    key.width, default.width = max(len(row.path) for row in rows), _DEFAULT_WIDTH
    meaning.width = max(_LEAST_MEANING_WIDTH, console().width - key.width - default.width - len(table.columns))
    meaning.overflow = default.overflow = "fold"
    console().print(table)


def _request(source: str, settings: Sequence[str] | None) -> Request:
    """Reads the experiment and applies --set."""
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
    """Prints a result, another reading of its bandwidth, and the written files. `more` goes into the JSON object."""
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
