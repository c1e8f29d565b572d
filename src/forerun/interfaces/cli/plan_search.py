"""Searches the plans of a model for `forerun plan`, once or over a range, and shows the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.answers.analysis.communication import collectives_of
from forerun.answers.analysis.prediction import Prediction
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.analysis.what_if import sensitivities
from forerun.answers.search.heat import DATA_PARALLEL, HeatMap, heat_map, telling_maps
from forerun.answers.search.result import SearchResult
from forerun.answers.search.search import search
from forerun.answers.search.space import make_spaces
from forerun.answers.search.standing import Standing, standing
from forerun.answers.search.sweep import sweep
from forerun.answers.search.why import Verdict, why
from forerun.common.errors import ForerunError, UnknownName
from forerun.describe.cluster.memory_limit import limited
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.parameters import model_flops_per_token
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.fields import FIELD_TYPES
from forerun.describe.plan.plan import Plan
from forerun.evidence.fitting.anchor import best_anchor
from forerun.interfaces.cli.anchor_option import SuggestAnchor
from forerun.interfaces.cli.launch_option import LaunchOptions
from forerun.interfaces.cli.output_option import output_option
from forerun.interfaces.cli.plan_options import plan_asked_about
from forerun.interfaces.cli.report_option import Report
from forerun.interfaces.report.documents import MAPS, InDetail
from forerun.interfaces.report.documents_of_searches import search_document
from forerun.interfaces.report.drawing import drawing_is_possible
from forerun.interfaces.report.page import write_page
from forerun.interfaces.report.pictures import write_pictures
from forerun.interfaces.report.pictures_of_results import search_pictures, sweep_pictures
from forerun.interfaces.report.progress import progress_bar
from forerun.interfaces.report.records_of_searches import (
    search_record,
    standing_record,
    sweep_record,
    verdict_record,
    write_csv,
)
from forerun.interfaces.report.search_console import print_search, print_standing, print_sweep, print_verdict
from forerun.interfaces.report.sweep_document import sweep_document
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.wording import command_line, plan_words
from forerun.interfaces.report.written import to_json, write_rows

TOP = 10
"""plans to list by default"""


@dataclass(frozen=True)
class Question:
    """The question of a search."""

    model: ModelSpec
    where: Cluster
    gpus: tuple[int, ...]
    seq_len: int
    batches: tuple[int, ...]
    options: Mapping[str, Any]
    """arguments of `search`"""
    choices: tuple[str, ...]
    """stacks whose best plans stand beside those that are ranked"""
    names: tuple[str, str]
    """model and cluster as the user wrote them"""
    place: str
    """options of the command that change the prediction"""
    command: str
    """the user's text"""
    own_plan: Plan | None = None
    """the plan of the recipe that asks, to show beside the best ones"""

    @property
    def is_range(self) -> bool:
        """Returns whether it takes more than one search."""
        return len(self.gpus) * len(self.batches) > 1


@dataclass(frozen=True)
class Shown:
    """Holds the options for the printed parts of the result, and for its files."""

    top: Annotated[int | None, typer.Option(min=1, help=f"How many plans to list (default {TOP}).")] = None
    why: Annotated[
        str | None,
        typer.Option(
            metavar="FIELDS|FILE",
            help="Say why plans with these values are not the best: tp=16,pp=3, or a YAML file of a plan.",
        ),
    ] = None
    suggest_anchor: SuggestAnchor = False
    csv: Annotated[
        Path | None,
        output_option(
            help="Write every valid plan to this CSV file; with several GPU counts or batches, write the best plan"
            " of each."
        ),
    ] = None
    report: Report = None
    pictures: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write heat maps and other plots to this folder as PNG files."),
    ] = None
    heat: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AXIS,AXIS",
            help=(
                "Draw the heat map of these two axes, such as tp,pp, instead of those with the largest"
                " differences. May be repeated."
            ),
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False

    @property
    def maps(self) -> list[tuple[str, str]]:
        """Returns the axes of the heat maps that the user asks for. Raises ForerunError for text that is not two
        axes."""
        return [_axes(text) for text in self.heat or ()]

    def check(self) -> None:
        """Raises ForerunError for files that could not be written after all the work."""
        if self.pictures is not None and not drawing_is_possible():
            raise ForerunError("--pictures needs matplotlib: pip install 'forerun[plot]'")
        if self.heat and not (self.report or self.pictures):
            raise ForerunError("--heat: give --report or --pictures too, where the maps go")

    def check_heat(self, fixed: Mapping[str, object]) -> None:
        """Raises ForerunError for heat maps of something else than two axes that may differ."""
        for text in self.heat or ():
            for axis in _axes(text):
                if axis not in (*FIELD_TYPES, DATA_PARALLEL):
                    raise ForerunError(f"--heat {text}: {UnknownName('axis', axis, [*FIELD_TYPES, DATA_PARALLEL])}")
                if axis in fixed and not isinstance(fixed[axis], list):
                    problem = f"{axis} is fixed to {fixed[axis]}; name an axis with several values"
                    raise ForerunError(f"--heat {text}: {problem}")


