"""The Python interface of experiments: `forerun.Experiment`, its runs and its studies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from forerun.answers.analysis.history import Event, History
from forerun.answers.experiment.answers import Answers, answers_of
from forerun.answers.experiment.comparison import compare
from forerun.answers.experiment.description.read import changed, preset_names, read_experiment
from forerun.answers.experiment.other_reading import OtherReading, other_reading
from forerun.answers.experiment.request import Request
from forerun.answers.experiment.result import Comparison, RunResult, ScalingStudy, StragglerStudy
from forerun.answers.experiment.run import run
from forerun.answers.experiment.run_history import RunHistory, run_history
from forerun.answers.experiment.scaling import scale
from forerun.answers.experiment.stragglers import study
from forerun.common.shown import Picture
from forerun.interfaces.notebook import result_picture, show_in_notebooks
from forerun.interfaces.report.experiment_files import document_of, export, write_pictures
from forerun.interfaces.report.in_notebook import document_html

if TYPE_CHECKING:
    from pandas import DataFrame

show_in_notebooks()


@dataclass(frozen=True)
class Experiment:
    """One experiment: hardware, model, training and network.

    >>> experiment = forerun.Experiment.from_preset("resnet50-a100")
    >>> experiment.run().summary()["step_time_s"]
    """

    request: Request

    @classmethod
    def from_yaml(cls, path: str | Path) -> Experiment:
        """Returns the experiment in a YAML or JSON file. Raises ForerunError, naming the file and the key."""
        return cls(read_experiment(Path(path)))

    @classmethod
    def from_preset(cls, name: str) -> Experiment:
        """Returns one of the experiments that come with Forerun. Raises UnknownName, which lists them."""
        return cls(read_experiment(name))

    @classmethod
    def from_dict(cls, sections: Mapping[str, Any]) -> Experiment:
        """Returns the experiment in a mapping of sections, which may hold Python objects (docs/experiments.md)."""
        return cls(read_experiment(sections))

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Returns the names of the experiments that come with Forerun."""
        return preset_names()

    def changed(self, changes: Mapping[str, Any]) -> Experiment:
        """Returns this experiment with other values of some keys, such as {"training.num_nodes": 8}."""
        return Experiment(changed(self.request, changes))

    def run(self) -> Run:
        """Simulates the run."""
        return Run(run(self.request))

    def scale(self, nodes: Sequence[int], *, strong: bool = False, folder: str | Path | None = None) -> Study:
        """Simulates the experiment on each number of nodes; with `folder` an interrupted study continues there."""
        return Study(scale(self.request, nodes, strong, folder=_path(folder)))

    def compare(
        self,
        *,
        patterns: Sequence[str] = (),
        topologies: Sequence[str] = (),
        devices: Sequence[str] = (),
        precisions: Sequence[str] = (),
        grid: bool = False,
        folder: str | Path | None = None,
    ) -> Study:
        """Simulates variants of the experiment: one change at a time, or all combinations with `grid`."""
        return Study(
            compare(
                self.request,
                patterns=patterns,
                topologies=topologies,
                devices=devices,
                precisions=precisions,
                grid=grid,
                folder=_path(folder),
            )
        )

    def stragglers(self, *, folder: str | Path | None = None) -> Study:
        """Returns step times under the experiment's disturbances, and the cost of the slowest rank."""
        return Study(study(self.request, folder=_path(folder)))


@dataclass(frozen=True)
class Run:
    """A simulated run."""

    result: RunResult

    def summary(self) -> dict[str, Any]:
        """Returns its figures; units are in the keys."""
        return self.result.summary()

    def other_reading(self) -> OtherReading | None:
        """Returns the step time if a network bandwidth without a unit means bytes instead of bits; None if nothing
        depends on it."""
        return other_reading(self.result.request)

    @cached_property
    def _answers(self) -> Answers:
        return answers_of(self.result)

    def analyze(self) -> Answers:
        """Returns bottlenecks, critical path, sensitivities and recommendations. Forerun simulates each of the last
        two."""
        return self._answers

    def to_dataframe(self) -> DataFrame:
        """Returns a row for each iteration, or for each run of equal iterations. Needs pandas."""
        return self.result.to_dataframe()

    @cached_property
    def _history(self) -> RunHistory:
        return run_history(self.result)

    @cached_property
    def event_history(self) -> DataFrame:
        """Returns every start and end of a kernel, collective, copy or launch, in the order of time. Needs pandas.

        It has the rows and columns of the events.csv that `export(history=True)` writes: whole iterations from the
        first one, up to 40,000 nodes. If iterations are missing, `attrs["note"]` says which ones are there.
        """
        frame = History(self._history.iterations).to_dataframe()
        if self._history.note:
            frame.attrs["note"] = self._history.note
        return frame

    def events(self, kind: str | None = None) -> Iterator[Event]:
        """Iterates over the events as objects with `event_type`, `timestamp` (seconds) and the columns of the table.

        Args:
            kind: compute, communication, copy, delay or host; or one of their starts or ends: communication_start.

        Raises UnknownName if there is no such kind.
        """
        return History(self._history.iterations).events(kind)

    @overload
    def plot(self, folder: None = None) -> Picture: ...

    @overload
    def plot(self, folder: str | Path) -> list[Path]: ...

    def plot(self, folder: str | Path | None = None) -> Picture | list[Path]:
        """Returns the picture that says most; with `folder` writes all pictures there and returns their paths.

        Raises ForerunError if matplotlib is not installed, or the files can't be written.
        """
        if folder is None:
            return result_picture(self.result)
        return write_pictures(self.result, Path(folder), self.analyze())

    def _repr_html_(self) -> str:
        """Returns the figures for a notebook."""
        return document_html(document_of(self.result))

    def export(self, folder: str | Path, *, history: bool = False) -> list[Path]:
        """Writes configuration, results, pictures and the page, all or none; with `history` every event too."""
        return export(self.result, Path(folder), self.analyze(), history=history).paths


@dataclass(frozen=True)
class Study:
    """A simulated study."""

    result: ScalingStudy | Comparison | StragglerStudy

    def summary(self) -> dict[str, Any]:
        """Returns its figures; units are in the keys."""
        return self.result.summary()

    def to_dataframe(self) -> DataFrame:
        """Returns a row for each point. Needs pandas."""
        return self.result.to_dataframe()

    @overload
    def plot(self, folder: None = None) -> Picture: ...

    @overload
    def plot(self, folder: str | Path) -> list[Path]: ...

    def plot(self, folder: str | Path | None = None) -> Picture | list[Path]:
        """Returns the picture that says most; with `folder` writes all pictures there and returns their paths.

        Raises ForerunError if matplotlib is not installed, or the files can't be written.
        """
        return result_picture(self.result) if folder is None else write_pictures(self.result, Path(folder))

    def _repr_html_(self) -> str:
        """Returns the points for a notebook."""
        return document_html(document_of(self.result))

    def export(self, folder: str | Path) -> list[Path]:
        """Writes configuration, results, pictures and the page, all or none."""
        return export(self.result, Path(folder)).paths


def _path(folder: str | Path | None) -> Path | None:
    return None if folder is None else Path(folder)
