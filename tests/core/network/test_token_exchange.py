"""Kernels that send a token once to a node and once to a GPU, against counts by hand and published bandwidths."""

from dataclasses import replace

import pytest

from forerun.core.network.token_exchange import copies_sent, exchange_time, parts_reached
from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import TokenExchange
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.kernels.dispatchers import transport_of

V3 = TokenExchange(n_experts=256, top_k=8, n_groups=8, top_groups=4, combine=0)
FREE = replace(V3, n_groups=1, top_groups=1)
HIDDEN = 7168


def group(size: int, per_node: int = 8) -> CommGroup:
    return CommGroup.on_mesh("ep", size, 1, per_node)


@pytest.mark.parametrize(
    ("parts", "routing", "expected"),
    [
        (8, FREE, 5.29),  # 8 (1 - C(224, 8) / C(256, 8))
        (8, V3, 3.62),  # 4 of 8 groups, and 4 (1 - C(96, 8) / C(128, 8)) of them
        (256, FREE, 8),  # each expert is a part of its own
        (1, V3, 1),
        (4, V3, 2.92),  # two groups a node: 0, 1 or 2 of them are among the 4 chosen
    ],
)
def test_a_token_reaches_as_many_parts_as_counting_says(parts, routing, expected):
    assert parts_reached(parts, routing) == pytest.approx(expected, abs=0.01)


def test_limited_routing_sends_no_token_to_more_nodes_than_it_chooses_groups():
    limited, free = (copies_sent(routing, group(64)) for routing in (V3, FREE))
    assert limited[1] == pytest.approx(3.62 * 7 / 8, abs=0.01)
    assert free[1] == pytest.approx(5.29 * 7 / 8, abs=0.01)
    assert copies_sent(FREE, group(8))[1] == 0


def logical_gb_s(cluster: str, dispatcher: str, size: int, per_node: int, combine: int, sms: int, row: float) -> float:
    """Returns the bandwidth as DeepEP prints it, which counts what stays in the node, or on the GPU within one node."""
    nodes = size // per_node
    limited = replace(V3, n_groups=max(1, nodes), top_groups=min(4, max(1, nodes)), combine=combine)
    transport = replace(transport_of(dispatcher), sms=sms)
    time = exchange_time(limited, transport, group(size, per_node), load_cluster(cluster))
    copies = parts_reached(nodes if nodes > 1 else size, limited)
    return copies * row / (time.s_per_byte * limited.top_k * row) / 1e9


@pytest.mark.parametrize(
    ("size", "dispatch", "combine"),
    [(8, 153, 158), (16, 43, 43), (32, 58, 57), (64, 51, 50)],
)
def test_deepep_on_h800_is_as_fast_as_its_table_says(size, dispatch, combine):
    for back, published in ((0, dispatch), (1, combine)):
        found = logical_gb_s("h800-sxm", "deepep", size, 8, back, 24, 2 * HIDDEN)
        assert found == pytest.approx(published, rel=0.1), (size, back)


@pytest.mark.parametrize(
    ("size", "sms", "dispatch", "combine"),
    [
        (8, 16, 362, 310),
        (8, 24, 513, 426),
        (8, 32, 616, 520),
        (16, 16, 329, 278),
        (16, 24, 442, 378),
        (16, 32, 521, 443),
    ],
)
def test_hybridep_in_a_rack_is_as_fast_as_its_table_says(size, sms, dispatch, combine):
    for back, published in ((0, dispatch), (1, combine)):
        found = logical_gb_s("gb200-nvl72", "hybridep", size, size, back, sms, 2 * HIDDEN)
        assert found == pytest.approx(published, rel=0.16), (size, sms, back)


@pytest.mark.parametrize(
    ("sms", "dispatch", "combine"), [(4, 66.5, 70.8), (12, 186, 202), (20, 281, 295), (24, 280, 296)]
)
def test_deepep_on_h100_grows_with_its_multiprocessors_up_to_what_nvlink_sustains(sms, dispatch, combine):
    """GB/s over NVLink from ai-dynamo/aiconfigurator's times of 8,192 tokens on 8 GPUs."""
    for back, published in ((0, dispatch), (1, combine)):
        sent = logical_gb_s("h100-sxm", "deepep", 8, 8, back, sms, 2 * HIDDEN) * 7 / 8
        assert sent == pytest.approx(published, rel=0.15), (sms, back)
