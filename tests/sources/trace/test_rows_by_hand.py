"""Rows of single operators against arithmetic by hand: every branch of a rule has a call here."""

import importlib

import pytest
import torch
from op_rows import Rows, called, empty
from torch._subclasses.fake_tensor import FakeTensorMode

from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.kinds import Attention, OpKind
from forerun.sources.trace.inside.kernels.memory import multi_tensor_launches
from forerun.sources.trace.inside.kernels.rules import describe

aten = torch.ops.aten
FORWARD, DGRAD, WGRAD = 0, 1, 2
INT, FP32 = torch.int64, torch.float32


def indices(*sizes):
    return empty(*sizes, dtype=INT)


# -- products ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "sizes", "out", "dims"),
    [
        ("bij,bjk->bik", [(3, 8, 5), (3, 5, 7)], (3, 8, 7), [(8, 7, 5, 3)]),
        ("ij,jk,kl->il", [(8, 5), (5, 7), (7, 9)], (8, 9), [(8, 7, 5, 1), (8, 9, 7, 1)]),
        ("ij,kj,jl->ikl", [(8, 5), (7, 5), (5, 9)], (8, 7, 9), [(8, 7, 1, 5), (56, 9, 5, 1)]),
        ("bhi,hij->bhj", [(2, 3, 5), (3, 5, 7)], (2, 3, 7), [(2, 7, 5, 3)]),
        ("i,j->ij", [(8,), (5,)], (8, 5), [(8, 5, 1, 1)]),
    ],
)
def test_einsum_contracts_from_left_to_right(terms, sizes, out, dims):
    rows = called(aten.einsum.default, terms, [empty(*one) for one in sizes], out=empty(*out))
    assert rows == [("einsum", *one, FORWARD) for one in dims]


@pytest.mark.parametrize(
    ("terms", "sizes", "out", "launches"),
    [("ij->i", [(8, 5)], (8,), 1), ("...i,ij->...j", [(8, 5), (5, 7)], (8, 7), 1), ("ij,jk,kl", [(8, 5)] * 3, (8,), 2)],
)
def test_einsums_that_are_not_read_cost_their_bytes(terms, sizes, out, launches):
    read = sum(2 * rows * columns for rows, columns in sizes)
    rows = called(aten.einsum.default, terms, [empty(*one) for one in sizes], out=empty(*out))
    assert rows == [("einsum", read, 2 * torch.Size(out).numel(), launches)]


@pytest.mark.parametrize(
    ("left", "right", "out", "dims"),
    [
        ((2, 3, 96, 40), (40, 56), (2, 3, 96, 56), (576, 56, 40, 1)),
        ((2, 3, 96, 40), (2, 3, 40, 56), (2, 3, 96, 56), (96, 56, 40, 6)),
        ((96, 40), (3, 40, 56), (3, 96, 56), (96, 56, 40, 3)),
        ((40,), (3, 40, 56), (3, 56), (1, 56, 40, 3)),
        ((96, 40), (40,), (96,), (96, 1, 40, 1)),
        ((40,), (40,), (), (1, 1, 40, 1)),
    ],
)
def test_matmul_is_one_product_or_a_batch(left, right, out, dims):
    assert called(aten.matmul.default, empty(*left), empty(*right), out=empty(*out)) == [("matmul", *dims, FORWARD)]
    lists = [empty(*left)] * 2, [empty(*right)] * 2
    both = (
        called(torch.ops.aten._foreach_mm.default, *lists, out=[empty(*out)] * 2)
        if hasattr(aten, "_foreach_mm")
        else []
    )
    assert all(row[1:] == (*dims, FORWARD) for row in both)


def test_a_linear_layer_has_a_row_for_each_output_feature():
    x = empty(4, 96, 40)
    assert called(aten.linear.default, x, empty(56, 40), out=empty(4, 96, 56)) == [("linear", 384, 56, 40, 1, FORWARD)]
    assert called(aten.linear.default, x, empty(40), out=empty(4, 96)) == [("linear", 384, 1, 40, 1, FORWARD)]


def test_what_a_product_is_added_to_is_copied_first_unless_it_is_a_vector_or_nothing():
    a, b = empty(96, 40), empty(40, 56)
    product = (96, 56, 40, 1, FORWARD)
    out = empty(96, 56)
    assert called(aten.addmm.default, empty(56), a, b, out=out) == [("addmm", *product)]
    assert called(aten.addmm.default, out, a, b, beta=0, out=out) == [("addmm", *product)]
    copied = [("copy_", 56 * 2, 96 * 56 * 2, 1), ("addmm", *product)]
    assert called(aten.addmm.default, empty(56), a, b, beta=2, out=out) == copied
    one_row = called(aten.addmm.default, empty(56), empty(1, 40), b, out=empty(1, 56))
    assert one_row == [("copy_", 56 * 2, 56 * 2, 1), ("addmm", 1, 56, 40, 1, FORWARD)]
    one_column = called(aten.addmm.default, empty(1), a, empty(40, 1), out=empty(96, 1))
    assert one_column == [("copy_", 2, 96 * 2, 1), ("addmm", 96, 1, 40, 1, FORWARD)]
    summed = called(aten.addbmm.default, out, empty(3, 96, 40), empty(3, 40, 56), out=out)
    assert summed == [("copy_", 96 * 56 * 2, 96 * 56 * 2, 1), ("addbmm", 96, 56, 120, 1, FORWARD)]
    batched = called(aten.baddbmm_.default, empty(3, 96, 56), empty(3, 96, 40), empty(3, 40, 56), out=empty(3, 96, 56))
    assert batched == [("baddbmm_", 96, 56, 40, 3, FORWARD)]


