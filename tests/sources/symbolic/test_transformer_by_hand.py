"""Every kernel and every tensor of a transformer's units, counted by hand.

FLOPs are those of the products alone; bytes are those that a kernel reads and writes; an element has two bytes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.core.program.types import Category
from forerun.core.program.validate import check
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.build import build

from .by_hand import (
    Held,
    Kernel,
    Node,
    block_of,
    grouped,
    held_by,
    kept_by,
    kernels_of,
    moves,
    nodes_of,
    product,
    products,
    run_again,
)
from .cases import BERT, CLUSTER, DENSE, GPT, MOE, plan

T, H, F, V = 2048, 1024, 2816, 32000
"""tokens, hidden size, width of the feed-forward, vocabulary"""
HEADS, KV_HEADS, WIDTH = 16, 8, 64
Q, KV = HEADS * WIDTH, KV_HEADS * WIDTH
EMBEDDING, NORM_A, ATTENTION, NORM_F, FFN, HEAD = range(6)
"""modules"""
EAGER = build(DENSE, plan(stack="torchtitan-0.1"), CLUSTER)
PAIRS = T * T / 2
"""pairs of a query and a key under a causal mask"""
SCORES = 2 * HEADS * PAIRS * 2 * WIDTH
"""FLOPs of a causal attention: a product with the keys and one with the values"""


def attention(backward: bool = False, heads: int = HEADS, kv_heads: int = KV_HEADS) -> Kernel:
    """Reads queries, keys and values; writes the output. Backward reads the output and its gradient too."""
    q, kv = T * heads * WIDTH, T * kv_heads * WIDTH
    flops = SCORES * heads / HEADS
    if backward:
        return Kernel("attention.kernel.backward", 2.5 * flops, 2 * (2 * (q + 2 * kv) + 2 * q), 1, ATTENTION)
    return Kernel("attention.kernel", flops, 2 * (q + 2 * kv + q), 1, ATTENTION)


# -- a layer, eager and compiled ---------------------------------------------------------------------------------------


def test_kernels_of_an_eager_layer() -> None:
    """RMSNorm runs in seven kernels that move 36 bytes an element; keys and values are copied to all heads."""
    assert kernels_of(EAGER, "layer.forward") == [
        moves("rmsnorm", 36 * T * H, 7, NORM_A),
        product("attention.q", T, Q, H, ATTENTION),
        product("attention.k", T, KV, H, ATTENTION),
        product("attention.v", T, KV, H, ATTENTION),
        moves("rope", 20 * T * (Q + KV), 4, ATTENTION),
        moves("copy", 4 * T * 2 * Q, 1, ATTENTION),
        moves("copy", 4 * T * Q, 1, ATTENTION),
        attention(),
        product("attention.out", T, H, Q, ATTENTION),
        moves("residual", 6 * T * H, 1, ATTENTION),
        moves("rmsnorm", 36 * T * H, 7, NORM_F),
        product("ffn.gate", T, F, H, FFN),
        product("ffn.up", T, F, H, FFN),
        moves("swiglu", 10 * T * F, 2, FFN),
        product("ffn.down", T, H, F, FFN),
        moves("residual", 6 * T * H, 1, FFN),
    ]
    assert kernels_of(EAGER, "layer.backward") == [
        moves("residual.backward", 6 * T * H, 1, FFN),
        *products("ffn.down", T, H, F, FFN),
        moves("swiglu.backward", 18 * T * F, 3, FFN),
        *products("ffn.up", T, F, H, FFN),
        *products("ffn.gate", T, F, H, FFN),
        moves("fan_out.backward", 6 * T * H, 1, FFN),
        moves("rmsnorm.backward", 58 * T * H, 12, NORM_F),
        moves("residual.backward", 6 * T * H, 1, ATTENTION),
        *products("attention.out", T, H, Q, ATTENTION),
        attention(backward=True),
        moves("copy.backward", 4 * T * Q, 1, ATTENTION),
        moves("copy.backward", 4 * T * 2 * Q, 1, ATTENTION),
        moves("rope.backward", 20 * T * (Q + KV), 4, ATTENTION),
        *products("attention.v", T, KV, H, ATTENTION),
        *products("attention.k", T, KV, H, ATTENTION),
        *products("attention.q", T, Q, H, ATTENTION),
        moves("fan_out.backward", 6 * 2 * T * H, 1, ATTENTION),
        moves("rmsnorm.backward", 58 * T * H, 12, NORM_A),
    ]


def test_tensors_of_an_eager_layer() -> None:
    """Kept are what products, attention and norms read; the rest goes with its last reader."""
    x, kept, passing = 2 * T * H, "activation", "temporary"
    q, kv, f, statistics = 2 * T * Q, 2 * T * KV, 2 * T * F, 4 * T * HEADS
    norm = [x, 2 * x, 2 * x]
    """result, and fp32 copy and quotient, of a norm; its fourth tensor is the cast of the quotient"""
    assert held_by(EAGER, "layer.forward") == sorted(
        [
            *(Held(size, kept, since, "") for size in (*norm, x) for since in ("rmsnorm", "rmsnorm'")),
            Held(q, passing, "attention.q", "rope"),
            Held(kv, passing, "attention.k", "rope"),
            Held(kv, passing, "attention.v", "copy"),
            Held(q, kept, "rope", ""),
            Held(kv, passing, "rope", "copy"),
            Held(q, kept, "copy", ""),
            Held(q, kept, "copy", ""),
            Held(q, kept, "attention.kernel", ""),
            Held(statistics, kept, "attention.kernel", ""),
            Held(x, passing, "attention.out", "residual"),
            Held(x, passing, "residual", "residual'"),
            Held(f, kept, "ffn.gate", ""),
            Held(f, kept, "ffn.up", ""),
            Held(f, kept, "swiglu", ""),
            Held(f, kept, "swiglu", ""),
            Held(x, passing, "ffn.down", "residual'"),
            Held(x, passing, "residual'", "residual'"),
        ]
    )
    gradients = [("ffn.down", H * F), ("ffn.up", H * F), ("ffn.gate", H * F), ("attention.out", H * Q)]
    gradients += [("attention.v", H * KV), ("attention.k", H * KV), ("attention.q", H * Q)]
    assert held_by(EAGER, "layer.backward") == sorted(
        [
            *(Held(2 * size, "unsharded", f"{name}.wgrad", "") for name, size in gradients),
            *(Held(size, kept, "", "rmsnorm.backward") for size in norm),
            *(Held(size, kept, "", "rmsnorm.backward'") for size in norm),
            Held(f, kept, "", "ffn.down.wgrad"),
            *[Held(f, kept, "", "swiglu.backward")] * 3,
            Held(x, kept, "", "ffn.gate.wgrad"),
            Held(x, kept, "", "attention.q.wgrad"),
            *[Held(q, kept, "", "attention.kernel.backward")] * 3,
            Held(q, kept, "", "attention.kernel.backward"),
            Held(statistics, kept, "", "attention.kernel.backward"),
            Held(x, passing, "residual.backward", "rmsnorm.backward'"),  # of the residual stream
            Held(f, passing, "ffn.down.dgrad", "swiglu.backward"),
            Held(f, passing, "swiglu.backward", "ffn.up.wgrad"),
            Held(f, passing, "swiglu.backward", "ffn.gate.wgrad"),
            Held(x, passing, "ffn.up.dgrad", "rmsnorm.backward"),
            Held(q, passing, "attention.out.dgrad", "attention.kernel.backward"),
            *[Held(q, passing, "attention.kernel.backward", "copy.backward'")] * 2,
            Held(q, passing, "attention.kernel.backward", "rope.backward"),
            Held(kv, passing, "copy.backward'", "rope.backward"),
            Held(kv, passing, "copy.backward'", "attention.v.wgrad"),
            Held(kv, passing, "rope.backward", "attention.k.wgrad"),
            Held(q, passing, "rope.backward", "attention.q.wgrad"),
            Held(x, passing, "attention.v.dgrad", "rmsnorm.backward'"),
        ]
    )


def test_kernels_of_a_compiled_layer() -> None:
    """Sums ride in the norms beside them, and heads are not repeated."""
    program = build(DENSE, plan(stack="torchtitan-0.1", compile=True), CLUSTER)
    assert kernels_of(program, "layer.forward") == [
        moves("rmsnorm", 4 * T * H, 1, NORM_A),
        product("attention.q", T, Q, H, ATTENTION),
        product("attention.k", T, KV, H, ATTENTION),
        product("attention.v", T, KV, H, ATTENTION),
        moves("rope", 4 * T * (Q + KV), 1, ATTENTION),
        moves("copy", 4 * T * Q, 1, ATTENTION),
        attention(),
        product("attention.out", T, H, Q, ATTENTION),
        moves("residual", 2 * T * H, 1, ATTENTION),
        moves("rmsnorm", 4 * T * H, 1, NORM_F),
        product("ffn.gate", T, F, H, FFN),
        product("ffn.up", T, F, H, FFN),
        moves("swiglu", 6 * T * F, 1, FFN),
        product("ffn.down", T, H, F, FFN),
        moves("residual", 2 * T * H, 1, FFN),
    ]
    assert sum(size for size, _, _, until in held_by(program, "layer.forward") if not until) == (
        2 * T * (2 * H + 2 * H + Q + 2 * KV + Q + 3 * F) + 4 * T * HEADS
    ), "inputs of norms and products, queries, keys, values, output, and three widths of the feed-forward"


# -- the ends of a model -----------------------------------------------------------------------------------------------


def test_kernels_and_tensors_of_the_ends() -> None:
    """The table's gradient is as large as the table. Logits are copied to fp32 for a composed loss."""
    assert kernels_of(EAGER, "embedding.forward") == [moves("embedding", 4 * T * H, 1, EMBEDDING)]
    assert kernels_of(EAGER, "embedding.backward") == [moves("embedding.backward", 8 * T * H, 3, EMBEDDING)]
    assert held_by(EAGER, "embedding.backward") == [Held(2 * V * H, "unsharded", "embedding.backward", "")]
    assert kernels_of(EAGER, "head.forward") == [
        moves("rmsnorm", 36 * T * H, 7, HEAD),
        product("head", T, V, H, HEAD),
        moves("loss", 18 * T * V, 3, HEAD),
    ]
    assert kernels_of(EAGER, "head.backward") == [
        moves("loss.backward", 18 * T * V, 2, HEAD),
        *products("head", T, V, H, HEAD),
        moves("rmsnorm.backward", 58 * T * H, 12, HEAD),
    ]
    x, logits = 2 * T * H, 2 * T * V
    assert held_by(EAGER, "head.forward") == sorted(
        [
            *(Held(size, "activation", "rmsnorm", "") for size in (x, 2 * x, 2 * x, x)),
            Held(logits, "temporary", "head", "join"),
            Held(2 * logits, "temporary", "join", "loss"),
            Held(2 * logits, "logits", "loss", ""),
            Held(4, "temporary", "loss", "loss"),
        ]
    )
    assert held_by(EAGER, "head.backward") == sorted(
        [
            Held(2 * V * H, "unsharded", "head.wgrad", ""),
            *(Held(size, "activation", "", "rmsnorm.backward") for size in (2 * x, 2 * x, x)),
            Held(x, "activation", "", "head.wgrad"),
            Held(2 * logits, "logits", "", "loss.backward"),
            Held(2 * logits, "temporary", "loss.backward", "loss.backward"),  # of the log-softmax
            Held(2 * logits, "temporary", "loss.backward", "join"),
            Held(logits, "temporary", "join", "head.wgrad"),
            Held(x, "temporary", "head.dgrad", "rmsnorm.backward"),
            Held(x, "temporary", "rmsnorm.backward", "rmsnorm.backward"),
        ]
    )


