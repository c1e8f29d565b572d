"""Decides whether one rank can stand for all: all must see the same distances in every phase of a collective.

Then a message arrives from a rank's predecessor exactly when its own message arrives at its successor, so the engine's
mirrored fabric delivers each message to its sender. Congestion and trees break the symmetry. Where ranks differ, one
block of them may stand for all, also with queues at links.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.astrasim.astra.collectives import Phase
from forerun.astrasim.messages import state as codes
from forerun.core.network.network_file import Network, NetworkDim
from forerun.core.program.types import I64

_ANYWHERE_ALIKE = ("Ring", "FullyConnected", "Switch", "Torus2D", "Torus3D")
"""topologies that look the same from every rank"""
_GRIDS = ("Torus2D", "Torus3D")
"""those whose numbers run through a grid"""


def is_symmetric(network: Network, phases: Sequence[Phase], groups: Sequence[tuple[int, ...]]) -> bool:
    """Returns whether all ranks of all `groups` take the same time for `phases` from a common start."""
    for phase in phases:
        if phase["algorithm"] in (codes.DOUBLE_BINARY_TREE, codes.CUSTOM):
            return False
        if phase["stride"] == 0:
            if not _equal_neighbours(network, groups):
                return False
            continue
        dims = _dims_of(network, phase)
        if len(dims) > 1 or any(dim.topology not in _ANYWHERE_ALIKE for dim in dims):
            return False
        if phase["algorithm"] == codes.HALVING_DOUBLING and not _equal_partners(network, phase):
            return False
        if dims and dims[0].topology in _GRIDS and not _equal_on_grid(network, phase):
            return False
    return True


def repeating_block(network: Network, phases: Sequence[Phase], aware: bool) -> int:
    """Returns how many ranks stand for all in a collective of all ranks: those a block apart do the same; 0 for none.

    Shifting every rank by the block shifts the outermost axis of the network by one and keeps distances, links and
    routes. The algorithms of `phases` have to shift with it.
    """
    outer = network.dims[-1]
    if outer.topology not in (_ANYWHERE_ALIKE if not aware else (*_GRIDS, "Ring", "FullyConnected")):
        return 0
    if aware and network.topology().n_devices != network.n_npus:
        return 0
    longest = network.dim_topology(len(network.dims) - 1).sizes[-1] if outer.topology in _GRIDS else outer.n_npus
    block = network.n_npus // longest
    for phase in phases:
        shifts = phase["algorithm"] in (codes.RING, codes.DIRECT)
        inside = phase["stride"] * phase["n"] <= block and phase["algorithm"] == codes.HALVING_DOUBLING
        if phase["stride"] == 0 or not (shifts or inside):
            return 0
    return block


def _dims_of(network: Network, phase: Phase) -> list[NetworkDim]:
    """Returns the dimensions of the network through which a logical ring runs."""
    reached, dims = 1, []
    for dim in network.dims:
        if phase["stride"] <= reached < phase["stride"] * phase["n"]:
            dims.append(dim)
        reached *= dim.n_npus
    return dims


def _equal_neighbours(network: Network, groups: Sequence[tuple[int, ...]]) -> bool:
    """Returns whether all ranks have the same distance (dimension and hops) to the next rank of their group's ring."""
    source = np.concatenate([np.array(group) for group in groups])
    target = np.concatenate([np.roll(np.array(group), -1) for group in groups])
    return bool(len(np.unique(distances(network, source, target), axis=0)) <= 1)


def _equal_on_grid(network: Network, phase: Phase) -> bool:
    """Returns whether ranks of a torus, numbered row by row, are alike: a ring takes another way at the ends of rows,
    and direct messages see their distances in another order."""
    if phase["algorithm"] != codes.RING:
        return bool(phase["algorithm"] == codes.HALVING_DOUBLING)
    ranks = np.arange(phase["n"]) * phase["stride"]
    return bool(len(np.unique(distances(network, ranks, np.roll(ranks, -1)), axis=0)) <= 1)


def _equal_partners(network: Network, phase: Phase) -> bool:
    """Returns whether in every step all ranks have the same distance to their exchange partners."""
    n, distance = phase["n"], 1
    index = np.arange(n)
    while distance < n:
        partner = np.where((index // distance) % 2 == 0, index + distance, index - distance) % n
        if len(np.unique(distances(network, index * phase["stride"], partner * phase["stride"]), axis=0)) > 1:
            return False
        distance *= 2
    return True


def distances(network: Network, source: I64, target: I64) -> I64:
    """Returns (n, 2): the lowest dimension in which two ranks differ, and the hops in it."""
    dimension, hops = np.full(len(source), -1), np.zeros(len(source), np.int64)
    stride = 1
    for d, dim in enumerate(network.dims):
        a, b = (source // stride) % dim.n_npus, (target // stride) % dim.n_npus
        here = (a != b) & (dimension < 0)
        if here.any():
            dimension[here] = d
            hops[here] = network.dim_topology(d).hop_counts(a[here].astype(np.int32), b[here].astype(np.int32))
        stride *= dim.n_npus
    return np.stack([dimension, hops], axis=1)


def delays_ns(network: Network, source: I64, target: I64, size: I64) -> I64:
    """Returns the congestion-unaware delay of each message."""
    seen = distances(network, source, target)
    latency_ns = np.array([dim.latency_ns for dim in network.dims])
    bytes_per_ns = np.array([network.bytes_per_ns(d) for d in range(len(network.dims))])
    delay: I64 = (seen[:, 1] * latency_ns[seen[:, 0]] + size / bytes_per_ns[seen[:, 0]]).astype(np.int64)
    return delay
