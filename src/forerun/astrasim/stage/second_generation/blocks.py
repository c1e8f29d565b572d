"""The blocks of STAGE's second generation: forward and backward tensors under tensor, sequence and expert parallelism.

Symbols: MicroBatch, Seq, Dmodel, Dff, Dvocal, Head, KVHead, Experts, KExperts; degrees dp, tp, cp (STAGE's --sp), ep.
Einsum letters: b batch, s position, m and n features, h heads.
"""

from __future__ import annotations

from forerun.astrasim.stage.reference import SECOND_GENERATION
from forerun.astrasim.stage.sizes import Size, number, size
from forerun.astrasim.stage.tensors import Block, Layout, layout

NORM_OPS, LOSS_OPS = SECOND_GENERATION.norm_ops, SECOND_GENERATION.loss_ops
ATTENTION_OPS = SECOND_GENERATION.attention_ops, SECOND_GENERATION.attention_gradient_ops

WHOLE_SEQUENCE = "Seq/cp"
SPLIT_SEQUENCE = "Seq/(cp*tp)"


def tokens(sequence: str, features: str = "Dmodel") -> Layout:
    return layout(f"MicroBatch/dp, {sequence}, {features}")


def embedding(sequence: str, inputs: str, outputs: str) -> Block:
    """Returns an embedding from `inputs` to `outputs`: tp splits the sequence, or the inputs and the weight."""
    split = inputs if sequence == SPLIT_SEQUENCE else f"{inputs}/tp"
    x, y = tokens(sequence, split), tokens(sequence, outputs)
    w = layout(f"{split}, {outputs}")
    block = Block()
    block.held("x", x)
    block.weight("w", w, "dw")
    block.product("y", "bsm,mn->bsn", ("x", x), ("w", w))
    block.held("dy", y)
    block.product("dw", "bsn,bsm->mn", ("dy", y), ("x", x))
    block.product("dx", "bsn,mn->bsm", ("dy", y), ("w", w))
    return block


def norm(sequence: str) -> Block:
    at = tokens(sequence)
    block = Block()
    block.held("x", at)
    block.pointwise("y", "x", NORM_OPS, at)
    block.held("dy", at)
    block.pointwise("dx", "dy", NORM_OPS, at)
    return block


def residual(sequence: str) -> Block:
    at = tokens(sequence)
    block = Block()
    block.held("x1", at)
    block.held("x2", at)
    block.sum("y", "x1", "x2", at)
    block.held("dy", at)
    block.same("dx1", "dy", at)
    block.same("dx2", "dy", at)
    return block


def loss(sequence: str) -> Block:
    at = tokens(sequence)
    block = Block()
    block.held("y", at)
    block.pointwise("loss", "y", LOSS_OPS, at)
    block.pointwise("dy", "loss", LOSS_OPS, at)
    return block


def attention(sequence: str, kv_heads: str) -> Block:
    """Returns the attention with heads split over tp: one weight for q, k and v, the fused kernel, and the output
    projection."""
    outer, inner = tokens(sequence), tokens(WHOLE_SEQUENCE)
    all_heads = f"(Head+2*{kv_heads})/tp"

    def heads(count: str) -> Layout:
        return layout(f"MicroBatch/dp, Seq/cp, Dmodel/Head, {count}")

    q, kv, qkv = heads("Head/tp"), heads(f"{kv_heads}/tp"), heads(all_heads)
    wqkv, wo = layout(f"Dmodel, Dmodel/Head, {all_heads}"), layout("Dmodel/Head, Head/tp, Dmodel")
    block = Block()
    block.held("x", outer)
    block.weight("wqkv", wqkv, "dwqkv")
    block.product("qkv", "bsm,mnh->bsnh", ("x", inner), ("wqkv", wqkv))
    block.sliced("q", ("qkv", qkv), 3, size("Head/tp"))
    block.sliced("k", ("qkv", qkv), 3, size(f"{kv_heads}/tp"))
    block.sliced("v", ("qkv", qkv), 3, size(f"{kv_heads}/tp"))
    block.held("attn", q)
    block.weight("wo", wo, "dwo")
    block.product("o1", "bsmh,mhn->bsn", ("attn", q), ("wo", wo))
    block.same("o", "o1", outer)
    block.held("do", outer)
    block.same("do1", "do", inner)
    block.product("dattn", "bsn,mhn->bsmh", ("do1", inner), ("wo", wo))
    block.product("dwo", "bsn,bsmh->mhn", ("do1", inner), ("attn", q))
    block.held("dv", kv)
    block.held("dk", kv)
    block.held("dq", q)
    block.sliced("dkv", ("dv", kv), 3, size(f"2*{kv_heads}/tp"), ("dk", kv))
    block.sliced("dqkv", ("dkv", heads(f"2*{kv_heads}/tp")), 3, size(all_heads), ("dq", q))
    block.product("dwqkv", "bsnh,bsm->mnh", ("dqkv", qkv), ("x", inner))
    block.product("dx1", "bsnh,mnh->bsm", ("dqkv", qkv), ("wqkv", wqkv))
    block.same("dx", "dx1", outer)
    block.nest("attn_kernel.", fused_attention(kv_heads))
    for name in ("q", "k", "v"):
        block.link(name, f"attn_kernel.{name}")
    for name in ("dq", "dk", "dv"):
        block.link(f"attn_kernel.{name}", name)
    block.link("attn_kernel.qkv", "attn")
    block.link("dattn", "attn_kernel.dqkv")
    return block


