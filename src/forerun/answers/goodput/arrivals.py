"""Draws when failures and slow periods begin. Each cause has its own random numbers.

Two runs with the same seed therefore meet the same failures, whatever else differs between them. The gain of a change
is the difference between two runs with the same failures.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from math import gamma, inf, log1p
from typing import NamedTuple
from zlib import crc32

import numpy as np

from forerun.answers.goodput.request import FailureKind, Lemons, RunRequest, Slowdown

_BLOCK = 64
"""draws at once"""


class Failure(NamedTuple):
    """A failure, which shows at `at_s` seconds since the run began."""

    at_s: float
    since_s: float
    """when it happened: earlier than it shows where it is silent"""
    kind: FailureKind
    luck: float
    """a random number from 0 to 1 for the choices that the kind leaves open"""


class Slow(NamedTuple):
    """A period in which steps take longer."""

    at_s: float
    end_s: float
    factor: float


def generator(seed: int, run: int, cause: str) -> np.random.Generator:
    """Returns the random numbers of one cause in one run."""
    return np.random.Generator(np.random.PCG64([seed, run, crc32(cause.encode())]))


def failures(request: RunRequest, seed: int, run: int) -> Iterator[Failure]:
    """Yields the failures of one run in the order of time, without end unless nothing ever fails."""
    sources = [
        _shown(_poisson(kind, seed, run) if kind.shape == 1.0 else _weibull(kind, seed, run))
        for kind in request.failures
        if kind.rate_per_s > 0.0
    ]
    if request.failures and request.lemons is not None and request.lemons.rate_per_s > 0.0:
        sources.append(_of_lemons(request.lemons, request.failures[0], seed, run))
    return heapq.merge(*sources, key=lambda failure: failure.at_s)


def slow_periods(slowdowns: tuple[Slowdown, ...], seed: int, run: int) -> Iterator[Slow]:
    """Yields the slow periods of one run in the order in which they begin."""
    sources = [_slow(each, seed, run) for each in slowdowns if each.rate_per_s > 0.0]
    return heapq.merge(*sources, key=lambda slow: slow.at_s)


def _shown(happening: Iterator[Failure]) -> Iterator[Failure]:
    """Yields failures in the order in which they show; silent ones show later, after an exponential time."""
    waiting: list[Failure] = []
    for failure in happening:
        while waiting and waiting[0].at_s <= failure.at_s:
            yield heapq.heappop(waiting)
        found_after_s = failure.kind.found_after_s
        if not found_after_s:
            yield failure
            continue
        heapq.heappush(waiting, failure._replace(at_s=failure.since_s - log1p(-failure.luck) * found_after_s))


def _poisson(kind: FailureKind, seed: int, run: int) -> Iterator[Failure]:
    random, at_s = generator(seed, run, kind.name), 0.0
    while True:
        gaps, luck = random.exponential(1.0 / kind.rate_per_s, _BLOCK), random.random(_BLOCK)
        for gap_s, one in zip(gaps.tolist(), luck.tolist(), strict=True):
            at_s += gap_s
            yield Failure(at_s, at_s, kind, one)


def _weibull(kind: FailureKind, seed: int, run: int) -> Iterator[Failure]:
    """Renews each component when it fails; all components are new when the run begins."""
    random = generator(seed, run, kind.name)
    mean_s = kind.components / kind.rate_per_s
    scale_s = mean_s / gamma(1.0 + 1.0 / kind.shape)
    ends = (scale_s * random.weibull(kind.shape, kind.components)).tolist()
    heapq.heapify(ends)
    while True:
        at_s = ends[0]
        heapq.heapreplace(ends, at_s + scale_s * float(random.weibull(kind.shape)))
        yield Failure(at_s, at_s, kind, float(random.random()))


def _of_lemons(lemons: Lemons, like: FailureKind, seed: int, run: int) -> Iterator[Failure]:
    """Returns the failures of lemon nodes: each fails as `like` does until it is evicted."""
    random = generator(seed, run, "lemons")
    kind = FailureKind("lemon node", 0.0, scope="node", nodes=like.nodes, repair_s=like.repair_s)
    nodes = [0] * int(random.poisson(lemons.nodes))
    at_s = 0.0
    while nodes:
        at_s += float(random.exponential(1.0 / (lemons.rate_per_s * len(nodes))))
        node = int(random.integers(len(nodes)))
        nodes[node] += 1
        if nodes[node] >= lemons.evict_after:
            del nodes[node]
        yield Failure(at_s, at_s, kind, float(random.random()))


def _slow(slowdown: Slowdown, seed: int, run: int) -> Iterator[Slow]:
    random, at_s = generator(seed, run, slowdown.name), 0.0
    while at_s < inf:
        at_s += float(random.exponential(1.0 / slowdown.rate_per_s))
        yield Slow(at_s, at_s + float(random.exponential(slowdown.duration_s)), slowdown.factor)
