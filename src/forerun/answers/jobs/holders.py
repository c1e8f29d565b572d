"""Who holds each GPU of each node, and who of them gives way to a job: the compiled part of `displacing`.

A job stands at a place in the policy's order. Free GPUs stand behind all jobs, and those under repair before them.
"""

from __future__ import annotations

from typing import NamedTuple

from forerun.common.jit import kernel
from forerun.core.program.types import I64


class Holders(NamedTuple):
    """Holds the state of all GPUs, and the arrays in which answers are computed."""

    of_gpu: I64
    """[node, GPU]: the number of the job that holds it"""
    stands: I64
    """for each job its place in the order"""
    places: I64
    """[node, GPU]: the places of those that hold the GPUs of a node, ascending"""
    heap: I64
    """scratch: the nodes of a switch"""
    last: I64
    """scratch: a node of each switch"""
    found: I64
    """the places of those that give way, one for each GPU"""


@kernel
def _note(holders: Holders, node: int) -> None:
    """Writes the places of those on a node."""
    of_gpu, places = holders.of_gpu[node], holders.places[node]
    for i in range(len(of_gpu)):
        place, at = holders.stands[of_gpu[i]], i
        while at and places[at - 1] > place:
            places[at] = places[at - 1]
            at -= 1
        places[at] = place


@kernel
def note_all(holders: Holders, most: I64) -> None:
    """Writes the places of those on all nodes, and into `most` the latest ones: of any node the i-th of its own."""
    most[:] = -1
    for node in range(len(holders.of_gpu)):
        _note(holders, node)
        for i in range(len(most)):
            most[i] = max(most[i], holders.places[node, i])


@kernel
def hand_over(holders: Holders, taken: I64, before: int, after: int) -> None:
    """Gives GPUs of who is `before` to `after`: `taken` has (node, how many of its GPUs)."""
    for i in range(len(taken)):
        node, left = taken[i, 0], taken[i, 1]
        of_gpu = holders.of_gpu[node]
        for gpu in range(len(of_gpu)):
            if left and of_gpu[gpu] == before:
                of_gpu[gpu] = after
                left -= 1
        _note(holders, node)


@kernel
def _give_way(holders: Holders, node: int, gpus: int, count: int) -> int:
    """Adds the latest places of `gpus` GPUs of a node to those that are found; returns how many there are."""
    first = holders.places.shape[1] - gpus
    for i in range(gpus):
        holders.found[count + i] = holders.places[node, first + i]
    return count + gpus


@kernel
def who_on_one_node(holders: Holders, gpus: int, at: int) -> int:
    """Writes the latest places of `gpus` GPUs of one node into `found`, all behind `at`.

    Returns how many there are, or -1 if no node has them.
    """
    first = holders.places.shape[1] - gpus
    best, latest = -1, at
    for node in range(len(holders.places)):
        if holders.places[node, first] > latest:
            best, latest = node, holders.places[node, first]
    if best < 0:
        return -1
    return _give_way(holders, best, gpus, 0)


@kernel
def _before(holders: Holders, one: int, other: int) -> bool:
    """Returns whether a node gives way before another one: its first job is later, or it has the larger number."""
    first, second = holders.places[one, 0], holders.places[other, 0]
    return bool(first > second or (first == second and one > other))


@kernel
def _sink(holders: Holders, nodes: I64, at: int, size: int) -> None:
    """Lets a node sink to its place in a heap of nodes that give way, the one that does so before all others first."""
    node = nodes[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and _before(holders, nodes[child + 1], nodes[child]):
            child += 1
        if _before(holders, node, nodes[child]):
            break
        nodes[at] = nodes[child]
        at = child
    nodes[at] = node


@kernel
def _last_whole(holders: Holders, switch: int, whole: int, at: int) -> int:
    """Returns the last of the first `whole` nodes of a switch that give way, -1 if it has not so many behind `at`."""
    nodes = holders.heap
    under, size = len(nodes), 0
    for node in range(switch * under, (switch + 1) * under):
        if holders.places[node, 0] > at:
            nodes[size] = node
            size += 1
    if size < whole:
        return -1
    for i in range(size // 2 - 1, -1, -1):
        _sink(holders, nodes, i, size)
    for _ in range(whole - 1):
        size -= 1
        nodes[0] = nodes[size]
        _sink(holders, nodes, 0, size)
    return int(nodes[0])


@kernel
def _part_of(holders: Holders, switch: int, last: int, gpus: int, at: int) -> int:
    """Returns the node behind node `last` whose latest `gpus` GPUs give way first; -1 if there is none."""
    under, per_node = len(holders.heap), holders.places.shape[1]
    best, latest = -1, at
    for node in range(switch * under, (switch + 1) * under):
        place = holders.places[node, per_node - gpus]
        if place < latest or place <= at or not _before(holders, last, node):
            continue
        if place > latest or _before(holders, node, best):
            best, latest = node, place
    return best


@kernel
def who_on_whole_nodes(holders: Holders, whole: int, rest: int, at: int) -> int:
    """Writes the places on `whole` nodes of one switch, and of `rest` GPUs of one more, into `found`: all behind `at`.

    Returns how many there are, or -1 if no switch has them.
    """
    under, per_node = len(holders.heap), holders.places.shape[1]
    for switch in range(len(holders.last)):
        holders.last[switch] = _last_whole(holders, switch, whole, at)
    while True:
        best, latest = -1, at
        for switch in range(len(holders.last)):
            last = holders.last[switch]
            if last >= 0 and holders.places[last, 0] > latest:
                best, latest = switch, holders.places[last, 0]
        if best < 0:
            return -1
        last = holders.last[best]
        part = _part_of(holders, best, last, rest, at) if rest else -1
        if rest and part < 0:
            holders.last[best] = -1
            continue
        count = 0
        for node in range(best * under, (best + 1) * under):
            if node == last or _before(holders, node, last):
                count = _give_way(holders, node, per_node, count)
        return _give_way(holders, part, rest, count) if rest else count
