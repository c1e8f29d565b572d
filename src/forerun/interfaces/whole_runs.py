"""Whole runs from Python: failures, checkpoints and goodput of a run of weeks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.answers.goodput.examples import load_run
from forerun.answers.goodput.outcome import Outcome
from forerun.answers.goodput.read import run_of
from forerun.answers.goodput.request import RunRequest
from forerun.answers.goodput.study import RunStudy, study_run
from forerun.answers.goodput.walk import walk
from forerun.common.errors import ForerunError
from forerun.interfaces.report.document_of_whole_run import whole_run_document
from forerun.interfaces.report.page import write_page
from forerun.interfaces.report.whole_run import run_rows, study_record

if TYPE_CHECKING:
    import pandas


class Run:
    """A training run of days or weeks, from a file, the name of an example, or a mapping with the keys of a file.

    Raises ForerunError where the description is wrong.
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
    ) -> SimulatedRuns:
        """Simulates `runs` runs that differ in luck, and with `gains` what changes of the system would do.

        With `store` outcomes are kept in that file, and a study that was broken off goes on from there. Raises
        ForerunError for fewer than one run, for more failures than can be simulated, or for a store that can't be used.
        """
        return SimulatedRuns(study_run(self.request, runs, seed, workers, gains, store=store))


@dataclass(frozen=True)
class SimulatedRuns:
    """What becomes of a run, over all seeds."""

    study: RunStudy

    def summary(self) -> dict[str, Any]:
        """Returns the figures; units are in the keys."""
        return study_record(self.study)

    def first(self) -> Outcome:
        """Returns the first of the runs with its events."""
        return walk(self.study.request, self.study.seed, record=True)

    def to_dataframe(self) -> pandas.DataFrame:
        """Returns a row for each run. Needs pandas."""
        try:
            import pandas
        except ImportError:
            raise ForerunError("to_dataframe needs pandas: pip install 'forerun[data]'") from None
        return pandas.DataFrame(run_rows(self.study.outcomes))

    def report(self, path: str | Path) -> None:
        """Writes a page with the figures and plots. Needs plotly."""
        write_page(path, whole_run_document(self.study, self.first()))
