"""Attention: projections, rotary embedding, the attention kernel and context parallelism."""

from __future__ import annotations

from forerun.core.program.kinds import Attention
from forerun.core.program.types import Collective, Stream
from forerun.describe.kernels.attention import attention_kernel
from forerun.describe.model.parameters import qk_norm_widths
from forerun.describe.model.spec import IndexerSpec
from forerun.sources.symbolic.linear import Product, Section
from forerun.sources.symbolic.ring import Piece, far_piece, gathered_piece
from forerun.sources.symbolic.shapes import ceil_div
from forerun.sources.symbolic.tape import Stage, TapeOp, on_compute
from forerun.sources.symbolic.unfused_flex import Sizes, unfused_flex
from forerun.sources.symbolic.weights import Matrix

SHARED = ("k.shared", "v.shared")
"""keys and values that an earlier layer has made"""


def attention(section: Section, x: str, y: str, module: int) -> None:
    """Writes self-attention from the normed input `x` to the branch output `y`."""
    if section.kernels.model.mla:
        _latent_projections(section, x, module)
    else:
        _projections(section, x, module)
    _rope_and_norms(section, module)
    _repeat_kv(section, module)
    _copies(section, "layout_in", module)
    context = section.kernels.plan.cp
    form = attention_kernel(kernel_name(section)).form
    if form == "products":
        _naive(section, module)
    elif form == "operations":
        _unfused_flex(section, module)
    elif context == 1:
        _fused(section, module)
    else:
        _context_parallel(section, module)
    kernels, shapes = section.kernels, section.kernels.shapes
    rows = _output_gate(section, module)
    if kernels.stack.sequence_first and kernels.plan.micro_batch > 1:
        inside, rows, (_, _, size) = rows, "o.rows", _sizes(section)
        elements = size // shapes.act_bytes
        section.pointwise("attention.layout_out", "copy", elements, "fused", (inside,), ((rows, size),), module=module)
    section.row(
        "attention.out", rows, y, shapes.heads * shapes.v_head_dim, shapes.hidden, kernels.model.out_bias, module
    )


def _output_gate(section: Section, module: int) -> str:
    """Writes the gate on the attention's output, if there is one; returns the name of what the output product reads."""
    kernels, (_, _, size) = section.kernels, _sizes(section)
    if kernels.model.sinks:
        section.weights.vectors.append(kernels.shapes.heads)
    if not kernels.model.attention_gate:
        return "o"
    reads = ("o", "q" if kernels.stack.fused_qkv else "gate")
    elements, makes = size // kernels.shapes.act_bytes, (("o.gated", size),)
    section.pointwise(
        "attention.gate", "output_gate", elements, kernels.stack.activation, reads, makes, reads, module=module
    )
    return "o.gated"


def kernel_name(section: Section) -> str:
    """Returns the name of the plan's attention kernel, or of the stack's."""
    kernels = section.kernels
    return kernels.stack.attention_kernel(kernels.plan.attention, kernels.architecture)


def _kind(section: Section) -> str:
    """Returns the kind of the fused kernel: `attention`, or `core` where checkpointing by operation drops it."""
    unknown = kernel_name(section) in section.kernels.stack.op_policy_misses
    return "core" if unknown else "attention"


def _sizes(section: Section) -> tuple[int, int, int]:
    """Returns the bytes of queries, of keys (or of values of equal width), and of the attention output."""
    s = section.kernels.shapes
    return (
        s.tokens * s.heads * s.head_dim * s.act_bytes,
        s.tokens * s.kv_heads * s.head_dim * s.act_bytes,
        s.tokens * s.heads * s.v_head_dim * s.act_bytes,
    )


