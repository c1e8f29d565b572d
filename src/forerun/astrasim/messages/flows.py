"""Flow-level delivery of messages: concurrent flows share the links max-min fairly.

A message is a flow that uses all links of its route from its start until its last byte is sent. It arrives later by the
latencies of those links. Rates are max-min fair: a flow can get more only if a flow with no more gets less. Progressive
filling finds them (Bertsekas and Gallager, *Data Networks*, section 6.5.2) whenever flows start or end: the link with
the smallest equal share fixes the rate of its flows, then the link with the next larger one, and so on.

There are no queues and no packets, so the cost grows with the number of times at which flows start or end, not with
hops. This suits collectives on large fabrics, where many flows end together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from forerun.astrasim.messages.links import Delivery, LinkUse, Messages
from forerun.common.jit import njit
from forerun.core.network.network_file import bytes_per_ns
from forerun.core.network.topology.base import Topology
from forerun.core.program.types import F64, I32, I64

_TOGETHER = 1e-9
"""flows end together if that moves none of them by more than this share of its bytes"""


def share(
    topology: Topology,
    start_ns: npt.ArrayLike,
    src: npt.ArrayLike,
    dst: npt.ArrayLike,
    size_bytes: npt.ArrayLike,
    *,
    gib: bool = False,
) -> Delivery:
    """Delivers messages, given as columns (messages,), as flows that share the links of `topology`.

    Arrivals are not rounded. A link's `busy_ns` is its bytes over its bandwidth. With `gib`, the topology's GB/s are
    of 2**30 bytes (see `Network.gib`).

    Raises ForerunError if a message makes no sense (see `Messages.of`), or its rank is not in the topology.
    """
    messages = Messages.of(start_ns, src, dst, size_bytes)
    links = topology.links()
    first, path = topology.routes(messages.src, messages.dst)
    rate = np.asarray(bytes_per_ns(links.bandwidth_gbps, gib=gib))
    size = messages.size_bytes.astype(np.float64)
    count = np.bincount(path, minlength=len(links))
    order = np.argsort(messages.start_ns, kind="stable")
    ended = _share(order, messages.start_ns, size, first, path, rate, count)
    hops = np.diff(first)
    delay = np.add.reduceat(links.latency_ns[path], first[:-1]) if len(path) else np.zeros(0)
    arrival = ended + delay
    carried: F64 = np.bincount(path, weights=np.repeat(size, hops), minlength=len(links)).astype(np.float64)
    return Delivery(
        arrival, LinkUse(links, carried / rate, carried, count.astype(np.int64), float(arrival.max(initial=0.0)))
    )


@njit
def _share(order: I64, start_ns: I64, size: F64, first: I64, path: I32, capacity: F64, count: I64) -> F64:
    """Returns when the last byte of each flow is sent; `count` (links,) is the number of flows over each link."""
    n, n_links = len(order), len(capacity)
    first_member = np.zeros(n_links + 1, np.int64)
    for link in range(n_links):
        first_member[link + 1] = first_member[link] + count[link]
    member = np.empty(len(path), np.int32)
    n_members = np.zeros(n_links, np.int64)
    active = np.empty(n, np.int64)
    left, ended = size.copy(), np.zeros(n)
    rate = np.zeros(n)
    n_active, started, now = 0, 0, 0.0
    while n_active or started < n:
        if n_active == 0:
            now = max(now, np.float64(start_ns[order[started]]))
        while started < n and start_ns[order[started]] <= now:
            flow = order[started]
            started += 1
            active[n_active] = flow
            n_active += 1
            for k in range(first[flow], first[flow + 1]):
                link = path[k]
                member[first_member[link] + n_members[link]] = flow
                n_members[link] += 1
        _fill(active[:n_active], first, path, capacity, member, first_member, n_members, left, rate)
        step = np.inf
        for i in range(n_active):
            step = min(step, left[active[i]] / rate[active[i]])
        until = now + step
        if started < n and start_ns[order[started]] < until:
            until = np.float64(start_ns[order[started]])
            step = until - now
        now = until
        kept = 0
        for i in range(n_active):
            flow = active[i]
            left[flow] -= rate[flow] * step
            if left[flow] <= _TOGETHER * size[flow]:
                left[flow] = 0.0
                ended[flow] = now
            else:
                active[kept] = flow
                kept += 1
        n_active = kept
    return ended


@njit
def _fill(
    active: I64,
    first: I64,
    path: I32,
    capacity: F64,
    member: I32,
    first_member: I64,
    n_members: I64,
    left: F64,
    rate: F64,
) -> None:
    """Finds max-min fair rates of the `active` flows, and removes ended flows from the links' lists of members.

    The equal share of a link never falls while other links fix their flows. So a heap of shares, in which each
    outdated share is corrected when it comes up, gives the links in the order of their true shares.
    """
    n_links = len(capacity)
    spare, waiting = capacity.copy(), np.zeros(n_links, np.int64)
    heap_share, heap_link = np.empty(n_links), np.empty(n_links, np.int64)
    n_heap = 0
    for i in range(len(active)):
        rate[active[i]] = 0.0
        for k in range(first[active[i]], first[active[i] + 1]):
            waiting[path[k]] += 1
    for link in range(n_links):
        if waiting[link]:
            n_heap = _push(heap_share, heap_link, n_heap, spare[link] / waiting[link], link)
    while n_heap:
        offered, link = heap_share[0], heap_link[0]
        n_heap = _pop(heap_share, heap_link, n_heap)
        if waiting[link] == 0:
            continue
        fair = max(offered, spare[link] / waiting[link])
        if fair > offered * (1 + 1e-12):
            n_heap = _push(heap_share, heap_link, n_heap, fair, link)
            continue
        i, end = first_member[link], first_member[link] + n_members[link]
        while i < end:
            flow = member[i]
            if left[flow] == 0.0:
                end -= 1
                member[i] = member[end]
                continue
            i += 1
            if rate[flow] > 0.0:
                continue
            rate[flow] = fair
            for k in range(first[flow], first[flow + 1]):
                spare[path[k]] -= fair
                waiting[path[k]] -= 1
        n_members[link] = end - first_member[link]


@njit
def _push(share: F64, link: I64, n: int, new_share: float, new_link: int) -> int:
    i = n
    while i > 0 and share[(i - 1) >> 1] > new_share:
        share[i], link[i] = share[(i - 1) >> 1], link[(i - 1) >> 1]
        i = (i - 1) >> 1
    share[i], link[i] = new_share, new_link
    return n + 1


@njit
def _pop(share: F64, link: I64, n: int) -> int:
    """Removes the smallest share. Returns the number of shares left."""
    n -= 1
    last_share, last_link = share[n], link[n]
    i = 0
    while 2 * i + 1 < n:
        child = 2 * i + 1
        if child + 1 < n and share[child + 1] < share[child]:
            child += 1
        if last_share <= share[child]:
            break
        share[i], link[i] = share[child], link[child]
        i = child
    share[i], link[i] = last_share, last_link
    return n
