"""Pairs measured work with predicted work: by name, by shape, by neighbouring work, by kind, and finally by part.

Each level pairs the work that all previous levels left over, so every piece of work is in exactly one pair.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.answers.comparison.module_names import module_of, modules_of
from forerun.answers.comparison.ran_step import EXCHANGE, Line

_BACKWARD = ("backward", "recompute")
_SUMS = ("count", "time_s", "waiting_s", "late_s", "held_s", "flops", "moved_bytes")
"""figures that add up over runs of a line"""


@dataclass(frozen=True)
class Pair:
    """The same work, measured and predicted; one of the sides may be empty."""

    measured: tuple[Line, ...]
    predicted: tuple[Line, ...]

    @property
    def lines(self) -> tuple[Line, ...]:
        """Returns all lines, the predicted ones first."""
        return (*self.predicted, *self.measured)

    @property
    def part(self) -> str:
        """Returns the part of the step that it counts as."""
        return self.lines[0].part

    @property
    def name(self) -> str:
        """Returns the predicted name, or else the measured one, of the work that takes most time."""
        side = self.predicted or self.measured
        return max(side, key=lambda line: line.time_s).name

    @property
    def kernel(self) -> str:
        """Returns the name of the measured kernel that takes most time; empty if nothing was measured."""
        return max(self.measured, key=lambda line: line.time_s).name if self.measured else ""

    @property
    def modules(self) -> tuple[str, ...]:
        """Returns the modules of the predicted work, or else of the measured."""
        return tuple(dict.fromkeys(line.module for line in self.predicted or self.measured))

    @property
    def phase(self) -> str:
        """Returns the phases of the work, joined."""
        return ", ".join(dict.fromkeys(line.phase for line in self.predicted or self.measured))

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape that all lines with a shape have; empty if they differ."""
        shapes = {line.shape for line in self.lines if line.shape}
        return shapes.pop() if len(shapes) == 1 else ()

    @property
    def measured_s(self) -> float:
        """Returns measured seconds, without waiting for other ranks."""
        return sum(line.time_s for line in self.measured)

    @property
    def predicted_s(self) -> float:
        """Returns predicted seconds."""
        return sum(line.time_s for line in self.predicted)

    @property
    def lost_s(self) -> float:
        """Returns the seconds that were measured and not predicted."""
        return self.measured_s - self.predicted_s

    @property
    def alone_s(self) -> tuple[float, float]:
        """Returns measured and predicted seconds without the slowdown by collectives beside them."""
        measured, predicted = (
            sum(line.time_s - line.held_s for line in side) for side in (self.measured, self.predicted)
        )
        return measured, predicted

    @property
    def counts(self) -> tuple[int, int]:
        """Returns measured and predicted number of runs, without kernels that help those of a known shape."""
        shaped = bool(self.shape)
        measured, predicted = (
            sum(line.count for line in side if line.shape or not shaped) for side in (self.measured, self.predicted)
        )
        return measured, predicted

    def rate(self, side: Sequence[Line], amount: str) -> float | None:
        """Returns FLOPs or bytes a second of one side; None if no time or amount is known."""
        time_s, total = sum(line.time_s for line in side), sum(getattr(line, amount) for line in side)
        return total / time_s if time_s > 0 and total > 0 else None


