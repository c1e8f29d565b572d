"""Communication patterns: known answers with textbook rates, and rings and trees as parts of NCCL's choice."""

from dataclasses import dataclass, replace
from math import log2

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from forerun.common.errors import ForerunError
from forerun.core.cost.gradient_exchange import wires_of
from forerun.core.network.alpha_beta import AlphaBeta
from forerun.core.network.for_experiment import topology_of
from forerun.core.network.nccl import collective_s
from forerun.core.network.patterns import CommunicationPattern, NoNetwork, TimedBy, Wires
from forerun.core.network.patterns_catalog import PATTERNS, pattern_of
from forerun.core.network.patterns_collectives import (
    AllGather,
    Compressed,
    Nccl,
    ReduceScatter,
    RingAllReduce,
    TreeAllReduce,
)
from forerun.core.network.patterns_messages import MessagePattern, ParameterServer, Round
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import Collective
from forerun.describe.cluster.catalog import cluster_names, load_cluster
from forerun.describe.cluster.types import Cluster
from forerun.describe.plan.plan import Plan

H100 = load_cluster("h100-sxm")
NEAR, FAR = H100.links
SINGLE = replace(H100, links=(replace(NEAR, size=1), FAR))
"""one GPU a node: only the network between nodes is left"""
CLUSTERS = [cluster for cluster in map(load_cluster, cluster_names()) if len(cluster.links) == 2]
ALPHA_S, BETA_S = FAR.latency_s, 1 / FAR.bytes_per_s
IDEAL = AlphaBeta()
SHARED = [RingAllReduce, TreeAllReduce, ReduceScatter, AllGather, ParameterServer]


def seconds(pattern, size_bytes, n_ranks, cluster=SINGLE, network=None, memory=False):
    """Of all-reduces of one group of all GPUs; without the passes over memory unless asked for."""
    group = CommGroup.on_mesh("dp", n_ranks, 1, cluster.node_size)
    wires = wires_of(cluster, n_ranks, network) if memory else Wires(cluster, n_ranks, network)
    return float(pattern.seconds(np.array([float(size_bytes)]), group, wires)[0])


# -- known answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 64, 500])
@pytest.mark.parametrize("size_bytes", [1, 1e6, 1e9])
def test_a_ring_takes_2_n_minus_1_steps_and_2_n_minus_1_over_n_of_the_bytes(n, size_bytes):
    closed = 2 * (n - 1) * ALPHA_S + 2 * (n - 1) / n * size_bytes * BETA_S
    assert seconds(RingAllReduce(IDEAL), size_bytes, n) == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize("n", [2, 5, 8])
def test_the_same_holds_inside_a_node(n):
    closed = 2 * (n - 1) * NEAR.latency_s + 2 * (n - 1) / n * 1e8 / NEAR.bytes_per_s
    assert seconds(RingAllReduce(IDEAL), 1e8, n, H100) == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize("nodes", [2, 4, 16])
def test_a_ring_crosses_the_nics_of_a_node_with_a_share_over_each(nodes):
    """The slower of the links inside a node, which pass everything, and the NICs of its GPUs together."""
    n, size_bytes = 8 * nodes, 4e9
    around = 2 * (n - 1) / n * size_bytes
    steps_s = 2 * (nodes * FAR.latency_s + (n - 1 - nodes) * NEAR.latency_s)
    for slow in (1, 100):
        far = replace(FAR, bytes_per_s=FAR.bytes_per_s / slow)
        busy_s = max(around / NEAR.bytes_per_s, around / (8 * far.bytes_per_s))
        cluster = replace(H100, links=(NEAR, far))
        found = seconds(RingAllReduce(IDEAL), size_bytes, n, cluster)
        assert found == pytest.approx(steps_s + busy_s, rel=1e-9)


@pytest.mark.parametrize("n", [4, 8, 16, 64, 256])
def test_a_tree_climbs_twice_and_sends_everything_twice(n):
    closed = 2 * log2(n) * ALPHA_S + 2 * 1e8 * BETA_S
    assert seconds(TreeAllReduce(IDEAL), 1e8, n) == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize("n", [8, 16, 64, 256])