def test_products_of_nothing_launch_nothing():
    for m, n, k in ((0, 5, 7), (5, 0, 7), (5, 7, 0)):
        assert called(aten.mm.default, empty(m, k), empty(k, n), out=empty(m, n)) == []
        assert (
            called(aten.bmm.default, empty(0, m + 1, k + 1), empty(0, k + 1, n + 1), out=empty(0, m + 1, n + 1)) == []
        )
        scale = empty(dtype=FP32)
        a, b = (empty(*sizes, dtype=torch.float8_e4m3fn) for sizes in ((m, k), (k, n)))
        assert called(aten._scaled_mm.default, a, b, scale, scale, out=empty(m, n)) == []
        grouped = empty(m, k), empty(4, k, n), empty(4, dtype=torch.int32)
        assert called(aten._grouped_mm.default, *grouped, out=empty(m, n)) == []


def figures(op, *args, out, **kwargs):
    """dtype, FLOPs, bytes read and written of the only kernel of a call."""
    mode = Rows()
    mode.kernels = describe(mode.table, op, args, kwargs, out)
    ((_, _, dtype, _, flops, read, written, _),) = mode.rows()
    return dtype, flops, read, written


def test_complex_products_have_four_real_ones():
    a, b, out = (empty(*sizes, dtype=torch.complex64) for sizes in ((8, 4), (4, 6), (8, 6)))
    assert called(aten.mm.default, a, b, out=out) == [("mm", 16, 6, 8, 1, FORWARD)]
    _, flops, _, written = figures(aten.mm.default, a, b, out=out)
    assert (flops, written) == (4 * 2.0 * 8 * 4 * 6, 8 * 6 * 8)


@pytest.mark.parametrize(
    ("dtype", "unit", "width"),
    [
        (torch.float16, "fp16", 2),
        (torch.float64, "fp32", 8),
        (torch.int8, "fp8", 1),
        (torch.bfloat16, "bf16", 2),
    ],
)
def test_a_product_runs_on_the_unit_of_its_dtype_and_moves_its_elements_once(dtype, unit, width):
    a, b, out = (empty(*sizes, dtype=dtype) for sizes in ((8, 4), (4, 6), (8, 6)))
    assert figures(aten.mm.default, a, b, out=out) == (unit, 2.0 * 8 * 6 * 4, (8 + 6) * 4 * width, 8 * 6 * width)
    wide = empty(8, 6, dtype=FP32)
    assert figures(aten.mm.default, a, b, out=wide)[3] == 8 * 6 * 4


def test_fp4_products_have_two_numbers_in_each_element():
    a, b = empty(64, 16, dtype=torch.float4_e2m1fn_x2), empty(16, 48, dtype=torch.float4_e2m1fn_x2)
    scale = empty(64 * 2, dtype=torch.float8_e4m3fn)
    read = (64 + 48) * 32 / 2
    row = figures(aten._scaled_mm.default, a, b, scale, scale, out=empty(64, 48))
    assert row == ("nvfp4", 2.0 * 64 * 48 * 32, read, 64 * 48 * 2)


@pytest.mark.parametrize(
    ("left", "right", "out", "dims"),
    [
        ((4, 64), (8, 64, 96), (4, 96), (1, 96, 64, 8)),
        ((64, 4), (4, 96), (8, 64, 96), (64, 96, 1, 8)),
        ((8, 128, 64), (64, 1024), (128, 1024), (128, 128, 64, 8)),
        ((8, 128, 64), (64, 4), (128, 4), (128, 1, 64, 8)),
    ],
)
def test_a_grouped_product_divides_the_shared_dim_and_moves_each_operand_once(left, right, out, dims):
    args = empty(*left), empty(*right), empty(8, dtype=torch.int32)
    assert called(aten._grouped_mm.default, *args, out=empty(*out)) == [("_grouped_mm", *dims, FORWARD)]
    sizes = [2 * torch.Size(one).numel() for one in (left, right, out)]
    assert figures(aten._grouped_mm.default, *args, out=empty(*out))[2:] == (sizes[0] + sizes[1], sizes[2])


