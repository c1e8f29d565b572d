"""Topologies by name: every one that a module of this folder defines."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Sequence

from forerun.common.errors import ForerunError, UnknownName
from forerun.core.network import topology
from forerun.core.network.topology.base import Topology

Option = int | float | bool | None


def _found() -> Iterator[type[Topology]]:
    """Returns the classes of the folder's modules that a network file can describe: all of their sizes are integers."""
    for module in pkgutil.iter_modules(topology.__path__, f"{topology.__name__}."):
        if module.name == __name__:
            continue
        for value in vars(importlib.import_module(module.name)).values():
            own = inspect.isclass(value) and issubclass(value, Topology) and value.__module__ == module.name
            if own and not inspect.isabstract(value) and value.has_plain_sizes():
                yield value


TOPOLOGIES: dict[str, type[Topology]] = {one.__name__: one for one in _found()}


def find(name: str) -> type[Topology]:
    """Returns the topology called `name`; case, `-` and `_` do not matter.

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
    """Builds a topology by name, from its sizes (or its only size) and its options.

    Raises:
        ForerunError: unknown name, wrong number of sizes, unknown option, a value that makes no sense.
    """
    found = find(name)
    given = tuple(sizes) if isinstance(sizes, Sequence) else (sizes,)
    expected = found.size_names()
    if len(given) != len(expected):
        needs = f"{len(expected)} size{'s' if len(expected) > 1 else ''} ({', '.join(expected)})"
        raise ForerunError(f"{found.__name__} takes {needs}, got {len(given)}")
    for option in options:
        if not found.option_names():
            raise ForerunError(f"{found.__name__} has no options, got {option!r}")
        if option not in found.option_names():
            raise UnknownName(f"option of {found.__name__}", option, list(found.option_names()))
    return found(*given, bandwidth_gbps=bandwidth_gbps, latency_ns=latency_ns, **options)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