def _projections(section: Section, x: str, module: int) -> None:
    kernels, s = section.kernels, section.kernels.shapes
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    own, gates = not kernels.model.shared_kv, kernels.model.attention_gate
    if kernels.stack.fused_qkv:
        width = q * (1 + gates) + 2 * kv * own
        section.column("attention.qkv", x, s.hidden, [("attention.qkv", "q", width)], kernels.model.qkv_bias, module)
        apart = [q * (1 + gates), *[kv] * (2 * own)]  # an optimizer of matrices takes the parts one by one
        section.weights.shapes[-1:] = [Matrix(rows, s.hidden) for rows in apart]
    else:
        outs = [("attention.q", "q", q), ("attention.k", "k", kv), ("attention.v", "v", kv)]
        outs = [*outs[: 1 + 2 * own], *([("attention.gate_in", "gate", q)] if gates else [])]
        section.column("attention.qkv", x, s.hidden, outs, kernels.model.qkv_bias, module)


def _latent_projections(section: Section, x: str, module: int) -> None:
    """Writes the projections of multi-head latent attention: low-rank down (replicated over tp), norms, up."""
    s, mla = section.kernels.shapes, section.kernels.model.mla
    assert mla is not None
    tokens = s.tokens_sp
    query = x
    section.fan_out("attention.down", x, tokens * s.hidden, 2, module)
    if mla.q_lora_rank:
        section.weights.add_matrix(s.hidden, mla.q_lora_rank)
        section.linear(Product("attention.q_down", x, "q_low", s.hidden, mla.q_lora_rank, False, module), tokens)
        section.norm("attention.q_norm", "q_low", "q_normed", tokens, module, mla.q_lora_rank)
        query = "q_normed"
    section.column(
        "attention.q_up",
        query,
        mla.q_lora_rank or s.hidden,
        [("attention.q_up", "q", s.heads * s.head_dim)],
        False,
        module,
    )
    width = mla.kv_lora_rank + mla.qk_rope_dim
    section.weights.add_matrix(s.hidden, width)
    section.linear(Product("attention.kv_down", x, "kv_low", s.hidden, width, False, module), tokens)
    section.norm("attention.kv_norm", "kv_low", "kv_normed", tokens, module, mla.kv_lora_rank)
    up = s.heads * (mla.qk_nope_dim + mla.v_head_dim)
    section.column("attention.kv_up", "kv_normed", mla.kv_lora_rank, [("attention.kv_up", "kv", up)], False, module)
    indexer = section.kernels.model.indexer
    if indexer:
        _indexer(section, indexer, x, query, module)
    keys = s.tokens * s.heads * s.head_dim * s.act_bytes
    values = s.tokens * s.heads * s.v_head_dim * s.act_bytes
    elements = s.tokens * s.heads * (s.head_dim + s.v_head_dim)
    section.pointwise(
        "attention.assemble", "copy", elements, "fused", ("kv",), (("k", keys), ("v", values)), module=module
    )


def _indexer(section: Section, indexer: IndexerSpec, x: str, query: str, module: int) -> None:
    """Writes the scores of all keys for each query, and the choice of the keys that the attention reads.

    Its parameters are whole on every tensor-parallel rank.
    """
    kernels, s, mla = section.kernels, section.kernels.shapes, section.kernels.model.mla
    rank, width = (mla.q_lora_rank if mla else None) or s.hidden, indexer.head_dim
    products = (("q", query, rank, indexer.heads * width), ("k", x, s.hidden, width), ("w", x, s.hidden, indexer.heads))
    for name, read, n_in, n_out in products:
        section.weights.add_matrix(n_in, n_out)
        product = Product(f"attention.indexer_{name}", read, f"indexer.{name}", n_in, n_out, False, module)
        section.linear(product, s.tokens)
    section.weights.vectors.append(2 * width)
    batch, keys = kernels.plan.micro_batch * indexer.heads, kernels.plan.seq_len // 2  # the causal half
    scores, dk, dq = (
        kernels.ops.gemm(f"attention.indexer{role}", s.seq, n, k, batch, 0, kernels.wide_dtype)
        for role, n, k in (("", keys, width), (".dk", width, keys), (".dq", width, keys))
    )
    pairs = s.tokens * keys
    chosen = kernels.traffic("attention.indexer_top_k", pairs * 4, s.tokens * indexer.top_k * 4, 2)
    section.tape.add(
        TapeOp(
            "attention.indexer",
            "attention",
            module,
            [*on_compute(scores), *chosen],
            on_compute(dk, dq),
            reads=("indexer.q", "indexer.k", "indexer.w"),
            saves=("indexer.q", "indexer.k", "indexer.w"),
            makes=(("indexer.chosen", s.tokens * indexer.top_k * 4),),
        )
    )


