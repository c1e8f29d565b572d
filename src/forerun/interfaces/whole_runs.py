"""Whole runs from Python: failures, checkpoints and goodput of a run of weeks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.answers.goodput.examples import load_run
from forerun.answers.goodput.outcome import Outcome
from forerun.answers.goodput.read import run_of
from forerun.answers.goodput.request import RunRequest
from forerun.answers.goodput.study import RunStudy, study_run
from forerun.answers.goodput.walk import walk
from forerun.common.shown import Picture, Shown
from forerun.interfaces.report.document_of_whole_run import whole_run_document, whole_run_plots
from forerun.interfaces.report.in_notebook import document_html, shown_picture
from forerun.interfaces.report.page import write_page
from forerun.interfaces.report.whole_run import conditions, heading, run_rows, study_record


class Run:
    """A training run of days or weeks, from a file, the name of an example, or a mapping with the keys of a file.

    Raises ForerunError if the description is wrong.
    """

    def __init__(self, source: str | Path | Mapping[str, Any]) -> None:
        self.request: RunRequest = run_of(source, "run") if isinstance(source, Mapping) else load_run(source)

    def simulate(
        self,
        runs: int = 100,
        seed: int = 0,
        *,
        workers: int | None = None,
        gains: bool = True,
        store: str | Path | None = None,
        executor: str = "local",
        ray_address: str | None = None,
    ) -> SimulatedRuns:
        """Simulates `runs` runs with different random failures, and with `gains` the gain of each improvement of the
        system.

        `store` is a file that keeps outcomes, from which an interrupted study continues. Executor `ray` simulates on a
        Ray cluster. Raises ForerunError for fewer than one run, for more failures than can be simulated, or for a store
        or a cluster that can't be used.
        """
        return SimulatedRuns(study_run(self.request, runs, seed, workers, gains, None, store, executor, ray_address))


@dataclass(frozen=True)
class SimulatedRuns(Shown):
    """The outcomes of a run for all seeds."""

    study: RunStudy

    def summary(self) -> dict[str, Any]:
        """Returns the figures; units are in the keys."""
        return study_record(self.study)

    def first(self) -> Outcome:
        """Returns the first of the runs with its events."""
        return walk(self.study.request, self.study.seed, record=True)

    def to_rows(self) -> list[dict[str, Any]]:
        """Returns a flat dict for each run; units are in the keys."""
        return [dict(row) for row in run_rows(self.study.outcomes)]

    def plot(self) -> Picture:
        """Returns the spread of goodput over all runs beside the classes of lost time. Needs matplotlib."""
        return shown_picture(heading(self.study), *whole_run_plots(self.study), note=conditions(self.study))

    def _repr_html_(self) -> str:
        """Returns the figures for a notebook."""
        return document_html(whole_run_document(self.study, self.first()))

    def report(self, path: str | Path) -> None:
        """Writes a page with the figures and plots. Raises ForerunError if it can't be written."""
        write_page(path, whole_run_document(self.study, self.first()))