def test_products_that_are_fused_with_a_collective_are_those_of_the_gathered_or_the_own_rows():
    import torch.distributed._symmetric_memory  # registers the operators

    shard, weights = empty(24, 40), [empty(40, 56), empty(40, 16)]
    gathered = empty(96, 40), [empty(96, 56), empty(96, 16)]
    gather = torch.ops.symm_mem.fused_all_gather_matmul.default
    rows = called(gather, shard, weights, 0, "tp", out=gathered)
    assert [row[1:] for row in rows] == [(96, 56, 40, 1, FORWARD), (96, 16, 40, 1, FORWARD)]
    scatter = torch.ops.symm_mem.fused_matmul_reduce_scatter.default
    rows = called(scatter, empty(96, 40), weights[0], "sum", 0, "tp", out=empty(24, 56))
    assert [row[1:] for row in rows] == [(96, 56, 40, 1, FORWARD)]
    scaled = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter.default
    narrow = [empty(*sizes, dtype=torch.float8_e4m3fn) for sizes in ((96, 40), (40, 56))]
    scales = [empty(dtype=FP32)] * 2
    row = figures(scaled, *narrow, *scales, "sum", 0, 0, "tp", [96, 56], out=empty(24, 56))
    assert row == ("fp8", 2.0 * 96 * 56 * 40, (96 + 56) * 40, 96 * 56 * 2)


# -- layers that cuDNN runs ----------------------------------------------------------------------------------------


def convolved(x, w, y, bias=None, transposed=False, groups=1):
    args = (x, w, bias, [1, 1], [0, 0], [1, 1], transposed, [0, 0], groups)
    return called(aten.convolution.default, *args, out=y), figures(aten.convolution.default, *args, out=y)


