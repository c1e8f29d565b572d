"""Users' measurements: looked up by shape, interpolated along bytes, read from CSV files with clear errors."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.common.errors import ForerunError
from forerun.core.cost.measured import ANY, Curve, KernelProfile, Measured, NetworkProfile
from forerun.core.cost.measured_files import read_kernel_profile, read_measured, read_network_profile
from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import Attention
from forerun.core.program.types import Collective

RING = Curve((1e3, 1e6, 1e9), (10e-6, 20e-6, 5e-3))


# -- curves ------------------------------------------------------------------------------------------------------------


def test_a_curve_goes_through_its_points():
    for size, time_s in zip(RING.size_bytes, RING.time_s, strict=True):
        assert RING.seconds(size) == (pytest.approx(time_s), True)


def test_between_points_logarithms_are_straight():
    middle, inside = RING.seconds(np.sqrt(1e6 * 1e9))
    assert inside
    assert middle == pytest.approx(np.sqrt(20e-6 * 5e-3))


def test_beyond_the_last_point_its_segment_keeps_its_bandwidth():
    time_s, inside = RING.seconds(2e9)
    assert not inside
    assert time_s == pytest.approx(5e-3 + 1e9 * (5e-3 - 20e-6) / (1e9 - 1e6))


def test_below_the_first_point_its_segment_keeps_its_latency():
    slope = 10e-6 / (1e6 - 1e3)
    time_s, inside = RING.seconds(1.0)
    assert not inside
    assert time_s == pytest.approx(10e-6 - slope * 999)


def test_one_point_has_a_bandwidth_above_and_a_latency_below():
    point = Curve((1e6,), (1e-3,))
    assert point.seconds(1e6) == (pytest.approx(1e-3), True)
    assert point.seconds(3e6) == (pytest.approx(3e-3), False)
    assert point.seconds(1.0) == (1e-3, False)


@given(
    st.dictionaries(st.integers(1, 10**10), st.integers(1, 10**9), min_size=1, max_size=6),
    st.integers(1, 10**12),
    st.integers(1, 10**12),
)
def test_curves_are_positive_and_grow_where_their_points_do(points, one, other):
    sizes, times = sorted(points), sorted(points.values())
    curve = Curve(tuple(map(float, sizes)), tuple(time * 1e-9 for time in times))
    small, large = curve.seconds(min(one, other))[0], curve.seconds(max(one, other))[0]
    assert 0 <= small <= large * (1 + 1e-9)


def test_a_last_segment_that_falls_or_is_flat_goes_on_with_the_bandwidth_of_its_end():
    falling, flat = Curve((1e6, 1e9, 1.1e9), (1e-4, 5e-3, 4.4e-3)), Curve((1e6, 2e6), (1e-3, 1e-3))
    assert falling.seconds(2.1e9) == (pytest.approx(4.4e-3 + 1e9 * 4e-12), False)
    assert flat.seconds(4e6) == (pytest.approx(2e-3), False)
    assert Curve((2e6, 4e6), (1e-3, 4e-3)).seconds(1e6) == (pytest.approx(5e-4), False)


def test_noise_at_the_end_does_not_make_large_messages_free():
    noisy = Curve((1e6, 1e9, 1.1e9), (1e-4, 5e-3, 4.9e-3))
    times = [noisy.seconds(size)[0] for size in (1.1e9, 2e9, 4e9, 1e12)]
    assert all(a < b for a, b in pairwise(times))


# -- lookup ------------------------------------------------------------------------------------------------------------


def table_of(*add):
    """An op table, one op for each function of a builder."""
    ops = OpTableBuilder()
    for one in add:
        one(ops)
    return ops.build()


def test_products_are_found_by_shape_and_dtype():
    ops = table_of(
        lambda b: b.gemm("a", 64, 128, 256),
        lambda b: b.gemm("transposed", 128, 64, 256),
        lambda b: b.gemm("wide", 64, 128, 256, dtype="fp32"),
        lambda b: b.gemm("grouped", 64, 128, 256, batch=4, kernels=4),
        lambda b: b.gemm("accumulating", 64, 128, 256, accumulate_bytes=4),
    )
    profile = KernelProfile(gemm={("bf16", 64, 128, 256, 1): 1e-6, ("bf16", 64, 128, 256, 4): 2e-6})
    found = Measured(profile).lookup(ops, ())
    assert found.time_s[0] == 1e-6
    assert np.isnan(found.time_s[1:]).all()
    assert found.lacks == {
        1: "gemm m 128 n 64 k 256 batch 1 bf16: not measured",
        2: "gemm m 64 n 128 k 256 batch 1 fp32: not measured",
        3: "gemm m 64 n 128 k 256 batch 4 bf16 grouped: not measured",
        4: "gemm m 64 n 128 k 256 batch 1 bf16 accumulating: not measured",
    }


def test_attention_is_found_by_kernel_or_by_any():
    ops = table_of(
        lambda b: b.attention("forward", Attention(1, 32, 8, 4096, 4096, 128, 1, 0, 128), kernel="flash2"),
        lambda b: b.attention("backward", Attention(1, 32, 8, 4096, 4096, 128, 1, 1, 128), kernel="flash2"),
    )
    shape = (1, 32, 8, 4096, 4096, 128, 1, 0, 128)
    named = Measured(KernelProfile(attention={("flash2", shape): 1.0, (ANY, shape): 2.0})).lookup(ops, ())
    anything = Measured(KernelProfile(attention={(ANY, shape): 2.0})).lookup(ops, ())
    other = Measured(KernelProfile(attention={("flash3", shape): 3.0})).lookup(ops, ())
    assert (named.time_s[0], anything.time_s[0]) == (1.0, 2.0)
    assert np.isnan(other.time_s[0])
    assert "backward" in named.lacks[1]


def test_memory_bound_ops_take_their_own_curve_or_that_of_all():
    ops = table_of(
        lambda b: b.memory("norm", 1e6, 1e6),
        lambda b: b.memory("silu", 1e6, 1e6),
        lambda b: b.memory("four", 4e6, 4e6, launches=4),
        lambda b: b.memory("join", 0, 0, launches=0),
    )
    profile = KernelProfile(memory={"norm": Curve((1e6, 4e6), (1e-3, 4e-3)), ANY: Curve((1e6, 4e6), (1e-5, 4e-5))})
    found = Measured(profile).lookup(ops, ())
    assert found.time_s[:3] == pytest.approx([2e-3, 2e-5, 4 * 2e-5])
    assert np.isnan(found.time_s[3])
    assert found.lacks == {}
    alone = Measured(KernelProfile(memory={"norm": Curve((1e9,), (1.0,))})).lookup(ops, ())
    assert (
        alone.lacks[0] == "memory-bound norm, 2,000,000 bytes: extrapolated from 1,000,000,000 to 1,000,000,000 bytes"
    )
    assert alone.lacks[1] == "memory-bound silu: not measured"


def test_collectives_are_found_by_kind_ranks_and_stride():
    ops = table_of(
        lambda b: b.collective("gather", Collective.ALL_GATHER, 0, 1e6),
        lambda b: b.collective("reduce", Collective.ALL_REDUCE, 0, 1e6),
        lambda b: b.collective("far", Collective.ALL_GATHER, 1, 1e6),
        lambda b: b.collective("alone", Collective.ALL_GATHER, 2, 1e6),
        lambda b: b.p2p("send", 3, 1e10),
    )
    groups = [CommGroup("near", 8, 1, 8), CommGroup("far", 8, 8, 1, 8), CommGroup("one", 1, 1, 1)]
    groups.append(CommGroup("pp", 2, 2, 1, 8))
    curves = {(Collective.ALL_GATHER, 8, 1): RING, (Collective.SEND_RECV, 2, 8): RING}
    found = Measured(network=NetworkProfile(curves)).lookup(ops, groups)
    assert found.time_s[0] == pytest.approx(20e-6)
    assert found.inside.tolist() == [True, False, False, False, False]
    assert set(found.lacks) == {1, 2, 4}
    assert found.lacks[2] == "all_gather over 8 ranks, stride 8: not measured"
    assert found.lacks[4].startswith("send_recv over 2 ranks, stride 8, 10,000,000,000 bytes: extrapolated")


def test_only_what_was_given_is_missed():
    ops = table_of(lambda b: b.gemm("a", 64, 64, 64), lambda b: b.collective("g", Collective.ALL_GATHER, 0, 1e6))
    groups = [CommGroup("dp", 8, 1, 8)]
    assert set(Measured(KernelProfile()).lookup(ops, groups).lacks) == {0}
    assert set(Measured(network=NetworkProfile({})).lookup(ops, groups).lacks) == {1}


# -- files -------------------------------------------------------------------------------------------------------------

KERNELS = """\
# measured with the GPU warm
kind,dtype,m,n,k,batch,heads,kv_heads,seq_q,seq_kv,head_dim,v_head_dim,causal,backward,kernel,bytes,op,time_us
gemm,bfloat16,4096,4096,4096,,,,,,,,,,,,,180.5

