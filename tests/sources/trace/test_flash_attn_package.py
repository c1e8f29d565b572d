"""What a program gets from `import flash_attn` where the package is not installed."""

from importlib.util import find_spec

import pytest
from virtual_process import run_virtual

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="tracing needs torch"),
    pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash_attn is installed"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_virtual(
        """
        import importlib, importlib.metadata, importlib.util
        from dataclasses import astuple
        from forerun.sources.trace.inside.device import attention_choice, device_kernels, flash_attention
        flash_attention.install(recorder)
        device_kernels.install()
        import flash_attn
        from flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
        from flash_attn import flash_attn_varlen_func, flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
        from flash_attn.layers.rotary import apply_rotary_emb
        from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn

        result["versions"] = [flash_attn.__version__, importlib.metadata.version("flash-attn"),
                              importlib.metadata.version("flash_attn")]
        result["distribution"] = importlib.metadata.distribution("flash-attn").metadata["Name"]
        result["others"] = fails(lambda: importlib.metadata.version("no-such-package-at-all")).split(":")[0]
        result["listed"] = sum(one.metadata["Name"] == "flash-attn" for one in importlib.metadata.distributions())
        result["notes"] = list(recorder.notes)
        specs = {name: importlib.util.find_spec(name) for name in ("flash_attn", "flash_attn.ops.triton", "xformers")}
        result["packages"] = [spec.submodule_search_locations is not None for spec in specs.values()]
        result["missing"] = [fails(lambda: importlib.import_module("flash_attn.losses")),
                             fails(lambda: importlib.import_module("flash_attn.layers").rotary_missing)]

        def make(*sizes, dtype=torch.bfloat16):
            return torch.empty(*sizes, dtype=dtype, device="cuda", requires_grad=True)

        def rows(*names):
            return [row[0] for row in nodes(*names)]

        batch, length, heads, size = 2, 64, 4, 32
        q, k, v = make(batch, length, heads, size), *(make(batch, 48, 2, size) for _ in range(2))
        shapes, columns = {}, {}

        def attention(name, call):
            recorder.start()
            out = call()
            shapes[name] = [list(one.shape) for one in (out if isinstance(out, tuple) else (out,))]
            op = recorder.ops.build()
            own = [row for row, *_ in recorder._nodes if "attention" in op.name[row] or "attn" in op.name[row]]
            columns[name] = [[op.kernel[i], *map(int, astuple(op.details_of(i))), int(op.flops[i])] for i in own]
            return out

        attention("plain", lambda: flash_attn_func(q, k, v)).sum().backward()
        result["gradients"] = [list(one.grad.shape) for one in (q, k, v)]
        attention("causal", lambda: flash_attn_func(q, q, q, 0.0, 0.5, True))
        attention("window", lambda: flash_attn_func(q, q, q, causal=True, window_size=(16, 0)))
        attention("left", lambda: flash_attn_func(q, q, q, window_size=(16, -1)))
        attention("with statistics", lambda: flash_attn_func(q, k, v, return_attn_probs=True))
        attention("qkv", lambda: flash_attn_qkvpacked_func(make(batch, length, 3, heads, size)))
        attention("kv", lambda: flash_attn_kvpacked_func(q, make(batch, 48, 2, 2, size)))
        starts = torch.tensor([0, 40, 96], dtype=torch.int32, device="cuda")
        tokens = make(96, heads, size)
        packed = starts, starts, 56, 56
        attention("packed", lambda: flash_attn_varlen_func(tokens, tokens, tokens, *packed, causal=True))
        attention("packed qkv", lambda: flash_attn_varlen_qkvpacked_func(make(96, 3, heads, size), starts, 56))
        attention("packed kv", lambda: flash_attn_varlen_kvpacked_func(tokens, make(96, 2, heads, size), *packed))
        import flash_attn_interface as third
        attention("third", lambda: third.flash_attn_func(q, q, q, causal=True)).sum().backward()
        result["third backward"] = [row[0] for row in nodes() if "flash_attn" in row[0]]
        attention("third with statistics", lambda: third.flash_attn_func(q, k, v, return_attn_probs=True))
        attention("third qkv", lambda: third.flash_attn_qkvpacked_func(make(batch, length, 3, heads, size)))
        attention("third packed", lambda: third.flash_attn_varlen_func(
            tokens, tokens, tokens, *packed, causal=True, return_attn_probs=True))
        attention("third window", lambda: third.flash_attn_func(q, q, q, causal=True, window_size=(16, 0)))
        narrow = torch.empty(batch, length, heads, size, dtype=torch.float8_e4m3fn, device="cuda")
        result["third narrow"] = [str(third.flash_attn_func(narrow, narrow, narrow).dtype),
                                  str(third.flash_attn_func(q, q, q).dtype)]
        result["third cache"] = fails(lambda: third.flash_attn_with_kvcache(q, k, v), ForerunError)

        import sys, types
        from forerun.sources.trace import opaque
        from forerun.sources.trace.inside.device import kernel_hub
        from forerun.sources.trace.inside.kernels.opaque_calls import Launches
        sys.modules["kernels"] = hub = types.ModuleType("kernels")
        kernel_hub.install(Launches(mode, recorder), recorder)
        names = ("kernels-community/flash-attn3", "vllm-flash-attn3", "Kernels-Community/flash-attn2", "flash-attn")
        found = [hub.get_kernel(name, revision="main") for name in names]
        result["hub"] = [[one.__name__, one.flash_attn_func.__module__.rpartition(".")[2],
                          one.flash_attn_interface.flash_attn_func is one.flash_attn_func] for one in found]
        result["has"] = [hub.has_kernel(names[0]), fails(lambda: hub.has_kernel("someone/no-kernel"), BaseException)]
        result["hub notes"] = [note for note in recorder.notes if "get_kernel" in note]
        result["shapes"], result["columns"] = shapes, columns

        attention_choice.install((8, 0))
        half = q.transpose(1, 2)
        def held(call):
            before = recorder.memory.allocated_bytes
            out = call()
            return recorder.memory.allocated_bytes - before
        result["dropout"] = [held(lambda: flash_attn_func(q, q, q, dropout_p=p)) for p in (0.0, 0.5)]
        sdpa = nn.functional.scaled_dot_product_attention
        result["dropout"] += [held(lambda: sdpa(half, half, half, dropout_p=p)) for p in (0.0, 0.5)]
        result["cache"] = fails(lambda: flash_attn.flash_attn_with_kvcache(q, k, v), ForerunError)

        recorder.start()
        cos, sin = (torch.empty(length, size // 2, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        turned = apply_rotary_emb(q, cos, sin, True)
        turned.sum().backward()
        result["rotary"] = [list(turned.shape), [row[0] for row in nodes() if "rotary" in row[0]]]

        from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward
        with torch.no_grad():
            of_parts = 0.0, 0.5, True, -1, -1, 0.0, None, False
            out, lse, *_ = attention("part", lambda: _flash_attn_forward(q, q, q, *of_parts))
            grads = [torch.empty_like(q) for _ in range(3)]
            attention("part backward", lambda: _flash_attn_backward(out, q, q, q, out, lse, *grads, *of_parts))
            out, lse, *_ = attention(
                "part packed", lambda: _flash_attn_varlen_forward(tokens, tokens, tokens, *packed, 0.0, 0.5, True))
            grads = [torch.empty_like(tokens) for _ in range(3)]
            attention("part packed backward", lambda: _flash_attn_varlen_backward(
                out, tokens, tokens, tokens, out, lse, *grads, *packed, *of_parts))

        from torch.nn.attention import activate_flash_attention_impl
        from torch.nn.attention.varlen import varlen_attn
        activate_flash_attention_impl("FA3")
        attention("third activated", lambda: varlen_attn(tokens, tokens, tokens, *packed, window_size=(-1, 0)))

        from flash_attn.layers.rotary import RotaryEmbedding
        from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
        recorder.start()
        rotary, made = RotaryEmbedding(size, device="cuda"), make(batch, length, 3, heads, size) * 1
        rotated = rotary(made)
        (rotated * 2).sum().backward()
        queries, keys = make(batch, length, heads, size) * 1, make(batch, length, 2, 2, size) * 1
        both = rotary(queries, keys, max_seqlen=length)
        rows_of = [row for row in recorder._nodes if "rotary_" in recorder.ops.build().name[row[0]]]
        bytes_of = recorder.ops.build().bytes_read
        result["rotary in place"] = [rotated.data_ptr() == made.data_ptr(), both[0].data_ptr() == queries.data_ptr(),
                                     both[1].data_ptr() == keys.data_ptr(), len(rows_of),
                                     [float(bytes_of[row[0]]) for row in rows_of]]

        recorder.start()
        logits, labels = make(16, 1000), torch.zeros(16, dtype=torch.int64, device="cuda")
        losses, _ = cross_entropy_loss(logits, labels)
        losses.sum().backward()
        taken = logits.detach().requires_grad_() * 1
        lost, _ = cross_entropy_loss(taken, labels, inplace_backward=True)
        lost.sum().backward()
        result["cross entropy"] = [list(losses.shape), str(losses.dtype), list(logits.grad.shape), rows(),
                                   fails(lambda: cross_entropy_loss(logits, labels, process_group=1))]

        from grouped_gemm import ops
        recorder.start()
        sizes = torch.tensor([4, 12])
        chosen = torch.tensor([[0, 1]] * 8, dtype=torch.int32, device="cuda")
        share = torch.ones(8, 2, device="cuda", requires_grad=True)
        tokens_in, first, second = make(8, 32), make(2, 32, 64), make(2, 32, 64)
        ordered, back = ops.permute(tokens_in, chosen)
        wide = ops.gmm(ordered, first, sizes)
        narrow = ops.gmm(wide, second, sizes, trans_b=True)
        summed = ops.unpermute(narrow, back, share)
        summed.sum().backward()
        table = recorder.ops.build()
        flops = sum(float(table.flops[row[0]]) for row in recorder._nodes)
        result["grouped"] = [list(one.shape) for one in (ordered, wide, narrow, summed, tokens_in.grad, share.grad)]
        result["grouped FLOPs"] = flops

        recorder.start()
        x, residual = make(8, size), make(8, size)
        weight, bias = make(size), make(size)
        out, total = layer_norm_fn(x, weight, bias, residual, prenorm=True)
        alone = layer_norm_fn(x, weight, bias)
        result["layer norm"] = [list(out.shape), list(total.shape), list(alone.shape), rows("add", "native_layer_norm")]
        recorder.start()
        out, total = rms_norm_fn(x, weight, None, residual, prenorm=True)
        result["rms norm"] = [list(out.shape), out is total, rows("add", "native_layer_norm", "_fused_rms_norm")]

        mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], device="cuda")
        hidden = make(2, 5, 16)
        kept, indices, cumulated, longest, lengths = unpad_input(hidden, mask)
        result["unpadded"] = [list(kept.shape), indices.tolist(), cumulated.tolist(), longest, lengths.tolist(),
                              str(cumulated.dtype)]
        result["padded"] = list(pad_input(kept, indices, 2, 5).shape)
        result["rows"] = list(index_first_axis(hidden.flatten(0, 1), indices).shape)
        values = torch.tensor([3, 5], device="cuda")
        result["put back"] = pad_input(values, torch.tensor([1, 4], device="cuda"), 2, 3).tolist()
        """,
        tmp_path_factory.mktemp("flash"),
    )


