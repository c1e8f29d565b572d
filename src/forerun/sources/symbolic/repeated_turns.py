"""Turns of a pipeline rank that are like an earlier turn, with other micro batches: their steps are copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from forerun.sources.symbolic.schedule import Turn
from forerun.sources.symbolic.steps import Steps

_Key: TypeAlias = tuple[object, ...]


class RepeatedTurns:
    """The steps of the turns of one rank, to copy where a turn is like an earlier one.

    Turns are alike where they run the same passes through the same stages, before a turn that does so too. The first
    and the last micro batch of a stage are like no others, as they start and finish its gradients.
    """

    def __init__(self, order: Sequence[Turn], ends: Mapping[int, tuple[int, int]]) -> None:
        """`ends` has the first and the last micro batch of each stage."""
        self._order, self._ends = order, ends
        self._known: dict[_Key, tuple[list[int], list[int], list[int]]] = {}
        """key -> block, place in the turn of the pass whose micro batch it has, and layer of each step"""
        self._start = 0
        self._key: _Key | None = None
        self._before: _Key = ()

    def repeat(self, steps: Steps, number: int) -> bool:
        """Appends the steps of turn `number` where they are known, and says whether they are."""
        self._key, self._start, self._before = self._like(steps, number), len(steps.block), _state(steps)
        found = None if self._key is None else self._known.get(self._key)
        if found is None:
            return False
        blocks, places, layers = found
        microbatches = [action.microbatch for action in self._order[number]]
        steps.block += blocks
        steps.microbatch += [microbatches[place] for place in places]
        steps.layer += layers
        steps.now = microbatches[-1]
        return True

    def keep(self, steps: Steps, number: int) -> None:
        """Notes the steps of turn `number`, the last ones, unless they change what later steps depend on."""
        if self._key is None or _state(steps) != self._before:
            return
        microbatches = [action.microbatch for action in self._order[number]]
        places = [microbatches.index(microbatch) for microbatch in steps.microbatch[self._start :]]
        self._known[self._key] = steps.block[self._start :], places, steps.layer[self._start :]

    def _like(self, steps: Steps, number: int) -> _Key | None:
        """Returns what alike turns have in common; None for a turn that is like no other."""
        turn = self._order[number]
        at_an_end = any(action.microbatch in self._ends[action.stage] for action in turn)
        if steps.activation_offload is not None or number == 0 or at_an_end:
            return None
        later = self._order[number + 1] if number + 1 < len(self._order) else ()
        passes = tuple((action.kind, action.stage) for action in turn)
        microbatches = [action.microbatch for action in turn]
        pairs = tuple(microbatches.index(microbatch) for microbatch in microbatches)
        return passes, pairs, tuple((action.kind, action.stage) for action in later), *_state(steps)


def _state(steps: Steps) -> _Key:
    """Returns what the next steps depend on, beside their turn."""
    return steps.gathers, steps.opens, steps.gathered, steps.reducing, len(steps.bucket)