def pairs_of(measured: Sequence[Line], predicted: Sequence[Line]) -> tuple[Pair, ...]:
    """Returns the pairs, the most lost time first."""
    found = _Pairing(list(measured), list(predicted))
    found.join(lambda line: (line.part, line.name, line.shape, line.phase))
    found.join(lambda line: (line.part, line.shape) if line.shape else None)
    found.add_helpers()
    found.join(lambda line: (line.part, line.shape[:2]) if _talks(line) else None)
    found.join(lambda line: line.part if _attends(line) or _talks(line) else None)
    names = modules_of(found.pairs)
    found.join(_in_module, lambda line: _in_module(replace(line, module=module_of(names, line.module))))
    found.join(lambda line: (line.part, line.work, line.phase in _BACKWARD, line.between) if line.between else None)
    found.join(lambda line: (line.part, line.phase in _BACKWARD, line.between) if line.between else None)
    found.forget_places()
    found.join(lambda line: (line.part, line.work, line.phase in _BACKWARD) if line.part == "memory" else None)
    found.join(lambda line: (line.part, line.work) if line.part == "memory" else None)
    found.join(lambda line: line.part if line.part in ("optimizer", "recurrence", "copies") else None)
    if any(line.part == "product" and not line.shape for line in found.measured):
        found.join(lambda line: line.part if line.part == "product" else None)
    alone = [Pair((one,), ()) for one in found.measured] + [Pair((), (one,)) for one in found.predicted]
    return tuple(sorted((*found.pairs, *alone), key=lambda pair: (-pair.lost_s, pair.part, pair.name)))


def _added_up(lines: Sequence[Line]) -> Line:
    """Returns the sum of lines that differ only in additive figures, and in the work before and after them."""
    sums: dict[str, Any] = {name: sum(getattr(line, name) for line in lines) for name in _SUMS}
    return replace(lines[0], between=(), **sums)


def _attends(line: Line) -> bool:
    return line.part.startswith("attention")


def _in_module(line: Line) -> Hashable:
    if line.part != "memory" or not line.module:
        return None
    return line.part, line.work, line.phase in _BACKWARD, line.module


def _talks(line: Line) -> bool:
    return len(line.shape) == 3 or line.work == EXCHANGE


@dataclass
class _Pairing:
    """Holds the work that is not paired yet, and the pairs."""

    measured: list[Line]
    predicted: list[Line]
    pairs: list[Pair] = field(default_factory=list)

    def add_helpers(self) -> None:
        """Adds kernels of attention without a shape to the pair of their part that takes most time.

        A backward pass has kernels for row sums and conversions beside the one whose shape is known.
        """
        helpers = [line for line in (*self.measured, *self.predicted) if _attends(line) and not line.shape]
        for part in dict.fromkeys(line.part for line in helpers):
            alike = [place for place, pair in enumerate(self.pairs) if pair.part == part and pair.shape]
            if not alike:
                continue
            most = max(alike, key=lambda place: self.pairs[place].measured_s)
            sides = []
            for line_of, of_pair in (
                (self.measured, self.pairs[most].measured),
                (self.predicted, self.pairs[most].predicted),
            ):
                mine = [line for line in line_of if line.part == part and not line.shape]
                line_of[:] = [line for line in line_of if line.part != part or line.shape]
                sides.append((*of_pair, *mine))
            self.pairs[most] = Pair(*sides)

    def forget_places(self) -> None:
        """Makes one line of those that differ only in the work before and after them."""
        for side in (self.measured, self.predicted):
            nothing: dict[str, Any] = dict.fromkeys(_SUMS, 0)
            alike: dict[Line, list[Line]] = {}
            for line in side:
                alike.setdefault(replace(line, between=(), **nothing), []).append(line)
            side[:] = [_added_up(lines) for lines in alike.values()]

    def join(self, key: Callable[[Line], Hashable], key_of_measured: Callable[[Line], Hashable] | None = None) -> None:
        """Makes a pair for each key, other than None, that both sides have."""
        groups: list[dict[Hashable, list[Line]]] = [{}, {}]
        for group, side, key_of in (
            (groups[0], self.measured, key_of_measured or key),
            (groups[1], self.predicted, key),
        ):
            for line in side:
                group.setdefault(key_of(line), []).append(line)
        for both in [one for one in groups[0] if one in groups[1] and one is not None]:
            self.pairs.append(Pair(tuple(groups[0].pop(both)), tuple(groups[1].pop(both))))
        self.measured, self.predicted = ([line for lines in group.values() for line in lines] for group in groups)
