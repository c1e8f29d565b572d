"""Topologies by name."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.common.errors import ForerunError, UnknownName
from forerun.core.network.topology.base import Topology
from forerun.core.network.topology.dragonfly import Dragonfly
from forerun.core.network.topology.fat_tree import FatTree
from forerun.core.network.topology.fully_connected import FullyConnected
from forerun.core.network.topology.mesh import Mesh2D
from forerun.core.network.topology.rail import Rail
from forerun.core.network.topology.ring import Ring
from forerun.core.network.topology.switch import Switch
from forerun.core.network.topology.torus import Torus2D, Torus3D
from forerun.core.network.topology.tree import Tree

Option = int | float | bool | None

TOPOLOGIES: dict[str, type[Topology]] = {
    "Ring": Ring,
    "FullyConnected": FullyConnected,
    "Switch": Switch,
    "Mesh2D": Mesh2D,
    "Torus2D": Torus2D,
    "Torus3D": Torus3D,
    "Tree": Tree,
    "FatTree": FatTree,
    "Rail": Rail,
    "Dragonfly": Dragonfly,
}


def find(name: str) -> type[Topology]:
    """The topology called `name`; case, `-` and `_` do not matter.

    Raises:
        UnknownName: there is none.
    """
    by_plain = {_plain(known): known for known in TOPOLOGIES}
    if _plain(name) not in by_plain:
        raise UnknownName("topology", name, list(TOPOLOGIES))
    return TOPOLOGIES[by_plain[_plain(name)]]


def make(
    name: str, sizes: int | Sequence[int], bandwidth_gbps: float, latency_ns: float, **options: Option
) -> Topology:
    """A topology by name, from its sizes (or its only one) and what it has of options.

    Raises:
        ForerunError: unknown name, wrong number of sizes, unknown option, a value that makes no sense.
    """
    topology = find(name)
    given = tuple(sizes) if isinstance(sizes, Sequence) else (sizes,)
    expected = topology.size_names()
    if len(given) != len(expected):
        needs = f"{len(expected)} size{'s' if len(expected) > 1 else ''} ({', '.join(expected)})"
        raise ForerunError(f"{topology.__name__} takes {needs}, got {len(given)}")
    for option in options:
        if not topology.option_names():
            raise ForerunError(f"{topology.__name__} has no options, got {option!r}")
        if option not in topology.option_names():
            raise UnknownName(f"option of {topology.__name__}", option, list(topology.option_names()))
    return topology(*given, bandwidth_gbps=bandwidth_gbps, latency_ns=latency_ns, **options)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