@pytest.mark.parametrize(
    ("fields", "forward", "backward", "kept"),
    [
        ({"stack": "torchtitan", "compile": True}, (4, 2), (4, 1), ("activation", 2)),
        ({"stack": "megatron-core"}, (6, 3), (6, 1), ("logits", 4)),
        ({"stack": "pytorch", "autocast": True, "master_dtype": "fp32"}, (8, 2), (14, 3), ("logits", 4)),
        ({"stack": "simple-fsdp"}, (6, 2), (8, 3), ("logits", 2)),
        ({"stack": "torchtitan", "precision": "fp32"}, (2 * 6, 2), (2 * 8, 3), ("logits", 4)),
    ],
    ids=str,
)
def test_kernels_of_every_loss(
    fields: dict[str, object], forward: tuple[int, int], backward: tuple[int, int], kept: tuple[str, int]
) -> None:
    """Bytes a logit and kernels: compiled; fused and in place on an fp32 copy; autocast; without a copy; fp32."""
    program = build(replace(DENSE, vocab=32000), plan(**fields), CLUSTER)
    there, back = kernels_of(program, "head.forward")[-1], kernels_of(program, "head.backward")[0]
    assert (there.moved, there.launches) == (forward[0] * T * V, forward[1])
    assert (back.moved, back.launches) == (backward[0] * T * V, backward[1])
    category, width = kept
    large = [held for held in held_by(program, "head.forward") if held.size_bytes >= 2 * T * V and not held.until]
    if category == "activation":  # compiled code keeps the logits themselves
        assert [held.size_bytes for held in large] == [width * T * V]
    else:
        assert [(held.size_bytes, held.category) for held in large] == [(width * T * V, category)]


