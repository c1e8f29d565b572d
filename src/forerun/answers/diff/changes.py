"""The difference between two simulated steps: causes of time, kernels and collectives, tensors at the peak.

Work is matched by its kind (kernel, collective, copy), the name of the operation, the module and the phase. Layers
count together: the numbers in a module's path become a star, so that a model with more layers has more runs of the same
work.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from forerun.answers.analysis.prediction import Prediction
from forerun.answers.analysis.reading import Simulation
from forerun.common.units import PS_PER_S
from forerun.core.memory.peak_tensors import peak_tensors
from forerun.core.program.types import F64, OpTable, Phase

Key = TypeVar("Key", bound=Hashable)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
KERNEL, COLLECTIVE, COPY, DELAY = "kernel", "collective", "copy", "delay"


@dataclass(frozen=True, slots=True)
class Work:
    """The sums over all runs of some work."""

    count: int = 0
    time_s: float = 0.0
    """seconds on the device or the network, hidden beside other work or not"""
    flops: float = 0.0
    moved_bytes: float = 0.0
    """bytes that kernels read and write, or of the full buffers of collectives"""


@dataclass(frozen=True, slots=True)
class WorkChange:
    """One kind of work in both steps."""

    what: str
    name: str
    module: str
    phase: str
    before: Work
    after: Work

    @property
    def lost_s(self) -> float:
        """Returns the seconds that the work takes longer."""
        return self.after.time_s - self.before.time_s

    @property
    def how(self) -> str:
        """Returns whether the work came, went, grew or shrank."""
        return _how(self.before.count, self.after.count, self.lost_s)


@dataclass(frozen=True, slots=True)
class TensorChange:
    """The tensors of one category and one maker at the peaks of both steps."""

    category: str
    name: str
    """the operation that makes them"""
    module: str
    before_count: int
    after_count: int
    before_bytes: int
    after_bytes: int

    @property
    def grown_bytes(self) -> int:
        """Returns the bytes by which they grew."""
        return self.after_bytes - self.before_bytes

    @property
    def how(self) -> str:
        """Returns whether the tensors came, went, grew or shrank."""
        return _how(self.before_count, self.after_count, self.grown_bytes)


def _how(before: int, after: int, grown: float) -> str:
    if not before or not after:
        return "came" if after else "went"
    return "grew" if grown > 0 else "shrank"


@dataclass(frozen=True, slots=True)
class StepDiff:
    """Two predicted steps, and their differences on the ranks that set the pace."""

    before: Prediction
    after: Prediction
    causes: Mapping[str, tuple[float, float]]
    """cause -> seconds of the step before and after; each column sums to its step time"""
    work: tuple[WorkChange, ...]
    """the changes, the most lost time first"""
    tensors: tuple[TensorChange, ...]
    """the changes at the peak of the fullest rank, the most grown bytes first"""

    @property
    def slowdown(self) -> float:
        """Returns the step time after over before, less 1."""
        return self.after.step_time_s / self.before.step_time_s - 1

    @property
    def growth(self) -> float | None:
        """Returns the peak of allocated memory after over before, less 1; None if the program before says no
        memory."""
        before = self.before.peak_allocated_gib
        return self.after.peak_allocated_gib / before - 1 if before else None


def diff_steps(before: Simulation, after: Simulation, depth: int | None = None) -> StepDiff:
    """Returns the differences between two steps that were simulated with their whole timelines.

    Args:
        depth: parts of a module's path to tell apart; None for all.
    """
    old, new = before.prediction, after.prediction
    names = dict.fromkeys([*old.breakdown, *new.breakdown])
    causes = {name: (old.breakdown.get(name, 0.0), new.breakdown.get(name, 0.0)) for name in names}
    return StepDiff(
        old,
        new,
        dict(sorted(causes.items(), key=lambda item: item[1][0] - item[1][1])),
        _work_changes(_work(before, depth), _work(after, depth)),
        _tensor_changes(_tensors(before, depth), _tensors(after, depth)),
    )


def _paired(old: Mapping[Key, object], new: Mapping[Key, object]) -> list[Key]:
    return list(dict.fromkeys([*old, *new]))


def _place(path: str, depth: int | None) -> str:
    """Returns a module's path with stars for numbers, cut to `depth` parts."""
    return ".".join(_NUMBER.sub("*", path).split(".")[:depth])


# -- work --------------------------------------------------------------------------------------------------------------

_WorkKey = tuple[str, str, str, str]


