"""Kernels of dispatched operators: FLOPs against torch's counter, bytes and launches against hand counts."""

import time

import pytest
import torch
import torch.nn.functional as F
from op_rows import Rows, empty, record
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from forerun.common.errors import ForerunError
from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.kinds import Attention, Gemm, GemmRole, OpKind
from forerun.sources.trace.inside.kernels import attention as attention_module
from forerun.sources.trace.inside.kernels.attention import window_pairs
from forerun.sources.trace.inside.kernels.memory import multi_tensor_launches
from forerun.sources.trace.inside.kernels.rules import describe

aten = torch.ops.aten


def flops_of(function):
    with FakeTensorMode(), Rows() as mode:
        function()
    ours = sum(row[4] for row in mode.rows())
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        function()
    return ours, counter.get_total_flops()


# -- FLOPs ---------------------------------------------------------------------------------------------------------


PRODUCTS = {
    "mm": lambda: aten.mm(empty(96, 40), empty(40, 56)),
    "addmm": lambda: aten.addmm(empty(56), empty(96, 40), empty(40, 56)),
    "addmm of a matrix": lambda: aten.addmm(empty(96, 56), empty(96, 40), empty(40, 56)),
    "bmm": lambda: aten.bmm(empty(3, 96, 40), empty(3, 40, 56)),
    "baddbmm": lambda: aten.baddbmm(empty(3, 96, 56), empty(3, 96, 40), empty(3, 40, 56)),
    "linear": lambda: F.linear(empty(4, 96, 40), empty(56, 40), empty(56)),
    "matmul": lambda: empty(2, 3, 96, 40) @ empty(2, 3, 40, 56),
    "einsum": lambda: torch.einsum("bij,bjk->bik", empty(3, 96, 40), empty(3, 40, 56)),
    "linear backward": lambda: F.linear(empty(96, 40, grad=True), empty(56, 40, grad=True)).sum().backward(),
    "conv1d": lambda: F.conv1d(empty(2, 8, 32), empty(16, 8, 3), padding=1),
    "conv2d": lambda: F.conv2d(empty(2, 8, 32, 30), empty(16, 8, 3, 5), stride=2),
    "conv3d": lambda: F.conv3d(empty(2, 8, 9, 10, 11), empty(16, 8, 3, 3, 3)),
    "grouped conv2d": lambda: F.conv2d(empty(2, 8, 32, 30), empty(16, 2, 3, 3), groups=4),
    "depthwise conv2d": lambda: F.conv2d(empty(2, 8, 32, 30), empty(8, 1, 3, 3), groups=8),
    "transposed conv2d": lambda: F.conv_transpose2d(empty(2, 8, 32, 30), empty(8, 6, 4, 4), stride=2),
    "conv2d backward": lambda: (
        F.conv2d(empty(2, 8, 32, 30, grad=True), empty(16, 8, 3, 3, grad=True), stride=2).sum().backward()
    ),
    "conv2d weight gradient": lambda: (
        F.conv2d(empty(2, 8, 32, 30), empty(16, 8, 3, 3, grad=True), empty(16, grad=True)).sum().backward()
    ),
    "transposed conv2d backward": lambda: (
        F.conv_transpose2d(empty(2, 8, 16, 15, grad=True), empty(8, 6, 4, 4, grad=True), stride=2).sum().backward()
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_of_products_are_those_of_torchs_counter(name):
    ours, theirs = flops_of(PRODUCTS[name])
    assert ours == theirs > 0


@pytest.mark.parametrize("op", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("backward", [False, True])
def test_flops_of_attention_are_those_of_torchs_counter_which_halves_no_causal_mask(op, backward):
    q, k, v = empty(2, 4, 128, 64), empty(2, 4, 192, 64), empty(2, 4, 192, 64)
    row = attention_rows(op, q, k, v, False, backward)[0]
    if backward:
        name = getattr(aten, f"_scaled_dot_product_{op}_attention_backward").default
        with FlopCounterMode(display=False) as counter:
            name(*_backward_args(op, q, k, v, False))
    else:
        with FlopCounterMode(display=False) as counter:
            getattr(aten, f"_scaled_dot_product_{op}_attention").default(*_forward_args(op, q, k, v, False))
    assert row[4] == counter.get_total_flops()


def _forward_args(op, q, k, v, causal):
    if op == "flash":
        return q, k, v, 0.0, causal
    return q, k, v, None, True, 0.0, causal


def _backward_args(op, q, k, v, causal):
    out, lse = empty(*q.shape), empty(*q.shape[:3], dtype=torch.float32)
    seed = empty(dtype=torch.int64)
    if op == "flash":
        return out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed
    if op == "efficient":
        bias = empty(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        return out, q, k, v, bias, out, lse, seed, seed, 0.0, [True, True, True, False], causal
    return out, q, k, v, out, lse, seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal


def attention_rows(op, q, k, v, causal, backward):
    mode = Rows()
    name = f"_scaled_dot_product_{op}_attention" + ("_backward" if backward else "")
    args = (_backward_args if backward else _forward_args)(op, q, k, v, causal)
    mode.kernels = describe(mode.table, getattr(aten, name).default, args, {}, (q, k, v))
    return mode.rows()


@pytest.mark.parametrize(("op", "kernel"), [("flash", "flash2"), ("efficient", "efficient"), ("cudnn", "cudnn")])
def test_attention_rows_have_shape_and_kernel_of_the_cost_room(op, kernel):
    q, k, v = empty(2, 8, 128, 64), empty(2, 2, 192, 64), empty(2, 2, 192, 32)
    ((name, kind, found, shape, *_),) = attention_rows(op, q, k, v, True, False)
    assert (name, kind, found) == (f"_scaled_dot_product_{op}_attention", OpKind.ATTENTION, kernel)
    assert shape == Attention(2, 8, 2, 128, 192, 64, causal=1, backward=0, v_head_dim=32)


@pytest.mark.parametrize(
    ("active", "kernel"), [(None, "flash2"), ("FA2", "flash2"), ("FA3", "flash3"), ("FA4", "flash4")]
)
def test_the_flash_attention_that_is_active_runs(active, kernel, monkeypatch):
    monkeypatch.setattr(attention_module, "current_flash_attention_impl", lambda: active)
    q = empty(2, 8, 128, 64)
    ((_, _, dtype, *_),) = attention_rows("flash", q, q, q, True, False)
    assert dtype == kernel


def test_a_flash_attention_without_an_entry_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(attention_module, "current_flash_attention_impl", lambda: "FA9")
    q = empty(2, 8, 128, 64)
    with pytest.raises(ForerunError, match=r"'FA9'.*attention\.yaml.*names: \{torch: FA9\}"):
        attention_rows("flash", q, q, q, True, False)


def test_the_backward_of_grouped_flash_attention_sums_the_expanded_gradients():
    q, k = empty(2, 8, 256, 64), empty(2, 2, 256, 64)
    row, total = attention_rows("flash", q, k, k, True, True)
    assert row[3] == Attention(2, 8, 2, 256, 256, 64, causal=1, backward=1, v_head_dim=64)
    assert total[0] == "sum"
    assert total[5:7] == (2 * 8 * 256 * 128 * 2, 2 * 2 * 256 * 128 * 2)
    mode = Rows()
    kernels = describe(
        mode.table,
        aten._scaled_dot_product_flash_attention_backward.default,
        _backward_args("flash", q, k, k, True),
        {},
        (q, k, k),
    )
    # fp32 query gradient and row sums, key and value gradients of all heads
    assert kernels[0].workspace_bytes == 2 * 8 * 256 * 4 * (64 + 1) + 2 * 8 * 256 * 128 * 2


def test_packed_sequences_count_as_equally_long():
    q, k = empty(1024, 8, 64), empty(1024, 2, 64)
    lengths = empty(5, dtype=torch.int32)
    mode = Rows()
    args = (q, k, k, lengths, lengths, 256, 256, 0.0, True, False)
    mode.kernels = describe(mode.table, aten._flash_attention_forward.default, args, {}, (q,))
    ((_, _, _, shape, flops, *_),) = mode.rows()
    assert shape == Attention(4, 8, 2, 256, 256, 64, causal=1, backward=0, v_head_dim=64)
    assert flops == 2.0 * 4 * 8 * 256 * 256 / 2 * 128


@pytest.mark.parametrize(
    ("seq_q", "seq_kv", "left", "right"), [(7, 7, 2, 0), (7, 7, 0, 3), (5, 9, 3, 1), (6, 6, -1, 2)]
)
def test_pairs_of_a_sliding_window_are_those_counted_one_by_one(seq_q, seq_kv, left, right):
    shift = seq_kv - seq_q
    counted = sum(
        (left < 0 or j >= i + shift - left) and (right < 0 or j <= i + shift + right)
        for i in range(seq_q)
        for j in range(seq_kv)
    )
    assert window_pairs(seq_q, seq_kv, left, right) == counted


# -- rows of products ------------------------------------------------------------------------------------------------


def test_roles_follow_autograd_and_a_recomputed_forward_is_a_forward():
    def body(x, w):
        return F.linear(x, w).sin()

    def step():
        x, w = empty(96, 40, grad=True), empty(56, 40, grad=True)
        torch.utils.checkpoint.checkpoint(body, x, w, use_reentrant=False).sum().backward()

    shapes = [row[3] for row in record(step).rows() if row[1] == OpKind.GEMM]
    assert sorted(shape.role for shape in shapes) == [0, 0, GemmRole.DGRAD, GemmRole.WGRAD]
    assert Gemm(56, 40, 96, role=GemmRole.WGRAD) in shapes


def test_a_product_added_to_a_matrix_copies_it_and_accumulates():
    rows = record(aten.baddbmm, empty(3, 96, 56), empty(3, 96, 40), empty(3, 40, 56)).rows()
    assert [row[0] for row in rows] == ["copy_", "baddbmm"]
    assert rows[1][3].accumulate_bytes == 2
    ((_, _, _, shape, *_),) = record(empty(96, 56).addmm_, empty(96, 40), empty(40, 56)).rows()
    assert shape == Gemm(96, 56, 40, accumulate_bytes=2)


def test_fp32_products_are_tf32_where_the_switch_says_so():
    a = empty(8, 8, dtype=torch.float32)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert record(aten.mm, a, a).rows()[0][2] == "fp32"
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert record(aten.mm, a, a).rows()[0][2] == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_scaled_products_are_fp8_and_block_scales_mxfp8():
    a = empty(64, 32, dtype=torch.float8_e4m3fn)
    out = empty(64, 48)
    for scale, dtype in ((torch.float32, "fp8"), (torch.float8_e8m0fnu, "mxfp8")):
        mode = Rows()
        args = (a, empty(48, 32, dtype=torch.float8_e4m3fn).t(), empty(1, dtype=scale), empty(1, dtype=scale))
        mode.kernels = describe(mode.table, aten._scaled_mm.default, args, {}, out)
        row = mode.rows()[0]
        assert (row[2], row[3], row[5], row[6]) == (dtype, Gemm(64, 48, 32), (64 + 48) * 32, 64 * 48 * 2)


@pytest.mark.parametrize(
    ("left", "right", "out", "shape"),
    [
        ((1024, 64), (8, 64, 96), (1024, 96), (128, 96, 64, 8)),
        ((64, 1024), (1024, 96), (8, 64, 96), (64, 96, 128, 8)),
        ((8, 128, 64), (8, 64, 96), (8, 128, 96), (128, 96, 64, 8)),
        ((1023, 64), (8, 64, 96), (1023, 96), (127, 96, 64, 8)),
    ],
)
def test_grouped_products_are_one_kernel_with_exact_flops(left, right, out, shape):
    mode = Rows()
    args = (empty(*left), empty(*right), empty(8, dtype=torch.int32))
    mode.kernels = describe(mode.table, aten._grouped_mm.default, args, {}, empty(*out))
    ((_, _, _, got, flops, *_, launches),) = mode.rows()
    assert (got.m, got.n, got.k, got.batch) == shape
    shared = left[0] * left[1] * right[-1] if len(left) == 2 else 8 * left[1] * left[2] * right[-1]
    assert (flops, launches) == (2.0 * shared, 1)


@pytest.mark.parametrize(
    ("op", "args", "out", "shape"),
    [
        (aten.mv.default, ((48, 32), (32,)), (48,), (48, 1, 32)),
        (aten.addmv.default, ((48,), (48, 32), (32,)), (48,), (48, 1, 32)),
        (aten.dot.default, ((32,), (32,)), (), (1, 1, 32)),
    ],
)
def test_products_with_vectors_have_one_column(op, args, out, shape):
    mode = Rows()
    mode.kernels = describe(mode.table, op, tuple(empty(*sizes) for sizes in args), {}, empty(*out))
    ((_, _, _, got, flops, *_),) = mode.rows()
    assert (got.m, got.n, got.k, got.batch) == (*shape, 1)
    assert flops == 2.0 * shape[0] * shape[2]


def test_a_grouped_product_without_tokens_launches_nothing():
    mode = Rows()
    args = (empty(0, 64), empty(8, 64, 32), empty(8, dtype=torch.int32))
    assert describe(mode.table, aten._grouped_mm.default, args, {}, empty(0, 32)) == []


def test_a_convolution_backward_has_a_row_for_each_gradient_that_is_asked_for():
    x, w = empty(2, 8, 16, 16), empty(12, 8, 3, 3)
    y = empty(2, 12, 14, 14)
    for mask, names in (
        ([True, True, True], ["convolution_backward", "convolution_backward", "sum"]),
        ([False, True, False], ["convolution_backward"]),
    ):
        mode = Rows()
        args = (y, x, w, [12], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask)
        out = (empty(*x.shape), empty(*w.shape), empty(12))
        mode.kernels = describe(mode.table, aten.convolution_backward.default, args, {}, out)
        assert [row[0] for row in mode.rows()] == names
    shape = mode.rows()[0][3]
    assert (shape.m, shape.n, shape.k, shape.batch, shape.role) == (12, 72, 2 * 14 * 14, 1, GemmRole.WGRAD)


# -- bytes and launches ------------------------------------------------------------------------------------------------


def moved(function, *args, **kwargs):
    """(name, bytes read, bytes written, launches) of each kernel."""
    return [(row[0], row[5], row[6], row[7]) for row in record(function, *args, **kwargs).rows()]


def test_pointwise_ops_read_and_write_once_and_expanded_tensors_count_what_they_store():
    a, row = empty(64, 32), empty(32)
    assert moved(torch.add, a, row.expand(64, 32)) == [("add", 64 * 32 * 2 + 32 * 2, 64 * 32 * 2, 1)]
    assert moved(a.mul_, 2.0) == [("mul_", 64 * 32 * 2, 64 * 32 * 2, 1)]
    assert moved(a.t().clone) == [("clone", 64 * 32 * 2, 64 * 32 * 2, 1)]
    assert moved(a.zero_) == [("zero_", 0, 64 * 32 * 2, 1)]
    assert moved(torch.add, a, a, out=empty(64, 32)) == [("add", 2 * 64 * 32 * 2, 64 * 32 * 2, 1)]
    assert moved(torch.zeros_like, a) == [("zeros_like", 0, 64 * 32 * 2, 1)]
    window = a.view(-1).unfold(0, 8, 1)
    assert moved(window.clone)[0][1] == 64 * 32 * 2


@pytest.mark.parametrize(
    "function",
    [
        lambda a: a.view(-1),
        lambda a: a.t().transpose(0, 1).unsqueeze(0).expand(3, 8, 8),
        lambda a: a[2:4, 1],
        lambda a: a.split(2),
        lambda a: a.detach(),
        lambda a: torch.empty_like(a),
        lambda a: a.new_empty(3),
        lambda a: a.as_strided((2, 2), (1, 1)),
        lambda a: a.squeeze_().t_(),
        lambda a: torch.ops.c10d.barrier.default._schema,
    ],
)
def test_views_and_empty_tensors_launch_nothing(function):
    assert record(function, empty(8, 8)).kernels == []


def test_collectives_are_left_to_the_process_group():
    table = OpTableBuilder()
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    assert describe(table, gather, (empty(8), 2, "0"), {}, empty(16)) == []
    assert len(table) == 0


def test_gathers_read_what_they_take_and_scatters_write_what_they_hit():
    table, ids = empty(1000, 64), empty(128, dtype=torch.int64)
    size = 128 * 64 * 2
    assert moved(F.embedding, ids, table) == [("embedding", size + 128 * 8, size, 1)]
    assert moved(torch.index_select, table, 0, ids) == [("index_select", size + 128 * 8, size, 1)]
    assert moved(table.index_add_, 0, ids, empty(128, 64)) == [("index_add_", 2 * size + 128 * 8, size, 1)]
    assert moved(table.index_fill_, 0, ids, 0.0) == [("index_fill_", 128 * 8, size, 1)]
    assert moved(table.scatter_, 0, ids[:, None], 1.0) == [("scatter_", 128 * 8, 128 * 2, 1)]
    whole = 1000 * 64 * 2
    ((_, read, written, launches),) = moved(torch.index_copy, table, 0, ids, empty(128, 64))
    assert (read, written, launches) == (whole + size + 128 * 8, whole + size, 2)
    ((_, read, written, launches),) = moved(aten.embedding_dense_backward, empty(128, 64), ids, 1000, -1, False)
    assert (read, written, launches) == (2 * size + 128 * 8, whole + size, 2)
    many = empty(8192, dtype=torch.int64)
    assert moved(aten.embedding_dense_backward, empty(8192, 64), many, 1000, -1, False)[0][3] > 8


def test_cross_entropy_reads_one_score_a_target_and_wide_rows_twice():
    table = OpTableBuilder()
    scores, target = empty(256, 128256, dtype=torch.float32), empty(256, dtype=torch.int64)
    size = 256 * 128256 * 4
    assert moved(aten._log_softmax, scores, 1, False) == [("_log_softmax", 2 * size, size, 1)]
    assert moved(aten._log_softmax, scores[:, :512].clone(), 1, False)[0][1] == 256 * 512 * 4
    ((_, read, _, _),) = moved(aten.nll_loss_forward, scores, target, None, 1, -100)
    assert read == 256 * (8 + 4)
    one = empty(1, dtype=torch.float32)[0]
    out = empty(256, 128256, dtype=torch.float32)
    args = (one, scores, target, None, 1, -100, one)
    (kernel,) = describe(table, aten.nll_loss_backward.default, args, {}, out)
    built = table.build()
    assert built.bytes_written[kernel.op] == size + 256 * 4
    assert built.launches[kernel.op] == 2


def test_logsumexp_makes_a_copy_of_what_it_sums():
    x = torch.empty(256, 1024)
    size, sums = 4 * 256 * 1024, 4 * 256
    mode = record(torch.logsumexp, x, 1)
    (kernel,) = mode.kernels
    (row,) = mode.rows()
    assert row[5:] == (4 * size + 5 * sums, 2 * size + 6 * sums, 9)
    assert kernel.workspace_bytes == size + sums


def test_softmax_backward_multiplies_into_a_result_of_its_own_first():
    a = empty(64, 512)
    mode = record(aten._softmax_backward_data, a, a, 1, torch.bfloat16)
    assert mode.rows()[0][5:] == (4 * 64 * 512 * 2, 2 * 64 * 512 * 2, 2)
    assert mode.kernels[0].workspace_bytes == 64 * 512 * 2


def test_norm_backwards_pass_twice_over_gradient_and_input():
    x, w, rstd = empty(64, 512), empty(512), empty(64, 1, dtype=torch.float32)
    args = (x, x, [512], rstd, w, [True, True])
    mode = Rows()
    mode.kernels = describe(mode.table, aten._fused_rms_norm_backward.default, args, {}, (x, w))
    size = 64 * 512 * 2
    assert mode.rows()[0][5:] == (4 * size + 64 * 4 + 512 * 2, size + 512 * 2, 2)


def test_padding_and_slice_gradients_fill_everything_first():
    a = empty(64, 512)
    size = 64 * 512 * 2
    assert moved(F.pad, a, (0, 512)) == [("constant_pad_nd", size, 3 * size, 2)]
    assert moved(aten.slice_backward, a, [128, 512], 0, 0, 64, 1) == [("slice_backward", size, 3 * size, 2)]


def test_cat_takes_128_tensors_a_kernel():
    assert moved(torch.cat, [empty(4)] * 300) == [("cat", 300 * 8, 300 * 8, 3)]


def test_copies_over_the_host_link_and_what_the_host_waits_for():
    device, host = empty(64, 32), torch.zeros(64, 32)
    table = OpTableBuilder()
    cases = [
        (aten._to_copy.default, (host,), {"device": "meta"}, device, 2, True),  # converted on the host
        (aten.copy_.default, (device, host, True), {}, device, 2, False),
        (aten._to_copy.default, (device,), {"device": "cpu"}, host, 2, True),  # converted on the host
        (aten._to_copy.default, (device,), {"device": "cpu", "non_blocking": True}, host, 2, False),
    ]
    for func, args, kwargs, out, width, sync in cases:
        (kernel,) = describe(table, func, args, kwargs, out)
        built = table.build()
        assert built.kind[kernel.op] == OpKind.HOST_COPY
        assert built.bytes_comm[kernel.op] == 64 * 32 * width
        assert (kernel.host_copy, kernel.sync) == (True, sync)
    transposed = describe(table, aten.copy_.default, (host, empty(32, 64).t()), {}, host)
    assert [kernel.host_copy for kernel in transposed] == [False, True]
    (item,) = describe(table, aten._local_scalar_dense.default, (empty(1),), {}, 0)
    assert (item.host_copy, item.sync) == (True, True)
    assert describe(table, aten._local_scalar_dense.default, (host[:1, 0],), {}, 0) == []


def test_masks_and_sizes_known_to_the_device_make_the_host_wait():
    with FakeTensorMode():
        a, mask = empty(64, device="cpu"), empty(64, dtype=torch.bool, device="cpu")
        table = OpTableBuilder()
        kernels = describe(table, aten.index.Tensor, (a, [mask]), {}, empty(32, device="cpu"))
        assert [kernel.sync for kernel in kernels] == [True, False]
        (kernel,) = describe(table, aten.nonzero.default, (mask,), {}, empty(32, 1, dtype=torch.int64, device="cpu"))
        assert kernel.sync


# -- lists of tensors --------------------------------------------------------------------


def launches_one_by_one(sizes, lists, scalars):
    """multi_tensor_apply's own loop, chunk by chunk."""
    tensors_max = ([672, 448, 336, 252, 210] if scalars else [770, 448, 336, 252, 210])[lists - 1]
    launches = blocks = tensors = 0
    for size in sizes:
        chunks = -(-size // 65536)
        tensors += chunks > 0
        for chunk in range(chunks):
            blocks += 1
            last = chunk == chunks - 1
            if blocks == 2240 or (tensors == tensors_max and last):
                launches, blocks, tensors = launches + 1, 0, 0 if last else 1
    return launches + (blocks > 0)


@pytest.mark.parametrize("lists", [1, 2, 4, 5])
@pytest.mark.parametrize("scalars", [False, True])
@pytest.mark.parametrize("sizes", [[1] * 2000, [65536 * 2240], [65537 * 1000] * 7, [0, 5, 0, 65536 * 4480, 3] * 90, []])
def test_multi_tensor_launches_are_those_of_its_loop(sizes, lists, scalars):
    assert multi_tensor_launches(sizes, lists, scalars) == launches_one_by_one(sizes, lists, scalars)


def test_foreach_ops_move_every_tensor_of_every_list():
    a, b = [empty(1000) for _ in range(5)], [empty(1000) for _ in range(5)]
    assert moved(torch._foreach_add_, a, b) == [("_foreach_add_", 20000, 10000, 1)]
    assert moved(torch._foreach_sqrt, a) == [("_foreach_sqrt", 10000, 10000, 1)]
    assert moved(torch._foreach_zero_, a) == [("_foreach_zero_", 0, 10000, 1)]
    mixed = [empty(1000), empty(1000, dtype=torch.float32)]
    assert moved(torch._foreach_add_, mixed, 1.0)[0][3] == 2
    assert moved(torch._foreach_norm, a)[0][1:] == (10000, 10, 2)


@pytest.mark.parametrize("scaled", [False, True])
def test_fused_adamw_moves_four_lists_and_writes_gradients_only_to_unscale_them(scaled):
    with FakeTensorMode():
        lists = [[empty(1000, dtype=torch.float32, device="cpu") for _ in range(3)] for _ in range(4)]
        steps = [empty(1, dtype=torch.float32, device="cpu") for _ in range(3)]
        table = OpTableBuilder()
        options = dict(lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False)
        if scaled:
            options["grad_scale"] = empty(1, dtype=torch.float32, device="cpu")
        (kernel,) = describe(table, aten._fused_adamw_.default, (*lists, [], steps), options, None)
    built = table.build()
    assert built.bytes_read[kernel.op] == 4 * 12000 + 3 * 4 + 4 * scaled
    assert built.bytes_written[kernel.op] == (3 + scaled) * 12000
    assert built.launches[kernel.op] == 1


def test_fsdp_copies_move_shards_and_full_buffers():
    import_fsdp = torch.distributed.fsdp.fully_shard  # registers the operators
    assert callable(import_fsdp)
    shards = [empty(1000, dtype=torch.float32), empty(24, dtype=torch.float32)]
    buffer = empty(8 * 1024)
    table = OpTableBuilder()
    args = (shards, buffer, [1000, 24], 1024, 0)
    copy_in = torch.ops.fsdp.all_gather_copy_in.default
    (kernel,) = describe(table, copy_in, args, {}, (buffer[:1024], buffer))
    outs = [empty(8, 1000), empty(8, 24)]
    split = torch.ops.fsdp.split_with_sizes_copy.default
    (copy_out,) = describe(table, split, (buffer.view(8, -1), [1000, 24], 1), {"out": outs}, None)
    cat = torch.ops.fsdp.chunk_cat.default
    (reduce_in,) = describe(table, cat, ([empty(1001, 8)], 0, 8), {"out": empty(8, 126 * 8)}, None)
    built = table.build()
    moved_bytes = list(zip(built.bytes_read.tolist(), built.bytes_written.tolist(), strict=True))
    assert moved_bytes[kernel.op] == (1024 * 4, 1024 * 2)
    assert moved_bytes[copy_out.op] == (8 * 1024 * 2, 8 * 1024 * 2)
    assert moved_bytes[reduce_in.op] == (1001 * 8 * 2, 8 * 126 * 8 * 2)


# -- what no rule knows --------------------------------------------------------------------


def test_an_unknown_library_op_is_costed_by_bytes_and_marked():
    with torch.library._scoped_library("forerun_test_ops", "DEF") as library:
        library.define("twist(Tensor x, Tensor(a!) y) -> Tensor")
        library.impl("twist", lambda x, y: x.clone(), "Meta")
        mode = record(torch.ops.forerun_test_ops.twist.default, empty(64), empty(32))
        ((name, kind, _, _, _, read, written, launches),) = mode.rows()[:1]
    assert (name, kind, read, written, launches) == ("twist", OpKind.MEMORY, 192, 192, 1)
    assert mode.kernels[0].guessed


def test_ops_of_a_training_step_are_all_known():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.GELU(), torch.nn.MaxPool2d(2), torch.nn.Flatten()
    )
    head = torch.nn.Sequential(torch.nn.Linear(8 * 7 * 7, 32), torch.nn.LayerNorm(32), torch.nn.Dropout(0.1))
    whole = torch.nn.Sequential(model, head, torch.nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(whole.parameters(), foreach=True)

    def step():
        loss = F.cross_entropy(whole(torch.randn(4, 3, 16, 16)), torch.randint(0, 10, (4,)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()

    mode = record(step)
    guessed = {str(op) for op, kernel in zip(mode.ops, mode.kernels, strict=True) if kernel.guessed}
    assert guessed == set()
    assert len(mode.kernels) > 50


@pytest.mark.parametrize("name", ["masked_fill_", "ge_", "abs_", "gelu_", "floor_divide", "floor_divide_", "rsub"])
def test_pointwise_ops_are_known_in_every_form(name):
    a = empty(8, 8)
    second = {"masked_fill_": (empty(8, 8, dtype=torch.bool), 0.0)}.get(
        name, (2.0,) if name not in ("abs_", "gelu_") else ()
    )
    mode = record(getattr(aten, name), a, *second)
    assert [kernel.guessed for kernel in mode.kernels] == [False]


def test_wrapped_ops_are_described_as_what_they_run():
    table = OpTableBuilder()
    wrapper = torch.ops.higher_order.run_and_save_rng_state
    a = empty(64, 32)
    out = (empty(16, dtype=torch.uint8), (a, a.bool()))
    (kernel,) = describe(table, wrapper, (aten.native_dropout.default, a, 0.1, True), {}, out)
    assert table.build().name[kernel.op] == "native_dropout"
    assert table.build().bytes_written[kernel.op] == 64 * 32 * 3


def test_flex_attention_takes_the_density_of_its_mask():
    q, k = empty(1, 8, 1024, 64), empty(1, 2, 1024, 64)

    def causal(b, h, i, j):
        return i >= j

    def window(width):
        return lambda b, h, i, j: (i >= j) & (i - j < width)

    table = OpTableBuilder()
    shapes = {}
    for name, mask in (("causal", causal), ("window", window(128)), ("wide", window(1024)), ("broken", lambda: 0)):
        block_mask = (1024, 1024, *[None] * 8, 128, 128, mask)
        flex = torch.ops.higher_order.flex_attention
        (kernel,) = describe(table, flex, (q, k, k, None, block_mask, 0.125, {}, (), ()), {}, (q, None, None))
        shapes[name] = table.build().details_of(kernel.op)
        assert table.build().kernel[kernel.op] == "flex"
    assert shapes["causal"] == Attention(1, 8, 2, 1024, 1024, 64, causal=1, backward=0, v_head_dim=64)
    assert not shapes["window"].causal
    assert shapes["wide"] == shapes["broken"] == shapes["causal"], "another width of the same function"
    assert shapes["window"].seq_kv == round((128 * 1024 - 128 * 128 / 2) / 1024)


def test_flex_attention_reads_the_data_of_its_mask():
    q = empty(2, 8, 2048, 64)
    lengths = ([300, 724, 1024], [512] * 4)
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(one)), torch.tensor(one)) for one in lengths])

    def mask(b, h, i, j, documents):
        every = aten.full.default([], True, dtype=torch.bool, device=torch.device("cuda"))  # as and_masks begins
        return every & (i >= j) & (documents[b, i] == documents[b, j])

    table = OpTableBuilder()
    flex = torch.ops.higher_order.flex_attention
    block_mask = (2048, 2048, *[None] * 8, 128, 128, mask)
    for data, pairs in ((documents, sum(n * n / 2 for one in lengths for n in one) / 2), (empty(2, 2048), 2048**2 / 2)):
        args = (q, q, q, None, block_mask, 0.125, {}, (), (data,))
        (kernel,) = describe(table, flex, args, {}, (q, None, None))
        made = table.build()
        assert made.flops[kernel.op] == pytest.approx(2 * 8 * 2.0 * pairs * 128, rel=0.01)
        assert made.details_of(kernel.op).seq_kv == (round(pairs / 2048) if data is documents else 2048)


def test_a_description_takes_microseconds():
    table, a, b = OpTableBuilder(), empty(64, 32), empty(32, 48)
    out = empty(64, 48)
    calls = [(aten.mm.default, (a, b), out), (aten.add.Tensor, (a, a), a), (aten.view.default, (a, [32, 64]), a)]
    for func, args, made in calls:
        describe(table, func, args, {}, made)
    took = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(400):
            for func, args, made in calls:
                describe(table, func, args, {}, made)
        took.append(time.process_time() - start)
    assert min(took) / 1200 < 40e-6