def fused_attention(kv_heads: str) -> Block:
    """Returns the attention kernel on local queries and on keys and values of the whole sequence."""
    q = layout("MicroBatch/dp, Seq/cp, Dmodel/Head, Head/tp")
    kv = layout(f"MicroBatch/dp, Seq/cp, Dmodel/Head, {kv_heads}/tp")
    all_kv = layout(f"MicroBatch/dp, Seq, Dmodel/Head, {kv_heads}/tp")
    partial = layout("MicroBatch/dp, Seq, Dmodel/Head, Head/tp", summed="1/cp")
    forward, backward = (number(ops) * q.elements for ops in ATTENTION_OPS)
    block = Block()
    block.held("q", q)
    block.held("k", kv)
    block.held("v", kv)
    block.same("k1", "k", all_kv)
    block.same("v1", "v", all_kv)
    block.custom("qkv", ("q", q), q, forward, after=("k1", "v1"))
    block.held("dqkv", q)
    block.custom("dq", ("dqkv", q), q, backward)
    grouped = kv_heads != "Head"
    for name in ("dk", "dv"):
        block.custom(f"{name}1" if grouped else name, ("dqkv", q), partial, backward)
    if grouped:
        for name in ("dk", "dv"):
            block.sliced(name, (f"{name}1", q), 3, size(f"{kv_heads}/tp"))
    return block


def feed_forward(sequence: str, gated: bool, positions: str = "Seq") -> Block:
    """Returns a feed-forward, Dmodel -> Dff -> Dmodel, with the inner features split over tp, on `positions` of the
    sequence."""
    local, whole = (text.replace("Seq", f"({positions})") for text in (sequence, WHOLE_SEQUENCE))
    outer, inner, hidden = tokens(local), tokens(whole), tokens(whole, "Dff/tp")
    w_in, w_out = layout("Dmodel, Dff/tp"), layout("Dff/tp, Dmodel")
    block = Block()
    block.held("x0", outer)
    if gated:
        block.weight("wup", w_in, "dwup")
    block.weight("wgate", w_in, "dwgate")
    block.weight("wdown", w_out, "dwdown")
    block.same("x00", "x0", inner)
    if gated:
        block.product("xup", "bsm,mn->bsn", ("x00", inner), ("wup", w_in))
    block.product("xgate", "bsm,mn->bsn", ("x00", inner), ("wgate", w_in))
    if gated:
        block.product("xupgate", "bsm,bsm->bsm", ("xup", hidden), ("xgate", hidden))
    activation = "xupgate" if gated else "xgate"
    block.product("xdown1", "bsm,mn->bsn", (activation, hidden), ("wdown", w_out))
    # STAGE gives this tensor Dff features, which only counts in the size that it writes.
    block.same("xdown", "xdown1", tokens(local, "Dff"))
    block.held("dxdown", outer)
    block.same("dxdown2", "dxdown", inner)
    block.product("dwdown", "bsn,bsm->mn", ("dxdown2", inner), (activation, hidden))
    block.product(f"d{activation}", "bsn,mn->bsm", ("dxdown2", inner), ("wdown", w_out))
    if gated:
        block.product("dxup", "bsm,bsm->bsm", ("dxupgate", hidden), ("xgate", hidden))
        block.product("dxgate", "bsm,bsm->bsm", ("dxupgate", hidden), ("xup", hidden))
    block.same("x01", "x0", inner)
    if gated:
        block.product("dwup", "bsn,bsm->mn", ("dxup", hidden), ("x01", inner))
    block.product("dwgate", "bsn,bsm->mn", ("dxgate", hidden), ("x01", inner))
    if gated:
        block.product("dx00", "bsn,mn->bsm", ("dxup", hidden), ("wup", w_in))
        block.product("dx01", "bsn,mn->bsm", ("dxgate", hidden), ("wgate", w_in))
        block.sum("dx000", "dx00", "dx01", Layout(inner.shape, (size("1/tp"),)))
    else:
        block.product("dx000", "bsn,mn->bsm", ("dxgate", hidden), ("wgate", w_in))
    block.same("dx0", "dx000", outer)
    return block


