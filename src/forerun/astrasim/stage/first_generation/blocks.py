"""The blocks of STAGE's first generation: an embedding, attention and a feed-forward network, forward and backward.

Symbols: Batch, Seq, Dmodel, Dff, Head, Din, Dout; degrees dp, tp, sp. Einsum letters: b batch, s and w positions, m and
n features, h heads. There is no output projection and no softmax. Names and order of the tensors are STAGE's, since
they decide names, ids and order of the nodes.
"""

from __future__ import annotations

from forerun.astrasim.stage.reference import FIRST_GENERATION
from forerun.astrasim.stage.tensors import Block, Layout, Operand, layout

NORM_OPS = FIRST_GENERATION.norm_ops
TOKENS = "Batch/dp, Seq/sp"
FEATURES = layout(f"{TOKENS}, Dmodel/tp")
"""layout between blocks, with features split over tp"""
ALL_FEATURES = layout(f"{TOKENS}, Dmodel")
FORWARD_IN, FORWARD_OUT = "mha_x", "ffn_norm"
BACKWARD_IN, BACKWARD_OUT = "ffn_dnorm", "mha_d_x"
"""the tensors that link a layer to its neighbours"""


def embedding(inputs: str, outputs: str, sharded: bool) -> Block:
    """Returns an embedding from `inputs` to `outputs`, both split over tp; the weight may be `sharded` over dp and sp
    too."""
    x, all_x = layout(f"{TOKENS}, {inputs}/tp"), layout(f"{TOKENS}, {inputs}")
    y = layout(f"{TOKENS}, {outputs}/tp")
    w = layout(f"{inputs}, {outputs}/tp")
    block = Block()
    block.held("x", x)
    block.weight("w", layout(f"{inputs}/(dp*sp), {outputs}/tp") if sharded else w, "dw")
    block.product("y", "bsm,mn->bsn", ("x", all_x), ("w", w))
    block.held("dy", y)
    block.product("dw", "bsn,bsm->mn", ("dy", y), ("x", all_x))
    block.product("dx", "bsn,mn->bsm", ("dy", y), ("w", w))
    return block


def layer(sharded: bool, recompute: bool) -> Block:
    """Returns a layer: attention, then a feed-forward network, each with a residual sum and a norm."""
    block = Block()
    block.nest("mha_", attention(sharded, recompute))
    block.nest("ffn_", feed_forward(sharded, recompute))
    block.link("mha_norm", "ffn_x0")
    block.link("ffn_dx0", "mha_d_norm")
    return block


