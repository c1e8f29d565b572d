"""The points of an exploration: every strategy that fills a system, or a sample of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from forerun.astrasim.dse.workload import Strategy, Workload
from forerun.common.errors import ForerunError

AXES = tuple(field.name for field in fields(Strategy))
MOST_POINTS = 1_000_000
DEGREES = ("dp", "tp", "sp", "pp", "ep")


@dataclass(frozen=True, slots=True)
class Point:
    """A strategy for a workload on a system, both by name."""

    workload: str
    system: str
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class Plan:
    """The values of every axis; None for a degree stands for every factor of the number of NPUs."""

    dp: tuple[int, ...] | None = None
    tp: tuple[int, ...] | None = None
    sp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = (1,)
    ep: tuple[int, ...] | None = (1,)
    weight_sharded: tuple[bool, ...] = (False,)
    activation_recompute: tuple[bool, ...] = (False,)
    factors: Literal["divisors", "powers_of_two"] = "divisors"

    def strategies(self, n_npus: int, experts: bool = True) -> Iterator[Strategy]:
        """Yields every strategy with `n_npus` ranks; the last axis varies fastest, and without experts ep is 1."""
        every = [n for n in range(1, n_npus + 1) if n_npus % n == 0]
        if self.factors == "powers_of_two":
            every = [n for n in every if n & (n - 1) == 0]
        values = [getattr(self, name) if getattr(self, name) is not None else every for name in DEGREES]
        values[-1] = values[-1] if experts else (1,)
        for dp, tp, sp, pp, ep in _products(values, n_npus):
            for sharded in self.weight_sharded:
                for recompute in self.activation_recompute:
                    yield Strategy(dp, tp, sp, pp, ep, sharded, recompute)


def _products(values: Sequence[Sequence[int]], product: int) -> Iterator[tuple[int, ...]]:
    if not values:
        if product == 1:
            yield ()
        return
    for value in values[0]:
        if product % value == 0:
            for others in _products(values[1:], product // value):
                yield (value, *others)


@dataclass(frozen=True, slots=True)
class Sampling:
    """A sample of points.

    `random` takes points with equal probability. `grid` takes evenly spaced points of the list. `latin` balances how
    often each value of an axis comes up, as a Latin hypercube does for independent axes.
    """

    method: Literal["all", "random", "grid", "latin"] = "all"
    points: int = 0
    seed: int = 0

    def sample(self, points: Sequence[Point]) -> list[Point]:
        """Returns the sample in the order of the points; the same list and seed give the same sample."""
        if self.method == "all" or self.points >= len(points):
            return list(points)
        if self.method == "grid":
            return [points[i * len(points) // self.points] for i in range(self.points)]
        shuffled = list(range(len(points)))
        random.Random(self.seed).shuffle(shuffled)
        if self.method == "latin":
            return [points[i] for i in sorted(_balanced(points, shuffled, self.points))]
        return [points[i] for i in sorted(shuffled[: self.points])]


@dataclass(frozen=True, slots=True)
class Draw:
    """A sample of each pair's points as scripts draw it: Python's `random.sample` of a list that is sorted by name.

    A name is dp_tp_pp_sp_sharded_recompute, sorted as text, so 16 precedes 2. The pairs draw in turn from one stream of
    random numbers, as after one `random.seed(seed)`.
    """

    n: int
    seed: int = 0

    def sample(self, points: Sequence[Point]) -> list[Point]:
        """Returns at most `n` points of each pair in their order; the same lists and seed give the same sample."""
        stream = random.Random(self.seed)
        by_pair: dict[tuple[str, str], list[Point]] = {}
        for point in points:
            by_pair.setdefault((point.workload, point.system), []).append(point)
        drawn: set[Point] = set()
        for of_pair in by_pair.values():
            drawn.update(stream.sample(sorted(of_pair, key=_name), min(self.n, len(of_pair))))
        return [point for point in points if point in drawn]


def _name(point: Point) -> str:
    split = point.strategy
    flags = (split.weight_sharded, split.activation_recompute)
    return "_".join(map(str, (split.dp, split.tp, split.pp, split.sp, *flags, split.ep)))


_LOOKED_AT = 256
"""number of points among which the next one of a balanced sample is picked"""


def _balanced(points: Sequence[Point], shuffled: list[int], n: int) -> list[int]:
    """Picks `n` points, each time the one among the next points whose values have come up least so far."""
    counts: Counter[tuple[str, object]] = Counter()
    taken: list[int] = []
    waiting = shuffled[::-1]
    near: list[int] = []
    while len(taken) < n:
        while waiting and len(near) < _LOOKED_AT:
            near.append(waiting.pop())
        best = min(near, key=lambda i: sorted((counts[value] for value in _values(points[i])), reverse=True))
        near.remove(best)
        taken.append(best)
        counts.update(_values(points[best]))
    return taken


def _values(point: Point) -> list[tuple[str, object]]:
    pair = ("pair", (point.workload, point.system))
    return [pair, *((name, getattr(point.strategy, name)) for name in AXES)]


def all_points(plan: Plan, pairs: Sequence[tuple[Workload, str]], npus: Mapping[str, int], place: str) -> list[Point]:
    """Returns every point of every pair of a workload and a system; `npus` is by system.

    Raises ForerunError if no strategy fills a system, or there are too many points.
    """
    points: list[Point] = []
    for workload, system in pairs:
        before = len(points)
        for strategy in plan.strategies(npus[system], experts=not workload.is_first_generation):
            points.append(Point(workload.name, system, strategy))
            if len(points) > MOST_POINTS:
                raise ForerunError(
                    f"{place}: plan: more than {MOST_POINTS:,} points; list fewer values of dp, tp, sp, pp or ep"
                )
        if len(points) == before:
            raise ForerunError(
                f"{place}: plan: no dp x tp x sp x pp x ep of these values makes the {npus[system]} NPUs of system "
                f"{system!r}; add values, or leave a degree out to try every factor"
            )
    return points