def test_ring_and_tree_cross_where_the_textbook_says(n):
    """2 (n - 1) alpha + 2 (n - 1) / n x beta = 2 log2(n) alpha + 2 x beta at x = n (n - 1 - log2 n) alpha / beta."""
    crossing = n * (n - 1 - log2(n)) * ALPHA_S / BETA_S
    ring, tree = RingAllReduce(IDEAL), TreeAllReduce(IDEAL)
    assert seconds(ring, crossing, n) == pytest.approx(seconds(tree, crossing, n), rel=1e-9)
    assert seconds(ring, 0.9 * crossing, n) > seconds(tree, 0.9 * crossing, n)
    assert seconds(ring, 1.1 * crossing, n) < seconds(tree, 1.1 * crossing, n)


@pytest.mark.parametrize("n", [2, 8, 33])
def test_gathers_and_scatters_add_up(n):
    ring = seconds(RingAllReduce(IDEAL), 1e8, n)
    assert seconds(ReduceScatter(IDEAL), 1e8, n) == pytest.approx(ring, rel=1e-12)
    gather = (n - 1) * ALPHA_S + (n - 1) * 1e8 * BETA_S
    assert seconds(AllGather(IDEAL), 1e8, n) == pytest.approx(gather, rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 8, 40])
@pytest.mark.parametrize("servers", [1, 2, 5, 1000])
def test_a_parameter_server_takes_in_and_gives_out_what_all_others_have(n, servers):
    """Push and pull: with s servers each takes 1 / s of the gradients of n - 1 ranks, and gives them back."""
    closed = 2 * ALPHA_S + 2 * (n - 1) / min(servers, n) * 1e8 * BETA_S
    assert seconds(ParameterServer(servers, rates=IDEAL), 1e8, n) == pytest.approx(closed, rel=1e-12)


def test_a_server_in_a_node_has_its_own_nic_and_its_own_link():
    """48 ranks of other nodes come in over one NIC, while 7 come over NVLink; 8 servers of a node use 8 NICs."""
    one = seconds(ParameterServer(1, rates=IDEAL), 1e9, 56, H100)
    assert one == pytest.approx(2 * 48 * 1e9 * BETA_S, rel=1e-3)
    spread = ParameterServer(7, rates=IDEAL)
    assert spread.places(CommGroup.on_mesh("dp", 56, 1, 8)) == [0, 8, 16, 24, 32, 40, 48]
    all_ranks = seconds(ParameterServer(56, rates=IDEAL), 1e9, 56, H100)
    assert all_ranks == pytest.approx(2 * 48 / 56 * 1e9 * BETA_S, rel=1e-3)


def test_sums_take_passes_over_memory():
    for pattern, size in ((AllGather(IDEAL), 9e8), (ParameterServer(rates=IDEAL), 9e8)):
        wires = wires_of(SINGLE, 8)
        more = seconds(pattern, 1e8, 8, memory=True) - seconds(pattern, 1e8, 8)
        assert more == pytest.approx(float(wires.pass_s(np.array(size))), rel=1e-9)
        assert more > 9e8 / H100.device.memory_bytes_per_s


def test_rates_scale_bytes_and_set_latencies():
    half = AlphaBeta(efficiency=0.5, hop_latency_us=3.0, base_latency_us=10.0)
    for pattern, steps in ((RingAllReduce, 14), (TreeAllReduce, 6), (AllGather, 7)):
        latency = seconds(pattern(half), 0, 8)
        assert latency == pytest.approx(10e-6 + steps * 3e-6)
        assert seconds(pattern(half), 1e8, 8) - latency == pytest.approx(
            2 * (seconds(pattern(IDEAL), 1e8, 8) - seconds(pattern(IDEAL), 0, 8))
        )
    assert seconds(ParameterServer(rates=half), 0, 8) == pytest.approx(10e-6 + 2 * 3e-6)
    assert seconds(ReduceScatter(half), 0, 8) == pytest.approx(20e-6 + 14 * 3e-6)


def test_an_ideal_network_is_free():
    assert seconds(NoNetwork(), 1e9, 64) == 0


