"""The embedding, and the final norm, head and loss of a model."""

from __future__ import annotations

from forerun.core.program.types import Category, Collective, Stream
from forerun.sources.symbolic.kernels import ENCODED, TransformerKernels
from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.products import Product
from forerun.sources.symbolic.shapes import ceil_div
from forerun.sources.symbolic.streams import closed, opened, stream_bytes
from forerun.sources.symbolic.tape import Stage, Tape, TapeOp, on_compute
from forerun.sources.symbolic.weights import Weights

EMBEDDING, HEAD = 0, 5


def embedding_section(kernels: TransformerKernels) -> Section:
    """Returns the section of the token (and position, type) tables; vocab-parallel under tensor parallelism."""
    s, model = kernels.shapes, kernels.model
    section = Section(kernels, Tape([], kernels.marker), Weights())
    weights = section.weights
    shared = model.runs is not None and model.runs.reads == "text"
    table = s.vocab * s.hidden
    weights.matrices += [table] * (not shared)
    if model.position == "learned":
        weights.matrices.append(model.max_positions * s.hidden)
    if model.token_types:
        weights.matrices.append(model.token_types * s.hidden)
    inputs = model.n_layers * model.layer_input
    if inputs:
        weights.matrices.append(ceil_div(model.layer_input_vocab, kernels.plan.tp) * inputs)
    weights.wide = sum(weights.matrices)
    if kernels.stack.dtensor and not shared:  # every rank makes the gradient of the whole table, then takes its part
        weights.beyond = (kernels.plan.tp - 1) * table
    lookups = 1 + (model.position == "learned") + bool(model.token_types)
    lookup(section, ("x", 0), lookups * s.hidden + inputs, sum(weights.matrices) + weights.beyond)
    if shared:  # it adds to the gradient that the encoder's own look-up makes
        section.tape.ops[-1].scratch_bytes = table * kernels.grad_bytes
    if inputs:
        _layer_inputs(section, inputs)
    x = "x"
    if model.runs is not None and model.runs.joins == "sequence":
        x = _joined_inputs(section, model.runs.out_tokens)
    if model.embedding_norm:
        section.norm("embedding.norm", x, "x.normed", s.tokens_sp, EMBEDDING)
    opened(section, "x.normed" if model.embedding_norm else x, EMBEDDING)
    return section


def _joined_inputs(section: Section, tokens: int) -> str:
    """Writes the encoder's output of `tokens` for each sequence over the embeddings in its place; returns the name of
    the result, a copy of all embeddings (masked_scatter)."""
    kernels, s, y = section.kernels, section.kernels.shapes, "x.joined"
    size = ceil_div(kernels.plan.micro_batch * tokens * s.tokens_sp, s.tokens) * s.hidden * s.act_bytes
    section.tape.inputs = ((ENCODED, size),)
    elements = s.tokens_sp * s.hidden
    section.pointwise("embedding.join", "copy", elements, "composed", ("x", ENCODED), ((y, 0),), module=EMBEDDING)
    return y


def lookup(section: Section, made: tuple[str, int], width: int, elements: int) -> None:
    """Writes the look-up of `width` elements a token in tables of `elements`, which makes the tensor `made`."""
    kernels, s = section.kernels, section.kernels.shapes
    size = s.tokens * s.hidden * s.act_bytes
    forward, backward = kernels.pattern("embedding", s.tokens * width, "composed")
    sp = kernels.plan.sequence_parallel and kernels.plan.tp > 1
    kind = Collective.REDUCE_SCATTER if sp else Collective.ALL_REDUCE
    forward = forward + kernels.collective("embedding.reduce", kind, "tp", size, Stream.TP)
    gather = kernels.collective("embedding.gather", Collective.ALL_GATHER, "tp", size, Stream.TP) if sp else []
    section.tape.add(
        TapeOp(
            "embedding",
            "embedding",
            EMBEDDING,
            forward,
            gather + backward,
            makes=(made,),
            weight_grad_bytes=section.weight_grad_bytes(elements),
            gradless=True,
        )
    )


def _layer_inputs(section: Section, width: int) -> None:
    """Writes the inputs of all layers, `width` together: rows of the table and normed projections of the embedding."""
    s, model = section.kernels.shapes, section.kernels.model
    name, size = "layer_inputs", s.tokens_sp * width * s.act_bytes
    section.weights.add_matrix(s.hidden, width)
    section.linear(Product(f"{name}.projection", "x", name, s.hidden, width, False, EMBEDDING), s.tokens_sp)
    rows = s.tokens_sp * model.n_layers
    section.norm(f"{name}.norm", name, f"{name}.normed", rows, EMBEDDING, model.layer_input)
    forward, backward = section.kernels.pattern("residual", s.tokens_sp * width, "composed")
    reads, makes = (f"{name}.normed",), ((f"{name}.sum", size),)
    op = TapeOp(
        f"{name}.sum", "pointwise", EMBEDDING, forward, backward, reads=reads, saves=(f"{name}.sum",), makes=makes
    )
    section.tape.add(op)