def test_a_vocabulary_is_cut_and_padded() -> None:
    """Megatron pads each part of 50,304 / 4 tokens to a multiple of 128; learned positions stay whole."""
    program = build(GPT, plan(stack="megatron-core", tp=4, sequence_parallel=True), CLUSTER)
    part, width = 99 * 128, GPT.hidden
    assert 98 * 128 < 50304 / 4 <= part
    head = next(kernel for kernel in kernels_of(program, "head.forward") if kernel.name == "head")
    assert head == product("head", T, part, width, HEAD)
    size = 2 * T * width
    assert kernels_of(program, "embedding.forward") == [
        moves("embedding", 2 * 4 * T * width, 1, EMBEDDING),  # of tokens and of positions
        moves("embedding.reduce", size, 1, EMBEDDING),
    ]
    assert kernels_of(program, "embedding.backward") == [
        moves("embedding.gather", size, 1, EMBEDDING),
        moves("embedding.backward", 2 * 8 * T * width, 3, EMBEDDING),
    ]
    wide = build(GPT, plan(stack="torchtitan-0.1", tp=4), CLUSTER)
    gradients = [held.size_bytes for held in held_by(wide, "embedding.backward") if held.category == "unsharded"]
    assert gradients == [2 * width * (50304 // 4 + 2048)]
    whole = build(GPT, plan(stack="pytorch", tp=4), CLUSTER)  # each rank makes the gradient of the whole table
    gradients = [held.size_bytes for held in held_by(whole, "embedding.backward") if held.category == "unsharded"]
    assert gradients == [2 * width * (50304 + 2048)]


# -- Megatron ----------------------------------------------------------------------------------------------------------


def test_kernels_of_a_layer_that_megatron_cuts_in_two() -> None:
    """One matrix makes queries, keys and values. Gradients of weights add to fp32 buffers, and biases cost nothing."""
    program = build(GPT, plan(stack="megatron-core", tp=2, sequence_parallel=True, zero_stage=1, dp_shard=2), CLUSTER)
    h, heads = GPT.hidden, 6
    q, f, x = heads * 64, GPT.ffn_hidden // 2, 2 * T * GPT.hidden
    flops = 2 * heads * PAIRS * 2 * 64
    assert kernels_of(program, "layer.forward") == [
        moves("layernorm", 4 * T / 2 * h, 1, NORM_A),
        moves("attention.qkv.gather", x, 1, ATTENTION),
        product("attention.qkv", T, 3 * q, h, ATTENTION),
        Kernel("attention.kernel", flops, 2 * 4 * T * q, 1, ATTENTION),
        product("attention.out", T, h, q, ATTENTION),
        moves("attention.out.reduce", x, 1, ATTENTION),
        moves("residual", 6 * T / 2 * h, 1, ATTENTION),
        moves("layernorm", 4 * T / 2 * h, 1, NORM_F),
        moves("ffn.up.gather", x, 1, FFN),
        product("ffn.up", T, f, h, FFN),
        moves("gelu", 4 * T * f, 1, FFN),
        product("ffn.down", T, h, f, FFN),
        moves("ffn.down.reduce", x, 1, FFN),
        moves("residual", 6 * T / 2 * h, 1, FFN),
    ]
    up, down, qkv, out = (
        products(*shape, accumulates=True)
        for shape in (
            ("ffn.up", T, f, h, FFN),
            ("ffn.down", T, h, f, FFN),
            ("attention.qkv", T, 3 * q, h, ATTENTION),
            ("attention.out", T, h, q, ATTENTION),
        )
    )
    assert kernels_of(program, "layer.backward") == [
        moves("residual.backward", 6 * T / 2 * h, 1, FFN),
        moves("ffn.down.gather", x, 1, FFN),
        *down,
        moves("gelu.backward", 6 * T * f, 1, FFN),
        moves("ffn.up.gather", x, 1, FFN),
        up[0],
        moves("ffn.up.reduce", x, 1, FFN),
        up[1],
        moves("layernorm.backward", 6 * T / 2 * h, 2, NORM_F),
        moves("residual.backward", 6 * T / 2 * h, 1, ATTENTION),
        moves("attention.out.gather", x, 1, ATTENTION),
        *out,
        Kernel("attention.kernel.backward", 2.5 * flops, 2 * 8 * T * q, 1, ATTENTION),
        moves("attention.qkv.gather", x, 1, ATTENTION),
        qkv[0],
        moves("attention.qkv.reduce", x, 1, ATTENTION),
        qkv[1],
        moves("layernorm.backward", 6 * T / 2 * h, 2, NORM_A),
    ]
    kept = [held for held in held_by(program, "layer.forward") if not held.until]
    small = x // 2
    """bytes of a shard of the tokens"""
    assert kept == sorted(
        [
            *[Held(small, "activation", "layernorm", "")] * 2,  # the norm's input and its result
            Held(2 * T * 3 * q, "activation", "attention.qkv.gather", ""),
            Held(2 * T * q, "activation", "attention.kernel", ""),
            Held(4 * T * heads, "activation", "attention.kernel", ""),
            Held(small, "activation", "residual", ""),
            Held(small, "activation", "layernorm'", ""),
            Held(2 * T * f, "activation", "ffn.up.gather", ""),
            Held(2 * T * f, "activation", "gelu", ""),
        ]
    )


def test_biases_and_dropout_cost_kernels_where_a_stack_does_not_fuse_them() -> None:
    """Megatron-LM of 2021: unfused attention with dropout, masks of one byte, gradients of biases one by one."""
    program = build(GPT, plan(stack="megatron-lm", zero_stage=0), CLUSTER)
    h, f, heads = GPT.hidden, GPT.ffn_hidden, 12
    scores = heads * T * T
    scored, weighted = (product(name, T, n, k, ATTENTION, heads) for name, n, k in (
        ("attention.qk", T, 64), ("attention.pv", 64, T)
    ))  # fmt: skip
    assert kernels_of(program, "layer.forward") == [
        moves("layernorm", 4 * T * h, 1, NORM_A),
        product("attention.qkv", T, 3 * h, h, ATTENTION),
        scored,
        moves("softmax", 4 * scores, 1, ATTENTION),
        moves("score_dropout", 5 * scores, 1, ATTENTION),
        weighted,
        product("attention.out", T, h, h, ATTENTION),
        moves("dropout_add", 7 * T * h, 1, ATTENTION),
        moves("layernorm", 4 * T * h, 1, NORM_F),
        product("ffn.up", T, f, h, FFN),
        moves("gelu", 4 * T * f, 1, FFN),
        product("ffn.down", T, h, f, FFN),
        moves("dropout_add", 7 * T * h, 1, FFN),
    ]
    sums = moves("bias_add.backward", 2 * T * h, 1, ATTENTION)
    assert kernels_of(program, "layer.backward") == [
        moves("dropout_add.backward", 7 * T * h, 2, FFN),
        *products("ffn.down", T, h, f, FFN),
        sums._replace(module=FFN),
        moves("gelu.backward", 6 * T * f, 1, FFN),
        *products("ffn.up", T, f, h, FFN),
        moves("bias_add.backward", 2 * T * f, 1, FFN),
        moves("layernorm.backward", 6 * T * h, 2, NORM_F),
        moves("dropout_add.backward", 7 * T * h, 2, ATTENTION),
        *products("attention.out", T, h, h, ATTENTION),
        sums,
        weighted._replace(name="attention.dv"),
        scored._replace(name="attention.dp"),
        moves("score_dropout.backward", 5 * scores, 1, ATTENTION),
        moves("softmax.backward", 6 * scores, 1, ATTENTION),
        weighted._replace(name="attention.dk"),
        weighted._replace(name="attention.dq"),
        *products("attention.qkv", T, 3 * h, h, ATTENTION),
        moves("bias_add.backward", 2 * T * 3 * h, 1, ATTENTION),
        moves("layernorm.backward", 6 * T * h, 2, NORM_A),
    ]
    kept = [(held.size_bytes, held.since) for held in held_by(program, "layer.forward") if not held.until]
    assert kept == sorted(
        [
            *[(2 * T * h, "layernorm")] * 2,
            (2 * T * 3 * h, "attention.qkv"),
            (2 * scores, "softmax"),
            (2 * scores, "score_dropout"),
            (scores, "score_dropout"),
            (2 * T * h, "attention.pv"),
            (T * h, "dropout_add"),
            (2 * T * h, "dropout_add"),
            (2 * T * h, "layernorm'"),
            (2 * T * f, "ffn.up"),
            (2 * T * f, "gelu"),
            (T * h, "dropout_add'"),
        ]
    )


# -- experts and latent attention --------------------------------------------------------------------------------------


def test_kernels_of_experts_and_latent_attention() -> None:
    """Two of eight experts for each token; each of two ranks has four. Head widths are 64 + 32 for keys, 64 for values.

    The router keeps its scores and 8 bytes for each choice.
    """
    program = build(MOE, plan(stack="torchtitan-0.1", dp_shard=4, ep=2), CLUSTER)
    e, top, n, local, shared = 704, 2, 8, 4, 1408
    low_q, low_kv, nope, rope, v = 384, 256, 64, 32, 64
    copies = top * T
    each = copies // local
    width = nope + rope
    flops = 2 * HEADS * PAIRS * (width + v)
    keys, values = T * HEADS * width, T * HEADS * v
    assert kernels_of(program, "moe_layer.forward") == [
        moves("rmsnorm", 36 * T * H, 7, NORM_A),
        product("attention.q_down", T, low_q, H, ATTENTION),
        moves("rmsnorm", 36 * T * low_q, 7, ATTENTION),
        product("attention.q_up", T, HEADS * width, low_q, ATTENTION),
        product("attention.kv_down", T, low_kv + rope, H, ATTENTION),
        moves("rmsnorm", 36 * T * low_kv, 7, ATTENTION),
        product("attention.kv_up", T, HEADS * (nope + v), low_kv, ATTENTION),
        moves("copy", 4 * (keys + values), 1, ATTENTION),
        moves("rope", 20 * T * rope * 2 * HEADS, 4, ATTENTION),
        moves("copy", 4 * keys, 1, ATTENTION),
        Kernel("attention.kernel", flops, 2 * (2 * keys + 2 * values), 1, ATTENTION),
        product("attention.out", T, H, HEADS * v, ATTENTION),
        moves("residual", 6 * T * H, 1, ATTENTION),
        moves("rmsnorm", 36 * T * H, 7, NORM_F),
        product("ffn.router", T, n, H, FFN),
        moves("router", 40 * T * n, 12, FFN),
        moves("permute", 4 * copies * H, 2, FFN),
        moves("ffn.dispatch", 2 * copies * H, 1, FFN),
        moves("copy", 4 * copies * H, 1, FFN),
        grouped(product("ffn.expert_up", each, 2 * e, H, FFN, local), local),
        moves("swiglu", 10 * copies * e, 2, FFN),
        grouped(product("ffn.expert_down", each, H, e, FFN, local), local),
        moves("copy", 4 * copies * H, 1, FFN),
        moves("ffn.combine_exchange", 2 * copies * H, 1, FFN),
        moves("combine", 8 * copies * H, 2, FFN),
        product("shared.gate", T, shared, H, FFN),
        product("shared.up", T, shared, H, FFN),
        moves("swiglu", 10 * T * shared, 2, FFN),
        product("shared.down", T, H, shared, FFN),
        moves("residual", 6 * T * H, 1, FFN),
        moves("residual", 6 * T * H, 1, FFN),
    ]
    expert_up, expert_down = (
        [grouped(kernel, local) for kernel in products(*shape, FFN, local)]
        for shape in (("ffn.expert_up", each, 2 * e, H), ("ffn.expert_down", each, H, e))
    )
    assert kernels_of(program, "moe_layer.backward") == [
        *[moves("residual.backward", 6 * T * H, 1, FFN)] * 2,
        *products("shared.down", T, H, shared, FFN),
        moves("swiglu.backward", 18 * T * shared, 3, FFN),
        *products("shared.up", T, shared, H, FFN),
        *products("shared.gate", T, shared, H, FFN),
        moves("fan_out.backward", 6 * T * H, 1, FFN),
        moves("combine.backward", 10 * copies * H, 3, FFN),
        moves("ffn.combine_exchange.backward", 2 * copies * H, 1, FFN),
        moves("copy.backward", 4 * copies * H, 1, FFN),
        *expert_down,
        moves("swiglu.backward", 18 * copies * e, 3, FFN),
        *expert_up,
        moves("copy.backward", 4 * copies * H, 1, FFN),
        moves("ffn.dispatch.backward", 2 * copies * H, 1, FFN),
        moves("permute.backward", 4 * copies * H, 2, FFN),
        moves("router.backward", 40 * T * n, 12, FFN),
        *products("ffn.router", T, n, H, FFN),
        moves("fan_out.backward", 6 * 2 * T * H, 1, FFN),  # experts, router and shared expert read one tensor
        moves("rmsnorm.backward", 58 * T * H, 12, NORM_F),
        moves("residual.backward", 6 * T * H, 1, ATTENTION),
        *products("attention.out", T, H, HEADS * v, ATTENTION),
        Kernel("attention.kernel.backward", 2.5 * flops, 2 * (4 * keys + 4 * values), 1, ATTENTION),
        moves("copy.backward", 4 * keys, 1, ATTENTION),
        moves("rope.backward", 20 * T * rope * 2 * HEADS, 4, ATTENTION),
        moves("copy.backward", 4 * (keys + values), 1, ATTENTION),
        *products("attention.kv_up", T, HEADS * (nope + v), low_kv, ATTENTION),
        moves("rmsnorm.backward", 58 * T * low_kv, 12, ATTENTION),
        *products("attention.kv_down", T, low_kv + rope, H, ATTENTION),
        *products("attention.q_up", T, HEADS * width, low_q, ATTENTION),
        moves("rmsnorm.backward", 58 * T * low_q, 12, ATTENTION),
        *products("attention.q_down", T, low_q, H, ATTENTION),
        moves("fan_out.backward", 6 * T * H, 1, ATTENTION),
        moves("rmsnorm.backward", 58 * T * H, 12, NORM_A),
    ]
    kept = [held.size_bytes for held in held_by(program, "moe_layer.forward") if not held.until]
    x, routed = 2 * T * H, 2 * copies * H
    attends = [2 * keys, 2 * keys, 2 * values, 2 * values, 4 * T * HEADS]
    assert sorted(kept) == sorted(
        [
            *[
                size for width in (H, low_q, low_kv, H) for size in (4 * T * width, 4 * T * width, 2 * T * width)
            ],  # norms
            *attends,
            *(x, 2 * T * low_q, 2 * T * low_kv, x),  # inputs of products that norms make
            2 * T * n,  # scores
            8 * copies,  # weights of the choices
            *(routed, 2 * copies * 2 * e, 2 * copies * e, 2 * copies * e),
            routed,  # what comes back
            *[2 * T * shared] * 4,
        ]
    )


# -- what runs again ---------------------------------------------------------------------------------------------------

PROJECTIONS = "attention.q attention.k attention.v rope copy copy'"
UP = "ffn.gate ffn.up swiglu"
AGAIN = {
    "op": [("", "rmsnorm attention.k rope copy copy' attention.out residual rmsnorm' ffn.up swiglu")],
    "attention": [("attention.out.wgrad", "attention.kernel")],
    "attention-block": [("residual.backward'", f"{PROJECTIONS} attention.kernel")],
    "mlp": [("residual.backward", UP)],
    "attention+mlp": [("residual.backward", UP), ("residual.backward'", f"{PROJECTIONS} attention.kernel")],
    "mlp-act-norm": [("residual.backward", "swiglu"), ("swiglu.backward", "rmsnorm"), ("rope.backward", "rmsnorm'")],
    "params": [],
}


@pytest.mark.parametrize(("policy", "expected"), AGAIN.items())
def test_what_selective_checkpointing_runs_again(policy: str, expected: list[tuple[str, str]]) -> None:
    """Each part runs again before the first gradient that needs it, up to the last tensor that is needed.

    `op` keeps every second product (queries, values, gate and down) and the output of attention.
    """
    fields = {"activation_checkpointing": "selective", "selective_policy": policy}
    program = build(DENSE, plan(stack="torchtitan-0.1", **fields), CLUSTER)
    assert run_again(program, "layer.backward") == expected


def test_what_full_checkpointing_runs_again() -> None:
    """torch stops at the last tensor that backward needs, Megatron runs the layer to its end. Both keep its input."""
    early, whole = (
        build(DENSE, plan(stack=stack, activation_checkpointing="full"), CLUSTER)
        for stack in ("torchtitan-0.1", "megatron-core")
    )
    parts = f"rmsnorm {PROJECTIONS} attention.kernel attention.out residual rmsnorm' {UP}"
    assert run_again(early, "layer.backward") == [("", parts)]
    parts = (
        "rmsnorm attention.qkv rope attention.kernel attention.out residual rmsnorm' ffn.up swiglu ffn.down residual'"
    )
    assert run_again(whole, "layer.backward") == [("", parts)]
    for program in (early, whole):
        assert kept_by(program, "layer.forward") == [("rmsnorm", 2 * T * H)]


def test_a_captured_graph_runs_nothing_again_that_nobody_reads() -> None:
    """torchtitan's checkpoints run to their end from 2025-08 on, unless a compiler sees them."""
    eager, compiled = (
        build(DENSE, plan(stack="torchtitan", activation_checkpointing="full", compile=compiles), CLUSTER)
        for compiles in (False, True)
    )
    ends = [run_again(program, "layer.backward")[0][1].split() for program in (eager, compiled)]
    assert ["ffn.down" in end for end in ends] == [True, False]


def test_a_compiler_keeps_of_a_checkpoint_only_what_backward_uses() -> None:
    """Eager code also keeps the output of `down`, which its policy lists and nothing reads."""
    fields = {"stack": "torchtitan", "activation_checkpointing": "selective", "selective_policy": "op"}
    eager, compiled = (build(DENSE, plan(compile=on, **fields), CLUSTER) for on in (False, True))
    both = [
        ("attention.kernel", 4 * T * HEADS),
        ("attention.kernel", 2 * T * Q),
        ("attention.q", 2 * T * Q),
        ("attention.v", 2 * T * KV),
        ("ffn.gate", 2 * T * F),
        ("rmsnorm", 2 * T * H),
    ]
    assert kept_by(compiled, "layer.forward") == sorted(both)
    assert kept_by(eager, "layer.forward") == sorted([*both, ("ffn.down", 2 * T * H)])


def test_what_runs_again_has_memory_until_its_last_reader() -> None:
    fields = {"activation_checkpointing": "selective", "selective_policy": "mlp"}
    program = build(DENSE, plan(stack="torchtitan-0.1", **fields), CLUSTER)
    size = 2 * T * F
    again = [held for held in held_by(program, "layer.backward") if held.since in ("ffn.gate", "ffn.up", "swiglu")]
    assert again == sorted(
        [
            Held(size, "temporary", "ffn.gate", "swiglu.backward"),
            Held(size, "temporary", "ffn.up", "swiglu.backward"),
            Held(size, "temporary", "swiglu", "swiglu.backward"),
            Held(size, "temporary", "swiglu", "ffn.down.wgrad"),
        ]
    )


# -- other ways to run a layer -----------------------------------------------------------------------------------------


def test_autocast_casts_each_weight_and_keeps_the_cast() -> None:
    """Norms and the residual stream are in fp32. A gradient of a weight is cast back to fp32."""
    program = build(DENSE, plan(stack="torchtitan-0.1", autocast=True), CLUSTER)
    found = {kernel.name: kernel.moved for kernel in kernels_of(program, "layer.forward")}
    back = {kernel.name: kernel.moved for kernel in kernels_of(program, "layer.backward")}
    assert (found["rmsnorm"], found["residual"]) == (2 * 36 * T * H, 2 * 6 * T * H)
    weights = {
        "attention.q": Q * H,
        "attention.k": KV * H,
        "attention.out": Q * H,
        "ffn.gate": F * H,
        "ffn.down": F * H,
    }
    for name, elements in weights.items():
        assert found[name + ".weight"] == back[name + ".weight.backward"] == 6 * elements
        assert (f"{name}.weight", 2 * elements) in kept_by(program, "layer.forward")
        assert Held(4 * elements, "unsharded", f"{name}.weight.backward", "") in held_by(program, "layer.backward")
    bert = build(BERT, plan(seq_len=512, stack="nvidia-bert", autocast=True, zero_stage=0), CLUSTER)
    first = kernels_of(bert, "layer.forward")[0]
    assert (first.name, first.moved) == ("layernorm", 2 * 4 * 512 * 768)


def test_one_compiled_graph_makes_weight_gradients_first_and_the_logits_gradient_in_place() -> None:
    program = build(DENSE, plan(stack="simple-fsdp", compile=True, dp_shard=4, attention="flash2"), CLUSTER)
    names = [kernel.name for kernel in kernels_of(program, "layer.backward")]
    assert names[:4] == ["residual.backward", "ffn.down.wgrad", "ffn.down.dgrad", "swiglu.backward"]
    assert [kernel.name for kernel in kernels_of(program, "head.backward")] == [
        *("loss_as_is.backward", "head.wgrad", "head.dgrad", "rmsnorm.backward")
    ]
    logits = [held for held in held_by(program, "head.backward") if held.size_bytes == 2 * T * V]
    assert logits == [Held(2 * T * V, "logits", "", "head.dgrad")]
    apart = build(
        DENSE, plan(stack="simple-fsdp", compile=True, dp_shard=4), CLUSTER
    )  # flex attention breaks the graph
    names = [kernel.name for kernel in kernels_of(apart, "layer.backward")]
    assert names[:3] == ["residual.backward", "ffn.down.dgrad", "ffn.down.wgrad"]
    assert "layer.hand_out" in apart.ops.name
    assert "layer.hand_out" not in program.ops.name


def test_norms_of_queries_and_keys() -> None:
    """The norm runs over all heads of queries and keys, before they are rotated."""
    model = replace(DENSE, qk_norm=True)
    program = build(model, plan(stack="megatron-core", zero_stage=0), CLUSTER)
    found = [(k.name, k.moved) for k in kernels_of(program, "layer.forward")][1:5]
    assert found == [
        ("attention.qkv", 2 * (T * H + H * (Q + 2 * KV) + T * (Q + 2 * KV))),
        ("rmsnorm", 4 * T * (Q + KV)),
        ("rope", 4 * T * (Q + KV)),
        ("attention.kernel", attention().moved),
    ]
    learned = replace(model, position="learned", max_positions=4096)
    plain = build(learned, plan(stack="torchtitan-0.1"), CLUSTER)
    assert "rope" not in plain.ops.name
    assert ("rmsnorm'", 2 * T * Q) in kept_by(plain, "layer.forward")


def test_a_window_caps_the_keys_of_each_query() -> None:
    """Every query reads the window's keys; a window as long as the sequence is a causal mask."""
    for window, pairs, keys in ((256, T * 256, 256), (T, PAIRS, T), (2 * T, PAIRS, T)):
        program = build(replace(DENSE, sliding_window=window), plan(stack="megatron-core"), CLUSTER)
        (kernel,) = [k for k in kernels_of(program, "layer.forward") if k.name == "attention.kernel"]
        assert kernel.flops == 2 * HEADS * pairs * 2 * WIDTH
        assert kernel.moved == 2 * (2 * T * Q + 2 * keys * KV)


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_a_rank_makes_gradients_of_its_own_experts(ep: int) -> None:
    """The gradients of all other weights of the layer are whole on every rank."""
    experts = 2 * 8 * 3 * H * 704

    def made(degree: int) -> int:
        block = block_of(build(MOE, plan(dp_shard=8, ep=degree, stack="torchtitan-0.1"), CLUSTER), "moe_layer.backward")
        here = (block.tensor_category == Category.UNSHARDED) & (block.tensor_alloc >= 0) & (block.tensor_free < 0)
        return int(block.tensor_bytes[here].sum())

    assert made(1) - made(ep) == experts - experts // ep


def test_experts_weighted_in_fp32_and_tokens_counted_first() -> None:
    """Plain PyTorch tells each rank how many tokens come, and keeps an fp32 copy of what comes back."""
    program = build(MOE, plan(stack="pytorch", dp_shard=4, ep=2), CLUSTER)
    copies = 2 * T
    counts = [k for k in kernels_of(program, "moe_layer.forward") if k.name == "ffn.counts"]
    assert counts == [moves("ffn.counts", 8 * 8, 1, FFN)]
    kept = [size for since, size in kept_by(program, "moe_layer.forward") if since == "combine"]
    assert kept == [4 * copies * H]


# -- sums over tensor-parallel ranks -----------------------------------------------------------------------------------


def test_dtensor_sums_the_gradients_of_norms_over_tensor_parallel_ranks() -> None:
    """With FSDP2 in each reduction, and else before the norm of the gradients and again before the update."""
    sharded = build(DENSE, plan(stack="pytorch", tp=2, dp_shard=2), CLUSTER)
    assert nodes_of(sharded, "layer.reduce")[:6] == [
        Node("join", "compute"),
        Node("layer.shared", "tp", ("join",)),
        Node("join'", "compute", ("layer.shared",)),
        Node("join''", "compute"),
        Node("layer.shared'", "tp", ("join''",)),
        Node("join'''", "compute", ("layer.shared'",)),
    ]
    assert kernels_of(sharded, "layer.reduce")[:2] == [moves("layer.shared", 2 * H, 1, 0)] * 2
    whole = build(replace(DENSE, n_layers=1), plan(stack="pytorch", tp=2, zero_stage=0), CLUSTER)
    sums = [k for k in kernels_of(whole, "optimizer") if k.name == "shared_gradients"]
    assert sums == [moves("shared_gradients", 2 * H, 1, 6)] * (2 * 3)  # two norms of the layer and the last
    nodes = nodes_of(whole, "optimizer")
    assert nodes[1] == Node("shared_gradients", "reduce", ("join",))
    assert nodes[2] == Node("shared_gradients'", "reduce", ("shared_gradients",))


def test_dtensor_reduces_the_norms_of_all_tensors_over_every_axis_that_shards_them() -> None:
    """A stage with the expert layer and the head: 5 matrices and 4 norms of attention, and 6 tensors more."""
    fields = {"stack": "pytorch", "tp": 2, "pp": 2, "ep": 2, "dp_shard": 4, "n_microbatches": 2}
    program = build(replace(MOE, n_layers=2), plan(**fields), CLUSTER)
    step = program.blocks[int(program.rank_classes[1].block[-1])]
    sent = [float(program.ops.bytes_comm[op]) for op in step.op if program.ops.name[op] == "grad_norm.reduce"]
    dense = 5 + 4 + 4 + 2
    """matrices and norms of attention and the layer, router and three of the shared expert, last norm and head"""
    assert sent == [4 * dense, 4 * 3, 4 * dense, 4]
    assert step.name == "optimizer"


@pytest.mark.parametrize("ep", [1, 2])
def test_a_dispatch_by_gathering_copies_tokens_of_all_ranks(ep: int) -> None:
    """A rank gathers the tokens of `ep` ranks, keeps those of its experts and scatters the weighted sums."""
    stack = replace(load_stack("megatron-core"), dispatcher="allgather")
    program = build(MOE, plan(stack="megatron-core", dp_shard=4, ep=ep, zero_stage=1), CLUSTER, stack)
    copies, every = 2 * T * H, 2 * T * ep * H
    around = ("ffn.dispatch", "permute", "combine", "ffn.combine_exchange")
    found = [kernel for kernel in kernels_of(program, "moe_layer.forward") if kernel.name in around]
    back = [kernel for kernel in kernels_of(program, "moe_layer.backward") if kernel.name.startswith(around)]
    middle = [moves("permute", 4 * copies, 2, FFN), moves("combine", 8 * copies, 2, FFN)]
    of_middle = [moves("combine.backward", 10 * copies, 3, FFN), moves("permute.backward", 4 * copies, 2, FFN)]
    if ep == 1:
        assert found == middle
        assert back == of_middle
    else:
        exchange = moves("ffn.dispatch", every, 1, FFN)
        assert found == [exchange, *middle, exchange._replace(name="ffn.combine_exchange")]
        of_exchange = exchange._replace(name="ffn.combine_exchange.backward")
        assert back == [of_exchange, *of_middle, exchange._replace(name="ffn.dispatch.backward")]
    assert ("permute", 2 * copies) in kept_by(program, "moe_layer.forward")


@pytest.mark.parametrize(
    "fields", [{}, {"tp": 2, "sequence_parallel": False}, {"compile": True, "dp_shard": 2}], ids=str
)
def test_tensors_live_from_one_node_of_their_block_to_another(fields: dict[str, object]) -> None:
    program = build(DENSE, plan(stack="torchtitan-0.1", **fields), CLUSTER)
    check(program)
    for block in program.blocks:
        assert max(block.tensor_alloc, default=-1) < len(block)
        assert max(block.tensor_free, default=-1) < len(block)
        assert not set(block.tensor_bytes.tolist()) & {1, 2, 3}
