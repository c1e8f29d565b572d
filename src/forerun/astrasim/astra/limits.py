"""Limits of a simulation: messages, memory, and times that fit in 64 bits.

Work near the limits takes much longer than minutes, so they need not be sharp.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from forerun.astrasim.astra.collectives import CollectiveTables
from forerun.astrasim.messages.state import CUSTOM, DIRECT, STREAM
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import Network

MOST_RANKS = 1 << 20
MOST_MESSAGES = 4_000_000_000
_MOST_TABLE_BYTES = 1 << 33
_MOST_QUEUE_STEPS = 20_000_000_000
"""a chunk that joins a queue passes all chunks before it"""
_MOST_BYTES = 1 << 52
_MOST_NS = 1 << 62


def check_work(calls: Mapping[int, int], tables: CollectiveTables, n_actors: int) -> None:
    """Checks the work of collectives. `calls` has the number of times that the `n_actors` ranks make each call.

    Raises ForerunError if there are too many messages or chunks.
    """
    width = STREAM.itemsize + 8 * (tables.most_phases + tables.n_queues * len(tables.dims))
    steps = sum(times * tables.n_chunks(call) ** 2 * tables.n_phases(call) for call, times in calls.items())
    if 2 * n_actors * tables.most_chunks * width > _MOST_TABLE_BYTES or steps > _MOST_QUEUE_STEPS:
        raise ForerunError(
            f"{tables.most_chunks:,} chunks on each of {n_actors:,} simulated ranks are too many; use fewer splits"
        )
    n_messages = sum(times * tables.n_messages(call) for call, times in calls.items())
    if n_messages > MOST_MESSAGES:
        raise ForerunError(f"it takes {n_messages:,} messages, more than the {MOST_MESSAGES:,} that are simulated")


def check_hops(network: Network, tables: CollectiveTables, call: int, n_actors: int) -> None:
    """Checks how many links the messages of a call of all ranks pass, which `n_actors` ranks make with queues.

    Raises ForerunError if there are too many.
    """
    direct = [
        phase for phase in tables.phases_of(call) if phase["algorithm"] == DIRECT and phase["n"] == network.n_npus
    ]
    if not direct:
        return
    others = np.arange(1, network.n_npus, dtype=np.int32)
    hops = network.topology().hop_counts(np.zeros_like(others), others).mean()
    passed = int(n_actors * tables.n_chunks(call) * sum(phase["n_messages"] for phase in direct) * hops)
    if passed > MOST_MESSAGES:
        raise ForerunError(f"its messages pass {passed:,} links, more than the {MOST_MESSAGES:,} that are simulated")


def check_times(network: Network, tables: CollectiveTables, call: int, n_actors: int, aware: bool) -> None:
    """Checks that sizes and times of a call, which `n_actors` ranks make at once, can't overflow.

    Raises ForerunError if sizes or times are too large.
    """
    largest, slowest_ns = 0, 0.0
    for phase in tables.phases_of(call):
        custom = phase["algorithm"] == CUSTOM
        message = tables.largest_step if custom else phase["message"] * phase["n"]
        largest = max(largest, message)
        slowest_ns = max(slowest_ns, message if custom else 0, phase["endpoint_ns"])
    if largest > _MOST_BYTES:
        raise ForerunError(f"messages of up to {largest:,} bytes are too large")
    latency_ns = network.n_npus * max(dim.latency_ns for dim in network.dims)
    bytes_per_ns = min(network.bytes_per_ns(d) for d in range(len(network.dims)))
    slowest_ns += latency_ns + largest / bytes_per_ns
    if tables.system.memory_bytes_per_s:
        slowest_ns += 3e9 * largest / tables.system.memory_bytes_per_s
    in_turn = n_actors if aware or tables.most_steps else 1
    if slowest_ns * in_turn * tables.n_messages(call) > _MOST_NS:
        raise ForerunError("it takes longer than a simulation can count in ns; check the bandwidths and latencies")