# -- beside NCCL -----------------------------------------------------------------------------------------------

SIZES = st.floats(1, 1e11)


def adding_nothing(cluster: Cluster) -> Cluster:
    """Returns the cluster with switches that only pass on."""
    return replace(cluster, links=tuple(replace(link, reduces=False) for link in cluster.links))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CLUSTERS), st.integers(1, 200), st.integers(1, 8), SIZES)
def test_nccl_is_never_slower_than_its_rings_and_trees(cluster, nodes, per_node, size_bytes):
    """And not much faster, where no switch adds."""
    assume(nodes * per_node > 1)
    group = CommGroup("dp", nodes * per_node, nodes, per_node)
    chosen, plain, ring, tree = (
        float(pattern.seconds(np.array([size_bytes]), group, wires_of(each, nodes * cluster.node_size))[0])
        for each, pattern in (
            (cluster, Nccl()),
            (adding_nothing(cluster), Nccl()),
            (cluster, RingAllReduce()),
            (cluster, TreeAllReduce()),
        )
    )
    assert chosen <= plain <= min(ring, tree) * (1 + 1e-12)
    assert min(ring, tree) <= 1.2 * plain


@pytest.mark.parametrize("topology", ["full_mesh", "ring", "tree", "torus_2d", "mesh_2d", "fat_tree", "rail"])
@pytest.mark.parametrize("nodes", [2, 8, 12])
def test_that_holds_on_topologies_too(topology, nodes):
    network = topology_of(topology, H100, nodes)
    for size_bytes in (1, 1e5, 1e7, 1e10):
        chosen, ring, tree = (
            seconds(pattern, size_bytes, 8 * nodes, adding_nothing(H100), network)
            for pattern in (Nccl(), RingAllReduce(), TreeAllReduce())
        )
        assert chosen <= min(ring, tree) * (1 + 1e-12)
        assert min(ring, tree) <= 1.2 * chosen


@pytest.mark.parametrize("n", [2, 8, 16, 128])
def test_nccl_as_a_pattern_is_what_collectives_cost_anyway(n):
    group = CommGroup.on_mesh("dp", n, 1, 8)
    wires = wires_of(H100, n)
    sizes = np.array([1e3, 1e6, 1e9])
    own = collective_s(Collective.ALL_REDUCE, sizes, group, H100, wires.measured)
    assert Nccl().seconds(sizes, group, wires).tolist() == own.tolist()


def test_trees_win_with_few_bytes_on_many_nodes_and_rings_with_many_on_few():
    ring, tree = RingAllReduce(), TreeAllReduce()
    assert seconds(tree, 1e4, 1024, H100) < 0.2 * seconds(ring, 1e4, 1024, H100)
    assert seconds(ring, 1e10, 16, H100) < seconds(tree, 1e10, 16, H100)


# -- properties ------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(SHARED),
    st.sampled_from([None, IDEAL, AlphaBeta(0.7, 2.0, 5.0)]),
    st.sampled_from([SINGLE, H100]),
    st.integers(2, 40),
    SIZES,
    st.floats(1.01, 10),
)
def test_more_bytes_take_longer_and_at_most_in_proportion(made, rates, cluster, n, size_bytes, factor):
    pattern = made(rates=rates)
    base, more = (seconds(pattern, x, n, cluster) for x in (size_bytes, size_bytes * factor))
    assert base < more <= factor * base * (1 + 1e-9)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(SHARED),
    st.sampled_from([None, IDEAL]),
    st.sampled_from([SINGLE, H100]),
    st.integers(1, 40),
    SIZES,
)
def test_more_nodes_never_help(made, rates, cluster, nodes, size_bytes):
    """Fitted lines from two nodes on: those inside one were fitted apart."""
    assume(nodes > 1 or (rates is not None and cluster.node_size > 1))
    pattern, p = made(rates=rates), cluster.node_size
    few, more = (seconds(pattern, size_bytes, k * p, cluster) for k in (nodes, nodes + 1))
    assert few <= more * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([RingAllReduce, TreeAllReduce, ReduceScatter, ParameterServer]), st.integers(2, 40), SIZES)
