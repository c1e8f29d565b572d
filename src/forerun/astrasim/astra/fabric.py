"""Converts a network to the engine's fabric: closed-form distances or links."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.astrasim.astra.reference import REFERENCE
from forerun.astrasim.messages.fabric import DIMENSION, HOPS_CONSTANT, HOPS_RING, HOPS_TABLE, Fabric
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import Network, bytes_per_ns

_LARGEST_TABLE = 4096
_CONSTANT_HOPS: dict[str, int] = REFERENCE.constant_hops


def has_closed_form(network: Network) -> bool:
    """Returns whether ASTRA-sim times every dimension in closed form, in which no message waits for another."""
    return all(dim.topology == "Ring" or dim.topology in _CONSTANT_HOPS for dim in network.dims)


def fabric_of(network: Network, aware: bool, mirrored_ranks: Sequence[int] = (), block: int = 0) -> Fabric:
    """Returns the fabric of `network`, congestion-aware or not. If given, `mirrored_ranks` stand for all ranks, or the
    first `block` ranks do.

    Raises ForerunError if the network is too large for a table of its routes.
    """
    nothing = np.zeros(0, np.float64)
    mirrored = len(mirrored_ranks) > 0
    rank = np.array(mirrored_ranks if mirrored else range(block or network.n_npus), np.int64)
    if aware:
        topology = network.topology()
        links = topology.links()
        return Fabric(
            network.n_npus,
            rank,
            mirrored,
            block,
            np.zeros(0, DIMENSION),
            np.zeros(0, np.int32),
            topology.next_link(block or None),
            links.dst.astype(np.int32),
            links.latency_ns,
            bytes_per_ns(links.bandwidth_gbps, gib=network.gib),
        )
    dimension, tables = np.zeros(len(network.dims), DIMENSION), [np.zeros(0, np.int32)]
    stride = 1
    for d, dim in enumerate(network.dims):
        rule, hops = HOPS_CONSTANT, _CONSTANT_HOPS.get(dim.topology, 0)
        if dim.topology == "Ring":
            rule = HOPS_RING
        elif hops == 0:
            senders = min(block or dim.n_npus, dim.n_npus)
            if senders * dim.n_npus > _LARGEST_TABLE**2:
                raise ForerunError(f"{dim.topology} of {dim.n_npus} ranks is too large for a table of its distances")
            rule, hops = HOPS_TABLE, sum(len(table) for table in tables)
            a, b = np.divmod(np.arange(senders * dim.n_npus, dtype=np.int32), dim.n_npus)
            tables.append(network.dim_topology(d).hop_counts(a, b).astype(np.int32))
        dimension[d] = (dim.n_npus, stride, rule, hops, dim.latency_ns, network.bytes_per_ns(d))
        stride *= dim.n_npus
    no_links = np.zeros((0, 0), np.int32)
    return Fabric(
        network.n_npus,
        rank,
        mirrored,
        block,
        dimension,
        np.concatenate(tables),
        no_links,
        np.zeros(0, np.int32),
        nothing,
        nothing,
    )
