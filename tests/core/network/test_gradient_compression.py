"""Compressed gradients: what is on the wire, and what the kernels around it cost."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.common.errors import ForerunError
from forerun.core.cost.gradient_exchange import wires_of
from forerun.core.network.gradient_compression import Int8, PowerSgd, TopK
from forerun.core.network.patterns import TimedBy, Wires
from forerun.core.network.patterns_collectives import AllGather, Nccl
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