attention,,,,,2,32,8,4096,4096,128,,yes,0,flash2,,,410
attention,,,,,2,32,8,4096,4096,192,128,true,1,,,,1500
memory,,,,,,,,,,,,,,,1e6,,5
memory,,,,,,,,,,,,,,,1e3,,3
memory,,,,,,,,,,,,,,,2000000,rmsnorm,9
"""
NETWORK = """\
collective,ranks,stride,bytes,time_us
all-reduce,8,1,1048576,40
all_reduce,8,1,1024,12.5
All_Gather,64,,1e9,30000
"""


def test_a_kernel_profile_is_read(tmp_path):
    path = tmp_path / "kernels.csv"
    path.write_text(KERNELS)
    profile = read_kernel_profile(path)
    assert profile.gemm == {("bf16", 4096, 4096, 4096, 1): pytest.approx(180.5e-6)}
    assert set(profile.attention) == {
        ("flash2", (2, 32, 8, 4096, 4096, 128, 1, 0, 128)),
        (ANY, (2, 32, 8, 4096, 4096, 192, 1, 1, 128)),
    }
    assert profile.memory[ANY].size_bytes == (1e3, 1e6)
    assert profile.memory[ANY].time_s == pytest.approx((3e-6, 5e-6))
    assert profile.memory["rmsnorm"].size_bytes == (2e6,)


def test_layouts_and_host_copies_are_read_and_used(tmp_path):
    path = tmp_path / "kernels.csv"
    path.write_text(
        "kind,dtype,m,n,k,layout,bytes,time_us\ngemm,bf16,64,32,16,,,5\ngemm,bf16,64,32,16,wgrad,,7\n"
        "host_copy,,,,,,1024,11\nhost_copy,,,,,,4096,13\n"
    )
    profile = read_kernel_profile(path)
    assert profile.gemm_of_layout == {(2, ("bf16", 64, 32, 16, 1)): pytest.approx(7e-6)}
    ops = table_of(
        lambda b: b.gemm("forward", 64, 32, 16),
        lambda b: b.gemm("dgrad", 64, 32, 16, role=1),
        lambda b: b.gemm("wgrad", 64, 32, 16, role=2),
        lambda b: b.host_copy("offload", 2048),
    )
    found = Measured(profile).lookup(ops, [])
    assert found.time_s == pytest.approx([5e-6, 5e-6, 7e-6, 11e-6 * (13 / 11) ** 0.5])
    assert not found.lacks


def test_each_direction_of_a_product_takes_its_own_time_and_others_that_of_all(tmp_path):
    path = tmp_path / "kernels.csv"
    rows = [f"gemm,bf16,64,32,16,{layout},{time}" for layout, time in (("", 3), ("forward", 5), ("dgrad", 7))]
    path.write_text("\n".join(["kind,dtype,m,n,k,layout,time_us", *rows]))
    ops = table_of(*(lambda b, role=role: b.gemm("product", 64, 32, 16, role=role) for role in range(3)))
    assert Measured(read_kernel_profile(path)).lookup(ops, []).time_s == pytest.approx([5e-6, 7e-6, 3e-6])


def test_a_network_profile_is_read(tmp_path):
    path = tmp_path / "network.csv"
    path.write_text("\ufeff" + NETWORK, encoding="utf-8")  # as spreadsheets save it
    curves = read_network_profile(path).curves
    assert set(curves) == {(Collective.ALL_REDUCE, 8, 1), (Collective.ALL_GATHER, 64, 1)}
    assert curves[Collective.ALL_REDUCE, 8, 1].time_s == pytest.approx((12.5e-6, 40e-6))


def test_algorithm_bandwidth_stands_for_a_time(tmp_path):
    path = tmp_path / "nccl.csv"
    path.write_text("collective,ranks,bytes,algbw_gb_per_s\nall_gather,8,1e9,200\n")
    assert read_network_profile(path).curves[Collective.ALL_GATHER, 8, 1].time_s == pytest.approx((5e-3,))


def test_nothing_given_is_nothing():
    assert read_measured(None, None) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no measurements; the columns are kind, time_us"),
        ("kind,time_us\n", "no measurements"),
        ("kind,time\ngemm,1\n", r"line 1: unknown column 'time'; known: .*time_us"),
        ("kind,dtype\n", "line 1: column time_us is missing"),
        ("kind,time_us,time_us\n", "column time_us is given twice"),
        (
            "kind,time_us\nconv,1\n",
            "column kind: expected one of gemm, attention, memory, host_copy, got 'conv'",
        ),
        ("kind,time_us,dtype,m,n,k\ngemm,1,bf16,8,8\n", "line 2: 5 cells under 6 columns"),
        ("kind,time_us,dtype,m,n,k\ngemm,-1,bf16,8,8,8\n", "column time_us: expected a number above 0, got '-1'"),
        ("kind,time_us,dtype,m,n,k\ngemm,nan,bf16,8,8,8\n", "column time_us"),
        ("kind,time_us,dtype,m,n,k\ngemm,1,bf17,8,8,8\n", "column dtype: expected one of"),
        ("kind,time_us,dtype,m,n,k\ngemm,1,bf16,8.5,8,8\n", "column m: expected a whole number above 0, got '8.5'"),
        ("kind,time_us,dtype,m,n,k\ngemm,1,bf16,,8,8\n", "column m is missing or empty"),
        ("kind,time_us,m,n,k\ngemm,1,8,8,8\n", "column dtype is missing or empty"),
        ("kind,time_us,bytes\nmemory,1,0\n", "column bytes"),
        ("kind,time_us,bytes\nmemory,1,5\n\nmemory,2,5\n", "line 4: the same measurement as line 2"),
        ('kind,time_us\n"gemm,1\n', "line 2: not CSV"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_a_wrong_kernel_profile_names_the_line_and_the_column(tmp_path, text, message):
    path = tmp_path / "mine.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ForerunError, match=r"mine\.csv.*" + message) as raised:
        read_kernel_profile(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("collective,ranks,bytes,time_us\nall_sum,8,1,1\n", "column collective: expected one of all_reduce"),
        ("collective,ranks,bytes,time_us\nall_reduce,1,1,1\n", "column ranks: expected at least 2, got '1'"),
        ("collective,ranks,bytes\nall_reduce,8,1\n", "column time_us: give a time"),
        ("collective,ranks,bytes,algbw_gb_per_s\nall_reduce,8,1,0\n", "column algbw_gb_per_s"),
        ("collective,ranks,stride,bytes,time_us\nall_reduce,8,x,1,1\n", "column stride: expected a whole number"),
    ],
)
def test_a_wrong_network_profile_names_the_line_and_the_column(tmp_path, text, message):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ForerunError, match=r"mine\.csv, line 2: " + message):
        read_network_profile(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ForerunError, match="nowhere"):
        read_network_profile(tmp_path / "nowhere.csv")


@pytest.mark.parametrize("time_s", [1e9, math.inf])
def test_a_measurement_in_another_unit_is_named_with_what_takes_it(time_s):
    ops = table_of(lambda table: table.gemm("a", 512, 512, 512))
    with pytest.raises(ForerunError, match=r"gemm m 512 n 512 k 512 .* no op takes over 100,000 s; check the unit"):
        Measured(KernelProfile(gemm={("bf16", 512, 512, 512, 1): time_s})).lookup(ops, ())
