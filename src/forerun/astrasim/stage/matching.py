"""The collectives that bring a tensor from the layout it is in to the layout that its consumer wants."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from forerun.astrasim.chakra.trace import CommType
from forerun.astrasim.stage.sizes import Size
from forerun.astrasim.stage.tensors import Layout
from forerun.common.errors import ForerunError

DEGREES = ("dp", "tp", "cp", "ep")
"""the symbols of STAGE's second generation; the first has dp, tp and sp"""

_Place = tuple[bool, Size]
"""whether the dimension was summed over, and the dimension"""


@cache
def collectives(
    have: Layout, want: Layout, degrees: tuple[str, ...], shared_dims: bool
) -> tuple[tuple[CommType, str], ...]:
    """Returns the collectives, at most one for each of `degrees` (those above 1), in their order.

    A consumer of partial sums gets a reduce-scatter if it wants a part and an all-reduce if it wants all. A consumer of
    parts gets an all-gather if it wants all, and an all-to-all if it wants another dimension split. Splitting a whole
    tensor is free. `shared_dims` is the rule of STAGE's second generation: several degrees may divide one dimension.
    """
    here, there = _places(have, degrees, shared_dims), _places(want, degrees, shared_dims)
    found = ((_collective(here.get(degree), there.get(degree)), degree) for degree in degrees)
    return tuple((comm, degree) for comm, degree in found if comm is not None)


def _collective(have: _Place | None, want: _Place | None) -> CommType | None:
    if want is not None and want[0]:
        if have is None or not have[0]:
            raise ForerunError("a tensor of this model is wanted as partial sums, but its producer makes none")
        return None
    if have is None:
        return None
    if have[0]:
        return CommType.ALL_REDUCE if want is None else CommType.REDUCE_SCATTER
    if want is None:
        return CommType.ALL_GATHER
    return None if have[1] == want[1] else CommType.ALL_TO_ALL


def _places(layout: Layout, degrees: Sequence[str], shared_dims: bool) -> dict[str, _Place]:
    """Returns the first dimension that each degree divides; local dimensions precede summed ones.

    Without `shared_dims`, a dimension counts for the first of its degrees that has no place yet.
    """
    places: dict[str, _Place] = {}
    for is_summed, dims in ((False, layout.shape), (True, layout.summed)):
        for dim in dims:
            symbols = dim.symbols()
            found = [degree for degree in degrees if degree in symbols and degree not in places]
            for degree in found if shared_dims else found[:1]:
                places[degree] = is_summed, dim.without(set(DEGREES) - {degree}) if shared_dims else dim
    return places
