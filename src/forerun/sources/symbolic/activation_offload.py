"""Decides when offloaded activations leave the device for host memory, and when they come back.

Copies run in turns. The activations of one turn are copied to the host beside the next forward turn, and the device
frees them when that turn ends. They are fetched beside the backward turn before their own, whose start allocates their
memory. Activations that would be fetched before their copy to the host ends stay on the device.

Where copies go layer by layer, a turn is a unit: TransformerEngine's pytorch/cpu_offload.py frees a group of tensors
when the next layer's forward pass is committed, and reloads it when the backward pass of the layer behind it starts.
Elsewhere a turn is a whole pass through a stage (Kwai's `schedule_1f1b_offload` in
megatron/core/pipeline_parallel/schedules.py). Whole passes come back into one of two buffers that stay allocated
(`onload_prologue` of its offload.py).
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
    """index of the run of its first unit"""
    last: int


class ActivationOffload:
    """Activations that leave the device and come back at each run, a forward or backward pass of a unit on a rank."""

    def __init__(self, order: Iterable[Action], n_units: Sequence[int], whole_passes: bool) -> None:
        """`order` lists the passes of a rank, `n_units` the number of units of each stage."""
        self.leaving: defaultdict[int, list[Place]] = defaultdict(list)
        """run -> places whose activations have left the device when it ends"""
        self.returning: defaultdict[int, list[Place]] = defaultdict(list)
        """run -> places whose activations have memory on the device when it starts"""
        turns = _turns(order, n_units, whole_passes)
        forward = [i for i, turn in enumerate(turns) if turn.kind == "F"]
        backward = [i for i, turn in enumerate(turns) if turn.kind == "B"]
        if not turns:
            return
        gone = {
            turns[i].places[0]: min(after, len(turns) - 1)
            for i, after in zip(forward, [*forward[1:], forward[-1] + 1], strict=True)
        }
        used: list[int] = []  # runs after which one of the two buffers is free again
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