def _rope_and_norms(section: Section, module: int) -> None:
    kernels, s = section.kernels, section.kernels.shapes
    q, kv, _ = _sizes(section)
    fused, own = kernels.stack.fused_qkv and not kernels.model.mla, not kernels.model.shared_kv
    rotated = s.heads + s.kv_heads * own
    elements = s.tokens * s.head_dim * rotated
    makes: tuple[tuple[str, int], ...] = (("q.normed", q), ("k.normed", kv))[: 1 + own]
    reads: tuple[str, ...] = ("q",) if fused or not own else ("q", "k")
    if kernels.model.qk_norm:
        section.weights.vectors += _qk_norm_vectors(section)
        section.pointwise(
            "attention.qk_norm", kernels.model.norm, elements, kernels.stack.norm, reads, makes, reads, module
        )
        reads = ("q.normed", "k.normed")[: 1 + own]
    makes = (("q.rotated", q), ("k.rotated", kv))[: 1 + own]
    if fused and own:  # rotation copies queries and keys out of the fused projection; values stay in it
        makes = (*makes, ("v", kv))
    if kernels.model.position == "rope":
        if kernels.model.mla:
            elements = s.tokens * kernels.model.mla.qk_rope_dim * rotated
        section.pointwise("attention.rope", "rope", elements, kernels.stack.rope, reads, makes, module=module)
    else:
        section.tape.add(TapeOp("attention.split", "view", module, [], [], reads=reads, makes=()))


def _qk_norm_vectors(section: Section) -> list[int]:
    """Returns the elements of the weights (and biases) of the norms on queries and keys."""
    model = section.kernels.model
    if model.mla:
        return [section.kernels.shapes.head_dim] * 2
    local = section.tp if model.qk_norm_over == "all_heads" else 1
    weights = [ceil_div(width, local) for width in qk_norm_widths(model) if width]
    biased = model.norm == "layernorm" and model.norm_bias and model.qk_norm_over == "head"
    return weights * (1 + biased)


def _query_names(section: Section) -> tuple[str, str, str]:
    """Returns the names of the tensors that the attention kernel reads: queries, keys, values."""
    query, key, value = _projected_names(section)
    return (query, "k.repeated", "v.repeated") if _repeats_kv(section) else (query, key, value)


def _projected_names(section: Section) -> tuple[str, str, str]:
    """Returns the names of queries, keys and values before key and value heads are repeated."""
    kernels = section.kernels
    fused = kernels.stack.fused_qkv and not kernels.model.mla
    if kernels.model.shared_kv:
        rotated = kernels.model.position == "rope"
        return "q.rotated" if rotated else "q.normed" if kernels.model.qk_norm else "q", *SHARED
    if kernels.model.position == "rope":
        return "q.rotated", "k.rotated", "v"
    if kernels.model.qk_norm:
        return "q.normed", "k.normed", "q" if fused else "v"
    return ("q", "q", "q") if fused else ("q", "k", "v")


def _repeats_kv(section: Section) -> bool:
    """Whether key and value heads are copied to the number of query heads; a compiler fuses the copies away."""
    kernels, s = section.kernels, section.kernels.shapes
    return kernels.stack.repeat_kv and s.heads != s.kv_heads and not kernels.model.mla and not kernels.plan.compile


