"""Networks: dimensions of topologies with their bandwidths and latencies, from a file or a line of text.

A file is ASTRA-sim's `network.yml`, optionally with further keys of Forerun:

    topology: [Ring, Mesh2D, FatTree]     # any name of the registry, dimension 0 (innermost) first
    npus_count: [2, [4, 4], 16]           # the sizes of a topology that has several are a list
    bandwidth: [200.0, 100.0, 50.0]       # GB/s of a link; one number goes for all dimensions
    latency: [50, 500, 2000]              # ns of a link
    options: [{}, {}, {oversubscription: 2}]    # optional, by dimension
    bandwidth_unit: GiB/s                 # optional: GiB/s (2**30 bytes, what ASTRA-sim means by GB/s) or GB/s (10**9)

Or it names one of Forerun's clusters (a preset or a file) and the number of its GPUs:

    cluster: h100-sxm
    gpus: 64

As text, dimensions are separated by commas: `name:sizes[:option=value...][@bandwidth[unit][/latency[ns|us]]]`, such as
`ring:8,switch:4@50GBps/500ns`, `mesh2d:4x4@100/0.5us` or `fat-tree:128:oversubscription=2@50`. Units of bandwidth are
GBps (10**9 bytes/s), GiBps (2**30) and Gbps (10**9 bits/s).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from operator import mul
from pathlib import Path
from typing import Any

from forerun.common.errors import ForerunError
from forerun.common.yaml_files import read_yaml
from forerun.core.network.of_cluster import cluster_dimensions
from forerun.core.network.topology.base import MAX_DEVICES, Topology
from forerun.core.network.topology.registry import Option, find, make
from forerun.core.network.topology.stacked import Stacked
from forerun.describe.cluster.catalog import load_cluster

_REQUIRED = ("topology", "npus_count", "bandwidth", "latency")
_SIZE_BITS = 31
_OWN = ("options", "bandwidth_unit")
_GIB_UNITS = {"GiB/s": True, "GB/s": False}
_TEXT_UNITS = {"Gbps": (0.125, False), "GBps": (1.0, False), "GiBps": (1.0, True)}
"""unit -> (GB/s in it, whether those are of 2**30 bytes)"""
_DIMENSION = re.compile(r"([^:@]+):([^:@]+)((?::[^:@]+)*)(?:@([^@/]+)(?:/([^@/]+))?)?")
_FIGURE = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*)")


@dataclass(frozen=True)
class NetworkDim:
    """One dimension: a topology that joins the NPUs that differ in one digit of their number."""

    topology: str
    sizes: tuple[int, ...]
    bandwidth_gbps: float
    """of a link, in the unit of the network"""
    latency_ns: float
    options: tuple[tuple[str, Option], ...] = ()

    @cached_property
    def n_npus(self) -> int:
        return self.build().n_npus

    def build(self) -> Topology:
        """Returns one instance of the dimension."""
        return make(self.topology, self.sizes, self.bandwidth_gbps, self.latency_ns, **dict(self.options))

    def scaled(self, bandwidth: float = 1.0, latency: float = 1.0) -> NetworkDim:
        """Returns the same with so many times the bandwidth and latency of every link, also of those that options
        name."""
        options = []
        for name, value in self.options:
            by = bandwidth if name.endswith("bandwidth_gbps") else latency if name.endswith("latency_ns") else None
            options.append((name, value if by is None or value is None else value * by))
        return NetworkDim(
            self.topology, self.sizes, self.bandwidth_gbps * bandwidth, self.latency_ns * latency, tuple(options)
        )


@dataclass(frozen=True)
class Network:
    """Dimensions, innermost first: NPU a0 + n0 * (a1 + n1 * (a2 ...))."""

    dims: tuple[NetworkDim, ...]
    gib: bool = True
    """whether the GB/s of its bandwidths are of 2**30 bytes, as ASTRA-sim's are, or of 10**9"""

    @property
    def n_npus(self) -> int:
        return prod(dim.n_npus for dim in self.dims)

    @property
    def strides(self) -> tuple[int, ...]:
        """Returns the distance between neighbours in each dimension."""
        return tuple(accumulate((dim.n_npus for dim in self.dims[:-1]), mul, initial=1))

    def dim_topology(self, d: int) -> Topology:
        """Returns one instance of dimension `d`."""
        return self.dims[d].build()

    def topology(self) -> Topology:
        """Returns all dimensions together."""
        parts = tuple(dim.build() for dim in self.dims)
        return parts[0] if len(parts) == 1 else Stacked(parts)

    def bytes_per_ns(self, d: int) -> float:
        """Returns the bandwidth of a link of dimension `d`."""
        return float(bytes_per_ns(self.dims[d].bandwidth_gbps, gib=self.gib))

    @property
    def npu_bytes_per_ns(self) -> float:
        """Returns the bandwidth of all links that leave an NPU, for the NPU that has the least.

        NPUs combine the places of all dimensions, so the least of the sums is the sum of the least.
        """
        total_gbps = sum(self.dim_topology(d).npu_bandwidth_gbps for d in range(len(self.dims)))
        return float(bytes_per_ns(total_gbps, gib=self.gib))


