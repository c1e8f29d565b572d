"""The exchange of an outer step: known times of a slow link, and what fewer bits save."""

import pytest

from forerun.core.cost.gradient_exchange import wires_of
from forerun.core.network.nccl import wire_efficiency
from forerun.core.network.outer_exchange import outer_exchange_s
from forerun.core.program.groups import CommGroup
from forerun.describe.cluster.catalog import load_cluster

CLUSTER = load_cluster("h100-sxm").with_outermost_link(0.001)
ELEMENTS = 1e9


def exchange_s(wire, replicas=4, elements=ELEMENTS, element_bytes=4, far_s=0.0):
    group = CommGroup.on_mesh("dp_replicate", replicas, 8, CLUSTER.node_size)
    return outer_exchange_s(elements, element_bytes, wire, group, wires_of(CLUSTER, 8 * replicas), far_s)


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_a_slow_link_carries_a_ring_of_all_parameters(replicas):
    link = CLUSTER.links[-1]
    ring = 2 * (replicas - 1) / replicas * 4 * ELEMENTS / (link.bytes_per_s * wire_efficiency(link))
    assert exchange_s("fp32", replicas) == pytest.approx(ring, rel=0.03)


@pytest.mark.parametrize(("wire", "share"), [("bf16", 2), ("fp8", 4), ("fp4", 8)])
def test_fewer_bits_take_as_much_less_time(wire, share):
    assert exchange_s("fp32") / exchange_s(wire) == pytest.approx(share, rel=0.06)


def test_parameters_of_16_bits_are_not_cast_to_16_bits():
    few = {"elements": 1e3}
    assert exchange_s("bf16", element_bytes=2, **few) < exchange_s("bf16", element_bytes=4, **few)


def test_time_grows_with_the_parameters_and_is_linear_in_the_end():
    assert exchange_s("fp8", elements=2e9) == pytest.approx(2 * exchange_s("fp8"), rel=0.01)
    assert 0 < exchange_s("fp8", elements=1) < 0.01


@pytest.mark.parametrize(
    ("wire", "replicas", "messages"), [("fp32", 2, 2), ("bf16", 8, 14), ("fp8", 2, 2), ("fp4", 8, 8)]
)
def test_a_far_link_delays_each_message_that_waits_for_another(wire, replicas, messages):
    """A ring sums in n - 1 rounds and gathers in as many; quantized parts go to all at once and are gathered."""
    later = exchange_s(wire, replicas, far_s=0.03) - exchange_s(wire, replicas)
    assert later == pytest.approx(messages * 0.03)