def test_nothing_beats_the_wire(made, n, size_bytes):
    """Every rank has to send its gradients' share of the others' sums, and to get the sum: 2 (n - 1) / n of the bytes.

    Trees over 2 or 3 ranks are no exception; they cost no more than a ring.
    """
    bound = 2 * (n - 1) / n * size_bytes * BETA_S
    assert seconds(made(rates=IDEAL), size_bytes, n) >= bound * (1 - 1e-9)
    assert seconds(made(), size_bytes, n) >= bound


@pytest.mark.parametrize("made", SHARED)
def test_equal_groups_of_an_axis_contend(made):
    """Sixteen pairs over one pair of uplinks of a tree take sixteen times as long as one."""
    from_text = pattern_of({"name": made().name, "efficiency": 1, "hop_latency_us": 0})
    network = topology_of("tree", SINGLE, 32, radix=16)
    group = CommGroup.on_mesh("dp", 2, 16, 1)
    all_s = float(from_text.seconds(np.array([1e8]), group, Wires(SINGLE, 32, network))[0])
    alone = CommGroup.on_mesh("dp", 2, 1, 1)
    one_s = float(from_text.seconds(np.array([1e8]), alone, Wires(SINGLE, 2, topology_of("tree", SINGLE, 2)))[0])
    assert all_s == pytest.approx(16 * one_s)


# -- the link that limits --------------------------------------------------------------------------------------


def test_patterns_know_their_busiest_link_of_a_topology():
    """On one switch a byte of gradients keeps a rank's link busy for what it sends of it."""
    n, group = 8, CommGroup.on_mesh("dp", 8, 1, 1)
    wires = Wires(SINGLE, n, topology_of("full_mesh", SINGLE, n))
    sent = {
        Nccl(): 2 * 7 / 8,
        RingAllReduce(): 2 * 7 / 8,
        TreeAllReduce(): 2,
        ReduceScatter(): 2 * 7 / 8,
        AllGather(): 7,
        ParameterServer(): 7,
        ParameterServer(8): 7 / 8,
        Butterfly(): 3,
        RingInRounds(): 2 * 7 / 8,
        Compressed(AllGather(), 7.0): 1,
    }
    for pattern, buffers in sent.items():
        link = pattern.busiest(1e9, group, wires)
        assert link.s_per_byte == pytest.approx(buffers * BETA_S), pattern
        assert max(link.src, link.dst) == n
        assert pattern.busiest(1e9, group, Wires(SINGLE, n)) is None
    assert ParameterServer().busiest(1e9, group, wires).dst == 0
    for pattern in (TimedBy(lambda size_bytes, n_ranks: 1.0), NoNetwork(), Compressed(NoNetwork(), 2.0)):
        assert pattern.busiest(1e9, group, wires) is None


# -- compression -----------------------------------------------------------------------------------------------


def test_compression_saves_bytes_for_passes_over_memory():
    ring = RingAllReduce(IDEAL)
    packed = Compressed(ring, 4.0)
    assert seconds(packed, 1e9, 8) == pytest.approx(seconds(ring, 2.5e8, 8))
    around = 2 * float(wires_of(SINGLE, 8).pass_s(np.array(1.25e9)))
    assert seconds(packed, 1e9, 8, memory=True) == pytest.approx(seconds(ring, 2.5e8, 8) + around)
    assert seconds(packed, 1e9, 8, memory=True) < seconds(ring, 1e9, 8, memory=True)
    assert packed.name == "ring_allreduce compressed 4x"


def test_compression_costs_more_than_it_saves_on_fast_links():
    assert seconds(Compressed(Nccl(), 1.1), 1e9, 8, H100, memory=True) > seconds(Nccl(), 1e9, 8, H100)


@pytest.mark.parametrize(("ratio", "passes"), [(0.5, 1), (float("inf"), 1), (float("nan"), 1), (2, -1)])
def test_impossible_compression_is_refused(ratio, passes):
    with pytest.raises(ForerunError, match="gradient compression: ratio"):
        Compressed(Nccl(), ratio, passes)


# -- one's own -------------------------------------------------------------------------------------------------


