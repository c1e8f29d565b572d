"""Custom collective algorithms, written as a class or as one execution trace for each rank.

A class yields the steps of each rank. This one broadcasts from rank 0 along the ring:

    class Pipeline:
        def steps(self, rank, n_ranks, size, costs):
            arrived = ()
            if rank > 0:
                arrived = (Receive(source=rank - 1, size=size),)
                yield arrived[0]
            if rank < n_ranks - 1:
                yield Send(to=rank + 1, size=size, after=arrived)

`rank` is the position in the ring of the collective's ranks, `size` the bytes of one chunk. The k-th send to a rank
with a tag meets the k-th receive of that tag there.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from forerun.astrasim.messages.algorithms import reduction_ns
from forerun.common.errors import ForerunError
from forerun.common.own_code import load_module


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """A step starts when all steps of `after`, which the class has yielded before, have ended."""

    after: Sequence[Step] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Send(Step):
    """A send ends when its message has arrived."""

    to: int
    size: int
    tag: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Receive(Step):
    """A receive ends when its message has arrived."""

    source: int
    size: int
    tag: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Wait(Step):
    """A wait takes time, as a reduction or a copy does."""

    ns: int


@dataclass(frozen=True)
class Costs:
    """The costs between two messages in the built-in algorithms."""

    endpoint_ns: int
    memory_bytes_per_s: float

    def reduction_ns(self, size: int) -> int:
        """Returns the time of one write and two reads of `size` bytes."""
        if self.memory_bytes_per_s <= 0:
            raise ForerunError("a reduction in memory needs local-mem-bw above 0")
        return int(reduction_ns(size, self.memory_bytes_per_s))


class Algorithm(Protocol):
    """A custom algorithm: any class with this method."""

    def steps(self, rank: int, n_ranks: int, size: int, costs: Costs) -> Iterable[Step]:
        """Yields the steps of one rank for a chunk of `size` bytes."""


class BinomialBroadcast:
    """A broadcast from rank 0: in round k, each rank below 2**k has the data and sends it to the rank 2**k above."""

    def steps(self, rank: int, n_ranks: int, size: int, costs: Costs) -> Iterable[Step]:
        """Yields the receive of a rank, then its sends, one after the other."""
        last: Step = Wait(ns=costs.endpoint_ns)
        distance = 1
        if rank > 0:
            distance = 1 << rank.bit_length()
            got = Receive(source=rank - (distance >> 1), size=size)
            yield got
            last = Wait(ns=costs.endpoint_ns, after=[got])
        yield last
        while rank + distance < n_ranks:
            last = Send(to=rank + distance, size=size, after=[last])
            yield last
            distance *= 2


class RingBroadcast:
    """A pipelined broadcast from rank 0 along the ring, in as many pieces as there are ranks."""

    def steps(self, rank: int, n_ranks: int, size: int, costs: Costs) -> Iterable[Step]:
        """Sends each piece on once it has arrived and the piece before it has reached the next rank."""
        n_pieces = min(n_ranks, size)
        sent: list[Step] = []
        for k in range(n_pieces):
            piece = size // n_pieces + (k < size % n_pieces)
            ready: Step = Wait(ns=costs.endpoint_ns, after=sent)
            if rank > 0:
                got = Receive(source=rank - 1, size=piece, tag=k)
                yield got
                ready = Wait(ns=costs.endpoint_ns, after=[got])
            yield ready
            if rank < n_ranks - 1:
                sent = [Send(to=rank + 1, size=piece, tag=k, after=[ready, *sent])]
                yield sent[0]


BUILT_IN: dict[str, type[Algorithm]] = {"binomial": BinomialBroadcast, "ringPipeline": RingBroadcast}
"""algorithms of a broadcast"""


def load_algorithm(spec: str) -> Algorithm:
    """Loads the algorithm `module:Class` or `path/to/file.py:Class`.

    Raises ForerunError if the class doesn't exist, can't be imported or has no method `steps`.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise ForerunError(f"algorithm {spec!r}: write module:Class or path/to/file.py:Class")
    try:
        module = load_module(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # whatever the user's file raises while it is imported
        raise ForerunError(f"algorithm {spec!r}: {place} can't be imported ({type(error).__name__}: {error})") from None
    found = getattr(module, name, None)
    if not isinstance(found, type) or not callable(getattr(found, "steps", None)):
        raise ForerunError(f"algorithm {spec!r}: {place} has no class {name} with a method steps")
    try:
        made: Algorithm = found()
    except Exception as error:
        raise ForerunError(f"algorithm {spec!r}: {name}() raises {type(error).__name__}: {error}") from None
    return made
