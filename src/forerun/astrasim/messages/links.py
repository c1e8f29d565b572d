"""Congestion-aware delivery of messages: every directed link is a queue, first come first served.

The model is that of astra-network-analytical (congestion-aware): every device stores and forwards a message whole. A
link is busy with it for `floor(size / bandwidth)` ns, and the message is at the next device `floor(latency + size /
bandwidth)` ns after its transmission began. Events of one tick happen in the order in which they were scheduled. As a
transmission schedules the arrival before the release of its link, this decides which message goes first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.astrasim.messages.calendar import Records, drop_first, open_slot
from forerun.common.errors import ForerunError
from forerun.common.jit import njit
from forerun.core.network.network_file import bytes_per_ns
from forerun.core.network.topology.base import Links, Paths, Topology
from forerun.core.program.types import F64, I32, I64

_LATEST_NS = 2.0**62
_EVENT = np.dtype([("time", np.int64), ("sequence", np.int64), ("what", np.int64)])


@dataclass(frozen=True, eq=False)
class LinkUse:
    """The traffic of each link of a topology; arrays have shape (links,), in the order of `links`."""

    links: Links
    busy_ns: F64
    """time in which the link transmitted"""
    size_bytes: F64
    messages: I64
    finish_ns: float
    """when the last message arrived"""

    @property
    def utilisation(self) -> F64:
        """Returns the share of the time until the last arrival in which each link transmitted."""
        return self.busy_ns / max(self.finish_ns, 1.0)

    def hottest(self, n: int) -> I64:
        """Returns at most `n` of the links that carried anything, busiest first."""
        order = np.argsort(-self.busy_ns, kind="stable")[: max(n, 0)]
        return order[self.messages[order] > 0]


@dataclass(frozen=True, eq=False)
class Delivery:
    """Arrival times of messages, and the use of links."""

    arrival_ns: F64 | I64
    """(messages,); whole ns from `deliver`"""
    use: LinkUse

    @property
    def finish_ns(self) -> float:
        """Returns the arrival of the last message; 0 without messages."""
        return self.use.finish_ns


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages to deliver: columns (messages,)."""

    start_ns: I64
    src: I32
    dst: I32
    size_bytes: I64

    @classmethod
    def of(cls, start_ns: npt.ArrayLike, src: npt.ArrayLike, dst: npt.ArrayLike, size_bytes: npt.ArrayLike) -> Messages:
        """Makes columns of anything that holds whole numbers; a single number counts for all messages.

        Raises ForerunError if a column has other values than whole numbers or another length, or a message has no
        bytes, goes to its own sender, or starts before 0.
        """
        names = ("start_ns", "src", "dst", "size_bytes")
        columns = [_whole(each, name) for each, name in zip((start_ns, src, dst, size_bytes), names, strict=True)]
        try:
            start, source, target, size = np.broadcast_arrays(*(np.atleast_1d(each) for each in columns))
        except ValueError:
            raise ForerunError(f"messages: the columns {', '.join(names)} differ in length") from None
        for wrong, problem in (
            (start < 0, "starts before 0"),
            (size <= 0, "has no bytes; a message has at least one"),
            (source == target, "goes to its own sender"),
        ):
            if wrong.any():
                raise ForerunError(f"message {int(np.argmax(wrong))} {problem}")
        ends = [np.clip(end, -1, np.iinfo(np.int32).max).astype(np.int32) for end in (source, target)]
        return cls(np.ascontiguousarray(start), ends[0], ends[1], np.ascontiguousarray(size))


def deliver(
    topology: Topology,
    start_ns: npt.ArrayLike,
    src: npt.ArrayLike,
    dst: npt.ArrayLike,
    size_bytes: npt.ArrayLike,
    *,
    gib: bool = False,
) -> Delivery:
    """Delivers messages, given as columns (messages,), over the links of `topology`. Each link is a queue.

    Messages that start at the same time are sent in the given order. With `gib`, the topology's GB/s are of 2**30
    bytes (see `Network.gib`).

    Raises ForerunError if a message makes no sense (see `Messages.of`), its rank is not in the topology, or it would
    take centuries.
    """
    messages = Messages.of(start_ns, src, dst, size_bytes)
    links = topology.links()
    paths = topology.routes(messages.src, messages.dst)
    rate = np.asarray(bytes_per_ns(links.bandwidth_gbps, gib=gib))
    _check_duration(messages, paths, links, rate)
    order = np.argsort(messages.start_ns, kind="stable")
    columns = np.zeros(len(links), np.int64), np.zeros(len(links), np.int64), np.zeros(len(links), np.int64)
    arrival = _deliver(order, messages.start_ns, messages.size_bytes, *paths, links.latency_ns, rate, *columns)
    busy, size, count = columns
    finish = float(arrival.max(initial=0))
    return Delivery(arrival, LinkUse(links, busy.astype(np.float64), size.astype(np.float64), count, finish))