def expert() -> Block:
    """Returns one expert on its share of the routed tokens. All experts get the same number."""
    share = "Seq*KExperts/(Experts*ep)"
    routed, mine = _routed(), tokens(f"{share}/(cp*tp)")
    block = Block()
    wrapper = Block()
    wrapper.held("x", routed)
    wrapper.sliced("x_expert", ("x", routed), 1, mine.shape[1])
    wrapper.held("dx_expert", mine)
    wrapper.sliced("dx", ("dx_expert", mine), 1, routed.shape[1])
    wrapper.held("y_expert", mine)
    wrapper.sliced("y", ("y_expert", mine), 1, routed.shape[1])
    wrapper.held("dy", routed)
    wrapper.sliced("dy_expert", ("dy", routed), 1, mine.shape[1])
    block.nest("ldis.", wrapper)
    block.nest("ffn.", feed_forward(SPLIT_SEQUENCE, gated=False, positions=share))
    block.link("ldis.x_expert", "ffn.x0")
    block.link("ffn.xdown", "ldis.y_expert")
    block.link("ldis.dy_expert", "ffn.dxdown")
    block.link("ffn.dx0", "ldis.dx_expert")
    return block


def mixture(local_experts: int) -> Block:
    """Returns a mixture of experts: routing, dispatch (all-to-all over ep), this rank's experts, combination."""
    block = Block()
    block.nest("moe.", _routing())
    for index in range(local_experts):
        block.nest(f"moe.{index}.", expert())
        block.link("moe.xrouted", f"moe.{index}.ldis.x")
        block.link("moe.dyrouted", f"moe.{index}.ldis.dy")
    for result, share in (("dxrouted", "dx"), ("yrouted", "y")):
        last = f"moe.0.ldis.{share}"
        for index in range(1, local_experts):
            name = f"moe.{result}_r{index}"
            # STAGE counts one pass over the data for all experts: only the last of the chain costs.
            ops = 1 if index == local_experts - 1 else 0
            block.combined(name, last, f"moe.{index}.ldis.{share}", ops, _routed())
            last = name
        block.link(last, f"moe.{result}")
    return block


def _routed() -> Layout:
    return tokens("Seq*KExperts/(cp*tp*ep)")


def _routing() -> Block:
    chosen, over = "KExperts", size("1/KExperts")
    whole, split = tokens(SPLIT_SEQUENCE), tokens(SPLIT_SEQUENCE, "Dmodel/ep")
    copies = tokens(f"{SPLIT_SEQUENCE}*KExperts", "Dmodel/ep")
    scores, flat = tokens(SPLIT_SEQUENCE, chosen), tokens(f"{SPLIT_SEQUENCE}*KExperts", "1")
    router = layout("Dmodel/ep, KExperts")
    features: Size = size("Dmodel/ep")
    block = Block()
    block.held("x", whole)
    block.weight("wrouter", router, "dwrouter")
    block.product("yrouter", "bsm,mn->bsn", ("x", whole), ("wrouter", layout("Dmodel, KExperts")))
    block.reshaped("yrouter2", ("yrouter", scores), flat)
    block.stretched("x1", ("x", split), 1, size(chosen))
    block.same("xrouted", "x1", _routed())
    block.held("yrouted", _routed())
    block.same("y1", "yrouted", copies)
    block.sliced("yrouter3", ("yrouter2", flat), 2, features)
    block.combined("y2", "y1", "yrouter3", 1, copies)
    block.stretched("y", ("y2", copies), 1, over)
    block.held("dy", split)
    block.stretched("dy2", ("dy", split), 1, size(chosen))
    block.combined("dy1", "dy2", "yrouter3", 1, copies)
    block.combined("dyrouter3", "dy2", "y1", 1, copies)
    block.sliced("dyrouter2", ("dyrouter3", copies), 2, number(1))
    block.same("dyrouted", "dy1", _routed())
    block.reshaped("dyrouter", ("dyrouter2", flat), scores)
    block.product("dwrouter", "bsn,bsm->mn", ("dyrouter", scores), ("x", split))
    block.product("dx01", "bsn,mn->bsm", ("dyrouter", scores), ("wrouter", router))
    block.held("dxrouted", _routed())
    block.same("dx1", "dxrouted", copies)
    block.stretched("dx02", ("dx1", copies), 1, over)
    block.sum("dx", "dx01", "dx02", split)
    return block
