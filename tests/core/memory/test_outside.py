"""What a device holds beside the allocator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.common.units import GIB, MIB
from forerun.core.memory.outside import (
    communicator_bytes,
    context_bytes,
    least_communicator_bytes,
    outside_bytes,
    outside_model,
)
from forerun.core.program.groups import CommGroup
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack, stack_names
from forerun.sources.symbolic.mesh import groups_of

CLUSTER = load_cluster("a100-sxm")
STACK = load_stack("megatron-core")
BUFFERS_MIB = 0.5 + 4.6875 + 4
"""of a connection: LL, LL128, Simple"""


def group(nodes: int, ranks_per_node: int) -> CommGroup:
    return CommGroup("dp_shard", nodes * ranks_per_node, nodes, ranks_per_node)


@pytest.mark.parametrize(
    ("nodes", "ranks", "mib"),
    [
        (1, 1, 0.0),
        (1, 2, 24 * BUFFERS_MIB),  # 24 channels, one neighbour
        (1, 8, 24 * 2 * BUFFERS_MIB),  # a neighbour on either side
        (2, 1, 2 * (2 * BUFFERS_MIB - 0.5)),  # two channels over one NIC, received and sent
        (4, 1, 2 * 3 * (2 * BUFFERS_MIB - 0.5)),  # a ring's and a tree's peers
        (4, 8, 2 * 3 * (2 * BUFFERS_MIB - 0.5) + 16 * 2 * 7 / 8 * BUFFERS_MIB),
    ],
)
def test_buffers_of_a_communicator_by_hand(nodes: int, ranks: int, mib: float) -> None:
    assert communicator_bytes(group(nodes, ranks), CLUSTER) == pytest.approx(mib * MIB, abs=32)


def test_without_nvlink_a_node_has_few_channels() -> None:
    pcie = replace(CLUSTER, links=(replace(CLUSTER.links[0], kind="pcie"), *CLUSTER.links[1:]))
    assert communicator_bytes(group(1, 8), pcie) < communicator_bytes(group(1, 8), CLUSTER) / 10
    assert least_communicator_bytes(pcie) < least_communicator_bytes(CLUSTER)


def test_no_communicator_is_smaller_than_the_least() -> None:
    sizes = [communicator_bytes(group(n, r), CLUSTER) for n in (1, 2, 3, 64) for r in (1, 2, 4, 8) if n * r > 1]
    assert min(sizes) == least_communicator_bytes(CLUSTER)


def test_kernels_that_are_loaded_at_once_take_more() -> None:
    eager = replace(STACK, lazy_kernels=False)
    more = outside_bytes([], eager, CLUSTER) - outside_bytes([], STACK, CLUSTER)
    assert more == int(outside_model().eager_context_gib * GIB) - int(outside_model().context_gib * GIB) > 0
    assert context_bytes(eager) == outside_bytes([], replace(eager, communicators=()), CLUSTER)


def test_a_stage_has_two_neighbours() -> None:
    groups = groups_of(Plan(seq_len=1, pp=4, tp=8), CLUSTER.node_size)
    bare = replace(STACK, communicators=())
    far = outside_bytes([groups["pp_far"]], bare, CLUSTER) - context_bytes(bare)
    assert far == 2 * (communicator_bytes(group(2, 1), CLUSTER) + outside_model().transfer_bytes)


def test_further_communicators_lie_where_their_axes_do() -> None:
    plan = Plan(seq_len=1, pp=4, tp=8, dp_shard=2)
    every = tuple(groups_of(plan, CLUSTER.node_size).values())

    def further(*communicators: str) -> int:
        stack = replace(STACK, communicators=communicators)
        return outside_bytes([], stack, CLUSTER, every) - context_bytes(stack)

    assert further("world") == communicator_bytes(group(8, 8), CLUSTER)
    assert further("tp+pp") == communicator_bytes(group(4, 8), CLUSTER)
    assert further("tp", "pp") == communicator_bytes(group(1, 8), CLUSTER) + communicator_bytes(group(4, 1), CLUSTER)
    assert further("cp") == 0


def test_the_communicators_of_every_stack_are_known() -> None:
    axes = {*groups_of(Plan(seq_len=1), 8), "world"}
    for name in stack_names():
        for communicator in load_stack(name).communicators:
            assert set(communicator.split("+")) <= axes