LENGTH, HEADS, SIZE = 64, 4, 32
OUT = [2, LENGTH, HEADS, SIZE]


def test_the_package_is_there_with_its_version(answers):
    assert answers["versions"] == ["2.8.3"] * 3
    assert answers["distribution"] == "flash-attn"
    assert answers["listed"] == 1
    assert answers["others"] == "PackageNotFoundError"
    assert answers["packages"] == [True] * 3
    assert answers["notes"] == ["flash_attn is not installed: traced with torch's own attention in its place"]


def test_what_it_lacks_is_an_import_error_or_refused_by_name(answers):
    module, attribute = answers["missing"]
    assert module == "ModuleNotFoundError: No module named 'flash_attn.losses'"
    assert attribute.startswith("AttributeError: module 'flash_attn.layers' has no attribute 'rotary_missing'")
    assert answers["cache"] == "ForerunError: flash_attn_with_kvcache: inference with a cache can't be traced"


def test_every_layout_of_queries_keys_and_values_has_outputs_like_the_queries(answers):
    shapes = {name: shape for name, shape in answers["shapes"].items() if not name.startswith(("third", "part"))}
    assert shapes.pop("with statistics") == [OUT, [2, HEADS, LENGTH], [0]]
    packed = {name: shapes.pop(name) for name in list(shapes) if name.startswith("packed")}
    assert {name: [[96, HEADS, SIZE]] for name in packed} == packed
    assert {name: [OUT] for name in shapes} == shapes
    assert answers["gradients"] == [OUT, [2, 48, 2, SIZE], [2, 48, 2, SIZE]]


