"""Ranks of a trace by their place: which number, which communicator groups.

A rank's number counts its place in the spatial dimensions (the first varies fastest), then pipeline stages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product

from forerun.astrasim.chakra.trace import CommGroups


def communicator_groups(degrees: Mapping[str, int], stage_order: Sequence[int]) -> CommGroups:
    """The groups of STAGE, numbered from 1: by dimension, then pipeline stage, then the other dimensions (the first of
    them slowest); groups of one rank too. `degrees` are ranks by dimension, `stage_order` the stages as ranks go."""
    step = _steps(degrees)
    place = {stage: number for number, stage in enumerate(stage_order)}
    a_stage = math.prod(degrees.values())
    found: dict[str, tuple[int, ...]] = {}
    for degree, ranks in degrees.items():
        others = [other for other in degrees if other != degree]
        for stage, *index in product(range(len(place)), *(range(degrees[other]) for other in others)):
            first = place[stage] * a_stage + sum(step[other] * i for other, i in zip(others, index, strict=True))
            found[str(len(found) + 1)] = tuple(range(first, first + ranks * step[degree], step[degree]))
    return found


def groups_of(rank: int, degrees: Mapping[str, int], stage_order: Sequence[int]) -> tuple[str, ...]:
    """Names of the groups of more than one rank that `rank` is in, by dimension."""
    own, index = divmod(rank, math.prod(degrees.values()))
    place = {degree: index // step % degrees[degree] for degree, step in _steps(degrees).items()}
    n_ranks = len(stage_order) * math.prod(degrees.values())
    before, names = 1, []
    for degree, ranks in degrees.items():
        number = stage_order[own]
        for other in degrees:
            if other != degree:
                number = number * degrees[other] + place[other]
        if ranks > 1:
            names.append(str(before + number))
        before += n_ranks // ranks
    return tuple(names)


def _steps(degrees: Mapping[str, int]) -> dict[str, int]:
    """How far apart neighbours in each dimension are."""
    steps, step = {}, 1
    for degree, ranks in degrees.items():
        steps[degree] = step
        step *= ranks
    return steps
