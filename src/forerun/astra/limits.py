"""What a simulation of a collective may take: messages, memory, and times that fit in 64 bits."""

from __future__ import annotations

from forerun.astra.collectives import CollectiveTables
from forerun.engine import state as machine
from forerun.errors import ForerunError
from forerun.network.network_file import Network

MOST_RANKS = 1 << 20
MOST_MESSAGES = 4_000_000_000
_MOST_CHUNKS = 10_000_000
"""of all simulated ranks: 4 GB"""
_MOST_QUEUE_STEPS = 20_000_000_000
_MOST_BYTES = 1 << 52
_MOST_NS = 1 << 62


def check_collective(network: Network, tables: CollectiveTables, call: int, n_actors: int, aware: bool) -> None:
    """Refuse a call that `n_actors` ranks make at once and that would take too long, or too much memory.

    The bounds are far above what ends within minutes, so they need not be sharp.

    Raises:
        ForerunError: too many messages or chunks, or times or sizes that do not fit.
    """
    phases, n_chunks = tables.phases_of(call), tables.n_chunks(call)
    if n_actors * n_chunks > _MOST_CHUNKS or n_actors * n_chunks**2 * len(phases) > _MOST_QUEUE_STEPS:
        raise ForerunError(
            f"{n_chunks:,} chunks on each of {n_actors:,} simulated ranks are too many; use fewer splits"
        )
    of_rank, largest, slowest_ns = 0, 0, 0.0
    for phase in phases:
        custom = phase["algorithm"] == machine.CUSTOM
        of_rank += n_chunks * (tables.most_steps if custom else max(phase["n_messages"], 2))
        message = tables.largest_step if custom else phase["message"] * phase["n"]
        largest = max(largest, message)
        slowest_ns = max(slowest_ns, message if custom else 0, phase["endpoint_ns"])
    n_messages = n_actors * of_rank
    if n_messages > MOST_MESSAGES:
        raise ForerunError(f"it takes {n_messages:,} messages, more than the {MOST_MESSAGES:,} that are simulated")
    if largest > _MOST_BYTES:
        raise ForerunError(f"messages of up to {largest:,} bytes are too large")
    latency_ns = network.n_npus * max(dim.latency_ns for dim in network.dims)
    bytes_per_ns = min(network.bytes_per_ns(d) for d in range(len(network.dims)))
    slowest_ns += latency_ns + largest / bytes_per_ns
    if tables.system.memory_bytes_per_s:
        slowest_ns += 3e9 * largest / tables.system.memory_bytes_per_s
    together = n_messages if aware or tables.most_steps else of_rank
    if slowest_ns * together > _MOST_NS:
        raise ForerunError("it takes longer than a simulation can count in ns; look at the bandwidths and latencies")
