"""A profiled step beside its prediction: parts that add up to the difference, pairs of work, modules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from forerun.answers.analysis.reading import Simulation
from forerun.answers.comparison.matching import Pair, pairs_of
from forerun.answers.comparison.ran_step import LAST_PARTS, PARTS, RanStep, ran_step
from forerun.answers.profile.imported import Imported, replay
from forerun.common.units import GIB
from forerun.core.engine.simulate import Timeline
from forerun.core.program.origin import Origin
from forerun.core.program.types import FlatProgram, Program

REPLAY = "replay"
_LEAST_REPLAY = 1e-4
"""share of the step from which on a replay that differs from the measured time is a part"""


class PartDifference(NamedTuple):
    """One part of the step."""

    part: str
    label: str
    measured_s: float
    """seconds of the step that count as the part"""
    predicted_s: float
    measured_busy_s: float
    """seconds that its work takes, hidden or not, without what collectives beside it add"""
    predicted_busy_s: float

    @property
    def lost_s(self) -> float:
        """Seconds of the step that were measured and not predicted."""
        return self.measured_s - self.predicted_s


class ModuleDifference(NamedTuple):
    """The kernels and collectives of one module."""

    module: str
    measured_s: float
    predicted_s: float

    @property
    def lost_s(self) -> float:
        """Seconds that were measured and not predicted."""
        return self.measured_s - self.predicted_s


class MeasuredRun(NamedTuple):
    """The profiled step as a simulated Program."""

    program: Program
    flat: FlatProgram
    timeline: Timeline
    rank_class: int


@dataclass(frozen=True)
class Comparison:
    """A profiled step beside its prediction, each on the rank that sets the pace."""

    imported: Imported
    simulation: Simulation
    run: MeasuredRun
    measured: RanStep
    predicted: RanStep
    rank_class: int
    """of the prediction"""
    pairs: tuple[Pair, ...]
    """the most lost time first"""
    notes: tuple[str, ...]

    @property
    def measured_s(self) -> float:
        """The measured time of the step."""
        return self.imported.measured_s

    @property
    def predicted_s(self) -> float:
        """The predicted time of the step."""
        return self.predicted.step_s

    @property
    def slowdown(self) -> float:
        """The measured time over the predicted one, less 1."""
        return self.measured_s / self.predicted_s - 1.0

    @cached_property
    def parts(self) -> tuple[PartDifference, ...]:
        """All parts, the most lost time first. What they lost adds up to the difference of the step times."""
        sides = (self.measured, self.predicted)
        rows = []
        for name in dict.fromkeys([*self.measured.parts, *self.predicted.parts]):
            counted = [one.parts.get(name, 0.0) for one in sides]
            busy = [sum(line.time_s - line.held_s for line in one.lines if line.part == name) for one in sides]
            rows.append(PartDifference(name, label_of(name), *counted, *busy))
        rest = self.measured_s - self.measured.step_s
        if abs(rest) > _LEAST_REPLAY * self.measured_s:
            rows.append(PartDifference(REPLAY, "what the replay of the profile misses", rest, 0.0, rest, 0.0))
        return tuple(sorted(rows, key=lambda row: -row.lost_s))

    @cached_property
    def modules(self) -> tuple[ModuleDifference, ...]:
        """Work by module, the most lost time first; measured work counts for the modules of the predicted work."""
        sums: dict[str, list[float]] = {}
        for pair in self.pairs:
            known = {line.module for line in pair.predicted}
            for line in pair.predicted:
                sums.setdefault(line.module, [0.0, 0.0])[1] += line.time_s
            for line in pair.measured:
                for module, share in _shares(pair, line.module, known):
                    sums.setdefault(module, [0.0, 0.0])[0] += share * line.time_s
        rows = [ModuleDifference(module or "(none)", *times) for module, times in sums.items()]
        return tuple(sorted(rows, key=lambda row: -row.lost_s))

    @property
    def measured_peak_gib(self) -> float | None:
        """The largest recorded sum of allocated memory; None where the profile has none."""
        cls = self.imported.program.rank_classes[self.run.rank_class]
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


def label_of(part: str) -> str:
    """Returns the name of a part as people read it."""
    return PARTS.get(part) or LAST_PARTS.get(part) or part


def compare(imported: Imported, simulation: Simulation, device: str) -> Comparison:
    """Compares the slowest profiled rank with the predicted rank whose work is most like it, the slowest of those.

    `device` is that of the prediction. The Timeline of `simulation` must not be folded.
    """
    run = _measured_run(imported)
    slowing = float(simulation.costs.slow_compute.max(initial=0.0))
    measured = ran_step(run.program, run.flat, run.timeline, run.rank_class, slowing)
    found: tuple[tuple[float, int], int, RanStep] | None = None
    for number in range(len(simulation.program.rank_classes)):
        step = ran_step(simulation.program, simulation.flat, simulation.timeline, number, slowing)
        rank = (_unlike(measured, step), int(number != simulation.slowest))
        if found is None or rank < found[0]:
            found = (rank, number, step)
    assert found is not None
    _, rank_class, predicted = found
    measured, predicted = _same_collectives(measured, predicted)
    pairs = pairs_of(measured.lines, predicted.lines)
    return Comparison(
        imported, simulation, run, measured, predicted, rank_class, pairs, _notes(imported, simulation, device)
    )


def _measured_run(imported: Imported) -> MeasuredRun:
    program = imported.program
    flat, timeline = replay(program)
    return MeasuredRun(program, flat, timeline, int(np.argmax(timeline.class_end_ps)))


def _unlike(one: RanStep, other: RanStep) -> float:
    """Returns how much the numbers of products, attention kernels and collectives differ, as a share."""
    total = apart = 0
    for part in dict.fromkeys(line.part for line in (*one.lines, *other.lines) if line.part != "memory"):
        counts = [sum(line.count for line in step.lines if line.part == part) for step in (one, other)]
        total, apart = total + sum(counts), apart + abs(counts[0] - counts[1])
    return round(apart / total, 2) if total else 0.0


def _same_collectives(measured: RanStep, predicted: RanStep) -> tuple[RanStep, RanStep]:
    """Names collectives without their ranks where the two sides differ in these, so that they can be compared."""
    names = [{name for name in step.parts if " over " in name} for step in (measured, predicted)]
    kinds = [{name.partition(" over ")[0] for name in side} for side in names]
    merged = {kind for kind in kinds[0] & kinds[1] if _over(names[0], kind) != _over(names[1], kind)}
    return _merged(measured, merged), _merged(predicted, merged)


def _over(names: set[str], kind: str) -> set[str]:
    return {name for name in names if name.partition(" over ")[0] == kind}


def _merged(step: RanStep, kinds: set[str]) -> RanStep:
    def short(part: str) -> str:
        kind = part.partition(" over ")[0]
        return kind if kind in kinds else part

    parts: dict[str, float] = {}
    for name, time_s in step.parts.items():
        parts[short(name)] = parts.get(short(name), 0.0) + time_s
    return replace(step, parts=parts, lines=tuple(replace(line, part=short(line.part)) for line in step.lines))


def _notes(imported: Imported, simulation: Simulation, device: str) -> tuple[str, ...]:
    """Returns what a reader has to know about the comparison."""
    origin = Origin.of(imported.program)
    notes = list(imported.notes)
    if origin.world_size != simulation.subject.n_gpus:
        notes.append(
            f"the profile is of {origin.world_size} ranks and the prediction of {simulation.subject.n_gpus}; give the"
            " plan of the run that was profiled"
        )
    if imported.device and imported.device != device:
        notes.append(f"the profile is of {imported.device}, and the prediction of {device}")
    if len(imported.program.rank_classes) < 2 and origin.world_size > 1:
        notes.append(
            "the profile is of one rank, so its collectives include waiting for other ranks; the files of all ranks"
            " tell the two apart"
        )
    return tuple(dict.fromkeys(notes))