def single_search(question: Question, shown: Shown, launch: LaunchOptions) -> bool:
    """Searches, shows the result, and returns whether anything fits. Raises ForerunError."""
    top = shown.top or TOP
    n_gpus, batch, model, options = question.gpus[0], question.batches[0], question.model, question.options
    place = (model, question.where, n_gpus, question.seq_len, batch)
    asked = None if shown.why is None else plan_asked_about(shown.why, question.seq_len)
    alone = None
    if asked is not None:
        fixed, on_network = {**options["fixed"], **asked}, options["network"] is not None
        alone = make_spaces(*place, fixed, options["limits"], options["space"], on_network)[0]
    with progress_bar("simulating") as advance:
        result = search(*place, keep=top, progress=advance, choices=question.choices, **options)
    verdict = None if asked is None or alone is None else why(result, asked, alone)
    stands = _standing(question, result, top)
    suggested = _suggested(question, result, top) if shown.suggest_anchor else None
    if shown.csv is not None:
        write_csv(shown.csv, result)
    if shown.as_json:
        more: dict[str, Any] = {} if verdict is None else {"why": verdict_record(verdict)}
        more |= {} if stands is None else {"recipe": standing_record(stands)}
        more |= {} if suggested is None else {"suggested_anchor": suggested + 1}
        print(to_json(search_record(result, top) | more))
    else:
        _print_search(question, shown, result, top, verdict)
        if stands is not None:
            print_standing(console(), stands, top)
        if suggested is not None:
            words = f"Measured and given as --anchor, place {suggested + 1} is most informative about the other places"
            console().print(f"{words}: " + plan_words(result.ranked[suggested].own_plan()), soft_wrap=True)
    maps = _maps(shown, result)
    if shown.report is not None:
        found = _whole(question, result.best)
        write_page(
            shown.report, search_document(result, top, found, question.command, _again(question, result.best), maps)
        )
    if shown.pictures is not None:
        write_pictures(shown.pictures, search_pictures(result, maps))
    if result.best is not None:
        launch.write(result.best.own_plan(), model, question.where)
    return result.best is not None


def range_of_searches(question: Question, shown: Shown, launch: LaunchOptions) -> bool:
    """Searches for each number of GPUs and each batch, shows the result, and returns whether anything fits.

    Raises ForerunError, also for an option that is about one search only.
    """
    about_one = {"--top": shown.top, "--why": shown.why, "--heat": shown.heat, "--suggest-anchor": shown.suggest_anchor}
    for name, given in about_one.items():
        if given:
            raise ForerunError(f"{name} is about one search; leave it out, or give one number of GPUs and one batch")
    with progress_bar("searches") as advance:
        found = sweep(
            *(question.model, question.where, question.gpus, question.seq_len, question.batches),
            progress=advance,
            **question.options,
        )
    if shown.csv is not None:
        write_rows(shown.csv, found.to_rows())
    best = None if found.best is None else found.best.best
    if shown.as_json:
        print(to_json(sweep_record(found)))
    else:
        flops = model_flops_per_token(question.model, question.seq_len)
        print_sweep(console(), found, flops, _again(question, best))
    if shown.report is not None:
        write_page(
            shown.report, sweep_document(found, _whole(question, best), question.command, _again(question, best))
        )
    if shown.pictures is not None:
        write_pictures(shown.pictures, sweep_pictures(found))
    if best is not None:
        launch.write(best.own_plan(), question.model, question.where)
    return best is not None


def _print_search(question: Question, shown: Shown, result: SearchResult, top: int, verdict: Verdict | None) -> None:
    out = console()
    flops = model_flops_per_token(question.model, question.seq_len)
    print_search(out, result, top, flops, _again(question, result.best))
    if verdict is not None and shown.why is not None:
        out.print()
        print_verdict(out, shown.why, verdict)


def _standing(question: Question, result: SearchResult, top: int) -> Standing | None:
    """Returns the place of the recipe's own plan in the ranking. Returns None without a recipe, or if nothing fits."""
    if question.own_plan is None or not result.ranked:
        return None
    options = question.options
    where = limited(question.where, options["memory_limit_gib"])
    setup = Setup(question.model, question.own_plan, where, options["network"], options["measured"], replays=True)
    return standing(simulate_setup(setup).prediction, result.top(top))


def _suggested(question: Question, result: SearchResult, top: int) -> int | None:
    """Returns the place (from 0) whose measurement would tell most about the other listed plans; None with fewer than
    two."""
    plans = [place.own_plan() for place in result.top(top)]
    if len(plans) < 2:
        return None
    network, measured = question.options["network"], question.options["measured"]
    return best_anchor([Setup(question.model, plan, question.where, network, measured) for plan in plans])


def _maps(shown: Shown, result: SearchResult) -> list[HeatMap]:
    """Returns the heat maps that the user asks for, or the most telling ones."""
    if shown.heat:
        return [heat_map(result, *axes) for axes in shown.maps]
    return telling_maps(result, MAPS) if shown.report or shown.pictures else []


def _axes(text: str) -> tuple[str, str]:
    axes = [part.strip().replace("-", "_") for part in text.split(",")]
    if len(axes) != 2 or axes[0] == axes[1]:
        raise ForerunError(f"--heat {text}: expected two axes, such as tp,pp")
    return axes[0], axes[1]


def _whole(question: Question, best: Prediction | None) -> InDetail | None:
    """Simulates the best plan with every node, and its gain on better machines. Returns None if nothing fits."""
    if best is None:
        return None
    options = question.options
    where = limited(question.where, options["memory_limit_gib"])
    setup = Setup(question.model, best.own_plan(), where, options["network"], options["measured"], replays=True)
    simulation = simulate_setup(setup)
    return InDetail(simulation, sensitivities(setup, simulation), collectives_of(setup, simulation))


def _again(question: Question, best: Prediction | None) -> str:
    """Returns the command that predicts the best plan, empty for none."""
    if best is None:
        return ""
    return f"{command_line(best.own_plan(), *question.names)}{question.place}"
