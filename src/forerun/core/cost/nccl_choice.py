"""The algorithm and the protocol that NCCL chooses for the collectives of a cluster, and their time, by size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.common.errors import ForerunError, UnknownName
from forerun.common.units import GIGA
from forerun.core.cost.profile import load_profile
from forerun.core.network.formulas import passes
from forerun.core.network.host_path import host_path_s_per_byte
from forerun.core.network.nccl import algorithms, chosen, collective_s
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import Collective
from forerun.describe.cluster.types import Cluster

NCCL_KINDS = {kind.name.lower(): kind for kind in Collective if kind != Collective.NONE}
_HOST = "through host memory"


@dataclass(frozen=True)
class NcclChoice:
    """One size of a collective."""

    size_bytes: int
    algorithm: str
    """under NCCL's name: Ring, Tree, NVLS, NVLSTree, CollNet, or P2P for sends and receives"""
    protocol: str
    """LL, LL128 or Simple"""
    time_s: float
    algbw_gb_s: float
    busbw_gb_s: float


def nccl_choices(kind: str, sizes: Sequence[int], cluster: Cluster, n_gpus: int) -> list[NcclChoice]:
    """Returns NCCL's choice for a collective of each size among `n_gpus` neighbours of `cluster`.

    Raises ForerunError for an unknown collective, fewer than two GPUs, or more than the cluster joins.
    """
    if kind not in NCCL_KINDS:
        raise UnknownName("collective", kind, list(NCCL_KINDS))
    if n_gpus < 2:
        raise ForerunError(f"collective: --gpus is {n_gpus}, and a collective needs at least 2")
    if cluster.max_gpus is not None and n_gpus > cluster.max_gpus:
        raise ForerunError(f"{cluster.name} joins at most {cluster.max_gpus:,} GPUs, not {n_gpus:,}")
    group = CommGroup.on_mesh("dp", n_gpus, 1, cluster.node_size or n_gpus)
    return [_choice(NCCL_KINDS[kind], size, group, cluster) for size in sizes]


def _choice(kind: Collective, size: int, group: CommGroup, cluster: Cluster) -> NcclChoice:
    measured = load_profile(cluster.device.cost_profile).collectives
    time_s = float(collective_s(kind, np.array(float(size)), group, cluster, measured))
    least_s = size * host_path_s_per_byte(kind, group, cluster, group.size)
    found = algorithms(kind, group.nodes, group.ranks_per_node, cluster, measured)
    algorithm, protocol = chosen(found, float(size))
    if least_s > time_s:
        time_s, protocol = least_s, _HOST
    algbw = size / time_s / GIGA
    return NcclChoice(size, algorithm.name, protocol, time_s, algbw, algbw * passes(kind, group.size))
