"""Profiled ranks beside the predicted rank classes that they belong to: pipeline stages, or ranks that do the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from forerun.answers.analysis.reading import Simulation
from forerun.answers.comparison.ran_step import ALL_TO_ALLS, EXCHANGES, LAST_PARTS, PARTS, WAITING, RanStep, ran_step
from forerun.core.engine.simulate import Timeline
from forerun.core.program.origin import Origin
from forerun.core.program.places import role_ranks
from forerun.core.program.types import FlatProgram, Program

_UNLIKE = 0.01
"""share of kernels by which a rank has to be more like another stage than like its own before that is said"""


class PartDifference(NamedTuple):
    """One part of the step."""

    part: str
    label: str
    measured_s: float
    """seconds of the step that count as the part"""
    predicted_s: float
    measured_busy_s: float
    """seconds of its work, hidden or not, without the slowdown by collectives beside it"""
    predicted_busy_s: float

    @property
    def lost_s(self) -> float:
        """Returns the seconds of the step that were measured and not predicted."""
        return self.measured_s - self.predicted_s


class MeasuredRun(NamedTuple):
    """The profiled step as a simulated Program."""

    program: Program
    flat: FlatProgram
    timeline: Timeline


@dataclass(frozen=True)
class RankDifference:
    """Holds the measured step of a profiled rank beside the predicted step of its stage."""

    rank: int
    """the global rank"""
    run_class: int
    """its rank class in the measured run"""
    rank_class: int
    """the rank class of the prediction that it belongs to"""
    stage: str
    """the name of that class"""
    measured: RanStep
    predicted: RanStep

    @property
    def work_s(self) -> tuple[float, float]:
        """Returns measured and predicted seconds of the step in which the rank does not wait for others."""
        measured, predicted = (one.step_s - one.parts.get(WAITING, 0.0) for one in (self.measured, self.predicted))
        return measured, predicted

    @property
    def parts(self) -> tuple[PartDifference, ...]:
        """Returns all parts, the most lost time first."""
        return tuple(sorted(parts_of(self.measured, self.predicted), key=lambda part: -part.lost_s))


def parts_of(measured: RanStep, predicted: RanStep) -> list[PartDifference]:
    """Returns the parts that either side has. What they lost adds up to the difference of the two steps."""
    rows = []
    for name in dict.fromkeys([*measured.parts, *predicted.parts]):
        counted = [one.parts.get(name, 0.0) for one in (measured, predicted)]
        busy = [
            sum(line.time_s - line.held_s for line in one.lines if line.part == name) for one in (measured, predicted)
        ]
        rows.append(PartDifference(name, label_of(name), *counted, *busy))
    return rows


def label_of(part: str) -> str:
    """Returns the name of a part as people read it."""
    return PARTS.get(part) or LAST_PARTS.get(part) or part


def beside(run: MeasuredRun, simulation: Simulation) -> tuple[tuple[RankDifference, ...], tuple[str, ...]]:
    """Returns every profiled rank beside its stage, in the order of the files, and notes for the reader.

    The rank's number determines its stage if the plan or the program states the layout of ranks. Otherwise its stage is
    the one with the most similar numbers of products, attention kernels and collectives. Among equally similar stages
    it is the one that sets the pace. The Timeline of `simulation` must not be folded.
    """
    slowing = float(simulation.costs.slow_compute.max(initial=0.0))
    stages = [
        ran_step(simulation.program, simulation.flat, simulation.timeline, number, slowing)
        for number in range(len(simulation.program.rank_classes))
    ]
    ranks = Origin.of(run.program).roles or tuple(range(len(run.program.rank_classes)))
    stated = _stated_classes(simulation, Origin.of(run.program).world_size)
    found, notes = [], []
    for number, rank in enumerate(ranks):
        measured = ran_step(run.program, run.flat, run.timeline, number, slowing)
        unlike = [_unlike(measured, stage) for stage in stages]
        by_work = min(range(len(stages)), key=lambda one: (unlike[one], one != simulation.slowest))
        chosen = stated[rank] if stated is not None and rank < len(stated) else by_work
        if unlike[chosen] >= unlike[by_work] + _UNLIKE:
            names = [simulation.program.rank_classes[one].name for one in (chosen, by_work)]
            notes.append(
                f"rank {rank} is of {names[0]} and has kernels like those of {names[1]}; is --mesh-order the run's?"
            )
        sides = _same_collectives(measured, stages[chosen])
        name = simulation.program.rank_classes[chosen].name
        found.append(RankDifference(rank, number, chosen, name, *sides))
    return tuple(found), tuple(notes)


def _stated_classes(simulation: Simulation, world_size: int) -> tuple[int, ...] | None:
    """Returns the rank class of each global rank of the prediction; None if it is of another size, or says none."""
    classes, plan = simulation.program.rank_classes, simulation.subject.plan
    if simulation.subject.n_gpus != world_size:
        return None
    if plan is not None and len(classes) == plan.pp:
        axes = plan.mesh_axes
        inside = prod(getattr(plan, axis) for axis in axes[: axes.index("pp")])
        return tuple(rank // inside % plan.pp for rank in range(world_size))
    own = Origin.of(simulation.program).roles
    roles = role_ranks(own, world_size) if own is not None else None
    if roles is None:
        return None
    of_rank = {rank: number for number, members in enumerate(roles) for rank in members}
    return tuple(of_rank[rank] for rank in range(world_size))


def _unlike(one: RanStep, other: RanStep) -> float:
    """Returns how much the numbers of products, attention kernels and collectives differ, as a share.

    Products count by their sizes where both sides know these.
    """
    sizes = all(line.shape for step in (one, other) for line in step.lines if line.part == "product")
    counts: list[Counter[tuple[object, ...]]] = [Counter(), Counter()]
    for count, step in zip(counts, (one, other), strict=True):
        for line in step.lines:
            if line.part != "memory":
                count[line.part, line.shape if sizes and line.part == "product" else ()] += line.count
    total = counts[0].total() + counts[1].total()
    apart = sum(abs(counts[0][key] - counts[1][key]) for key in counts[0] | counts[1])
    return round(apart / total, 2) if total else 0.0


def _same_collectives(measured: RanStep, predicted: RanStep) -> tuple[RanStep, RanStep]:
    """Names collectives without their ranks where the two sides differ in these, so that they can be compared.

    Kernels that exchange without NCCL, such as DeepEP's, count as the predicted all-to-alls where NCCL runs none.
    """
    names = [
        {name for name in (*step.parts, *(line.part for line in step.lines)) if " over " in name}
        for step in (measured, predicted)
    ]
    kinds = [{name.partition(" over ")[0] for name in side} for side in names]
    if EXCHANGES in {line.part for line in measured.lines} and ALL_TO_ALLS in kinds[1] - kinds[0]:
        measured = _renamed(measured, lambda part: ALL_TO_ALLS if part == EXCHANGES else part)
        kinds[0].add(ALL_TO_ALLS)
    merged = {kind for kind in kinds[0] & kinds[1] if _over(names[0], kind) != _over(names[1], kind)}
    return _merged(measured, merged), _merged(predicted, merged)


def _over(names: set[str], kind: str) -> set[str]:
    return {name for name in names if name.partition(" over ")[0] == kind}


def _merged(step: RanStep, kinds: set[str]) -> RanStep:
    def short(part: str) -> str:
        kind = part.partition(" over ")[0]
        return kind if kind in kinds else part

    return _renamed(step, short)


def _renamed(step: RanStep, renamed: Callable[[str], str]) -> RanStep:
    parts: dict[str, float] = {}
    for name, time_s in step.parts.items():
        parts[renamed(name)] = parts.get(renamed(name), 0.0) + time_s
    return replace(step, parts=parts, lines=tuple(replace(line, part=renamed(line.part)) for line in step.lines))


def slowest_of(ranks: Sequence[RankDifference]) -> int:
    """Returns the place of the rank that waits least for others, which sets the pace."""
    return max(range(len(ranks)), key=lambda place: ranks[place].work_s[0])