def _work(simulation: Simulation, depth: int | None) -> dict[_WorkKey, Work]:
    """Returns the work of the rank class that sets the pace."""
    flat, timeline, ops = simulation.flat, simulation.timeline, simulation.program.ops
    nodes = slice(int(flat.class_ptr[simulation.slowest]), int(flat.class_ptr[simulation.slowest + 1]))
    op, phase = flat.op[nodes].astype(np.int64), flat.phase[nodes].astype(np.int64)
    n_modules = len(simulation.program.modules)
    module = np.clip(flat.module[nodes], -1, n_modules - 1).astype(np.int64) + 1
    mixed = (op * (n_modules + 1) + module) * len(Phase) + phase
    keys, place, counts = np.unique(mixed, return_inverse=True, return_counts=True)
    spent = np.bincount(place, weights=timeline.end_ps[nodes] - timeline.start_ps[nodes], minlength=len(keys))
    paths = ["", *(_place(path, depth) for path in simulation.program.modules)]
    moved, what = _moved(ops), _what(ops)
    out: dict[_WorkKey, Work] = {}
    for number, count, time_ps in zip(keys.tolist(), counts.tolist(), spent.tolist(), strict=True):
        rest, stage = divmod(number, len(Phase))
        row, path = divmod(rest, n_modules + 1)
        key = (what[row], ops.name[row], paths[path], Phase(stage).name.lower())
        sums = out.get(key, Work())
        out[key] = Work(
            sums.count + count,
            sums.time_s + time_ps / PS_PER_S,
            sums.flops + count * float(ops.flops[row]),
            sums.moved_bytes + count * float(moved[row]),
        )
    return out


def _moved(ops: OpTable) -> F64:
    """Returns the bytes that each op moves, (n_ops,)."""
    moved: F64 = np.where(ops.is_communication | ops.is_host_copy, ops.bytes_comm, ops.bytes_read + ops.bytes_written)
    return moved


def _what(ops: OpTable) -> list[str]:
    """Returns the sort of each op in one word, such as kernel or collective, (n_ops,)."""
    masks = ((ops.is_communication, COLLECTIVE), (ops.is_host_copy, COPY), (ops.is_delay, DELAY))
    return [next((word for mask, word in masks if mask[row]), KERNEL) for row in range(len(ops))]


def _work_changes(old: Mapping[_WorkKey, Work], new: Mapping[_WorkKey, Work]) -> tuple[WorkChange, ...]:
    pairs = [WorkChange(*key, old.get(key, Work()), new.get(key, Work())) for key in _paired(old, new)]
    changed = [pair for pair in pairs if _differs(pair)]
    return tuple(sorted(changed, key=lambda pair: (-pair.lost_s, pair.what, pair.name, pair.module)))


_LEAST = 1e-6
"""relative difference of time below which work is the same; sums of picoseconds in another order differ by less"""


def _differs(pair: WorkChange) -> bool:
    if pair.before.count != pair.after.count:
        return True
    longest = max(pair.before.time_s, pair.after.time_s)
    same_size = (pair.before.flops, pair.before.moved_bytes) == (pair.after.flops, pair.after.moved_bytes)
    return not same_size or abs(pair.lost_s) > _LEAST * longest


# -- tensors -----------------------------------------------------------------------------------------------------------

_TensorKey = tuple[str, str, str]


def _tensors(simulation: Simulation, depth: int | None) -> dict[_TensorKey, tuple[int, int]]:
    """Returns the number and bytes of the tensors at the peak of the fullest rank class."""
    fullest = max(range(len(simulation.memory)), key=lambda number: simulation.memory[number].peak_bytes)
    out: dict[_TensorKey, tuple[int, int]] = {}
    for one in peak_tensors(simulation.program, fullest, simulation.memory[fullest]):
        key = (one.category.name.lower(), one.maker.op, _place(one.maker.module, depth))
        count, size = out.get(key, (0, 0))
        out[key] = count + one.count, size + one.total_bytes
    return out


def _tensor_changes(
    old: Mapping[_TensorKey, tuple[int, int]], new: Mapping[_TensorKey, tuple[int, int]]
) -> tuple[TensorChange, ...]:
    changes = []
    for key in _paired(old, new):
        (before_count, before_bytes), (after_count, after_bytes) = old.get(key, (0, 0)), new.get(key, (0, 0))
        if (before_count, before_bytes) != (after_count, after_bytes):
            changes.append(TensorChange(*key, before_count, after_count, before_bytes, after_bytes))
    return tuple(sorted(changes, key=lambda change: -change.grown_bytes))