def bytes_per_ns(bandwidth_gbps: Any, *, gib: bool) -> Any:
    """Returns GB/s, of 2**30 bytes or of 10**9, as bytes/ns (a number or an array).

    The order of the operations is that of astra-network-analytical's `bw_GBps_to_Bpns`.
    """
    return bandwidth_gbps * 2**30 / 1e9 if gib else bandwidth_gbps


def read_network(path: str | Path) -> Network:
    """Returns the network in a file.

    Raises:
        ForerunError: it can't be read, lacks a key, or a value makes no sense.
    """
    return network_from(read_yaml(Path(path)), str(path))


def network_from(data: Mapping[str, Any], place: str) -> Network:
    """Returns the network in the mapping of a file; `place` names it in errors.

    Raises:
        ForerunError: a key is missing, or a value makes no sense.
    """
    if "cluster" in data:
        return _network_of_cluster(data, place)
    for key in _REQUIRED:
        if key not in data:
            other = "; of a cluster: cluster, gpus" if "device" in data else ""
            raise ForerunError(f"{place}: key {key!r} is missing; a network has {', '.join(_REQUIRED)}{other}")
    for key in data.keys() - {*_REQUIRED, *_OWN}:
        close = difflib.get_close_matches(key, _OWN, 1)
        if close:  # ASTRA-sim ignores what it does not know; an option that is misspelt should not be lost that way
            raise ForerunError(f"{place}: unknown key {key!r}; did you mean {close[0]}?")
    names = data["topology"] if isinstance(data["topology"], list) else [data["topology"]]
    columns = [_by_dimension(data, key, len(names), place) for key in _REQUIRED[1:]]
    options = _by_dimension({"options": {}, **data}, "options", len(names), place)
    dims = []
    for d, (name, sizes, bandwidth, latency, option) in enumerate(zip(names, *columns, options, strict=True)):
        where = f"{place}: dimension {d}"
        if not isinstance(name, str):
            raise ForerunError(f"{where}: topology is {_short(name)}, it has to be a name")
        figures = _number(bandwidth, "bandwidth", where), _number(latency, "latency", where)
        dims.append(_dimension(name, _sizes(sizes, name, where), *figures, _options(option, where), where))
    return _network(dims, unit_is_gib(data.get("bandwidth_unit", "GiB/s"), place), place)


def _network_of_cluster(data: Mapping[str, Any], place: str) -> Network:
    """Returns the network of a cluster that a file names."""
    n_gpus = data.get("gpus")
    if data.keys() - {"cluster", "gpus", "bandwidth_unit"} or not isinstance(data["cluster"], str):
        raise ForerunError(f"{place}: a network of a cluster has the keys cluster (a preset or a file) and gpus")
    if isinstance(n_gpus, bool) or not isinstance(n_gpus, int):
        raise ForerunError(f"{place}: gpus is {_short(n_gpus)}; say how many GPUs of {data['cluster']} there are")
    dims = [
        NetworkDim(name, (size,), bandwidth, latency)
        for name, size, bandwidth, latency in cluster_dimensions(load_cluster(data["cluster"]), n_gpus)
    ]
    return _network(dims, False, place)


def parse_topology(
    text: str,
    bandwidth: Sequence[float] = (),
    latency: Sequence[float] = (),
    *,
    gib: bool = False,
) -> Network:
    """Returns the network that `text` describes (see the module).

    `bandwidth` (GB/s) and `latency` (ns), one for all dimensions or one for each, hold for the dimensions that do not
    name theirs. `gib` is the unit of bandwidths without one.

    Raises:
        ForerunError: the text can't be read, a bandwidth or latency is missing, units differ, a value makes no sense.
    """
    parts = [part.strip() for part in text.split(",")]
    given = [_for_all(figures, len(parts), name) for name, figures in (("bandwidth", bandwidth), ("latency", latency))]
    dims, units = [], set()
    for d, part in enumerate(parts):
        where = f"topology {part!r}"
        match = _DIMENSION.fullmatch(part)
        if not match:
            raise ForerunError(f"{where}: expected name:sizes[:option=value][@bandwidth[/latency]], as ring:8@50/500ns")
        name, sizes, options, own_bandwidth, own_latency = match.groups()
        speed, unit = _text_bandwidth(own_bandwidth, gib, where) if own_bandwidth else (given[0][d], gib)
        delay = _text_latency(own_latency, where) if own_latency else given[1][d]
        if speed is None or delay is None:
            missing = "bandwidth" if speed is None else "latency"
            raise ForerunError(f"{where} has no {missing}: write {name}:{sizes}@50/500ns, or give --{missing}")
        units.add(unit)
        speed, delay = _number(speed, "bandwidth", where), _number(delay, "latency", where)
        size_list = _sizes(sizes.split("x"), name, where)
        dims.append(_dimension(name, size_list, speed, delay, _text_options(options, where), where))
    if len(units) > 1:
        raise ForerunError(f"topology {text!r}: give all bandwidths in one unit, GBps or GiBps")
    return _network(dims, units.pop(), f"topology {text!r}")


