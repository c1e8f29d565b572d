"""Constants of collectives: inside a node by link, between nodes by fabric (`fabrics.yaml`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import log2

import pydantic
import yaml

from forerun.common.errors import ForerunError


@dataclass(frozen=True, slots=True)
class NodeOp:
    """One collective inside a node, three protocols; times in microseconds, bandwidths in GB/s of bus bandwidth.

    With r = ranks - 1, g = r / (r + kappa) and x the bytes that pass each rank's link:
    a + h r + x / (bw1 g),  a + d2 + h r + x / (bw2 g),  a + d2 + d3 + (h + h3) r + x / (bw3 g).
    """

    a_us: float
    h_us: float
    bw1: float
    d2: float
    bw2: float
    d3: float
    h3: float
    bw3: float
    kappa: float


@dataclass(frozen=True, slots=True)
class NodeCollectives:
    """Collectives inside a node whose links run at `link_gb_s` per GPU and direction; other rates scale with it."""

    link_gb_s: float
    all_reduce: NodeOp
    all_gather: NodeOp
    reduce_scatter: NodeOp
    all_to_all: NodeOp
    source: str


@dataclass(frozen=True, slots=True)
class Protocol:
    """One NCCL protocol between nodes."""

    base_us: float
    node_hop_us: float
    """of a hop inside a node"""
    net_hop_us: float
    """of a hop between nodes, on a fabric of reference latency"""
    rate: float
    """bandwidth as a share of what the fabric sustains"""


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Between nodes: latency base_us + growth_us (ranks / 8)^power; each rank exchanges with every other."""

    base_us: float
    growth_us: float
    power: float


@dataclass(frozen=True, slots=True)
class Crowding:
    """What rings and trees lose on a fabric: nothing over `nodes` nodes or fewer, `loss` with each doubling."""

    nodes: int
    loss: float

    def factor(self, nodes: int) -> float:
        """Time over `nodes` nodes over that without other flows."""
        return 1.0 + self.loss * log2(max(nodes / self.nodes, 1.0))


@dataclass(frozen=True, slots=True)
class HostPath:
    """Bus bandwidth of each GPU where GPUs have no peer access and n of a node send at once through host memory."""

    pair_gb_s: float
    """of two GPUs"""
    power: float
    """n GPUs have (2 / n)^power of that"""

    def share(self, known: int, gpus: int) -> float:
        """What each of `gpus` GPUs gets over what each of `known` gets."""
        return float((known / gpus) ** self.power)


@dataclass(frozen=True, slots=True)
class Fabrics:
    """Everything in `fabrics.yaml`."""

    ring: tuple[Protocol, ...]
    tree: tuple[Protocol, ...]
    all_to_all: AllToAll
    reference_latency_us: float
    """of the fabric that the hops were measured on; a slower one adds its difference to every hop"""
    efficiency: dict[str, float]
    """link kind -> share of the wire rate that large collectives sustain"""
    efficiency_other: float
    crowding: Crowding
    host_path: HostPath
    in_node: dict[str, NodeCollectives]
    source: dict[str, str]

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")


@cache
def fabrics() -> Fabrics:
    """The shipped constants.

    Raises:
        ForerunError: `fabrics.yaml` has an unknown key or a value of the wrong type.
    """
    text = (resources.files("forerun.core.network") / "fabrics.yaml").read_text(encoding="utf-8")
    try:
        return pydantic.TypeAdapter(Fabrics).validate_python(yaml.safe_load(text))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ForerunError(f"fabrics.yaml: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