def _repeat_kv(section: Section, module: int) -> None:
    """Writes the copies of key and value heads, which the kernel keeps for the backward pass."""
    if not _repeats_kv(section):
        return
    kernels, s = section.kernels, section.kernels.shapes
    keys, values = s.tokens * s.heads * s.head_dim, s.tokens * s.heads * s.v_head_dim
    forward, backward = kernels.pattern("copy", keys + values, "composed")
    makes = (("k.repeated", keys * s.act_bytes), ("v.repeated", values * s.act_bytes))
    reads = tuple(dict.fromkeys(_projected_names(section)[1:]))
    section.tape.add(TapeOp("attention.repeat_kv", "pointwise", module, forward, backward, reads=reads, makes=makes))


def _copies(section: Section, name: str, module: int) -> None:
    kernels, s = section.kernels, section.kernels.shapes
    copies = kernels.stack.qkv_copies
    if not copies:
        return
    forward, backward = kernels.pattern("copy", copies * s.tokens * s.heads * s.head_dim, "fused")
    section.tape.add(TapeOp("attention." + name, "pointwise", module, forward, backward))


def _kernel_op(
    section: Section, seq_q: int, seq_kv: int, causal: bool, heads: int, kv_heads: int, share: float = 1.0
) -> tuple[int, int]:
    """Returns the op numbers of the forward and backward kernel; the average rank executes `share` of the FLOPs."""
    kernels, s = section.kernels, section.kernels.shapes
    kernel = kernel_name(section)
    add = kernels.ops.attention
    window = kernels.model.sliding_window
    if window and window < seq_kv and causal:
        seq_kv, causal = window, False
    batch, chunk, indexer = kernels.plan.micro_batch, kernels.model.attention_chunk, kernels.model.indexer
    if chunk and chunk < min(seq_q, seq_kv):
        batch, seq_q, seq_kv = batch * ceil_div(seq_q, chunk), chunk, chunk
    if indexer and indexer.top_k < seq_kv:
        seq_kv, causal = indexer.top_k, False
    sizes = (batch, heads, kv_heads, seq_q, seq_kv, s.head_dim, int(causal))
    forward, backward = (Attention(*sizes, backward=turn, v_head_dim=s.v_head_dim) for turn in (0, 1))
    return (
        add("attention.kernel", forward, kernel, kernels.wide_dtype, share=share),
        add("attention.kernel.backward", backward, kernel, kernels.wide_dtype, share=share),
    )


def _piece_op(section: Section, piece: Piece) -> tuple[int, int]:
    """Returns the op numbers of the kernels of one piece of a context-parallel rank's attention."""
    s = section.kernels.shapes
    return _kernel_op(section, piece.queries, piece.keys, piece.causal, s.heads, s.kv_heads, piece.share)


def _saved(section: Section) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """Returns the tensors that the kernel reads and keeps, and those it makes as (name, bytes).

    It makes the output, and fp32 statistics of each query and head.
    """
    s = section.kernels.shapes
    _, _, out = _sizes(section)
    reads = tuple(dict.fromkeys(_query_names(section)))
    statistics = attention_kernel(kernel_name(section)).keeps
    return reads, (("o", out), *((name, s.tokens * s.heads * 4) for name in statistics))


def _fused(section: Section, module: int) -> None:
    kernels, s = section.kernels, section.kernels.shapes
    forward, backward = _kernel_op(
        section, kernels.plan.seq_len, kernels.plan.seq_len, kernels.model.causal, s.heads, s.kv_heads
    )
    reads, makes = _saved(section)
    section.tape.add(
        TapeOp(
            "attention.kernel",
            _kind(section),
            module,
            on_compute(forward),
            on_compute(backward),
            reads=reads,
            saves=(*reads, *(name for name, _ in makes)),
            makes=makes,
        )
    )


