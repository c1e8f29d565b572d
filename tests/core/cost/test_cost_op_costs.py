"""Whole op tables: every kind of row reaches its model."""

from dataclasses import replace

import numpy as np
import pytest

from forerun.common.errors import ForerunError
from forerun.common.units import PS_PER_S, PS_PER_US
from forerun.core.cost.op_costs import durations_ps
from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import Attention
from forerun.core.program.types import Collective, OpTable
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import KernelRates

GROUPS = (CommGroup("tp", 4, 1, 4), CommGroup("dp", 16, 2, 8), CommGroup("one", 1, 1, 1))
H100 = load_cluster("h100")


def table() -> OpTable:
    ops = OpTableBuilder()
    ops.gemm("product", 4096, 4096, 4096)
    ops.gemm("product.fp8", 4096, 4096, 4096, dtype="fp8")
    ops.attention("attention", Attention(1, 32, 8, 4096, 4096, 128, 1, 0, 128), kernel="flash3")
    ops.attention("attention.backward", Attention(1, 32, 8, 4096, 4096, 128, 1, 1, 128), kernel="flash3")
    ops.memory("norm", 1e8, 1e8)
    ops.collective("gather", Collective.ALL_GATHER, 0, 1e8)
    ops.collective("reduce", Collective.REDUCE_SCATTER, 1, 1e8)
    ops.collective("alone", Collective.ALL_REDUCE, 2, 1e8)
    ops.p2p("send", 1, 1e8)
    ops.host_copy("offload", 1e9)
    ops.delay("wait", 12345)
    return ops.build()


def durations(ops: OpTable, cluster=H100, **rates: float) -> dict[str, int]:
    time, _ = durations_ps(ops, GROUPS, cluster, KernelRates(**rates))
    return dict(zip(ops.name, time.tolist(), strict=True))


def test_every_row_takes_time_but_collectives_of_one_rank():
    time, covered = durations_ps(table(), GROUPS, H100, KernelRates())
    by_name = dict(zip(table().name, time.tolist(), strict=True))
    assert time.dtype == np.int64
    assert by_name.pop("alone") == 0
    assert all(value > 0 for value in by_name.values())
    assert set(covered.tolist()) <= {0.0, 1.0}


def test_known_answers():
    time = durations(table())
    assert time["wait"] == 12345
    assert time["norm"] / PS_PER_S == pytest.approx(1.5e-6 + 2e8 / (0.83 * 3.35e12), rel=1e-6)
    assert time["offload"] / PS_PER_S == pytest.approx(1e-5 + 1e9 / (0.8 * H100.host_bytes_per_s), rel=1e-6)
    assert time["product.fp8"] < time["product"]
    assert time["attention.backward"] > 2.5 * time["attention"]


def test_the_order_of_rows_does_not_matter():
    ops = OpTableBuilder()
    ops.delay("wait", 12345)
    ops.collective("reduce", Collective.REDUCE_SCATTER, 1, 1e8)
    ops.gemm("product", 4096, 4096, 4096)
    ops.attention("attention", Attention(1, 32, 8, 4096, 4096, 128, 1, 0, 128), kernel="flash3")
    whole, part = durations(table()), durations(ops.build())
    assert part == {name: whole[name] for name in part}


def test_launches_pay_one_by_one():
    one, many = OpTableBuilder(), OpTableBuilder()
    one.memory("norm", 1e8, 1e8)
    many.memory("norm", 1e8, 1e8, launches=5)
    extra = durations(many.build())["norm"] - durations(one.build())["norm"]
    assert extra == pytest.approx(4 * 1.5 * PS_PER_US, rel=1e-6)


@pytest.mark.parametrize(
    ("rate", "names"),
    [
        ("gemm", {"product", "product.fp8"}),
        ("attention", {"attention", "attention.backward"}),
        ("memory", {"norm"}),
        ("network", {"gather", "reduce", "send"}),
    ],
)
def test_a_stacks_rate_slows_its_own_kernels_only(rate, names):
    full, half = durations(table()), durations(table(), **{rate: 0.5})
    assert {name for name in full if half[name] > 1.5 * full[name]} == names
    assert all(half[name] == full[name] for name in set(full) - names)


def test_sustained_clocks_slow_compute_only():
    slow = replace(H100, device=replace(H100.device, sustained=0.5))
    fast = replace(H100, device=replace(H100.device, sustained=1.0))
    full, half = durations(table(), fast), durations(table(), slow)
    slower = {name for name in full if half[name] > full[name]}
    assert slower == {"product", "product.fp8", "attention", "attention.backward"}


def covered(cluster, **shape: int) -> float:
    ops = OpTableBuilder()
    ops.gemm("product", **({"m": 4096, "n": 4096, "k": 4096} | shape))
    return float(durations_ps(ops.build(), (), cluster, KernelRates())[1][0])


def test_coverage_tells_measured_shapes_of_measured_devices():
    assert covered(H100) == 1
    assert covered(H100, k=16) == 0
    assert covered(H100, n=200_000) == 0
    assert covered(load_cluster("a6000")) == 0
    cover = dict(zip(table().name, durations_ps(table(), GROUPS, H100, KernelRates())[1].tolist(), strict=True))
    assert (cover["gather"], cover["reduce"], cover["send"], cover["attention"]) == (1, 0, 0, 1)


def test_an_empty_table_takes_no_time():
    time, cover = durations_ps(OpTableBuilder().build(), GROUPS, H100, KernelRates())
    assert len(time) == len(cover) == 0


def test_a_group_that_no_link_joins_is_refused():
    island = replace(H100, links=H100.links[:1])
    with pytest.raises(ForerunError, match="no link joins 2 nodes of 8 GPUs"):
        durations_ps(table(), GROUPS, island, KernelRates())
