"""Modules that predict further tokens behind the last layer of a model (multi-token prediction).

Module n reads the stream behind the last layer, or behind the module before, and the embedding of the n-th next token.
It has a norm of each, a projection of both together, a layer, a norm, and the head, whose matrix is the model's own
(DeepSeek-V3, arXiv 2412.19437, section 2.2). Modules run on the rank of the head, which holds a copy of the embedding
where it has none (Megatron-Core, transformer/multi_token_prediction.py).
"""

from __future__ import annotations

from dataclasses import replace

from forerun.sources.symbolic.checkpoints import settle_activations
from forerun.sources.symbolic.embedding_and_head import HEAD, head_section, lookup, norm_and_loss
from forerun.sources.symbolic.kernels import TransformerKernels
from forerun.sources.symbolic.layer import write_layer
from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.products import Product
from forerun.sources.symbolic.tape import Tape
from forerun.sources.symbolic.weights import Weights

_STREAM = "stream"
"""name, inside a module, of the stream that it reads"""


def heads_section(kernels: TransformerKernels) -> Section:
    """Returns the section of final norm, head and loss, and of the modules that predict further tokens."""
    section, stream = head_section(kernels), "x"
    model, s = kernels.model, kernels.shapes
    for number in range(1, model.mtp_modules + 1):
        module = _module(kernels.of_layer(model.layer(model.n_layers - 1)))
        module.tape.rename(f"mtp{number}.", ())
        _append(section, module, stream)
        stream = f"mtp{number}.layer.y"
    if model.mtp_modules and not model.tied_embeddings:  # last, as the embedding that a rank may already hold
        section.weights.matrices.append(s.vocab * s.hidden)
        section.weights.wide += s.vocab * s.hidden
    return section


def _module(kernels: TransformerKernels) -> Section:
    """Returns the section of one module."""
    s = kernels.shapes
    section = Section(kernels, Tape([], kernels.marker), Weights())
    size = s.tokens_sp * s.hidden * s.act_bytes
    section.tape.inputs = ((_STREAM, s.tokens_sp * s.hidden * kernels.stream_bytes),)
    lookup(section, ("embedded", size), s.hidden, s.vocab * s.hidden)
    section.norm("mtp.embedding_norm", "embedded", "embedded.normed", s.tokens_sp, HEAD)
    section.norm("mtp.stream_norm", _STREAM, "stream.normed", s.tokens_sp, HEAD)
    reads, makes = ("embedded.normed", "stream.normed"), (("both", 2 * size),)
    section.pointwise("mtp.concat", "copy", 2 * s.tokens_sp * s.hidden, "composed", reads, makes, module=HEAD)
    section.weights.add_matrix(2 * s.hidden, s.hidden)
    section.linear(Product("mtp.projection", "both", "x", 2 * s.hidden, s.hidden, False, HEAD), s.tokens_sp)
    write_layer(section)
    section.tape.rename("layer.", ())
    settle_activations(kernels, section.tape, kernels.plan.activation_checkpointing != "none")
    norm_and_loss(section, "layer.y", first=False)
    return section


def _append(section: Section, module: Section, stream: str) -> None:
    """Appends the operations and weights of `module`, which reads `stream` of `section`."""
    tape, more, names = section.tape, module.tape, {_STREAM: stream}
    for op in more.ops:
        op.reads = tuple(names.get(name, name) for name in op.reads)
        op.saves = tuple(names.get(name, name) for name in op.saves)
    start = len(tape.ops)
    tape.regions += [replace(each, first=start + each.first, last=start + each.last) for each in more.regions]
    tape.narrow |= {names.get(wide, wide): narrow for wide, narrow in more.narrow.items()}
    tape.early_stop, tape.compiled = more.early_stop, more.compiled
    tape.ops += more.ops
    section.weights = Weights.joined((section.weights, module.weights))