def test_a_convolution_reads_input_weight_and_bias_and_writes_its_output():
    x, w, y, bias = empty(2, 8, 16, 15), empty(12, 8, 3, 5), empty(2, 12, 14, 11), empty(12)
    rows, (_, flops, read, written) = convolved(x, w, y, bias)
    assert rows == [("convolution", 2 * 14 * 11, 12, 8 * 15, 1, FORWARD)]
    assert flops == 2.0 * y.numel() * 8 * 15
    assert (read, written) == (2 * (x.numel() + w.numel() + 12), 2 * y.numel())
    rows, (_, flops, read, _) = convolved(x, empty(12, 4, 3, 5), y, groups=2)
    assert rows == [("convolution", 2 * 14 * 11, 6, 4 * 15, 2, FORWARD)]
    assert (flops, read) == (2.0 * y.numel() * 4 * 15, 2 * (x.numel() + w.numel() // 2))


def test_a_transposed_convolution_has_a_product_for_each_position_of_its_input():
    x, w, y = empty(2, 8, 14, 11), empty(8, 6, 3, 5), empty(2, 12, 16, 15)
    rows, (_, flops, read, written) = convolved(x, w, y, transposed=True, groups=2)
    assert rows == [("convolution", 2 * 14 * 11, 6 * 15, 4, 2, FORWARD)]
    assert flops == 2.0 * x.numel() * 6 * 15
    assert (read, written) == (2 * (x.numel() + w.numel()), 2 * y.numel())


def test_a_depthwise_convolution_is_bound_by_memory():
    x, w, y = empty(2, 8, 16, 16), empty(16, 1, 3, 3), empty(2, 16, 14, 14)
    rows, (_, flops, *_) = convolved(x, w, y, groups=8)
    assert rows == [("convolution", 2 * (x.numel() + w.numel()), 2 * y.numel(), 1)]
    assert flops == 2.0 * y.numel() * 9
    own = called(aten._conv_depthwise2d.default, x, empty(8, 1, 3, 3), [3, 3], None, [1, 1], [0, 0], [1, 1], out=y)
    assert own == [("_conv_depthwise2d", 2 * (x.numel() + 72), 2 * y.numel(), 1)]


def test_a_convolution_of_nothing_launches_nothing():
    assert convolved_rows(empty(0, 8, 16, 16), empty(12, 8, 3, 3), empty(0, 12, 14, 14)) == []


def convolved_rows(x, w, y):
    return called(aten.convolution.default, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, out=y)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_gradients_of_a_convolution_move_what_they_need(transposed):
    small, large = empty(2, 12, 14, 14), empty(2, 8, 16, 16)
    w = empty(12, 8, 3, 3)
    x, y = (small, large) if transposed else (large, small)
    bias = y.shape[1]
    args = (y, x, w, [bias], [1, 1], [0, 0], [1, 1], transposed, [0, 0], 1, [True, True, True])
    out = empty(*x.shape), empty(*w.shape), empty(bias)
    mode = Rows()
    mode.kernels = describe(mode.table, aten.convolution_backward.default, args, {}, out)
    positions, channels, unfolded = 2 * 14 * 14, 12, 8 * 9
    of_input = (positions, channels, unfolded) if transposed else (positions, unfolded, channels)
    assert called(aten.convolution_backward.default, *args, out=out) == [
        ("convolution_backward", *of_input, 1, DGRAD),
        ("convolution_backward", channels, unfolded, positions, 1, WGRAD),
        ("sum", 2 * y.numel(), 2 * bias, 1),
    ]
    moved = [row[5:7] for row in mode.rows()]
    sizes = [2 * one.numel() for one in (x, w, y)]
    assert moved[:2] == [(sizes[2] + sizes[1], sizes[0]), (sizes[2] + sizes[0], sizes[1])]
    assert {row[4] for row in mode.rows()[:2]} == {2.0 * positions * channels * unfolded}


RELU, TANH, LSTM, GRU = range(4)


def recurrent(x, mode, hidden, layers, batch_first=False, both=False, projected=0, packed=(), backward=False):
    named = {
        "mode": mode,
        "hidden_size": hidden,
        "proj_size": projected,
        "num_layers": layers,
        "batch_first": batch_first,
        "bidirectional": both,
        "batch_sizes": list(packed),
    }
    op = aten._cudnn_rnn_backward.default if backward else aten._cudnn_rnn.default
    return [row[1:] for row in called(op, x, out=None, **named)]


@pytest.mark.parametrize(("mode", "gates"), [(RELU, 1), (TANH, 1), (LSTM, 4), (GRU, 3)])
def test_a_recurrent_layer_has_one_product_over_all_steps_and_one_for_each(mode, gates):
    x = empty(10, 4, 32)
    made = gates * 48
    assert recurrent(x, mode, 48, 1) == [(40, made, 32, 1, FORWARD), (4, made, 48, 10, FORWARD)]
    first = recurrent(x, mode, 48, 1, batch_first=True)
    assert first == [(40, made, 32, 1, FORWARD), (10, made, 48, 4, FORWARD)]


def test_further_layers_read_the_states_of_all_directions():
    rows = recurrent(empty(10, 4, 32), LSTM, 48, 2, both=True, projected=16)
    assert (
        rows
        == [(40, 192, 32, 1, FORWARD), (4, 192, 16, 10, FORWARD)] * 2
        + [
            (40, 192, 32, 1, FORWARD),
            (4, 192, 16, 10, FORWARD),
        ]
        * 2
    )
    rows = recurrent(empty(10, 4, 32), GRU, 48, 2)
    assert rows[2:] == [(40, 144, 48, 1, FORWARD), (4, 144, 48, 10, FORWARD)]


def test_packed_sequences_have_a_step_for_each_batch_size():
    rows = recurrent(empty(9, 32), LSTM, 48, 1, packed=(4, 3, 2))
    assert rows == [(12, 192, 32, 1, FORWARD), (4, 192, 48, 3, FORWARD)]


def test_the_backward_of_a_recurrent_layer_has_twice_the_flops():
    rows = recurrent(empty(10, 4, 32), LSTM, 48, 1, backward=True)
    assert rows == [
        (4, 48, 192, 10, DGRAD),
        (40, 32, 192, 1, DGRAD),
        (192, 32, 40, 1, WGRAD),
        (192, 48, 40, 1, WGRAD),
    ]
    forward = recurrent(empty(10, 4, 32), LSTM, 48, 1)
    flops = [sum(m * n * k * batch for m, n, k, batch, _ in one) for one in (forward, rows)]
    assert flops[1] == 2 * flops[0]


# -- copies, gathers, scatters -------------------------------------------------------------------------------------


def test_copies_over_the_host_link_change_layouts_on_the_device():
    device, host = empty(64, 32), torch.zeros(64, 32, dtype=torch.bfloat16)
    turned = empty(32, 64).t()
    size = 64 * 32 * 2
    table = OpTableBuilder()
    for args, kinds in (((host, turned), ("copy_", "")), ((turned, host), ("", "copy_")), ((device, host), ("",))):
        kernels = describe(table, aten.copy_.default, args, {}, args[0])
        rows = table.build()
        for kernel, kind in zip(kernels, kinds, strict=True):
            if kind:
                assert (rows.bytes_read[kernel.op], rows.bytes_written[kernel.op]) == (size, size)
                assert (rows.launches[kernel.op], kernel.workspace_bytes, kernel.host_copy) == (1, size, False)
            else:
                assert (rows.bytes_comm[kernel.op], kernel.workspace_bytes, kernel.host_copy) == (size, 0, True)
    both = torch.zeros(32, 64, dtype=torch.bfloat16).t(), empty(32, 64).t()
    assert [kernel.host_copy for kernel in describe(table, aten.copy_.default, both, {}, both[0])] == [True]
    assert describe(table, aten.copy_.default, (empty(0, 4), torch.zeros(0, 4)), {}, empty(0, 4)) == []
    scalar = describe(table, aten._local_scalar_dense.default, (empty(1, dtype=FP32),), {}, 0)
    assert table.build().bytes_comm[scalar[0].op] == 4
    assert scalar[0].workspace_bytes == 0


def test_a_comparison_reads_both_tensors_and_the_host_reads_one_flag():
    one, other = empty(64, 16), empty(64, 16)
    size, flags = 64 * 16 * 2, 64 * 16
    rows = called(aten.equal.default, one, other)
    assert rows[:2] == [("eq", 2 * size, flags, 1, flags), ("all", flags, 1, 1)]
    table = OpTableBuilder()
    *_, read = describe(table, aten.equal.default, (one, other), {}, None)
    assert (table.build().bytes_comm[read.op], read.host_copy, read.sync, read.workspace_bytes) == (1, True, True, 0)
    assert called(aten.equal.default, one, empty(64, 8)) == called(aten.equal.default, empty(0), empty(0)) == []


def test_indices_on_the_host_are_copied_first_and_masks_become_indices():
    with FakeTensorMode():
        a, ids = empty(64, 16), torch.zeros(8, dtype=INT)
        mask = empty(64, dtype=torch.bool)
        table = OpTableBuilder()
        copy, gather = describe(table, aten.index.Tensor, (a, [None, ids]), {}, empty(64, 8))
        nonzero, take = describe(table, aten.index.Tensor, (a, [mask]), {}, empty(24, 16))
        put = describe(table, aten.index_put_.default, (a, [mask, ids], empty(24)), {}, a)
    rows = table.build()
    moved = list(zip(rows.bytes_read.tolist(), rows.bytes_written.tolist(), rows.launches.tolist(), strict=True))
    assert (rows.bytes_comm[copy.op], copy.host_copy, copy.sync, copy.workspace_bytes) == (64, True, True, 0)
    assert moved[gather.op] == (64 * 8 * 2 + 64, 64 * 8 * 2, 1)
    assert (moved[nonzero.op], nonzero.sync) == ((128, 64, 3), True)
    assert (moved[take.op], take.sync) == ((24 * 16 * 2 + 64, 24 * 16 * 2, 1), False)
    assert [kernel.host_copy for kernel in put] == [False, True, False]


def test_many_indices_of_an_embedding_are_sorted_and_summed_in_fp32():
    count, width, rows = 4096, 64, 70000
    gradient, table = empty(count, width), empty(rows, width)
    op = aten.embedding_dense_backward.default
    moved, whole, pairs = count * width * 2, rows * width * 2, count * 16
    (row,) = called(op, gradient, indices(count), rows, -1, False, out=table)
    passes = 3  # of 8 bits over the 17 bits of a row's number
    partial = moved // 2 * 4
    assert row == (
        "embedding_dense_backward",
        moved + (passes + 1) * pairs + partial,
        whole + moved + passes * pairs + partial,
        1 + passes + 4 + 8,
        2 * pairs + partial,
    )
    (few,) = called(op, empty(3072, width), indices(3072), rows, -1, False, out=table)
    assert few[1:] == (2 * 3072 * width * 2 + 3072 * 8, whole + 3072 * width * 2, 2)
    (dense,) = called(op, empty(3072, width), indices(3072), 10, -1, False, out=empty(10, width))
    assert dense[1:] == (3072 * width * 2 + 3072 * 8 + 10 * width * 2, 2 * 10 * width * 2, 2)


def test_scatters_read_and_write_the_rows_that_they_hit():
    target, ids = empty(100, 16), indices(8)
    whole, hit = 100 * 16 * 2, 8 * 16 * 2
    values = empty(8, 16)
    assert called(aten.index_copy_.default, target, 0, ids, values) == [("index_copy_", 64 + hit, hit, 1)]
    assert called(aten.index_add_.default, target, 0, ids, values) == [("index_add_", 64 + 2 * hit, hit, 1)]
    added = called(aten.index_add.default, target, 0, ids, values, out=target)
    assert added == [("index_add", 64 + 2 * hit + whole, hit + whole, 2)]
    columns = called(aten.index_fill_.int_Scalar, target, 1, indices(4), 0.0)
    assert columns == [("index_fill_", 4 * 8, 4 * 100 * 2, 1)]
    twice = called(aten.index_copy_.default, target, 0, indices(1000), empty(1000, 16))
    assert twice == [("index_copy_", 8000 + 1000 * 32, whole, 1)]  # no more than the whole target
    spread = called(aten.scatter_.src, target, 0, indices(8, 16), values)
    assert spread == [("scatter_", 8 * 16 * 8 + hit, hit, 1)]
    reduced = called(aten.scatter_.reduce, target, 0, indices(8, 16), values, reduce="multiply")
    assert reduced == [("scatter_", 8 * 16 * 8 + 2 * hit, hit, 1)]
    constant = called(aten.scatter_.value, target, 0, indices(8, 16), 1.0)
    assert constant == [("scatter_", 8 * 16 * 8, hit, 1)]
    assert called(aten.index_fill_.int_Scalar, empty(), 0, indices(1), 0.0) == [("index_fill_", 8, 2, 1)]


def test_puts_write_their_values_and_accumulating_ones_sort_their_indices_first():
    target, ids, values = empty(100, 16), indices(8), empty(8, 16)
    moved, whole = 8 * 16 * 2, 100 * 16 * 2
    assert called(aten.index_put_.default, target, [ids], values) == [("index_put_", moved + 64, moved, 1)]
    copied = called(aten.index_put.default, target, [ids], values, out=target)
    assert copied == [("index_put", moved + 64 + whole, moved + whole, 2)]
    passes = 2  # of 8 bits over the 11 bits of 1600 places
    sorting = 8 * 16 * passes
    added = called(aten.index_put_.default, target, [ids], values, True)
    assert added == [("index_put_", 2 * moved + 64 + sorting, moved + sorting, passes + 4 + 1)]
    # The values are those of index_put, in another place: (self, mask, indices, values).
    masked = aten._unsafe_masked_index_put_accumulate.default
    always = called(masked, target, empty(8, dtype=torch.bool), [ids], values, out=target)
    assert [row[1:] for row in always] == [(2 * moved + 64 + 8 + sorting + whole, moved + sorting + whole, passes + 6)]
    mask = empty(100, 16, dtype=torch.bool)
    assert called(aten.index_put_.default, target, [mask], empty(1)) == [("index_put_", whole + 1600, whole, 1)]
    by_number = called(aten.index_put_.default, target, [indices(1)], empty(1))
    assert by_number == [("index_put_", 2 + 8, 2, 1)]


def test_a_part_that_replaces_another_is_copied_after_the_whole():
    whole, part = 64 * 32 * 2, 16 * 32 * 2
    rows = called(aten.slice_scatter.default, empty(64, 32), empty(16, 32), 0, 0, 16, out=empty(64, 32))
    assert rows == [("slice_scatter", whole + part, whole + part, 2)]
    rows = called(aten.select_backward.default, empty(32), [64, 32], 0, 3, out=empty(64, 32))
    assert rows == [("select_backward", 32 * 2, whole + 32 * 2, 2)]


# -- softmax, losses, sorts ----------------------------------------------------------------------------------------


def test_rows_of_softmax_that_do_not_fit_shared_memory_are_read_twice():
    for columns, reads in ((49152 // 2, 1), (49152 // 2 + 1, 2)):  # 48 KiB of bf16
        x = empty(4, columns)
        size = 4 * columns * 2
        assert called(aten._softmax.default, x, 1, False, out=x) == [("_softmax", reads * size, size, 1)]
        gradient = called(aten._log_softmax_backward_data.default, x, x, 1, torch.bfloat16, out=x)
        assert gradient == [("_log_softmax_backward_data", (1 + reads) * size, size, 1)]
        gradient = called(aten._softmax_backward_data.default, x, x, 1, torch.bfloat16, out=x)
        assert gradient == [("_softmax_backward_data", (3 + reads) * size, 2 * size, 2, size)]
    assert called(aten._softmax.default, empty(), 0, False, out=empty()) == [("_softmax", 2, 2, 1)]


def test_a_safe_softmax_looks_for_rows_without_a_score():
    x = empty(4, 100)
    rows = called(aten._safe_softmax.default, x, 1, out=x)
    assert rows == [("_softmax", 800, 800, 1), ("_safe_softmax", 2 * 800 + 400, 400 + 800, 5, 400 + 800)]


def test_losses_read_one_score_for_each_target():
    scores, target, one = empty(256, 1000, dtype=FP32), indices(256), empty(dtype=FP32)
    rows = called(aten.nll_loss_forward.default, scores, target, None, 1, -100, out=(one, one))
    assert rows == [("nll_loss_forward", 256 * 8 + 256 * 4, 8, 1)]
    rows = called(aten.nll_loss_backward.default, one, scores, target, None, 1, -100, one, out=scores)
    assert rows == [("nll_loss_backward", 4 + 256 * 8, 256 * 1000 * 4 + 256 * 4, 2)]


@pytest.mark.parametrize(("dtype", "passes"), [(torch.bfloat16, 2), (FP32, 4), (INT, 8), (torch.int8, 1)])
def test_a_sort_passes_over_keys_and_positions_for_every_8_bits(dtype, passes):
    keys = empty(10, 100, dtype=dtype)
    pairs = 1000 * (keys.itemsize + 8)
    (row,) = called(aten.sort.default, keys, 1, False, out=(keys, indices(10, 100)))
    assert row == ("sort", 1000 * keys.itemsize + passes * pairs, (passes + 1) * pairs, passes + 4, 2 * pairs)


# -- lists of tensors ----------------------------------------------------------------------------------------------


def test_lists_of_tensors_take_as_many_kernels_as_their_chunks_and_dtypes_ask_for():
    many, wide = [empty(4) for _ in range(400)], [empty(4, dtype=FP32) for _ in range(400)]
    add = aten._foreach_add_.List
    assert called(add, many, many)[0][3] == multi_tensor_launches([4] * 400, 2) == 1
    assert called(aten._foreach_add.List, many, many, out=many)[0][3] == multi_tensor_launches([4] * 400, 3) == 2
    assert called(aten._foreach_mul_.ScalarList, many * 2, [1.0] * 800)[0][3] == 2  # at most 672 tensors with scalars
    assert called(aten._foreach_mul_.Scalar, many * 2, 1.0)[0][3] == 2  # at most 770 without
    assert called(add, [*many[:3], wide[0]], [*many[:3], wide[0]])[0][3] == 4
    assert called(aten._foreach_copy_.default, many[:3] + wide[:1], wide[:4])[0][3] == 1
    assert called(aten._foreach_copy_.default, many[:1], wide[:1]) == [("_foreach_copy_", 16 + 0, 8, 1)]
    assert called(aten._foreach_add_.List, [], []) == []
    norms = [empty() for _ in range(5)]
    assert called(aten._foreach_norm.Scalar, many[:5], 2, out=norms) == [("_foreach_norm", 40, 10, 2)]
    largest = called(aten._foreach_max.default, many[:5], out=norms)
    assert largest == [("_foreach_max", 40, 10, 2)]


@pytest.mark.parametrize("kept", [[], [1]])
def test_fused_optimizers_read_and_write_parameters_and_states(kept):
    lists = [[empty(1000, dtype=FP32) for _ in range(300)] for _ in range(3)]
    steps = [empty(dtype=FP32) for _ in range(300)]
    options = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "maximize": False}
    sgd = aten._fused_sgd_.default
    size = 300 * 4000
    momentum = lists[2] if kept else []
    rows = called(sgd, lists[0], lists[1], momentum, **options, is_first_step=False)
    used = 2 + len(kept)
    assert rows == [("_fused_sgd_", used * size, (used - 1) * size, multi_tensor_launches([1000] * 300, used))]
    adam = dict.fromkeys(("lr", "beta1", "beta2", "weight_decay", "eps"), 0.1) | {
        "amsgrad": False,
        "maximize": False,
    }
    states = [lists[2], lists[2], lists[2] if kept else []]
    rows = called(aten._fused_adam_.default, lists[0], lists[1], *states, steps, **adam)
    used = 4 + len(kept)
    launches = multi_tensor_launches([1000] * 300, used)
    assert rows == [("_fused_adam_", used * size + 1200, (used - 1) * size, launches)]
    assert called(aten._fused_adam_.default, [], [], [], [], [], [], **adam) == []


def test_lists_are_joined_128_at_a_time():
    for count, launches in ((128, 1), (129, 2)):
        rows = called(aten.cat.default, [empty(4)] * count, out=empty(4 * count))
        assert rows == [("cat", 8 * count, 8 * count, launches)]


# -- attention -----------------------------------------------------------------------------------------------------


def attended(op, q, k, v, out=None, **named):
    """(shape, FLOPs, bytes read, bytes written, launches, workspace) of the kernels of a call."""
    mode = Rows()
    mode.kernels = describe(mode.table, op, (q, k, v), named, out if out is not None else (q,))
    return [
        (row[3] if row[1] == OpKind.ATTENTION else None, *row[4:], kernel.workspace_bytes)
        for row, kernel in zip(mode.rows(), mode.kernels, strict=True)
    ]


FLASH = aten._flash_attention_forward.default


def pairs_of(lengths, left, right):
    return sum(
        max(0, i - left if left >= 0 else 0) <= j <= (i + right if right >= 0 else n - 1)
        for n in lengths
        for i in range(n)
        for j in range(n)
    )


@pytest.mark.parametrize(
    ("window", "causal"), [((2, 0), True), ((-1, 0), True), ((3, 2), False), ((-1, -1), False), ((5, -1), False)]
)
def test_windows_and_masks_of_sequences_of_one_length(window, causal):
    q, k = empty(2, 12, 8, 64), empty(2, 12, 2, 64)
    left, right = window
    ((shape, flops, *_),) = attended(FLASH, q, k, k, is_causal=causal, window_size_left=left, window_size_right=right)
    windowed = 0 <= left < 11
    pairs = 12 * 12 / 2 if causal and not windowed else pairs_of([12], left, right)
    assert flops == 2 * 8 * 2.0 * pairs * 128
    if windowed:
        assert (shape.seq_kv, shape.causal) == (max(1, round(pairs / 12)), 0)
    else:
        assert (shape.seq_kv, shape.causal) == (12, int(causal))


@pytest.mark.parametrize(("causal", "left", "right"), [(True, -1, -1), (True, 2, 0), (False, -1, -1), (False, 1, 1)])
def test_packed_sequences_of_known_lengths_attend_within_themselves(causal, left, right):
    lengths = [3, 9, 0, 4]
    cumulated = torch.tensor([0, 3, 12, 12, 16], dtype=torch.int32)
    q, k = empty(16, 8, 64), empty(16, 2, 64)
    ((shape, flops, *_),) = attended(
        FLASH, q, k, k, cum_seq_q=cumulated, cum_seq_k=cumulated, is_causal=causal, window_size_left=left,
        window_size_right=right,
    )  # fmt: skip
    pairs = pairs_of(lengths, left, 0 if causal else right)
    assert flops == 8 * 2.0 * pairs * 128
    assert (shape.batch, shape.seq_q, shape.seq_kv) == (1, 16, max(1, round(pairs / 16)))


@pytest.mark.parametrize(("window", "left"), [((-1, 0), -1), ((2, 0), 2)])
def test_attention_on_packed_sequences_is_flash_attention(window, left):
    importlib.import_module("torch.nn.attention.varlen")  # registers the operators
    lengths, operators = [3, 9, 4], torch.ops.torch_attn
    cumulated = torch.tensor([0, 3, 12, 16], dtype=torch.int32)
    q, lse, rng = empty(16, 8, 64), empty(8, 16, dtype=torch.float32), empty(2, dtype=torch.int64)
    causal = window == (-1, 0)
    pairs = pairs_of(lengths, left, 0)
    of_packed = {"cu_seq_q": cumulated, "cu_seq_k": cumulated, "max_q": 9, "max_k": 9, "is_causal": causal}
    of_packed["window_size"] = list(window)
    ((shape, flops, *_),) = attended(operators._varlen_attn.default, q, q, q, **of_packed)
    assert flops == 8 * 2.0 * pairs * 128
    assert (shape.batch, shape.seq_q, shape.heads, shape.backward) == (1, 16, 8, 0)
    mode = Rows()
    of_packed |= {"out": q, "lse": lse, "rng_state": rng}
    mode.kernels = describe(mode.table, operators._varlen_attn_backward.default, (q, q, q, q), of_packed, (q, q, q))
    backward = next(row for row in mode.rows() if row[1] == OpKind.ATTENTION)
    assert (backward[4], backward[3].backward) == (2.5 * 8 * 2.0 * pairs * 128, 1)


def test_packed_sequences_of_unknown_lengths_share_their_tokens():
    lengths = empty(5, dtype=torch.int32)
    for q in (empty(64, 8, 64), empty(1, 64, 8, 64)):
        ((shape, *_),) = attended(FLASH, q, q, q, cum_seq_q=lengths, cum_seq_k=lengths, is_causal=False)
        assert shape == Attention(4, 8, 8, 16, 16, 64, causal=0, backward=0, v_head_dim=64)
    short = empty(2, 8, 64)
    ((shape, *_),) = attended(FLASH, short, short, short, cum_seq_q=lengths, cum_seq_k=lengths, is_causal=False)
    assert (shape.batch, shape.seq_q, shape.seq_kv) == (4, 1, 1)


@pytest.mark.parametrize(
    ("name", "kv_heads", "head_dim", "expanded", "summed"),
    [
        ("flash", 8, 64, 0, False),
        ("flash", 2, 64, 2, True),
        ("efficient", 8, 64, 0, False),
        ("efficient", 2, 64, 0, False),
        ("efficient", 8, 128, 4, False),
    ],
)
def test_a_backward_pass_needs_fp32_rows_and_the_gradients_of_shared_heads(name, kv_heads, head_dim, expanded, summed):
    """`expanded` is the bytes of an element of key and value gradients that are made for every head first."""
    q, k = empty(2, 8, 200, head_dim), empty(2, kv_heads, 100, head_dim)
    op = getattr(aten, f"_scaled_dot_product_{name}_attention_backward").default
    mode = Rows()
    mode.kernels = describe(mode.table, op, (q, q, k, k), {"is_causal": False}, (q, k, k))
    padded = 2 * 8 * 256 * 4 * (1 + head_dim)  # queries to whole blocks of 128
    all_heads = 2 * 8 * 100 * 2 * head_dim
    assert mode.kernels[0].workspace_bytes == padded + expanded * all_heads
    first, *rest = mode.rows()
    assert first[4] == 2.5 * 2.0 * 2 * 8 * 200 * 100 * 2 * head_dim
    assert first[7] == (1 if name == "efficient" else 3)
    assert [row[0] for row in rest] == ["sum"] * summed
    for row in rest:
        assert row[5:] == (all_heads * 2, all_heads * 2 * kv_heads // 8, 2)


def test_attention_of_nothing_launches_nothing():
    full = empty(2, 12, 8, 64)
    for sizes in ((0, 12, 8, 64), (2, 0, 8, 64), (2, 12, 0, 64), (2, 12, 8, 0)):
        assert attended(FLASH, empty(*sizes), empty(*sizes), full, is_causal=False) == []
