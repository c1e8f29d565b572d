"""Offloaded activations on their way to the host and back.

A copy runs beside what the rank runs next, so the device goes on holding what is copied. What was made in one turn goes
beside the next forward turn and is freed when that ends; it is fetched beside the backward turn before its own, and has
its place on the device when that starts. What would be fetched before it has gone stays where it is.

A turn is a unit where copies go layer by layer (TransformerEngine's pytorch/cpu_offload.py: a group of tensors is freed
when the next layer's forward pass is committed, and reloaded when the backward pass of the layer behind it starts), or
a whole pass through a stage (Kwai's `schedule_1f1b_offload` in megatron/core/pipeline_parallel/schedules.py). Whole
passes come back into one of two buffers, which are never given back (`onload_prologue` of its offload.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from forerun.sources.symbolic.schedule import Action, Pass


class Place(NamedTuple):
    """A unit of a stage in one micro batch."""

    stage: int
    unit: int
    microbatch: int


class _Turn(NamedTuple):
    kind: Pass
    places: tuple[Place, ...]
    first: int
    """run of its first unit"""
    last: int


class ActivationOffload:
    """What leaves the device and what comes back, by the run of a unit, counted over forward and backward passes of a
    rank."""

    def __init__(self, order: Iterable[Action], n_units: Sequence[int], whole_passes: bool) -> None:
        """`order` are the passes of a rank, `n_units` the units of each stage."""
        self.leaving: defaultdict[int, list[Place]] = defaultdict(list)
        """after a run"""
        self.returning: defaultdict[int, list[Place]] = defaultdict(list)
        """before a run"""
        turns = _turns(order, n_units, whole_passes)
        forward = [i for i, turn in enumerate(turns) if turn.kind == "F"]
        backward = [i for i, turn in enumerate(turns) if turn.kind == "B"]
        if not turns:
            return
        gone = {
            turns[i].places[0]: min(after, len(turns) - 1)
            for i, after in zip(forward, [*forward[1:], forward[-1] + 1], strict=True)
        }
        used: list[int] = []  # the runs after which each of the pair of buffers was free again
        for before, i in zip([backward[0] - 1, *backward], backward, strict=False):
            own = sorted(turns[i].places)
            left = gone[own[0]]
            if before <= left + 1:
                continue
            self.leaving[turns[left].last] += own
            fetched = turns[before].first
            if whole_passes:
                fetched = used[-2] + 1 if len(used) > 1 else 0
                used.append(turns[i].last)
            self.returning[fetched] += own


def _turns(order: Iterable[Action], n_units: Sequence[int], whole_passes: bool) -> list[_Turn]:
    turns: list[_Turn] = []
    run = 0
    for kind, stage, microbatch in order:
        if kind == "W" or not n_units[stage]:
            continue
        places = [Place(stage, unit, microbatch) for unit in range(n_units[stage])]
        if kind == "B":
            places.reverse()
        for some in [places] if whole_passes else [[place] for place in places]:
            turns.append(_Turn(kind, tuple(some), run, run + len(some) - 1))
            run += len(some)
    return turns