class RingInRounds(MessagePattern):
    """A ring written as messages."""

    name = "ring in rounds"
    rates = IDEAL

    def rounds(self, group, size_bytes):
        n = group.size
        yield Round([(rank, (rank + 1) % n, size_bytes / n) for rank in range(n)], times=2 * (n - 1))


@dataclass(frozen=True)
class Butterfly(MessagePattern):
    """Recursive doubling: in round k everybody exchanges all it has with the rank that differs in bit k."""

    name: str = "butterfly"
    rates: AlphaBeta | None = None

    def rounds(self, group, size_bytes):
        for bit in range(group.size.bit_length() - 1):
            yield [(rank, rank ^ (1 << bit), size_bytes) for rank in range(group.size)]


@pytest.mark.parametrize("n", [2, 5, 8, 24])
def test_a_ring_of_messages_is_the_ring(n):
    assert seconds(RingInRounds(), 1e8, n) == pytest.approx(seconds(RingAllReduce(IDEAL), 1e8, n), rel=1e-12)


def test_recursive_doubling_has_its_closed_form():
    for n in (2, 8, 64):
        closed = log2(n) * (ALPHA_S + 1e7 * BETA_S)
        assert seconds(Butterfly(rates=IDEAL), 1e7, n) == pytest.approx(closed, rel=1e-12)


def test_messages_reach_what_transfers_of_nccl_do():
    """Not far from NCCL's own ring, which is fitted apart."""

    class Ring(RingInRounds):
        rates = None

    for n, cluster in ((8, SINGLE), (32, SINGLE), (8, H100)):
        for size_bytes in (1e4, 1e6, 1e9):
            own, fitted = (seconds(pattern, size_bytes, n, cluster) for pattern in (Ring(), RingAllReduce()))
            assert 0.6 * fitted < own < 1.7 * fitted
            assert own >= 2 * (n - 1) / n * size_bytes / cluster.links[cluster is SINGLE].bytes_per_s


def test_messages_contend_on_a_topology():
    """Half of a butterfly's last round crosses each of the two links at the middle of a ring."""
    network = topology_of("ring", SINGLE, 8)
    assert seconds(Butterfly(rates=IDEAL), 1e8, 8, SINGLE, network) > 1.5 * seconds(Butterfly(rates=IDEAL), 1e8, 8)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([(0, 8, 1.0)], "there is no rank 8; the group has ranks 0 to 7"),
        ([(0, 1)], r"messages have to be \(from, to, bytes\)"),
        ([(0.5, 1, 1.0)], "messages have .* whole numbers"),
        ([(-1, 1, 1.0)], "messages have .* whole numbers"),
        ([(0, 1, float("nan"))], "messages have .* whole numbers"),
        ([(0, 1, -1.0)], "bytes and times have to be 0 or more"),
        ("abc", r"messages have to be \(from, to, bytes\)"),
    ],
)
def test_messages_that_make_no_sense_are_named(messages, problem):
    class Wrong(MessagePattern):
        name = "wrong"

        def rounds(self, group, size_bytes):
            return [Round([(0, 1, 1.0)]), Round(messages)]

    with pytest.raises(ForerunError, match=f"communication pattern wrong: round 1: {problem}"):
        seconds(Wrong(), 1e6, 8)


def test_code_that_fails_is_named():
    class Broken(MessagePattern):
        name = "broken"

        def rounds(self, group, size_bytes):
            yield [(0, 1, size_bytes / 0)]

    with pytest.raises(ForerunError, match="pattern broken: its rounds can't be made: ZeroDivisionError"):
        seconds(Broken(), 1e6, 8)
    with pytest.raises(ForerunError, match="pattern <lambda>: its function failed: ZeroDivisionError"):
        seconds(pattern_of(lambda size_bytes, n_ranks: 1 / 0), 1e6, 8)


def test_a_function_of_bytes_and_ranks_is_a_pattern():
    def recursive_doubling(size_bytes: float, n_ranks: int) -> float:
        return log2(n_ranks) * (5e-6 + size_bytes / 50e9)

    pattern = pattern_of(recursive_doubling)
    assert pattern == TimedBy(recursive_doubling, "recursive_doubling")
    assert seconds(pattern, 1e9, 16) == pytest.approx(4 * (5e-6 + 0.02))


