"""Messages between ranks, as the astra-network-analytical library times them.

The congestion-unaware fabric is a closed form of size and distance, in which messages never meet. In the
congestion-aware fabric every directed link is a queue (first come, first served), and every device stores and forwards
a message whole: the link is busy for `floor(size / bandwidth)` ns, and the message reaches the next device after
`floor(latency + size / bandwidth)` ns.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.astrasim.messages.calendar import NOW, OVERFLOW, TIE, Calendar, Records, schedule
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
        ("hops", np.int64),  # HOPS_CONSTANT: their number; HOPS_TABLE: start of the (n, n) table
        ("latency_ns", np.float64),
        ("bytes_per_ns", np.float64),
    ]
)

MESSAGE = np.dtype(
    [
        ("to", np.int64),  # actor that receives it
        ("target", np.int64),  # rank that it is addressed to
        ("communicator", np.int64),  # of its collective; -1 for a send node of the program
        ("stream", np.int64),  # number of the stream in its communicator; for a send node, its pair in Matches
        ("route", np.int64),  # identifies sender and receiver
        ("size", np.int64),
        ("device", np.int64),
        ("link", np.int64),
        ("next", np.int64),
    ]
)


class Fabric(NamedTuple):
    """The network in tables for the kernels. A fabric without links is congestion-unaware."""

    n_ranks: int
    rank: I64
    """(actors,) rank of each actor"""
    mirrored: bool
    """whether every actor stands for all ranks of its collectives, so that it receives its own messages"""
    block: int
    """if above 0, the ranks below it stand for all: ranks this far apart do the same at the same time"""
    dimension: Records
    hop_table: I32
    next_link: I32
    """(devices, ranks) next link on the way to a rank, of the devices of the block where there is one; (0, 0) if
    congestion-unaware"""
    link_to: I32
    link_latency_ns: F64
    link_bytes_per_ns: F64


class Traffic(NamedTuple):
    """Messages under way, and the state of every link."""

    message: Records
    """pool; entry 0 is not a message: its `next` is the first free entry, its `link` the last entry ever used"""
    link_busy: npt.NDArray[np.bool_]
    link_head: I64
    link_tail: I64
    link_used_ns: I64
    """time that each link has been transmitting"""
    link_bytes: I64
    link_asked_ns: I64
    """when a message last came to each link, and over which link, OWN for one that starts there; with a block only"""
    link_asked_by: I64


OWN = np.int64(-1)
ARRIVAL = np.int64(1)
"""event: a message has reached its receiver (unaware) or the next device (aware)"""
LINK_FREE = np.int64(2)


def new_traffic(fabric: Fabric, capacity: int) -> Traffic:
    message = np.zeros(capacity, MESSAGE)
    n_links = len(fabric.link_to)
    empty = [np.zeros(n_links, np.int64) for _ in range(4)]
    asked = [np.full(n_links, -1, np.int64) for _ in range(2)]
    return Traffic(message, np.zeros(n_links, np.bool_), *empty, *asked)


@kernel
def delay_ns(fabric: Fabric, source: int, target: int, size: int) -> int:
    """Returns the congestion-unaware delay. Only the lowest dimension in which the ranks differ counts."""
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
    calendar: Calendar, traffic: Traffic, to: int, target: int, communicator: int, stream: int, route: int, size: int
) -> int:
    """Takes a message from the pool. Returns its number, or 0 if the pool is empty."""
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
    message[m].route = route
    message[m].size = size
    return int(m)


@kernel
def free_message(traffic: Traffic, m: int) -> None:
    traffic.message[m].next = traffic.message[0].next
    traffic.message[0].next = m


@kernel
def send(calendar: Calendar, fabric: Fabric, traffic: Traffic, m: int, source: int) -> None:
    """Sends message `m` from rank `source` to its target."""
    message = traffic.message[m]
    if len(fabric.link_to) == 0:
        arrival = calendar.clock[NOW] + delay_ns(fabric, source, message.target, message.size)
        schedule(calendar, arrival, ARRIVAL, m)
    else:
        message.device = source
        _queue(calendar, fabric, traffic, m, OWN)


@kernel
def _queue(calendar: Calendar, fabric: Fabric, traffic: Traffic, m: int, came_over: int) -> None:
    message = traffic.message[m]
    link = fabric.next_link[message.device, message.target]
    message.link = link
    if fabric.block > 0:
        now = calendar.clock[NOW]
        if traffic.link_asked_ns[link] == now and traffic.link_asked_by[link] != came_over:
            calendar.clock[OVERFLOW] = TIE  # which comes first depends on the numbers of the ranks
        traffic.link_asked_ns[link] = now
        traffic.link_asked_by[link] = came_over
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
    """Forwards message `m` at the device that it has reached. Returns whether that is its receiver."""
    if len(fabric.link_to) == 0:
        return True
    message = traffic.message[m]
    over = message.link
    device = fabric.link_to[over]
    if device == message.target:
        return True
    if fabric.block > 0:  # goes on from the rank of the block that does what `device` does
        same = device % fabric.block
        message.target = (message.target - device + same) % fabric.n_ranks
        device = same
    message.device = device
    _queue(calendar, fabric, traffic, m, over)
    return False


@inlined
def free_link(calendar: Calendar, fabric: Fabric, traffic: Traffic, link: int) -> None:
    """Lets `link`, which has sent a message, transmit the next one that waits."""
    traffic.link_busy[link] = False
    m = traffic.link_head[link]
    if m > 0:
        traffic.link_head[link] = traffic.message[m].next
        _transmit(calendar, fabric, traffic, m)
