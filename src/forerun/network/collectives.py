"""Time of NCCL collectives by how their group lies on the nodes.

A collective is a few straight lines (latency + bytes / bandwidth), one for each protocol or algorithm, joined by a
smooth minimum: NCCL picks the fastest. Inside a node the lines are fitted to measurements of the device; across
nodes they follow NCCL's own tuning model (src/graph/tuning.cc) with the fabric's measured efficiency.

Bytes are the full buffer (nccl-tests' convention). Every line rises with bytes and with ranks, so does the minimum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

import numpy as np
import yaml

from forerun.cluster.types import Cluster, Link
from forerun.cost.device_profile import CollectiveProfile, ProtocolLines, load_profile
from forerun.errors import ForerunError
from forerun.program.groups import CommGroup
from forerun.program.types import Collective

_SHARPNESS = 8
"""exponent of the smooth minimum"""

_MEASURED = {
    Collective.ALL_REDUCE: "all_reduce",
    Collective.ALL_GATHER: "all_gather",
    Collective.REDUCE_SCATTER: "reduce_scatter",
    Collective.ALL_TO_ALL: "all_to_all",
    Collective.BROADCAST: "all_gather",
}


@dataclass(frozen=True, slots=True)
class Lines:
    """Latency in microseconds and microseconds per byte of every way to run one collective."""

    latency_us: tuple[float, ...]
    us_per_byte: tuple[float, ...]

    def time_us(self, size_bytes: float) -> float:
        """Smooth minimum over the lines."""
        times = [a + b * size_bytes for a, b in zip(self.latency_us, self.us_per_byte, strict=True)]
        fastest = min(times)
        spread = sum((fastest / t) ** _SHARPNESS for t in times)
        return float(fastest * spread ** (-1 / _SHARPNESS))


@lru_cache(maxsize=1)
def _across() -> Any:
    return yaml.safe_load((resources.files("forerun.network") / "across_nodes.yaml").read_text(encoding="utf-8"))


def collective_us(kind: Collective, size_bytes: float, group: CommGroup, cluster: Cluster) -> float:
    """Microseconds of one collective of `size_bytes` over `group`; 0 for a single rank.

    Raises:
        ForerunError: the group spans nodes and the cluster has no link between nodes.
    """
    if group.size <= 1 or size_bytes <= 0:
        return 0.0
    return _lines(kind, group, cluster.links, cluster.device.cost_profile).time_us(size_bytes)


def p2p_us(size_bytes: float, group: CommGroup, cluster: Cluster) -> float:
    """Microseconds of one transfer between neighbours of `group`."""
    link = _outer(cluster.links) if group.nodes > 1 else cluster.links[0]
    fabric = _fabric(link)
    return float(fabric["step_us"][2] + 2.0 + size_bytes / (fabric["efficiency"] * link.bytes_per_s) * 1e6)


def _outer(links: tuple[Link, ...]) -> Link:
    if len(links) < 2:
        raise ForerunError("the plan spans several nodes, but the cluster has no link between nodes (add inter_node)")
    return links[1]


def _fabric(link: Link) -> Any:
    kinds = _across()["kinds"]
    if link.kind not in kinds:
        raise ForerunError(f"network: no figures for links of kind {link.kind!r}; known: {', '.join(kinds)}")
    return kinds[link.kind]


@lru_cache(maxsize=4096)
def _lines(kind: Collective, group: CommGroup, links: tuple[Link, ...], profile: str) -> Lines:
    inside = load_profile(profile).collectives
    if group.nodes == 1:
        return _inside_node(kind, group.size, links[0], inside)
    return _across_nodes(kind, group, links[0], _outer(links), inside)


def _share(kind: Collective, n: int) -> float:
    """Bytes that a rank's link carries over the bytes of the buffer (nccl-tests, PERFORMANCE.md)."""
    return (2 if kind == Collective.ALL_REDUCE else 1) * (n - 1) / n


def _inside_node(kind: Collective, n: int, link: Link, profile: CollectiveProfile) -> Lines:
    lines: ProtocolLines = getattr(profile, _MEASURED[kind])
    hops = n - 1
    ramp = hops / (hops + lines.kappa)
    scale = link.bytes_per_s / 1e9 / profile.link_gb_s
    slope = _share(kind, n) / (ramp * scale) / 1e3
    base = lines.a_us + lines.h_us * hops
    return Lines(
        (base, base + lines.d2_us, base + lines.d2_us + lines.d3_us + lines.h3_us * hops),
        (slope / lines.bw1, slope / lines.bw2, slope / lines.bw3),
    )


def _across_nodes(kind: Collective, group: CommGroup, near: Link, far: Link, profile: CollectiveProfile) -> Lines:
    data, fabric = _across(), _fabric(far)
    n, nodes, per_node = group.size, group.nodes, group.ranks_per_node
    wire = far.bytes_per_s * fabric["efficiency"] / 1e6
    lines: ProtocolLines = getattr(profile, _MEASURED[kind])
    inside = lines.bw3 * near.bytes_per_s / profile.link_gb_s / 1e6
    if kind == Collective.ALL_TO_ALL:
        slope = max((per_node - 1) / n / inside, (n - per_node) / n / wire)
        return Lines((data["base_us"][1] + data["all_to_all_us_per_node"] * nodes,), (slope,))
    rounds = 2 if kind == Collective.ALL_REDUCE else 1
    ring = rounds * max((nodes - 1) / nodes / (wire * per_node), (n - 1) / n / inside if per_node > 1 else 0.0)
    latency, slopes = [], []
    for protocol in range(3):
        step = nodes * fabric["step_us"][protocol] + (n - nodes) * data["near_step_us"][protocol]
        latency.append(data["base_us"][protocol] + rounds * step)
        slopes.append(ring / data["bandwidth_share"][protocol])
    if kind == Collective.ALL_REDUCE:  # a tree over the nodes: logarithmic latency at half the bandwidth
        hops = (per_node - 1) * data["near_step_us"][2] + math.ceil(math.log2(nodes)) * fabric["step_us"][2]
        latency.append(data["base_us"][2] + 2 * hops)
        slopes.append(ring / 2 / data["tree_share"] * np.clip(2 * (nodes - 1) / nodes, 1.0, 1.25))
    return Lines(tuple(latency), tuple(float(s) for s in slopes))