def head_section(kernels: TransformerKernels) -> Section:
    """Returns the section of final norm, head matrix (the embedding's when tied) and loss."""
    section = Section(kernels, Tape([], kernels.marker), Weights())
    section.tape.inputs = (("x", stream_bytes(section)),)
    norm_and_loss(section, closed(section, "x", HEAD))
    return section


def norm_and_loss(section: Section, x: str, first: bool = True) -> None:
    """Writes the final norm, the head's matrix and the loss behind the stream `x`. Unless it is the `first` head of the
    model, the matrix is that of the first one."""
    kernels = section.kernels
    s, model, plan = kernels.shapes, kernels.model, kernels.plan
    if model.final_norm:
        section.norm("final_norm", x, "x.normed", s.tokens_sp, HEAD)
        x = "x.normed"
    if model.head_transform:
        section.weights.add_matrix(s.hidden, s.hidden)
        dense = Product("head.transform", x, "t", s.hidden, s.hidden, model.head_transform_bias, HEAD)
        section.linear(dense, s.tokens_sp)
        section.norm("head.norm", "t", "t.normed", s.tokens_sp, HEAD)
        section.weights.vectors += [s.hidden] * model.head_transform_bias
        x = "t.normed"
    if model.pooler:
        _pooler(section, x)
    if model.head_bias and first:
        section.weights.vectors.append(s.vocab)
    section.tape.weights_first = kernels.whole_graph
    if first:
        section.weights.matrices.append(s.hidden * s.vocab)
        section.weights.wide += s.hidden * s.vocab
    if plan.loss_chunks > 1:
        _chunked_loss(section, x)
        return
    inside = section.enter("head.enter", x, "x.gathered", HEAD)
    _head_matrix(section, inside, first)
    if first and plan.pp > 1 and kernels.stack.pipeline_keeps:
        norm = section.tape.ops[0]  # the runtime keeps the last stage's output as it does the others'
        norm.saves = (*norm.saves, "logits")
    if plan.loss_parallel or plan.tp == 1:
        _loss(section, s.tokens, s.vocab)
    else:
        size = s.tokens * s.vocab * plan.tp * s.act_bytes
        gather = kernels.collective("loss.gather", Collective.ALL_GATHER, "tp", size, Stream.TP)
        section.tape.add(
            TapeOp("loss.gather", "gather", HEAD, gather, [], reads=("logits",), makes=(("all_logits", size),))
        )
        _loss(section, s.tokens, s.vocab * plan.tp, "all_logits")


def _pooler(section: Section, x: str) -> None:
    """Writes a dense layer on the first token of every sequence, and a classifier on it."""
    kernels, model = section.kernels, section.kernels.model
    hidden, rows = model.hidden, kernels.plan.micro_batch
    section.weights.matrices += [hidden * hidden, hidden * model.pooler_classes]
    section.weights.vectors += [hidden, model.pooler_classes]
    section.linear(Product("pooler", x, "pooled", hidden, hidden, True, HEAD), rows)
    if model.pooler_classes:
        section.linear(
            Product("pooler.classifier", "pooled", "classes", hidden, model.pooler_classes, True, HEAD), rows
        )


def _head_matrix(section: Section, x: str, first: bool) -> None:
    kernels, s = section.kernels, section.kernels.shapes
    forward, dgrad, wgrad = kernels.gemms("head", s.tokens, s.hidden, s.vocab, dtype=kernels.wide_dtype)
    elements = s.hidden * s.vocab
    weight = section.autocast_weight("head", elements)
    gradient = section.weight_grad_bytes(elements)
    section.tape.add(
        TapeOp(
            "head",
            "matmul",
            HEAD,
            weight.forward + on_compute(forward),
            on_compute(dgrad),
            on_compute(wgrad) + weight.backward,
            reads=(x,),
            saves=(x, *(tensor for tensor, _ in weight.made)),
            makes=(("logits", s.tokens * s.vocab * s.act_bytes), *weight.made),
            parameters=(elements,) if first else (),
            weight_grad_bytes=gradient if first else 0,
            category=Category.ACTIVATION if kernels.in_graphs else Category.LOGITS,
            scratch_bytes=0 if first else gradient,  # it adds to the gradient that the first head makes
        )
    )


_CHUNK_BYTES = (4, 2)
"""bytes read and written for each logit of 2 bytes by the kernel that replaces logits by their gradients (Liger-Kernel,
ops/cross_entropy.py: one pass for the sum of exponentials, one for the gradients)"""


