"""Who gives way to a job on nodes, against the rule written out plainly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.answers.jobs.displacing import OnNodes
from forerun.answers.jobs.placement import Packed, Shape

SHAPES = [Shape(1, 4, 4), Shape(2, 3, 2), Shape(3, 2, 8), Shape(1, 1, 3)]
FREE = np.iinfo(np.int64).max


@st.composite
def clusters(draw):
    """A cluster with jobs on it in an order of which some wait, and one that asks for GPUs."""
    shape = draw(st.sampled_from(SHAPES))
    place, placements = Packed(shape), []
    for gpus in draw(st.lists(st.integers(1, shape.nodes * shape.gpus), max_size=12)):
        found = place.place(gpus)
        if found is not None:
            placements.append(found)
    order = draw(st.permutations(range(len(placements) + 4)))
    return shape, placements, order, draw(st.integers(1, shape.nodes * shape.gpus)), draw(st.integers(0, 12))


def places_on_nodes(shape, placements, order):
    """The places in the order of those that hold the GPUs of each node; FREE for free ones."""
    on = [[FREE] * shape.gpus for _ in range(shape.switches * shape.nodes)]
    for number, placement in enumerate(placements):
        for node, gpus in placement:
            free = on[node].index(FREE)
            on[node][free : free + gpus] = [order.index(number)] * gpus
    return [sorted(places) for places in on]


def expected(shape, on, gpus, at):
    """The jobs that give way: those on the node, or on the nodes of one switch, whose first one is the latest."""
    if gpus <= shape.gpus:
        latest = max(places[-gpus] for places in on)
        node = next(places for places in on if places[-gpus] == latest)
        return sorted({*node[-gpus:]} - {FREE}) if latest > at else None
    whole, rest = divmod(gpus, shape.gpus)
    ways = []
    for switch in range(shape.switches):
        nodes = range(switch * shape.nodes, (switch + 1) * shape.nodes)
        ranked = sorted(nodes, key=lambda node: (on[node][0], node), reverse=True)
        least = on[ranked[whole - 1]][0]
        gives = [place for node in ranked[:whole] for place in on[node]]
        if least <= at:
            continue
        if rest:
            node = max(ranked[whole:], key=lambda node: on[node][-rest], default=None)
            if node is None or on[node][-rest] <= at:
                continue
            gives += on[node][-rest:]
        ways.append((-least, switch, sorted({*gives} - {FREE})))
    return min(ways)[2] if ways else None


@settings(deadline=None, max_examples=400)
@given(clusters())
def test_those_on_the_nodes_with_the_last_jobs_give_way(drawn):
    shape, placements, order, gpus, at = drawn
    displaced = OnNodes(shape, len(order))
    for number, placement in enumerate(placements):
        displaced.took(placement, number)
    running = np.array([place for place, number in enumerate(order) if number < len(placements)], dtype=np.int64)
    displaced.look(np.array(order), running)
    on = places_on_nodes(shape, placements, order)
    found = expected(shape, on, gpus, at)
    assert displaced.who(gpus, at) == found
    if found is None:
        return
    for place in found:
        displaced.left(placements[order[place]], order[place])
    on = places_on_nodes(
        shape, [() if order.index(number) in found else each for number, each in enumerate(placements)], order
    )
    assert displaced.holders.places.tolist() == on
    assert displaced.who(gpus, at) == []


@pytest.mark.parametrize("gpus", [1, 4])
def test_nobody_gives_way_on_a_node_under_repair(gpus):
    displaced = OnNodes(Shape(1, 1, 4), 1)
    displaced.away([0])
    displaced.look(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    assert displaced.who(gpus, -1) is None
    displaced.away([])
    displaced.look(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    assert displaced.who(gpus, -1) == []
