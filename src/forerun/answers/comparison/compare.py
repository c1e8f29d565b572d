"""Compares a profiled step with its prediction: parts that add up to the difference, pairs of work, modules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from forerun.answers.analysis.reading import Simulation
from forerun.answers.comparison.matching import Pair, pairs_of
from forerun.answers.comparison.module_names import module_of, modules_of
from forerun.answers.comparison.ran_step import RanStep
from forerun.answers.comparison.ranks import MeasuredRun, PartDifference, RankDifference, beside, parts_of, slowest_of
from forerun.answers.profile.imported import Imported, replay
from forerun.common.units import GIB
from forerun.core.program.origin import Origin
from forerun.sources.profile.graph_breaks import GraphBreak

REPLAY = "replay"
_LEAST_REPLAY = 1e-4
"""share of the step from which on a replay that differs from the measured time is a part"""


class ModuleDifference(NamedTuple):
    """The kernels and collectives of one module."""

    module: str
    measured_s: float
    predicted_s: float

    @property
    def lost_s(self) -> float:
        """Returns the seconds that were measured and not predicted."""
        return self.measured_s - self.predicted_s


@dataclass(frozen=True)
class Comparison:
    """A profiled step beside its prediction. Parts, pairs and modules are those of the rank that sets the pace."""

    imported: Imported
    simulation: Simulation
    run: MeasuredRun
    ranks: tuple[RankDifference, ...]
    """every profiled rank beside its stage"""
    slowest: int
    """the place in `ranks` of the rank that sets the pace"""
    pairs: tuple[Pair, ...]
    """the most lost time first"""
    notes: tuple[str, ...]

    @property
    def rank(self) -> RankDifference:
        """Returns the rank that sets the pace."""
        return self.ranks[self.slowest]

    @property
    def measured(self) -> RanStep:
        """Returns the measured step of the rank that sets the pace."""
        return self.rank.measured

    @property
    def predicted(self) -> RanStep:
        """Returns the predicted step of the stage of that rank."""
        return self.rank.predicted

    @cached_property
    def stages(self) -> tuple[RankDifference, ...]:
        """Returns the rank that sets the pace, and the rank that waits least from each other stage."""
        found = {self.rank.rank_class: self.rank}
        for one in sorted(self.ranks, key=lambda rank: -rank.work_s[0]):
            found.setdefault(one.rank_class, one)
        return tuple(found.values())

    @cached_property
    def pairs_of_stages(self) -> tuple[Pair, ...]:
        """Returns the pairs of work of `stages`."""
        others = (pairs_of(one.measured.lines, one.predicted.lines) for one in self.stages[1:])
        return (*self.pairs, *(pair for pairs in others for pair in pairs))

    @property
    def measured_s(self) -> float:
        """Returns the measured time of the step."""
        return self.imported.measured_s

    @property
    def predicted_s(self) -> float:
        """Returns the predicted time of the step."""
        return self.predicted.step_s

    @property
    def slowdown(self) -> float:
        """Returns the measured time over the predicted one, less 1."""
        return self.measured_s / self.predicted_s - 1.0

    @cached_property
    def parts(self) -> tuple[PartDifference, ...]:
        """Returns all parts, the most lost time first. What they lost adds up to the difference of the step times."""
        rows = parts_of(self.measured, self.predicted)
        rest = self.measured_s - self.measured.step_s
        if abs(rest) > _LEAST_REPLAY * self.measured_s:
            rows.append(PartDifference(REPLAY, "what the replay of the profile misses", rest, 0.0, rest, 0.0))
        return tuple(sorted(rows, key=lambda row: -row.lost_s))

    @cached_property
    def modules(self) -> tuple[ModuleDifference, ...]:
        """Returns work by module, the most lost time first; measured work counts for the predicted module that its own
        is (`module_names`), or else for those of the predicted work of its pair."""
        sums: dict[str, list[float]] = {}
        names = modules_of(self.pairs)
        predicted = {line.module for pair in self.pairs for line in pair.predicted}
        for pair in self.pairs:
            known = {line.module for line in pair.predicted}
            for line in pair.predicted:
                sums.setdefault(line.module, [0.0, 0.0])[1] += line.time_s
            for line in pair.measured:
                own = line.module if line.module in predicted else module_of(names, line.module) or line.module
                for module, share in _shares(pair, own, known):
                    sums.setdefault(module, [0.0, 0.0])[0] += share * line.time_s
        rows = [ModuleDifference(module or "(none)", *times) for module, times in sums.items()]
        return tuple(sorted(rows, key=lambda row: -row.lost_s))

    @property
    def graph_breaks(self) -> tuple[GraphBreak, ...]:
        """Places at which graphs break on the rank that sets the pace, the most idle time first."""
        return self.imported.graph_breaks[self.rank.run_class]

    @property
    def measured_peak_gib(self) -> float | None:
        """Returns the largest recorded sum of allocated memory; None if the profile has none."""
        cls = self.imported.program.rank_classes[self.rank.run_class]
        size = int(np.sum(cls.resident_bytes))
        return size / GIB if size else None


def _shares(pair: Pair, module: str, known: set[str]) -> list[tuple[str, float]]:
    """Returns the modules that measured work counts for, with shares that add up to 1."""
    if module in known or not known:
        return [(module, 1.0)]
    total = pair.predicted_s
    if total <= 0:
        return [(pair.predicted[0].module, 1.0)]
    return [(line.module, line.time_s / total) for line in pair.predicted]


def compare(imported: Imported, simulation: Simulation, device: str) -> Comparison:
    """Compares every profiled rank with the predicted rank class that it belongs to, the slowest of them in detail.

    `device` is that of the prediction. The Timeline of `simulation` must not be folded.
    """
    run = MeasuredRun(imported.program, *replay(imported.program))
    ranks, notes = beside(run, simulation)
    slowest = slowest_of(ranks)
    pairs = pairs_of(ranks[slowest].measured.lines, ranks[slowest].predicted.lines)
    notes = (*_notes(imported, simulation, device), *notes)
    return Comparison(imported, simulation, run, ranks, slowest, pairs, notes)


def _notes(imported: Imported, simulation: Simulation, device: str) -> tuple[str, ...]:
    """Returns notes on the limits of the comparison."""
    origin = Origin.of(imported.program)
    notes = list(imported.notes)
    if origin.world_size != simulation.subject.n_gpus:
        notes.append(
            f"the profile has {origin.world_size} ranks, but the prediction has"
            f" {simulation.subject.n_gpus}; give the plan of the profiled run"
        )
    if imported.device and imported.device != device:
        notes.append(f"the profile was recorded on {imported.device}, but the prediction is for {device}")
    if len(imported.program.rank_classes) < 2 and origin.world_size > 1:
        notes.append(
            "the profile has one rank, so its collectives include the wait for other ranks; give the"
            " files of all ranks to separate the two"
        )
    return tuple(dict.fromkeys(notes))
