"""Turns of a pipeline rank that are like an earlier turn, with other micro batches: their steps are copied."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.schedule import Pass, Turn, rank_turns
from forerun.sources.symbolic.steps import Steps

TurnKind: TypeAlias = tuple[tuple[Pass, int], ...]
"""the kind and the stage of each pass of a turn"""
_State: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OrderedTurns:
    """The turns of one rank in order, with the values that all plans of its schedule share."""

    turns: tuple[Turn, ...]
    ends: Mapping[int, tuple[int, int]]
    """stage -> its first and last micro batch"""
    microbatches: Sequence[tuple[int, ...]]
    """the micro batch of each pass of each turn"""
    alike: Sequence[int]
    """a number that alike turns share; -1 for a turn that is like no other

    Turns are alike where they run the same passes through the same stages, before a turn that does so too. The first
    and the last micro batch of a stage are like no others, as they start and finish its gradients.
    """


def ordered_turns(plan: Plan, rank: int) -> OrderedTurns:
    """Returns the turns of pipeline rank `rank` of `plan`."""
    return _ordered(rank_turns(plan, rank))


def turn_counts(plan: Plan, rank: int) -> Mapping[TurnKind, int]:
    """Returns how many turns of each kind pipeline rank `rank` of `plan` runs."""
    return _counts(rank_turns(plan, rank))


@lru_cache(maxsize=4096)
def _counts(turns: tuple[Turn, ...]) -> Mapping[TurnKind, int]:
    return Counter([_kind(turn) for turn in turns])


def _kind(turn: Turn) -> TurnKind:
    return tuple([(action.kind, action.stage) for action in turn])


@lru_cache(maxsize=4096)
def _ordered(turns: tuple[Turn, ...]) -> OrderedTurns:
    microbatches = [tuple([action.microbatch for action in turn]) for turn in turns]
    of_stage: defaultdict[int, list[int]] = defaultdict(list)
    for turn in turns:
        for action in turn:
            of_stage[action.stage].append(action.microbatch)
    ends = {stage: (min(some), max(some)) for stage, some in of_stage.items()}
    passes = [_kind(turn) for turn in turns]
    numbers: dict[tuple[TurnKind, tuple[int, ...], TurnKind], int] = {}
    alike: list[int] = []
    for turn, own, here, later in zip(turns, microbatches, passes, [*passes[1:], ()], strict=True):
        at_an_end = not alike or any(action.microbatch in ends[action.stage] for action in turn)
        pairs = tuple([own.index(microbatch) for microbatch in own])
        alike.append(-1 if at_an_end else numbers.setdefault((here, pairs, later), len(numbers)))
    return OrderedTurns(turns, ends, microbatches, alike)


class _Repeated(NamedTuple):
    """The steps of a turn, and their changes of the state."""

    blocks: list[int]
    places: list[int]
    """place in the turn of the pass whose micro batch each step has"""
    layers: list[int]
    gathers: int
    """gathers that the turn issues"""
    opens: int
    """gathers that the turn opens"""
    gathered: int
    """bytes of the buffer into which the turn has gathered last"""
    reducing: int
    """bytes of the buffer that the turn's last reduction uses"""


class RepeatedTurns:
    """The steps of the turns of one rank, to copy where a turn is like an earlier one."""

    def __init__(self, order: OrderedTurns, depth: int) -> None:
        """`depth` is the number of buffers that gathers take in turn."""
        self._order, self._depth = order, depth
        self._known: defaultdict[_State, dict[int, _Repeated]] = defaultdict(dict)
        """state that steps depend on beside their turn -> number of alike turns -> their steps"""
        self._before: tuple[int, int, int, int] = (0, 0, 0, 0)
        """steps, gathers, opened gathers and units in the bucket before the turn that is being written"""
        self._state: _State = ()

    def repeat(self, steps: Steps, number: int) -> int:
        """Appends the steps of turn `number` and of those after it as long as they are known.

        Returns the number of the first turn that is not.
        """
        if steps.activation_offload is None:
            number = self._copied(steps, number)
        self._before = len(steps.block), steps.gathers, steps.opens, len(steps.bucket)
        self._state = self._state_of(steps)
        return number

    def _copied(self, steps: Steps, number: int) -> int:
        microbatches, alike = self._order.microbatches, self._order.alike
        end, state = len(alike), self._state_of(steps)
        while number < end:
            found = self._known[state].get(alike[number])
            if found is None:
                break
            own, blocks = microbatches[number], found.blocks
            steps.block += blocks
            steps.microbatch += [own[place] for place in found.places] if len(own) > 1 else own * len(blocks)
            steps.layer += found.layers
            steps.now = own[-1]
            if found.gathers or found.opens or found.gathered != steps.gathered or found.reducing != steps.reducing:
                steps.gathers, steps.opens = steps.gathers + found.gathers, steps.opens + found.opens
                steps.gathered, steps.reducing = found.gathered, found.reducing
                state = self._state_of(steps)
            number += 1
        return number

    def keep(self, steps: Steps, number: int) -> None:
        """Notes the steps of turn `number`, the last ones, unless they put gradients into a bucket."""
        alike = self._order.alike[number]
        start, gathers, opens, waiting = self._before
        if alike < 0 or steps.activation_offload is not None or len(steps.bucket) != waiting:
            return
        own = self._order.microbatches[number]
        places = [own.index(microbatch) for microbatch in steps.microbatch[start:]]
        changes = steps.gathers - gathers, steps.opens - opens, steps.gathered, steps.reducing
        self._known[self._state][alike] = _Repeated(steps.block[start:], places, steps.layer[start:], *changes)

    def _state_of(self, steps: Steps) -> _State:
        """Returns the state that the next steps depend on, except their turn."""
        ahead, turn = steps.gathers - steps.opens, steps.gathers % self._depth
        return ahead, turn, steps.gathered, steps.reducing, len(steps.bucket)
