"""Which collectives bring a tensor from the layout it is in to the layout that its consumer wants."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from forerun.astrasim.chakra.trace import CommType
from forerun.astrasim.stage.sizes import Size
from forerun.astrasim.stage.tensors import Layout


@cache
def collectives(have: Layout, want: Layout, degrees: tuple[str, ...]) -> tuple[tuple[CommType, str], ...]:
    """The collectives, at most one for each of `degrees` (those above 1, in the order dp, tp, sp).

    Partial sums: reduce-scatter where the consumer wants a part, all-reduce where it wants all. Parts: all-gather
    where it wants all, all-to-all where it wants another dimension in parts.
    """
    here, there = _places(have, degrees), _places(want, degrees)
    found = []
    for degree in degrees:
        if degree in here:
            is_partial_sum, dim = here[degree]
            wanted = there.get(degree)
            if is_partial_sum:
                found.append((CommType.REDUCE_SCATTER if wanted else CommType.ALL_REDUCE, degree))
            elif wanted is None:
                found.append((CommType.ALL_GATHER, degree))
            elif wanted[1] != dim:
                found.append((CommType.ALL_TO_ALL, degree))
    return tuple(found)


def _places(layout: Layout, degrees: Sequence[str]) -> dict[str, tuple[bool, Size]]:
    """Where each degree counts: whether in a dimension that was summed over, and the dimension.

    A dimension counts for one degree only, the first that divides it and has no place yet; local dimensions come first.
    """
    places: dict[str, tuple[bool, Size]] = {}
    for is_summed, dims in ((False, layout.shape), (True, layout.summed)):
        for dim in dims:
            symbols = dim.symbols()
            degree = next((degree for degree in degrees if degree in symbols and degree not in places), None)
            if degree is not None:
                places[degree] = is_summed, dim
    return places
