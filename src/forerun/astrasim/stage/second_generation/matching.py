"""Which collectives bring a tensor from the layout it is in to the layout that its consumer wants."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.astrasim.chakra.trace import CommType
from forerun.astrasim.stage.sizes import Size
from forerun.astrasim.stage.tensors import Layout
from forerun.common.errors import ForerunError

DEGREES = ("dp", "tp", "cp", "ep")

_Place = tuple[bool, Size]
"""whether the dimension was summed over, and the dimension with all other degrees at 1"""


def collectives(have: Layout, want: Layout, degrees: Sequence[str]) -> list[tuple[CommType, str]]:
    """The collectives, one a parallel degree at most, in the order of `degrees` (those above 1).

    Partial sums: reduce-scatter where the consumer wants a part, all-reduce where it wants all. Parts: all-gather
    where it wants all, all-to-all where it wants another dimension in parts. A whole tensor is cut for free.
    """
    found = []
    there, here = _places(want, degrees), _places(have, degrees)
    for degree in degrees:
        comm = _collective(here.get(degree), there.get(degree))
        if comm is not None:
            found.append((comm, degree))
    return found


def _collective(have: _Place | None, want: _Place | None) -> CommType | None:
    if want is not None and want[0]:
        if have is None or not have[0]:
            raise ForerunError("a tensor of this model is wanted as partial sums where its producer made none")
        return None
    if have is None:
        return None
    if have[0]:
        return CommType.ALL_REDUCE if want is None else CommType.REDUCE_SCATTER
    if want is None:
        return CommType.ALL_GATHER
    return None if have[1] == want[1] else CommType.ALL_TO_ALL


def _places(layout: Layout, degrees: Sequence[str]) -> dict[str, _Place]:
    """Where each degree shows: in the first dimension that it divides, local dimensions before summed ones."""
    places: dict[str, _Place] = {}
    for summed, dims in ((False, layout.shape), (True, layout.summed)):
        for dim in dims:
            symbols = dim.symbols()
            for degree in degrees:
                if degree in symbols and degree not in places:
                    places[degree] = summed, dim.without(set(DEGREES) - {degree})
    return places