def _whole(values: npt.ArrayLike, name: str) -> I64:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        raise ForerunError(f"messages: {name} must be whole numbers") from None
    if array.size and (array.dtype.kind not in "iu" or array.max() > np.iinfo(np.int64).max):
        raise ForerunError(f"messages: {name} must be whole numbers below 2**63")
    return array.astype(np.int64)


def _check_duration(messages: Messages, paths: Paths, links: Links, rate: F64) -> None:
    if not len(paths.link):
        return
    slowest = links.latency_ns.max() + messages.size_bytes / rate.min() + 1.0
    if messages.start_ns.max() + float(np.sum(slowest * paths.hops)) > _LATEST_NS:
        raise ForerunError("messages: they would take more than a century; check sizes, latencies and bandwidths")


@njit
def _deliver(
    order: I64,
    start_ns: I64,
    size_bytes: I64,
    first: I64,
    path: I32,
    latency_ns: F64,
    rate: F64,
    busy_ns: I64,
    link_bytes: I64,
    link_messages: I64,
) -> I64:
    """Returns arrival times, and fills in the last three columns (links,).

    An event is a message's arrival (its number) or a link's release (-1 - its number). The release of a link for which
    no message waits does nothing. So it becomes an event only when a message joins the link's queue, with the time and
    the place in the order that it got when the transmission started.
    """
    n_links, n_messages = len(rate), len(order)
    position = first[:-1].copy()
    arrival = np.zeros(n_messages, np.int64)
    following = np.full(n_messages, -1, np.int64)
    head, tail = np.full(n_links, -1, np.int64), np.full(n_links, -1, np.int64)
    free_ns, free_sequence = np.full(n_links, -1, np.int64), np.full(n_links, -1, np.int64)
    event = np.empty(1024, _EVENT)
    n_events, sequence, started = 0, 0, 0
    while n_events or started < n_messages:
        if started < n_messages and (not n_events or start_ns[order[started]] <= event[0].time):
            m = order[started]
            started += 1
            now, place = start_ns[m], -1
            link = np.int64(path[position[m]])
        else:
            now, place, what = event[0].time, event[0].sequence, event[0].what
            n_events = drop_first(event, n_events)
            if what < 0:
                link = -1 - what
                m = head[link]
                head[link] = following[m]
            else:
                m = what
                position[m] += 1
                if position[m] == first[m + 1]:
                    arrival[m] = now
                    continue
                link = np.int64(path[position[m]])
        if free_ns[link] > now or (free_ns[link] == now and free_sequence[link] > place):
            if head[link] < 0:
                head[link] = m
                event, n_events = _push(event, n_events, free_ns[link], free_sequence[link], -1 - link)
            else:
                following[tail[link]] = m
            tail[link] = m
            following[m] = -1
            continue
        duration = size_bytes[m] / rate[link]
        event, n_events = _push(event, n_events, now + np.int64(latency_ns[link] + duration), sequence, m)
        free_ns[link] = now + np.int64(duration)
        free_sequence[link] = sequence + 1
        sequence += 2
        if head[link] >= 0:
            event, n_events = _push(event, n_events, free_ns[link], free_sequence[link], -1 - link)
        busy_ns[link] += np.int64(duration)
        link_bytes[link] += size_bytes[m]
        link_messages[link] += 1
    return arrival


@njit
def _push(event: Records, n: int, time: int, sequence: int, what: int) -> tuple[Records, int]:
    if n == len(event):
        larger = np.empty(2 * n, _EVENT)
        for i in range(n):
            larger[i] = event[i]
        event = larger
    i = open_slot(event, n, time, sequence)
    event[i].time = time
    event[i].sequence = sequence
    event[i].what = what
    return event, n + 1