def _chunked_loss(section: Section, x: str) -> None:
    """Writes head and loss over parts of the tokens, each with its gradients, in the forward pass.

    The backward pass only hands the gradients on, or scales them where several micro batches share the loss
    (Liger-Kernel, ops/fused_linear_cross_entropy.py). Frozen matrices and reference models need fewer products.
    """
    kernels, s, plan = section.kernels, section.kernels.shapes, section.kernels.plan
    elements, rows = s.hidden * s.vocab, ceil_div(s.tokens, plan.loss_chunks)
    product, dgrad, wgrad = kernels.gemms("head", rows, s.hidden, s.vocab, dtype=kernels.wide_dtype)
    scale = kernels.act_bytes / 2
    read, written = (rows * s.vocab * size * scale for size in _CHUNK_BYTES)
    gradient = elements * kernels.grad_bytes
    chunk = [*on_compute(product), *kernels.traffic("loss.chunk", read, written)]
    if not kernels.scores:
        chunk += on_compute(dgrad)
    trained = not (plan.lora_rank or kernels.scores)
    if trained:
        chunk += [*on_compute(wgrad), *kernels.traffic("head.accumulate", 2 * gradient, gradient)]
    logits = rows * s.vocab * kernels.act_bytes
    last = len(chunk) * plan.loss_chunks - 1
    held = [(logits, i, i + len(chunk) - 1) for i in range(0, last, len(chunk))]
    size = s.tokens * s.hidden * kernels.act_bytes
    moved = size + gradient * trained
    scaled = kernels.traffic("loss.scale", moved, moved, 1 + trained) if plan.n_microbatches > 1 else []
    section.tape.add(
        TapeOp(
            "head.loss",
            "loss",
            HEAD,
            chunk * plan.loss_chunks,
            scaled or on_compute(kernels.marker),
            on_compute(kernels.marker),
            reads=(x,),
            saves=("head.x_grad",),
            makes=(("head.x_grad", size), ("loss", 4)),
            parameters=(elements,),
            weight_grad_bytes=section.weight_grad_bytes(elements),
            category=Category.LOGITS,
            passing=Category.LOGITS,
            forward_held=(*held, (gradient * trained, 0, last)),
        )
    )


def _loss(section: Section, tokens: int, vocab: int, logits: str = "logits") -> None:
    """Writes the cross entropy of `tokens` over `vocab` classes.

    Composed code may copy the logits to fp32, keeps the log-softmax, and makes a gradient of each. Fused code works in
    place on one fp32 copy or on the logits. Compiled code reads the logits again in backward, and writes their gradient
    over them where the head is in the same graph (AOTAutograd's donated buffers).
    """
    kernels = section.kernels
    style = kernels.loss_style
    narrow = kernels.shapes.act_bytes < 4
    casts = (
        kernels.stack.loss_in_fp32 and narrow and not kernels.plan.autocast
    )  # autocast's log-softmax reads 2 bytes and writes 4
    name = "loss" if casts else "loss_autocast" if kernels.plan.autocast else "loss_as_is"
    forward, backward = kernels.pattern_in(name, tokens * vocab, style)
    sharded = kernels.plan.loss_parallel and kernels.plan.tp > 1
    if sharded:  # all-reduces of maximum, sum and target logit of every token
        forward = forward + 3 * kernels.collective("loss.reduce", Collective.ALL_REDUCE, "tp", 4 * tokens, Stream.TP)
    wide = tokens * vocab * 4
    kept, size = logits, 4  # compiled code and in-place kernels keep the logits themselves
    if style == "composed":
        cast = on_compute(kernels.marker)
        if not (kernels.stack.loss_in_fp32 or kernels.plan.autocast):
            wide = tokens * vocab * kernels.shapes.act_bytes
        elif casts:
            section.tape.add(_loss_op(kernels, "loss.float", cast, cast, logits, (), ("logits32", wide)))
            logits = "logits32"
        made = ("log_softmax", wide)
        section.tape.add(_loss_op(kernels, "log_softmax", forward, backward, logits, made[:1], made))
        if sharded:  # the exponentials are in memory beside the gradient
            section.tape.ops[-1].scratch_bytes = wide
        section.tape.add(_loss_op(kernels, "loss", [], [], "log_softmax", (), ("loss", 4)))
        return
    if style == "fused" and kernels.stack.loss_in_fp32:
        kept, size = "softmax", wide
    made = (kept if kept != logits else "loss", size)
    section.tape.add(_loss_op(kernels, "loss", forward, backward, logits, (kept,), made))
    section.tape.ops[-1].in_place = style == "compiled" and kernels.whole_graph


def _loss_op(
    kernels: TransformerKernels,
    name: str,
    forward: list[Stage],
    backward: list[Stage],
    reads: str,
    saves: tuple[str, ...],
    made: tuple[str, int],
) -> TapeOp:
    op = TapeOp(name, "loss", HEAD, forward, backward, reads=(reads,), saves=saves, makes=(made,))
    if not kernels.in_graphs:
        op.category = Category.LOGITS
    elif kernels.loss_style != "compiled":  # an eager loss takes memory outside of the graphs' pool
        op.category = op.passing = Category.LOGITS
    return op
