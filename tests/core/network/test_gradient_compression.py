"""Compressed gradients: what is on the wire, and what the kernels around it cost."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.common.errors import ForerunError
from forerun.core.cost.gradient_exchange import wires_of
from forerun.core.network.gradient_compression import Int8, PowerSgd, TopK
from forerun.core.network.gradient_sums import OneBit, Summed8
from forerun.core.network.on_topology import load_network
from forerun.core.network.patterns import TimedBy, Wires
from forerun.core.network.patterns_collectives import AllGather, Nccl, RingAllReduce
from forerun.core.program.groups import CommGroup
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.plan.plan import Plan

H100 = load_cluster("h100-sxm")
GROUP = CommGroup("dp", 32, 4, 8)
NO_KERNELS = Wires(H100, 32)
A_NANOSECOND_A_BYTE = TimedBy(lambda size, ranks: size * 1e-9, "a nanosecond a byte")
SHAPES = st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), min_size=1, max_size=5)


def seconds(pattern, size_bytes, wires=NO_KERNELS, group=GROUP):
    return float(pattern.seconds(np.array([float(size_bytes)]), group, wires)[0])


@given(SHAPES, st.integers(1, 64), st.integers(0, 10_000))
def test_powersgd_sends_what_torch_would(shapes, rank, vectors):
    hook = pytest.importorskip("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    parameters = vectors + sum(n * m for n, m in shapes)
    sent = vectors
    for n, m in shapes:
        compresses, whole, factors = hook._should_compress(n, m, min(n, m, rank), 2)
        sent += factors if compresses else whole
    pattern = PowerSgd.of(Counter(shapes), parameters, rank, A_NANOSECOND_A_BYTE)
    assert pattern.share == pytest.approx(sent / parameters)
    assert seconds(pattern, 4 * parameters) == pytest.approx(4e-9 * sent)


def test_powersgd_of_one_matrix_is_r_times_rows_and_columns():
    pattern = PowerSgd.of(Counter([(4096, 1024)]), 4096 * 1024, 4, Nccl())
    assert pattern.share * 4096 * 1024 == pytest.approx(4 * (4096 + 1024))
    assert pattern.name == "powersgd rank 4 over nccl (205x fewer bytes)"


def test_powersgd_keeps_what_torch_does():
    """Its hook kept 6,426 elements of errors, 240 of P and 400 of Q for a bucket of 60 x 100, 6 x 60 and 66 more."""
    pattern = PowerSgd.of(Counter([(60, 100), (6, 60)]), 6426, 4, FREE)
    assert pattern.residual_share(8) * 6426 == pytest.approx(6426 + 240 + 400)


def test_int8_gathers_a_byte_an_element_and_a_scale():
    size = 4 * 10**7
    expected = seconds(AllGather(), size / 4) + seconds(AllGather(), 8)
    assert seconds(Int8(4), size) == pytest.approx(expected)


def test_topk_gathers_values_and_places():
    size = 4 * 10**7
    assert seconds(TopK(4, 0.5), size) == pytest.approx(seconds(AllGather(), size))
    assert seconds(TopK(2, 0.01), size) == pytest.approx(seconds(AllGather(), 0.03 * size))


@pytest.mark.parametrize(
    ("pattern", "moved"),
    [
        (PowerSgd(TimedBy(lambda size, ranks: 0.0), 1, 0.0, 0.01, 0.01), 8 + 3),
        (PowerSgd(TimedBy(lambda size, ranks: 0.0), 1, 1.0, 0.0, 0.0), 8 + 4),
    ],
)
def test_kernels_move_the_bytes_of_the_hook(pattern, moved):
    wires = Wires(H100, 32, memory_bytes_per_s=1e12)
    assert seconds(pattern, 1e9, wires) == pytest.approx(moved * 1e-3)


FREE = TimedBy(lambda size, ranks: 0.0)


@pytest.mark.parametrize(
    ("pattern", "launches", "moved"),
    [
        (PowerSgd(FREE, 1, 0.0, 0.1, 0.1), 6, 8 + 3),
        (PowerSgd(FREE, 1, 0.25, 0.1, 0.1), 8, 8 + 0.75 * 3 + 2 * 2 * 0.25),
        (PowerSgd(FREE, 1, 1.0, 0.0, 0.0), 8, 8 + 4),
        (Int8(4), 2 + 32 * 2, 1 + 1.25 + 32 * (1.25 + 3)),
        (Int8(2), 2 + 32 * 2, 1 + 1.5 + 32 * (1.5 + 3)),
        (TopK(4, 0.01), 1 + 4 + 2 + 1 + 32, 5 + 4 + 1.02 + 0.01 + 1 + 32 * 0.04),
        (TopK(2, 0.01), 1 + 2 + 2 + 1 + 32, 5 + 2 + 1.03 + 0.01 + 1 + 32 * 0.05),
    ],
)
def test_kernels_launch_and_move_what_their_method_says(pattern, launches, moved):
    """Besides the exchange, over 32 ranks."""
    exchange = seconds(pattern, 1e9)
    launching = seconds(pattern, 1e9, Wires(H100, 32, launch_s=1.0))
    moving = seconds(pattern, 1e9, Wires(H100, 32, memory_bytes_per_s=1e9))
    assert launching - exchange == pytest.approx(launches)
    assert moving - exchange == pytest.approx(moved)


def test_powersgd_exchanges_three_buffers_and_its_pattern_names_the_link():
    sent = []
    pattern = PowerSgd(TimedBy(lambda size, ranks: sent.append(float(size)) or 0.0), 2, 0.5, 0.125, 0.25)
    seconds(pattern, 1000)
    assert sent == [500.0, 125.0, 250.0]
    over = PowerSgd(RingAllReduce(), 2, 0.5, 0.125, 0.25)
    wires = Wires(H100, 32, load_network("switch:8@450/300,switch:4@50/1350"))
    whole, part = (each.busiest(1e6, GROUP, wires) for each in (RingAllReduce(), over))
    assert part.s_per_byte == pytest.approx(0.875 * whole.s_per_byte)
    assert over.busiest(1e6, GROUP, NO_KERNELS) is None


def test_a_matrix_is_compressed_where_that_saves_more_than_half():
    """Rank 2 of 8 x 8 sends 32 of 64 elements, of 8 x 9 it sends 34 of 72; a rank is at most the shorter side."""
    assert PowerSgd.of({(8, 8): 1}, 64, 2, FREE) == PowerSgd(FREE, 2, 1, 0, 0)
    assert PowerSgd.of({(8, 9): 3}, 3 * 72, 2, FREE) == PowerSgd(FREE, 2, 0, 16 / 72, 18 / 72)
    assert PowerSgd.of({(1, 9): 1, (100, 100): 1}, 10_009, 4, FREE).first == pytest.approx(400 / 10_009)


def test_gathered_gradients_go_as_nccl_sends_them():
    assert Int8(4).as_nccl
    assert TopK(4).as_nccl
    assert PowerSgd(RingAllReduce(), 1, 0, 0, 0).as_nccl == RingAllReduce().as_nccl
    assert PowerSgd(FREE, 1, 0, 0, 0).as_nccl == FREE.as_nccl
    assert TopK(4).name == "top 0.01 of gradients gathered"
    assert Int8(4).name == "int8 gathered"


@pytest.mark.parametrize("pattern", [PowerSgd(Nccl(), 4, 0.01, 0.01, 0.01), Int8(4), TopK(4, 0.01)])
def test_more_bytes_and_more_ranks_never_help(pattern):
    sizes = [1e4, 1e6, 1e8]
    wires = wires_of(H100, 256)
    times = [[seconds(pattern, size, wires, CommGroup("dp", 8 * n, n, 8)) for size in sizes] for n in (2, 4, 32)]
    assert all(row == sorted(row) for row in times)
    assert all(column == sorted(column) for column in map(list, zip(*times, strict=True)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dp_shard": 8}, "with zero_stage 3 gradients are reduce-scattered"),
        ({"dp_replicate": 4, "tp": 2, "zero_stage": 0}, "tp 2 splits the parameters"),
    ],
)
def test_plans_that_reduce_no_whole_gradients_are_refused(fields, message):
    with pytest.raises(ForerunError, match=message):
        Int8(4).check(Plan(128, **fields))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_sums_of_8_bits_all_reduce_a_byte_an_element(kind):
    size = 4 * 10**7
    assert seconds(Summed8(kind, 4), size) == pytest.approx(seconds(Nccl(), size / 4) + seconds(Nccl(), 4))
    assert Summed8(kind, 4).wire_share(32) == 0.25
    assert Summed8(kind, 4).residual_share(32) == 0.0


def test_signs_are_a_bit_an_element_and_keep_the_errors_of_both_ends():
    node = CommGroup("dp", 8, 1, 8)
    alike = 2 * seconds(AllGather(), 32 * 10**8 / 32 / 8, group=node)
    assert seconds(OneBit(4), 32 * 10**8, group=node) == pytest.approx(alike, rel=0.4)
    few, many = (seconds(OneBit(4), size) for size in (4 * 10**9, 8 * 10**9))
    assert many == pytest.approx(2 * few, rel=0.1)
    assert OneBit(4).wire_share(32) == 1 / 32
    assert OneBit(4).residual_share(32) == 1 + 1 / 32


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_what_is_gathered_grows_with_the_ranks(ranks):
    """An all-gather sends n - 1 parts of a rank where an all-reduce sends 2 (n - 1) / n."""
    assert Int8(4).wire_share(ranks) == pytest.approx((ranks - 1) / (2 * (ranks - 1) / ranks) / 4)
    assert TopK(4, 0.01).wire_share(ranks) == pytest.approx(ranks / 2 * 0.02)
    assert TopK(4, 0.01).residual_share(ranks) == 1.0