def attention(sharded: bool, recompute: bool) -> Block:
    """Returns the attention with heads split over tp, and queries and keys over sp: ranks gather queries and keep their
    keys.

    With `recompute`, queries, keys, values and scores are computed again when the gradient arrives.
    """
    every = "Batch/dp, Seq, Dmodel/Head, Head/tp"
    heads = layout(f"{TOKENS}, Dmodel/Head, Head/tp")
    all_heads, scores = layout(every), layout("Batch/dp, Seq, Seq/sp, Head/tp")
    whole = layout("Dmodel, Dmodel/Head, Head/tp")
    weight = layout("Dmodel/dp, Dmodel/(Head*sp), Head/tp") if sharded else whole
    block = Block()
    block.held("x", FEATURES)
    for name in "qkv":
        block.weight(f"w{name}", weight, f"d_w{name}")

    def project(suffix: str) -> None:
        for name in "qkv":
            block.product(f"{name}{suffix}", "bsm,mnh->bsnh", ("x", ALL_FEATURES), (f"w{name}", whole))

    def score(suffix: str, operands: str) -> None:
        queries, keys = (f"q{operands}", all_heads), (f"k{operands}", heads)
        block.product(f"qk{suffix}", "bsnh,bwnh->bswh", queries, keys)

    project("")
    score("", "")
    block.product("qkv", "bswh,bwnh->bsnh", ("qk", scores), ("v", heads))
    block.reshaped("qkv_reshape", ("qkv", heads), FEATURES)
    block.sum("res", "qkv_reshape", "x", FEATURES)
    block.pointwise("norm", "res", NORM_OPS, FEATURES)
    again = "_recomp" if recompute else ""
    if recompute:
        project(again)
        # With sharded weights STAGE's scores come from the first queries and keys.
        score(again, "" if sharded else again)
        for name in ("q", "k", "v", "qk"):
            block.tensors[f"{name}{again}"].after = ("d_res",)
    block.held("d_norm", FEATURES)
    block.pointwise("d_res", "d_norm", NORM_OPS, FEATURES)
    block.same("d_qkv_reshape", "d_res", FEATURES)
    block.reshaped("d_qkv", ("d_qkv_reshape", FEATURES), heads)
    block.product("d_qk", "bsnh,bwnh->bswh", ("d_qkv", all_heads), (f"v{again}", heads))
    block.product("d_v", "bsnh,bswh->bwnh", ("d_qkv", all_heads), (f"qk{again}", scores))
    block.product("d_q", "bswh,bwnh->bsnh", ("d_qk", scores), (f"k{again}", heads))
    block.product("d_k", "bswh,bsnh->bwnh", ("d_qk", scores), (f"q{again}", all_heads))
    for name in "qkv":
        block.product(f"d_w{name}", "bsnh,bsm->mnh", (f"d_{name}", heads), ("x", ALL_FEATURES))
    for part, name in enumerate("qkv", 1):
        block.product(f"d_x{part}", "bsnh,mnh->bsm", (f"d_{name}", heads), (f"w{name}", whole))
    block.same("d_x4", "d_res", FEATURES)
    block.sum("d_x12", "d_x1", "d_x2", FEATURES)
    block.sum("d_x34", "d_x3", "d_x4", FEATURES)
    block.sum("d_x", "d_x12", "d_x34", FEATURES)
    return block


def feed_forward(sharded: bool, recompute: bool) -> Block:
    """Returns two matrices with the inner dimension split over tp; with `recompute`, the first product is computed
    again."""
    wide = layout(f"{TOKENS}, Dff/tp")
    up, down = layout("Dmodel, Dff/tp"), layout("Dff/tp, Dmodel")
    block = Block()

    def expand(name: str) -> None:
        block.product(name, "bsm,mn->bsn", ("x0", ALL_FEATURES), ("w1", up))

    def weight(name: str, whole: Layout, parts: str) -> Operand:
        block.weight(name, layout(parts) if sharded else whole, f"d{name}")
        return name, whole

    block.held("x0", FEATURES)
    first = weight("w1", up, "Dmodel/(dp*sp), Dff/tp")
    expand("x1")
    second = weight("w2", down, "Dff/tp, Dmodel/(dp*sp)")
    block.product("x2", "bsm,mn->bsn", ("x1", wide), second)
    block.sum("res", "x2", "x0", FEATURES)
    block.pointwise("norm", "res", NORM_OPS, FEATURES)
    again = "x1_recomp" if recompute else "x1"
    if recompute:
        expand(again)
        block.tensors[again].after = ("dres",)
    block.held("dnorm", FEATURES)
    block.pointwise("dres", "dnorm", NORM_OPS, FEATURES)
    block.same("dx2", "dres", FEATURES)
    block.product("dw2", "bsn,bsm->mn", ("dx2", ALL_FEATURES), (again, wide))
    block.product("dx1", "bsn,mn->bsm", ("dx2", ALL_FEATURES), second)
    block.product("dw1", "bsn,bsm->mn", ("dx1", wide), ("x0", ALL_FEATURES))
    block.same("dx00", "dres", FEATURES)
    block.product("dx01", "bsn,mn->bsm", ("dx1", wide), first)
    block.sum("dx0", "dx00", "dx01", FEATURES)
    return block
