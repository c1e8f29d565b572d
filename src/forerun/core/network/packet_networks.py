"""Networks of packet simulators, whose files Forerun reads: ns-3 as ASTRA-sim drives it, and htsim.

ns-3 reads a file of links (numbers of devices, switches and links; the switches; `one other 200Gbps 0.005ms 0` for each
link). Its configuration names this file as TOPOLOGY_FILE. ns-3 also reads a file of logical dimensions,
{"logical-dims": ["8", "2"]}. htsim reads a fat tree of two or three tiers of switches (Nodes, Podsize, and for each
tier Radix_Down, Radix_Up, Downlink_speed_Gbps, Downlink_Latency_ns, Switch_Latency_ns, Bundle).

Formats: github.com/astra-sim/astra-network-ns3, scratch/common.h; github.com/Broadcom/csg-htsim,
sim/datacenter/fat_tree_topology.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from forerun.common.admission import read_json, read_text
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import Network, NetworkDim
from forerun.core.network.topology.base import MAX_DEVICES, Topology
from forerun.core.network.topology.graph import Cable, Graph

_TOPOLOGY_KEY = "TOPOLOGY_FILE"
_SPEEDS = {"Gbps": 1 / 8, "Mbps": 1 / 8e3, "Tbps": 125.0, "Gb/s": 1 / 8, "Mb/s": 1 / 8e3, "Tb/s": 125.0}
"""unit -> GB/s"""
_DELAYS = {"ms": 1e6, "us": 1e3, "ns": 1.0, "s": 1e9}
_FIGURE = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z/]+)")
_MOST_LINES = 2_000_000
"""also the links of a fat tree"""
_LARGEST = 1e12
"""GB/s of a rate, ns of a delay"""


@dataclass(frozen=True)
class PacketNetwork(Network):
    """A network with the links of a packet simulator; its dimensions are logical, and say how collectives run."""

    graph: Graph | None = None

    def topology(self) -> Topology:
        """Returns the links."""
        assert self.graph is not None
        return self.graph

    def hurried(self) -> PacketNetwork:
        """Returns the network with links as many times as fast as the longest route has links.

        A message that every link passes on whole then takes no longer than one that goes in small packets.
        """
        assert self.graph is not None
        hops = self.graph.most_hops
        cables = [cable._replace(bandwidth_gbps=cable.bandwidth_gbps * hops) for cable in self.graph.cables]
        dims = tuple(dim.scaled(bandwidth=hops) for dim in self.dims)
        return PacketNetwork(dims, self.gib, replace(self.graph, cables=tuple(cables)))


def ns3_network(links: Path, logical: Path) -> PacketNetwork:
    """Reads a network for ns-3: its configuration or its file of links, and the file of logical dimensions.

    Raises ForerunError for files that can't be read, lack something or don't go together.
    """
    sizes = _logical_sizes(logical)
    path, lines = links, _lines(links)
    named = [words for _, words in lines if words[0] == _TOPOLOGY_KEY]
    if named:
        path = _named_file(links, named[0])
        lines = _lines(path)
    return _network(sizes, *_ns3_cables(lines, path, prod(sizes)))


def htsim_network(tree: Path, logical: Network) -> PacketNetwork:
    """Reads the fat tree of an htsim file, on which collectives run by the dimensions of `logical`.

    Raises ForerunError for a file that can't be read or whose numbers of switches don't fit together.
    """
    cables, devices = _tree_cables(_tiers(tree), logical.n_npus, tree)
    return _network([dim.n_npus for dim in logical.dims], cables, devices)


def _network(sizes: Sequence[int], cables: list[Cable], devices: int) -> PacketNetwork:
    slowest, latency = min(cable.bandwidth_gbps for cable in cables), max(cable.latency_ns for cable in cables)
    dims = tuple(NetworkDim("Switch", (size,), slowest, latency) for size in sizes)
    graph = Graph(prod(sizes), devices, tuple(cables), bandwidth_gbps=slowest, latency_ns=latency)
    return PacketNetwork(dims, False, graph)


def _logical_sizes(path: Path) -> list[int]:
    data = read_json(path)
    dims = data.get("logical-dims") if isinstance(data, dict) else None
    texts = [str(size) for size in dims] if isinstance(dims, list) else []
    if not texts or not all(re.fullmatch(r"[1-9][0-9]{0,8}", text) for text in texts):
        raise ForerunError(f'{path}: expected the sizes of logical dimensions, as {{"logical-dims": ["8", "2"]}}')
    sizes = [int(text) for text in texts]
    if not 1 < prod(sizes) <= MAX_DEVICES:
        raise ForerunError(f"{path}: logical-dims make {prod(sizes):,} NPUs; a network has 2 to {MAX_DEVICES:,}")
    return [size for size in sizes if size > 1]


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """Returns the numbers and words of the lines that have any."""
    found = [(number, line.split()) for number, line in enumerate(read_text(path).splitlines(), 1) if line.strip()]
    if not 0 < len(found) <= _MOST_LINES:
        raise ForerunError(f"{path}: it has {len(found):,} lines; a network has 1 to {_MOST_LINES:,}")
    return found


def _named_file(config: Path, words: list[str]) -> Path:
    """Returns the file of links that a configuration names, from where ns-3 runs or from beside the configuration."""
    if len(words) != 2:
        raise ForerunError(f"{config}: {_TOPOLOGY_KEY} names no file")
    named = Path(words[1])
    parts = [part for part in named.parts if part not in ("..", ".", "/")]
    places = [named, config.parent / named]
    places += [folder.joinpath(*parts[k:]) for folder in (config.parent, *config.parents) for k in range(len(parts))]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ForerunError(f"{config}: {_TOPOLOGY_KEY} {words[1]} is neither here nor beside the configuration")
    return found


def _ns3_cables(lines: list[tuple[int, list[str]]], path: Path, npus: int) -> tuple[list[Cable], int]:
    (number, head), *rest = lines
    devices, n_switches, n_links = _whole(head, 3, f"{path}, line {number}", "devices, switches and links")
    if not 1 < devices <= MAX_DEVICES or n_links < 1:
        raise ForerunError(f"{path}, line {number}: {devices:,} devices and {n_links:,} links make no network")
    switches: set[int] = set()
    if n_switches and rest:
        (number, words), *rest = rest
        switches = set(_whole(words, n_switches, f"{path}, line {number}", "the switches"))
    if len(rest) < n_links:
        raise ForerunError(f"{path}: it lists {len(rest):,} links, and its first line says {n_links:,}")
    if npus > devices or switches.intersection(range(npus)):
        raise ForerunError(f"{path}: NPUs are devices 0 to {npus - 1}, and some of them are switches or missing")
    return [_ns3_cable(words, f"{path}, line {number}", devices) for number, words in rest[:n_links]], devices


def _ns3_cable(words: list[str], place: str, devices: int) -> Cable:
    if len(words) < 4:
        raise ForerunError(f"{place}: expected two devices, a rate and a delay, as 0 8 400Gbps 0.0005ms 0")
    one, other = _whole(words[:2], 2, place, "two devices")
    if max(one, other) >= devices or one == other:
        raise ForerunError(f"{place}: a link joins two of the devices 0 to {devices - 1}, got {one} and {other}")
    speed = _amount(words[2], _SPEEDS, place)
    if not speed:
        raise ForerunError(f"{place}: a link needs a rate above 0, got {words[2][:40]!r}")
    return Cable(one, other, speed, _amount(words[3], _DELAYS, place))


def _whole(words: list[str], n: int, place: str, what: str) -> list[int]:
    if len(words) < n or not all(re.fullmatch("[0-9]{1,9}", word) for word in words[:n]):
        raise ForerunError(f"{place}: expected the numbers of {what}, got {' '.join(words)[:60]!r}")
    return [int(word) for word in words[:n]]


def _amount(text: str, units: dict[str, float], place: str) -> float:
    match = _FIGURE.fullmatch(text)
    try:
        number, factor = (float(match[1]), units[match[2]]) if match else (0.0, 0.0)
    except (ValueError, KeyError):
        match = None
    if match is None or number * factor > _LARGEST:
        raise ForerunError(f"{place}: expected a number in {', '.join(units)}, got {text[:40]!r}")
    return number * factor


@dataclass(frozen=True)
class _Tier:
    """The switches of one tier of an htsim file."""

    down: int
    up: int
    speed_gbps: float
    """of a link down, GB/s"""
    latency_ns: float
    """of a link down and the switch above it"""
    bundle: int
    """links to each switch below"""


_TIER_KEYS = ("radix_down", "radix_up", "downlink_speed_gbps", "downlink_latency_ns", "switch_latency_ns", "bundle")
_OTHER_KEYS = ("queue_up", "queue_down", "oversubscribed")
_HEAD_KEYS = ("nodes", "tiers", "podsize")


def _tiers(path: Path) -> tuple[dict[str, int], list[_Tier]]:
    head, tiers = {}, list[dict[str, int]]()
    for number, words in _lines(path):
        key, place = words[0].lower(), f"{path}, line {number}"
        if key.startswith("#"):
            continue
        (value,) = _whole(words[1:], 1, place, f"{key}")
        if key == "tier":
            if value != len(tiers):
                raise ForerunError(f"{place}: tiers follow one another from 0, got tier {value}")
            tiers.append({})
        elif key in _HEAD_KEYS and not tiers:
            head[key] = value
        elif key in (*_TIER_KEYS, *_OTHER_KEYS) and tiers:
            tiers[-1][key] = value
        else:
            raise ForerunError(f"{place}: {words[0]!r} is not a key of an htsim topology here")
    missing = [key for key in _HEAD_KEYS if not head.get(key)]
    missing += [f"tier {k}" for k in range(len(tiers), min(head.get("tiers", 0), 3))]
    for k, tier in enumerate(tiers):
        needed = ["radix_down", "downlink_speed_gbps", "downlink_latency_ns"] + ["radix_up"] * (k < len(tiers) - 1)
        missing += [f"{key} of tier {k}" for key in needed if not tier.get(key)]
    if missing or not 2 <= len(tiers) <= 3 or len(tiers) != head["tiers"]:
        raise ForerunError(f"{path}: an htsim topology has 2 or 3 tiers; missing: {', '.join(missing) or 'none'}")
    return head, [_tier(tier) for tier in tiers]


def _tier(keys: dict[str, int]) -> _Tier:
    latency = keys["downlink_latency_ns"] + keys.get("switch_latency_ns", 0)
    speed = keys["downlink_speed_gbps"] / 8
    return _Tier(keys["radix_down"], keys.get("radix_up", 0), speed, float(latency), keys.get("bundle", 1) or 1)


def _tree_cables(described: tuple[dict[str, int], list[_Tier]], npus: int, path: Path) -> tuple[list[Cable], int]:
    """Returns the links of a fat tree, and how many devices it has: NPUs, then the switches of each tier."""
    head, (tor, agg, *core) = described
    nodes, podsize = head["nodes"], head["podsize"]
    if nodes != npus:
        raise ForerunError(f"{path}: the tree has {nodes:,} nodes, and the network {npus:,} NPUs")
    tors = _share(nodes, tor.down, "nodes by Radix_Down of tier 0", path)
    pods = _share(nodes, podsize, "nodes by Podsize", path)
    of_pod = _share(podsize, tor.down, "Podsize by Radix_Down of tier 0", path)
    aggs = _share(tor.up, agg.bundle, "Radix_Up of tier 0 by Bundle of tier 1", path)
    if of_pod * agg.bundle != agg.down:
        raise ForerunError(
            f"{path}: Radix_Down of tier 1 is {agg.down}, a pod has {of_pod * agg.bundle} links up to it"
        )
    planes = _share(agg.up, core[0].bundle, "Radix_Up of tier 1 by Bundle of tier 2", path) if core else 0
    n_links = nodes + tors * aggs + pods * aggs * planes
    if n_links > _MOST_LINES:
        raise ForerunError(f"{path}: the tree has {n_links:,} links; at most {_MOST_LINES:,} are simulated")
    first_agg, first_core = nodes + tors, nodes + tors + pods * aggs
    cables = [Cable(node, nodes + node // tor.down, tor.speed_gbps, tor.latency_ns) for node in range(nodes)]
    for switch in range(tors):
        above = range(first_agg + switch // of_pod * aggs, first_agg + (switch // of_pod + 1) * aggs)
        cables += [Cable(nodes + switch, each, agg.speed_gbps * agg.bundle, agg.latency_ns) for each in above]
    if not core:
        return cables, first_core
    top = core[0]
    if pods * top.bundle != top.down:
        raise ForerunError(
            f"{path}: Radix_Down of tier 2 is {top.down}, {pods} pods have {pods * top.bundle} links up to it"
        )
    cables += list(_core_cables(top, pods, aggs, planes, first_agg, first_core))
    return cables, first_core + aggs * planes


def _core_cables(top: _Tier, pods: int, aggs: int, planes: int, first_agg: int, first_core: int) -> Iterator[Cable]:
    for pod in range(pods):
        for a in range(aggs):
            for k in range(planes):
                below, above = first_agg + pod * aggs + a, first_core + a * planes + k
                yield Cable(below, above, top.speed_gbps * top.bundle, top.latency_ns)


def _share(whole: int, part: int, what: str, path: Path) -> int:
    if whole % part:
        raise ForerunError(f"{path}: {what}: {whole} is not a multiple of {part}")
    return whole // part
