"""Ranks and communicator groups as STAGE numbers them.

The number of a rank counts its place in the spatial dimensions (the first varies fastest), then its pipeline stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product

from forerun.astrasim.chakra.trace import CommGroups


def communicator_groups(degrees: Mapping[str, int], stage_order: Sequence[int]) -> CommGroups:
    """Returns all groups, also of one rank, numbered from 1 by dimension, pipeline stage and the other dimensions.

    The first of the other dimensions varies slowest. `degrees` are the ranks in each dimension, and `stage_order` holds
    the stages in the order of their ranks.
    """
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
    """Returns the names of the groups of more than one rank that `rank` is in, by dimension."""
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
    """Returns the distance in rank numbers of neighbours in each dimension."""
    steps, step = {}, 1
    for degree, ranks in degrees.items():
        steps[degree] = step
        step *= ranks
    return steps
