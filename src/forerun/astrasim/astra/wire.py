"""Computes a lower bound of the time in which the links of a rank carry the bytes of a collective.

Without queues a message passes every other one, so that with many messages at once a link carries more than its
bandwidth. The time here is that of the busiest link if its bytes follow one another without a gap. It is exact where
all links of a dimension are equally busy and never idle, and a lower limit elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.astrasim.astra.collectives import CollectiveTables, Phase
from forerun.astrasim.astra.symmetry import distances
from forerun.astrasim.messages import state as codes
from forerun.core.network.network_file import Network, NetworkDim


def wire_ns(network: Network, tables: CollectiveTables, call: int, groups: Sequence[tuple[int, ...]]) -> int | None:
    """Returns the time of the busiest link of a call that all `groups` make at once.

    Trees, custom algorithms and exchanges round a ring load links unevenly, so that they have no rule: None.
    """
    busy_ns: dict[tuple[int, bool], float] = {}
    for phase in tables.phases_of(call):
        loads = _group_loads(network, phase, groups) if phase["stride"] == 0 else _loads(network, phase, tables)
        if loads is None:
            return None
        for dim, load in loads:
            for backward in _ways(network.dims[dim], phase):
                way = dim, backward
                busy_ns[way] = busy_ns.get(way, 0.0) + tables.n_chunks(call) * load / network.bytes_per_ns(dim)
    return int(max(busy_ns.values(), default=0.0))


def _ways(dim: NetworkDim, phase: Phase) -> tuple[bool, ...]:
    """Returns the directions in which a phase loads links: a logical ring that goes backward has links of its own."""
    if phase["algorithm"] != codes.RING:
        return False, True
    return (phase["pick"] == codes.PICK_LAST_HALF and dim.topology != "Switch",)


def _loads(network: Network, phase: Phase, tables: CollectiveTables) -> list[tuple[int, float]] | None:
    """Returns the dimension of a phase, with the bytes that a chunk puts on one of its links."""
    reached = phase["stride"], phase["stride"] * phase["n"]
    dims = [d for d, stride in enumerate(network.strides) if reached[0] <= stride < reached[1]]
    load = _load(network.dims[dims[0]], phase, tables) if len(dims) == 1 else None
    return None if load is None else [(dims[0], load)]


def _load(dim: NetworkDim, phase: Phase, tables: CollectiveTables) -> float | None:
    n, message, n_messages = phase["n"], phase["message"], phase["n_messages"]
    on_ring, each_other = dim.topology == "Ring", dim.topology == "FullyConnected"
    if phase["algorithm"] == codes.RING:
        return float(n_messages * message)
    if phase["algorithm"] == codes.DIRECT:
        rounds, away = n_messages / (n - 1), np.arange(1, n)
        hops = np.minimum(away, n - away).sum() / 2 if on_ring else 1 if each_other else n - 1
        return float(rounds * message * hops)
    if phase["algorithm"] == codes.HALVING_DOUBLING and not on_ring:
        sizes, distance = (column[phase["steps"] :][:n_messages] for column in tables.exchanges())
        return float(np.bincount(distance, sizes).max() if each_other else sizes.sum())
    return None


def _group_loads(network: Network, phase: Phase, groups: Sequence[tuple[int, ...]]) -> list[tuple[int, float]] | None:
    """Returns the mean load of the links round which the rings of groups go."""
    if phase["algorithm"] != codes.RING:
        return None
    source = np.concatenate([np.array(group) for group in groups])
    target = np.concatenate([np.roll(np.array(group), -1) for group in groups])
    found = []
    for d, dim in enumerate(network.dims):
        seen = distances(network, source, target)
        hops = seen[seen[:, 0] == d, 1].sum() if dim.topology == "Ring" else (seen[:, 0] == d).sum()
        if hops:
            found.append((d, float(phase["n_messages"] * phase["message"] * hops / network.n_npus)))
    return found