# -- checks shared by both forms -----------------------------------------------------------------------------------


def _network(dims: list[NetworkDim], gib: bool, place: str) -> Network:
    network = Network(tuple(dims), gib)
    if not dims:
        raise ForerunError(f"{place}: topology lists no dimension")
    if network.n_npus > MAX_DEVICES:
        raise ForerunError(f"{place}: {network.n_npus:,} NPUs are more than {MAX_DEVICES:,}")
    return network


def _dimension(
    name: str, sizes: tuple[int, ...], bandwidth: float, latency: float, options: Mapping[str, Option], where: str
) -> NetworkDim:
    try:
        dim = NetworkDim(find(name).__name__, sizes, bandwidth, latency, tuple(options.items()))
        dim.build()
    except ForerunError as error:
        raise ForerunError(f"{where}: {error}") from None
    return dim


def _sizes(value: Any, name: str, where: str) -> tuple[int, ...]:
    sizes = tuple(_int(size) for size in (value if isinstance(value, list) else [value]))
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size.bit_length() > _SIZE_BITS:
            raise ForerunError(f"{where}: npus_count is {_short(size)}, it has to be a whole number below 2**31")
    if len(sizes) <= 1 and all(size <= 1 for size in sizes):
        raise ForerunError(f"{where}: npus_count is {_short(value)}, {name} has to join more than 1 NPU")
    return sizes


def _int(value: Any) -> Any:
    """Returns a whole number, also from text; anything else as it is."""
    return int(value) if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", value) else value


def _options(value: Any, where: str) -> dict[str, Option]:
    if not isinstance(value, dict):
        raise ForerunError(f"{where}: options are {_short(value)}, they have to be keys and values")
    for key, each in value.items():
        if not isinstance(each, (int, float, bool)) or (isinstance(each, int) and each.bit_length() > _SIZE_BITS):
            raise ForerunError(f"{where}: option {key} is {_short(each)}, it has to be a number, true or false")
    return {str(key): each for key, each in value.items()}


def _number(value: Any, what: str, where: str) -> float:
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ForerunError(f"{where}: {what} is {_short(value)}, it has to be a number")
    return number


# -- files ---------------------------------------------------------------------------------------------------------


def _by_dimension(data: Mapping[str, Any], key: str, n_dims: int, place: str) -> list[Any]:
    value = data[key]
    if not isinstance(value, list):
        return [value] * n_dims
    if len(value) != n_dims:
        hint = "; sizes of one dimension go into a list of their own, as [[4, 4]]" if key == "npus_count" else ""
        raise ForerunError(f"{place}: {key} lists {len(value)} values, topology {n_dims} dimensions{hint}")
    return value


def unit_is_gib(value: Any, place: str) -> bool:
    """Returns whether the unit of bandwidth called `value` is of 2**30 bytes.

    Raises:
        ForerunError: there is no such unit.
    """
    if not isinstance(value, str) or value not in _GIB_UNITS:
        raise ForerunError(f"{place}: bandwidth_unit is {_short(value)}, it has to be one of: {', '.join(_GIB_UNITS)}")
    return _GIB_UNITS[value]


def _short(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 64 * _SIZE_BITS:  # Python refuses to print it
        return f"a number of {value.bit_length()} bits"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- text ----------------------------------------------------------------------------------------------------------


def _for_all(figures: Sequence[float], n_dims: int, what: str) -> list[float | None]:
    if len(figures) not in (0, 1, n_dims):
        raise ForerunError(f"--{what} has {len(figures)} values, the topology {n_dims} dimensions")
    if len(figures) == n_dims:
        return [*figures]
    return [figures[0] if len(figures) else None] * n_dims


def _text_bandwidth(text: str, gib: bool, where: str) -> tuple[float, bool]:
    number, unit = _figure(text, "bandwidth", where)
    known = {**_TEXT_UNITS, "": (1.0, gib)}
    if unit not in known:
        raise ForerunError(f"{where}: bandwidth {text!r} has to end in {', '.join(_TEXT_UNITS)} or nothing")
    factor, in_gib = known[unit]
    return number * factor, in_gib


def _text_latency(text: str, where: str) -> float:
    number, unit = _figure(text, "latency", where)
    if unit not in ("", "ns", "us"):
        raise ForerunError(f"{where}: latency {text!r} has to end in ns, us or nothing")
    return number * 1000 if unit == "us" else number


def _figure(text: str, what: str, where: str) -> tuple[float, str]:
    match = _FIGURE.fullmatch(text.strip())
    if not match:
        raise ForerunError(f"{where}: {what} {text!r} is not a number with a unit")
    return _number(match[1], what, where), match[2]


def _text_options(text: str, where: str) -> dict[str, Option]:
    options: dict[str, Option] = {}
    for item in text.split(":")[1:]:
        key, equals, value = item.partition("=")
        if not equals:
            raise ForerunError(f"{where}: {item!r} is not option=value")
        whole = _int(value)
        options[key.strip()] = whole if isinstance(whole, int) else _number(value, key, where)
    return options