def _unfused_flex(section: Section, module: int) -> None:
    """Writes FlexAttention outside of compiled code."""
    kernels, s, plan = section.kernels, section.kernels.shapes, section.kernels.plan
    reads, makes = _saved(section)
    kv_heads = s.heads if _repeats_kv(section) else s.kv_heads
    sizes = Sizes(plan.micro_batch, s.heads, kv_heads, s.seq, s.seq, s.head_dim, s.v_head_dim)
    section.tape.add(unfused_flex(kernels, sizes, reads, makes, module))


def _context_parallel(section: Section, module: int) -> None:
    """Writes attention over a sequence cut in cp parts; `symbolic.ring` says what the slowest rank computes.

    ring: ranks pass keys and values round, each hop beside the attention over the part that has arrived;
    allgather: ranks gather keys and values first; ulysses: all-to-alls from sequence shards to head shards and back.
    """
    kernels, s, plan = section.kernels, section.kernels.shapes, section.kernels.plan
    q, kv, out = _sizes(section)
    if kernels.stack.repeat_kv and not kernels.model.mla:  # compiled too: collectives send the copies
        kv = q
    reads, makes = _saved(section)
    forward: list[Stage]
    backward: list[Stage]
    if plan.cp_method == "ulysses":
        heads, kv_heads = max(1, s.heads // plan.cp), max(1, s.kv_heads // plan.cp)
        f, b = _kernel_op(section, plan.seq_len, plan.seq_len, kernels.model.causal, heads, kv_heads)
        into = kernels.collective("cp.qkv", Collective.ALL_TO_ALL, "cp", q + 2 * kv, Stream.CP)
        back = kernels.collective("cp.out", Collective.ALL_TO_ALL, "cp", out, Stream.CP)
        forward, backward = [*into, *on_compute(f), *back], [*back, *on_compute(b), *into]
    elif plan.cp_method == "allgather" and kernels.stack.cp_merge == "fused":
        gather = kernels.collective("cp.gather", Collective.ALL_GATHER, "cp", 2 * kv * plan.cp, Stream.CP)
        scatter = kernels.collective("cp.scatter", Collective.REDUCE_SCATTER, "cp", 2 * kv * plan.cp, Stream.CP)
        whole = Piece(s.seq, plan.seq_len, causal=False)
        f, b = _piece_op(
            section, gathered_piece(plan.cp_load_balance, plan.cp, s.seq) if kernels.model.causal else whole
        )
        forward, backward = [*gather, *on_compute(f)], [*gather, *on_compute(b), *scatter]
    else:
        forward, backward = _pieces(section, 2 * kv)
    section.tape.add(
        TapeOp(
            "attention.kernel",
            _kind(section),
            module,
            forward,
            backward,
            reads=reads,
            saves=(*reads, *(name for name, _ in makes)),
            makes=makes,
        )
    )


def _pieces(section: Section, kv_bytes: int) -> tuple[list[Stage], list[Stage]]:
    """Returns the forward and backward stages of attention piece by piece, with the transfers of keys and values.

    The transfer of the next keys and values runs beside the piece before it. A ring passes them on with their
    gradients. PyTorch can also gather all keys and values beside the first piece; it passes gradients on until each is
    back at its owner. Compiled code waits for each collective at once (`wait_tensor` follows it in a traced graph,
    torch/distributed/_functional_collectives.py).
    """
    kernels, s, plan = section.kernels, section.kernels.shapes, section.kernels.plan
    own_f, own_b = _kernel_op(section, s.seq, s.seq, kernels.model.causal, s.heads, s.kv_heads)
    whole = Piece(s.seq, s.seq, causal=False)
    far_f, far_b = _piece_op(section, far_piece(plan.cp_load_balance, s.seq) if kernels.model.causal else whole)
    by_pytorch = kernels.stack.cp_merge != "fused"
    beside = kernels.stack.cp_overlap and not (by_pytorch and plan.compile)
    gradients = kv_bytes // s.act_bytes * 4 if by_pytorch else kv_bytes
    home = (kernels.p2p("cp.hop.gradients", "cp", gradients), Stream.CP)
    last = plan.cp - 1
    there: list[Stage]
    back: list[Stage]
    if plan.cp_method == "allgather":
        gather = kernels.collective("cp.gather", Collective.ALL_GATHER, "cp", kv_bytes * plan.cp, Stream.CP)
        there, back = [*gather, *[()] * last], [*gather, *[(home,)] * last]
    else:
        hop = (kernels.p2p("cp.hop", "cp", kv_bytes), Stream.CP)
        there, back = [*[(hop,)] * last, ()], [*[(hop, home)] * last, ()]
    merge_f, merge_b = kernels.pattern("cp_merge", s.tokens * s.heads * s.v_head_dim, kernels.stack.cp_merge)

    def stages(own: int, far: int, wires: list[Stage], merge: list[Stage]) -> list[Stage]:
        out: list[Stage] = []
        for i, wire in enumerate(wires):
            work = on_compute(own if i == 0 else far)
            if beside or not wire:
                out.append((*wire, *work[0]))
            else:
                out += [*work, wire]
            out += merge if i else []
        return out

    backward = stages(own_b, far_b, back, merge_b)
    if by_pytorch:  # one more hop brings the gradients back to their owner
        backward.append((home,))
    return stages(own_f, far_f, there, merge_f), backward


def _naive(section: Section, module: int) -> None:
    """Writes two batched matrix products around a materialised softmax (no flash kernel)."""
    kernels, s, stack, plan = section.kernels, section.kernels.shapes, section.kernels.stack, section.kernels.plan
    batch = plan.micro_batch * s.heads
    keys = plan.seq_len
    scores = batch * s.seq * keys
    score_bytes = scores * s.act_bytes
    reads = tuple(dict.fromkeys(_query_names(section)))
    gemm = kernels.ops.gemm
    dtype = kernels.wide_dtype

    def product(name: str, n: int, k: int) -> int:
        return gemm(name, s.seq, n, k, batch, 0, dtype)

    qk, pv = product("attention.qk", keys, s.head_dim), product("attention.pv", s.head_dim, keys)
    qk_back = [product("attention.dk", s.head_dim, keys), product("attention.dq", s.head_dim, keys)]
    pv_back = [product("attention.dv", s.head_dim, keys), product("attention.dp", keys, s.head_dim)]
    soft_f, soft_b = kernels.pattern("softmax", scores, stack.softmax)
    value = reads[-1]
    add = section.tape.add
    add(
        TapeOp(
            "attention.qk",
            "core",
            module,
            on_compute(qk),
            on_compute(*qk_back),
            reads=reads[:2],
            saves=reads[:2],
            makes=(("scores", score_bytes),),
        )
    )
    add(
        TapeOp(
            "attention.softmax",
            "core",
            module,
            soft_f,
            soft_b,
            reads=("scores",),
            saves=("probs",),
            makes=(("probs", score_bytes),),
        )
    )
    probs = "probs"
    if stack.attention_dropout:
        drop_f, drop_b = kernels.pattern("score_dropout", scores, stack.softmax)
        makes = (("dropped", score_bytes), ("score.mask", scores))
        add(
            TapeOp(
                "attention.dropout",
                "core",
                module,
                drop_f,
                drop_b,
                reads=("probs",),
                saves=("score.mask",),
                makes=makes,
            )
        )
        probs = "dropped"
    out = s.tokens * s.heads * s.v_head_dim * s.act_bytes
    add(
        TapeOp(
            "attention.pv",
            "core",
            module,
            on_compute(pv),
            on_compute(*pv_back),
            reads=(probs, value),
            saves=(probs, value),
            makes=(("o", out),),
        )
    )
