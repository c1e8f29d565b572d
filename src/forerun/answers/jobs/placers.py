"""The placers by the names that files and options use."""

from __future__ import annotations

from forerun.answers.jobs.nearest import Nearest, Rails
from forerun.answers.jobs.placement import Counted, Packed, Placer, Shape, Spread
from forerun.common.errors import UnknownName

PLACERS: dict[str, type[Placer]] = {
    "count": Counted,
    "packed": Packed,
    "spread": Spread,
    "nearest": Nearest,
    "rails": Rails,
}


def placer(name: str, shape: Shape) -> Placer:
    """Returns the placement called `name`. Raises UnknownName if there is none."""
    if name not in PLACERS:
        raise UnknownName("placement", name, list(PLACERS))
    return PLACERS[name](shape)