def sums(*lengths):
    """The pairs of a causal mask over sequences of these lengths."""
    return sum(n * (n + 1) // 2 for n in lengths)


@pytest.mark.parametrize(
    ("name", "batch", "kv_heads", "pairs"),
    [
        ("plain", 2, 2, LENGTH * 48),
        ("causal", 2, HEADS, LENGTH * LENGTH / 2),
        ("window", 2, HEADS, sums(17) + (LENGTH - 17) * 17),
        ("left", 2, HEADS, LENGTH * LENGTH - sums(LENGTH - 17)),
        ("with statistics", 2, 2, LENGTH * 48),
        ("qkv", 2, HEADS, LENGTH * LENGTH),
        ("kv", 2, 2, LENGTH * 48),
        ("packed", 1, HEADS, sums(40, 56)),
        ("packed qkv", 1, HEADS, 40**2 + 56**2),
        ("packed kv", 1, HEADS, 40**2 + 56**2),
    ],
)
def test_each_call_is_one_kernel_over_the_pairs_of_its_mask(answers, name, batch, kv_heads, pairs):
    ((kernel, *shape, flops),) = answers["columns"][name]
    assert kernel == "flash2"
    assert shape[:3] == [batch, HEADS, kv_heads]
    assert flops == 2 * batch * HEADS * pairs * (SIZE + SIZE)


@pytest.mark.parametrize(
    ("name", "batch", "kv_heads", "pairs"),
    [
        ("third", 2, HEADS, LENGTH * LENGTH / 2),
        ("third with statistics", 2, 2, LENGTH * 48),
        ("third activated", 1, HEADS, sums(40, 56)),
        ("third qkv", 2, HEADS, LENGTH * LENGTH),
        ("third packed", 1, HEADS, sums(40, 56)),
        ("third window", 2, HEADS, sums(17) + (LENGTH - 17) * 17),
    ],
)
def test_flash_attention_3_is_a_kernel_of_its_own(answers, name, batch, kv_heads, pairs):
    ((kernel, *shape, flops),) = answers["columns"][name]
    assert kernel == "flash3"
    assert shape[:3] == [batch, HEADS, kv_heads]
    assert flops == 2 * batch * HEADS * pairs * (SIZE + SIZE)


def test_flash_attention_3_returns_what_the_package_does(answers):
    shapes = answers["shapes"]
    assert shapes["third"] == shapes["third qkv"] == [OUT]
    assert shapes["third with statistics"] == [OUT, [2, HEADS, LENGTH]]
    assert shapes["third packed"] == [[96, HEADS, SIZE], [HEADS, 96]]
    assert answers["third backward"] == ["_flash_attn_forward", "_flash_attn_backward"]
    assert answers["third narrow"] == ["torch.bfloat16", "torch.bfloat16"]
    assert answers["third cache"] == "ForerunError: flash_attn_with_kvcache: inference with a cache can't be traced"


def test_downloaded_kernels_are_those_of_the_packages(answers):
    assert answers["hub"] == [
        ["flash_attn3", "flash_attention_3", True],
        ["vllm_flash_attn3", "flash_attention_3", True],
        ["flash_attn2", "flash_attention", True],
        ["flash_attn", "flash_attention", True],
    ]
    has, refused = answers["has"]
    assert has
    assert "nothing is known of it; describe its functions with kernels.extension('no_kernel.FUNCTION')" in refused
    assert len(answers["hub notes"]) == 4


def test_dropout_keeps_no_mask(answers):
    plain, dropped, chosen, chosen_dropped = answers["dropout"]
    assert plain == dropped >= 2 * LENGTH * HEADS * SIZE * 2
    assert chosen == chosen_dropped == plain


def test_rotary_embeddings_are_one_kernel_each_way(answers):
    assert answers["rotary"] == [OUT, ["rotary", "rotary"]]


def test_norms_add_the_residual_first_and_return_the_sum_when_asked(answers):
    assert answers["layer norm"] == [[8, SIZE]] * 3 + [["add", "native_layer_norm", "native_layer_norm"]]
    assert answers["rms norm"] == [[8, SIZE], False, ["add", "_fused_rms_norm"]]


def test_padding_is_taken_out_and_put_back_by_the_mask(answers):
    assert answers["unpadded"] == [[7, 16], [0, 1, 2, 5, 6, 7, 8], [0, 3, 7], 4, [3, 4], "torch.int32"]
    assert answers["padded"] == [2, 5, 16]
    assert answers["rows"] == [7, 16]
    assert answers["put back"] == [[0, 3, 0], [0, 5, 0]]


def test_attention_in_parts_has_statistics_and_writes_to_the_gradients_of_its_caller(answers):
    shapes, columns = answers["shapes"], answers["columns"]
    assert shapes["part"][:2] == [OUT, [2, HEADS, LENGTH]]
    assert shapes["part packed"][:2] == [[96, HEADS, SIZE], [HEADS, 96]]
    assert columns["part"] == columns["causal"]
    assert columns["part packed"] == columns["packed"]
    for name in ("part", "part packed"):
        (forward,), (backward,) = columns[name], columns[f"{name} backward"]
        assert forward[0] == backward[0] == "flash2"
        assert backward[-1] == 2.5 * forward[-1]


def test_rotary_embeddings_in_place_turn_what_they_are_given(answers):
    *in_place, count, read = answers["rotary in place"]
    assert in_place == [True, True, True]
    assert count == 4
    tables = 2 * LENGTH * SIZE // 2 * 2
    whole = 2 * LENGTH * HEADS * SIZE * 2
    assert read == [2 * whole + tables, 2 * whole + tables, whole + tables, whole // 2 + tables]


def test_cross_entropy_is_a_kernel_in_each_direction(answers):
    shape, dtype, gradient, names, refused = answers["cross entropy"]
    assert (shape, dtype, gradient) == ([16], "torch.float32", [16, 1000])
    assert [name for name in names if "cross_entropy" in name] == [
        "cross_entropy",
        "cross_entropy_backward",
        "cross_entropy",
        "cross_entropy_backward_",
    ]
    assert refused.startswith("NotImplementedError")


def test_products_of_experts_run_on_torchs_own(answers):
    assert answers["grouped"] == [[16, 32], [16, 64], [16, 32], [8, 32], [8, 32], [8, 2]]
    assert answers["grouped FLOPs"] == 3 * 2 * (2 * 16 * 32 * 64)