@pytest.mark.parametrize("answer", [-1.0, float("inf"), float("nan"), None, "1", True])
def test_a_function_has_to_return_seconds(answer):
    with pytest.raises(ForerunError, match=r"pattern own: .* for 1,000,000 bytes over 4 ranks"):
        seconds(TimedBy(lambda size_bytes, n_ranks: answer), 1e6, 4)


def test_a_pattern_may_be_written_from_the_ground():
    class Telepathy(CommunicationPattern):
        name = "telepathy"

        def seconds(self, size_bytes, group, wires):
            return np.full_like(size_bytes, 1e-6 * group.nodes)

    assert seconds(pattern_of(Telepathy), 1e9, 24, H100) == 3e-6


# -- by name ---------------------------------------------------------------------------------------------------


def test_every_pattern_has_its_name():
    for name, made in PATTERNS.items():
        assert made().name == name
        assert pattern_of(name.upper().replace("_", "-")) == (None if name == "nccl" else made())
    assert pattern_of(None) is None
    assert pattern_of({"name": "ring_allreduce", "efficiency": 0.9}) == RingAllReduce(AlphaBeta(0.9))
    assert pattern_of({"name": "parameter_server", "servers": 4}) == ParameterServer(4)
    assert pattern_of({"name": "nccl", "compression": 4}) == Compressed(Nccl(), 4.0)
    assert pattern_of({"name": ParameterServer(2), "compression": 2}) == Compressed(ParameterServer(2), 2.0)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("ring", "unknown comm 'ring'; did you mean ring_allreduce"),
        ({"efficiency": 1}, "comm: key name is missing"),
        ({"name": "ring_allreduce", "efficency": 1}, "unknown key of comm 'efficency'; did you mean efficiency"),
        ({"name": "ring_allreduce", "efficiency": 1.5}, "efficiency is 1.5"),
        ({"name": "ring_allreduce", "efficiency": "1"}, "efficiency is '1', it has to be a number"),
        ({"name": "ring_allreduce", "hop_latency_us": 1}, "latencies go with efficiency"),
        ({"name": "ring_allreduce", "servers": 2}, "servers is not an option of ring_allreduce"),
        ({"name": "no_network", "efficiency": 1}, "efficiency is not an option of no_network"),
        ({"name": "parameter_server", "servers": 0}, "servers is 0"),
        ({"name": "nccl", "compression": 0.1}, "ratio 0.1"),
        (7, "comm: 7 is not a pattern"),
        (Compressed, "Compressed can't be made without arguments"),
    ],
)
def test_what_makes_no_sense_is_named(given, problem):
    with pytest.raises(ForerunError, match=problem):
        pattern_of(given, "comm")


@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in ("nccl", "no_network", "reduce_scatter")])
def test_a_plan_without_all_reduces_is_refused(name):
    pattern = pattern_of(name)
    pattern.check(Plan(seq_len=128, dp_shard=8, zero_stage=0))
    pattern.check(Plan(seq_len=128, dp_shard=4, dp_replicate=2, zero_stage=3))
    pattern.check(Plan(seq_len=128, dp_shard=4, zero_stage=1, stack="megatron-lm"))
    for stage in (1, 3):
        with pytest.raises(ForerunError, match=f"{name}: with zero_stage {stage} gradients are reduce-scattered"):
            pattern.check(Plan(seq_len=128, dp_shard=8, zero_stage=stage))


def test_patterns_that_go_with_sharded_state():
    fsdp = Plan(seq_len=128, dp_shard=8, zero_stage=3)
    for pattern in (Nccl(), ReduceScatter(), NoNetwork()):
        pattern.check(fsdp)
    assert ReduceScatter().zero_stage == 1
    for pattern in (Compressed(Nccl(), 4.0), Compressed(ReduceScatter(), 4.0)):
        with pytest.raises(ForerunError, match="gradient compression: with zero_stage 3"):
            pattern.check(fsdp)
