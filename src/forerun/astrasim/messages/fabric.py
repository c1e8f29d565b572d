"""Messages between ranks: how long one takes, and what it waits for.

Two fidelities behind one call. Congestion-unaware: a closed form of size and distance, messages never meet.
Congestion-aware: every directed link is a queue, first come first served, and a message is stored and forwarded whole
at every device (`floor(size / bandwidth)` ns on the link, at the next device after
`floor(latency + size / bandwidth)` ns). Both are those of the astra-network-analytical library.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.astrasim.messages.calendar import NOW, OVERFLOW, Calendar, Records, schedule
from forerun.common.jit import inlined, kernel
from forerun.core.program.types import F64, I32, I64

HOPS_CONSTANT = 0
HOPS_RING = 1
HOPS_TABLE = 2

DIMENSION = np.dtype(
    [
        ("n", np.int64),
        ("stride", np.int64),
        ("hop_rule", np.int64),
        ("hops", np.int64),  # HOPS_CONSTANT: how many; HOPS_TABLE: where its (n, n) table starts
        ("latency_ns", np.float64),
        ("bytes_per_ns", np.float64),
    ]
)

MESSAGE = np.dtype(
    [
        ("to", np.int64),  # actor that gets it
        ("target", np.int64),  # rank it is addressed to
        ("communicator", np.int64),  # of a collective; -1: a send node of the program
        ("stream", np.int64),  # number of the stream in its communicator; of a send: its match
        ("lane", np.int64),  # identifies sender and receiver
        ("size", np.int64),
        ("device", np.int64),
        ("link", np.int64),
        ("next", np.int64),
    ]
)


class Fabric(NamedTuple):
    """The network, as the kernels see it. Without links it is congestion-unaware."""

    n_ranks: int
    rank: I64
    """(actors,) rank of each actor"""
    mirrored: bool
    """every actor stands for all ranks of its collectives: what it sends, it gets"""
    dimension: Records
    hop_table: I32
    next_link: I32
    """(devices, ranks), (0, 0) for congestion-unaware"""
    link_to: I32
    link_latency_ns: F64
    link_bytes_per_ns: F64


class Traffic(NamedTuple):
    """Messages under way."""

    message: Records
    """pool; [0] is never used as a message: its `next` heads the free list, its `link` is the last one ever used"""
    link_busy: npt.NDArray[np.bool_]
    link_head: I64
    link_tail: I64
    link_used_ns: I64
    """time each link has transmitted"""
    link_bytes: I64


ARRIVAL = np.int64(1)
"""event: a message is at its receiver (unaware) or at the next device (aware)"""
LINK_FREE = np.int64(2)


def new_traffic(fabric: Fabric, capacity: int) -> Traffic:
    message = np.zeros(capacity, MESSAGE)
    n_links = len(fabric.link_to)
    empty = [np.zeros(n_links, np.int64) for _ in range(4)]
    return Traffic(message, np.zeros(n_links, np.bool_), *empty)


@kernel
def delay_ns(fabric: Fabric, source: int, target: int, size: int) -> int:
    """Congestion-unaware delay: only the lowest dimension in which the two ranks differ counts."""
    for d in range(len(fabric.dimension)):
        dimension = fabric.dimension[d]
        a = (source // dimension.stride) % dimension.n
        b = (target // dimension.stride) % dimension.n
        if a != b:
            hops = dimension.hops
            if dimension.hop_rule == HOPS_RING:
                clockwise = (b - a) % dimension.n
                hops = min(clockwise, dimension.n - clockwise)
            elif dimension.hop_rule == HOPS_TABLE:
                hops = fabric.hop_table[dimension.hops + a * dimension.n + b]
            return int(hops * dimension.latency_ns + size / dimension.bytes_per_ns)
    return 0


@kernel
def new_message(
    calendar: Calendar, traffic: Traffic, to: int, target: int, communicator: int, stream: int, lane: int, size: int
) -> int:
    """A message from the pool, 0 if there is none left."""
    message = traffic.message
    m = message[0].next
    if m > 0:
        message[0].next = message[m].next
    else:
        m = message[0].link + 1
        if m == len(message):
            calendar.clock[OVERFLOW] = 1
            return 0
        message[0].link = m
    message[m].to = to
    message[m].target = target
    message[m].communicator = communicator
    message[m].stream = stream
    message[m].lane = lane
    message[m].size = size
    return int(m)


@kernel
def free_message(traffic: Traffic, m: int) -> None:
    traffic.message[m].next = traffic.message[0].next
    traffic.message[0].next = m


@kernel
def send(calendar: Calendar, fabric: Fabric, traffic: Traffic, m: int, source: int) -> None:
    """Send message `m` from rank `source` to its target."""
    message = traffic.message[m]
    if len(fabric.link_to) == 0:
        arrival = calendar.clock[NOW] + delay_ns(fabric, source, message.target, message.size)
        schedule(calendar, arrival, ARRIVAL, m)
    else:
        message.device = source
        _queue(calendar, fabric, traffic, m)


@kernel
def _queue(calendar: Calendar, fabric: Fabric, traffic: Traffic, m: int) -> None:
    message = traffic.message[m]
    link = fabric.next_link[message.device, message.target]
    message.link = link
    if not traffic.link_busy[link]:
        _transmit(calendar, fabric, traffic, m)
        return
    message.next = 0
    if traffic.link_head[link] == 0:
        traffic.link_head[link] = m
    else:
        traffic.message[traffic.link_tail[link]].next = m
    traffic.link_tail[link] = m


@kernel
def _transmit(calendar: Calendar, fabric: Fabric, traffic: Traffic, m: int) -> None:
    message = traffic.message[m]
    link = message.link
    traffic.link_busy[link] = True
    serialization_ns = message.size / fabric.link_bytes_per_ns[link]
    now = calendar.clock[NOW]
    schedule(calendar, now + int(fabric.link_latency_ns[link] + serialization_ns), ARRIVAL, m)
    schedule(calendar, now + int(serialization_ns), LINK_FREE, link)
    traffic.link_used_ns[link] += int(serialization_ns)
    traffic.link_bytes[link] += message.size


@inlined
def forward(calendar: Calendar, fabric: Fabric, traffic: Traffic, m: int) -> bool:
    """Message `m` has reached a device: whether it is its receiver; else it goes on."""
    if len(fabric.link_to) == 0:
        return True
    message = traffic.message[m]
    message.device = fabric.link_to[message.link]
    if message.device == message.target:
        return True
    _queue(calendar, fabric, traffic, m)
    return False


@inlined
def free_link(calendar: Calendar, fabric: Fabric, traffic: Traffic, link: int) -> None:
    """Link `link` has sent a message: it takes the next one that waits."""
    traffic.link_busy[link] = False
    m = traffic.link_head[link]
    if m > 0:
        traffic.link_head[link] = traffic.message[m].next
        _transmit(calendar, fabric, traffic, m)
