"""`forerun run`: a whole training run with its failures, checkpoints and recoveries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from forerun.answers.goodput.best_plans import PlansOfRun, about_slower_plans
from forerun.answers.goodput.examples import example_names, load_alternatives, load_run
from forerun.answers.goodput.request import RunRequest
from forerun.answers.goodput.soonest_plan import soonest_plans
from forerun.answers.goodput.study import RunStudy, by_time_to_train, study_run
from forerun.answers.goodput.walk import walk
from forerun.common.errors import ForerunError
from forerun.interfaces.cli.option_groups import grouped
from forerun.interfaces.cli.output_option import output_option
from forerun.interfaces.cli.program_options import AsJson
from forerun.interfaces.cli.report_option import Report, typed
from forerun.interfaces.cli.work_options import WorkOptions
from forerun.interfaces.report.document_of_whole_run import whole_run_document, whole_run_pictures
from forerun.interfaces.report.drawing import drawing_is_possible
from forerun.interfaces.report.page import write_page
from forerun.interfaces.report.pictures import write_pictures
from forerun.interfaces.report.progress import progress_bar
from forerun.interfaces.report.terminal import console
from forerun.interfaces.report.whole_run import print_study, run_rows, study_record
from forerun.interfaces.report.written import to_json, write_rows

_SHOWN_PLANS = 10
"""of those that were simulated to find the best one, unless --plans says more"""


@dataclass(frozen=True)
class Draws(WorkOptions):
    """Holds the options for the number of simulated runs, their seed, and their workers."""

    runs: Annotated[
        int, typer.Option(min=1, help="Number of runs to simulate. They differ in their random failures.")
    ] = 100
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random numbers; the same seed gives the same runs.")] = 0
    store: Annotated[
        Path | None, output_option(help="Keep simulated runs in this file; the same command later continues from it.")
    ] = None

    def study(
        self, request: RunRequest, gains: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> RunStudy:
        """Simulates a run under these draws. Raises as `study_run` does."""
        work = (self.store, self.executor, self.ray_address)
        return study_run(request, self.runs, self.seed, self.jobs, gains, progress, *work)


@grouped
def run(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="FILE|PRESET", help=f"YAML or JSON file, or one of: {', '.join(example_names())}.")
    ],
    draws: Draws,
    gains: Annotated[
        bool,
        typer.Option(
            "--gains/--no-gains",
            help="Also simulate what each improvement, such as faster saves or restarts, would gain.",
        ),
    ] = True,
    plans: Annotated[
        int | None,
        typer.Option(min=1, help="Also simulate the run under this many of the fastest plans that a search finds."),
    ] = None,
    best_plan: Annotated[
        bool,
        typer.Option("--best-plan", help="Also find, with proof, the plan that finishes the run soonest."),
    ] = False,
    pictures: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the plots of the page to this folder as PNG files.")
    ] = None,
    csv: Annotated[Path | None, output_option(help="Write a row for each run to this CSV file.")] = None,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Predict a run of days or weeks: goodput, time to train, failures, and what would improve it."""
    if pictures is not None and not drawing_is_possible():
        raise ForerunError("--pictures needs matplotlib: pip install 'forerun[plot]'")
    request = load_run(source)
    of_run = PlansOfRun(source, draws.executor, draws.ray_address) if plans is not None or best_plan else None
    if of_run is not None and best_plan:
        of_run.check_one_step()
    with progress_bar("simulating runs") as advance:
        study = draws.study(request, gains, advance)
    others = [draws.study(other) for other in load_alternatives(source)]
    of_plans, said = ((), "") if of_run is None else _under_plans(of_run, draws, plans, best_plan)
    rivals = [*others, *of_plans]
    ranked = by_time_to_train([study, *rivals]) if rivals else []
    if said:
        study = replace(study, request=replace(study.request, notes=(*study.request.notes, said)))
    if csv is not None:
        write_rows(csv, run_rows(study.outcomes))
    first = walk(study.request, draws.seed, record=True)
    if pictures is not None:
        write_pictures(pictures, whole_run_pictures(study, first))
    if report is not None:
        write_page(report, whole_run_document(study, first, typed(context), ranked))
    if as_json:
        print(to_json(study_record(study, ranked)))
    else:
        print_study(console(), study, ranked)


def _under_plans(
    of_run: PlansOfRun, draws: Draws, plans: int | None, best_plan: bool
) -> tuple[Sequence[RunStudy], str]:
    """Returns the run under the best plan and the next ones, or under the fastest plans, and a note on all others."""
    if best_plan:
        soonest = soonest_plans(of_run, draws.study)
        return soonest.studies[: plans or _SHOWN_PLANS], soonest.proof
    assert plans is not None
    fastest = [draws.study(of_run.run(each)) for each in of_run.fastest(plans)]
    if not fastest or len(fastest[0].request.phases) > 1:
        return fastest, ""
    return fastest, about_slower_plans(fastest, by_time_to_train(fastest)[0], plans)
