"""The indexer of sparse attention: scores of all keys, or entries, for each query, and the choice of those that the
attention reads.

Its parameters are whole on every tensor-parallel rank. It learns from a loss of its own, whose gradient ends at its
inputs (DeepSeek-V3.2, arXiv 2512.02556, section 2.1.1): its products have gradients of weights and none of inputs.
"""

from __future__ import annotations

from forerun.describe.model.layer_parameters import indexer_products, indexer_vectors
from forerun.describe.model.spec import IndexerSpec
from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.products import Product
from forerun.sources.symbolic.tape import TapeOp, on_compute

_SCORE_BYTES = 4


def indexer(section: Section, spec: IndexerSpec, x: str, query: str, module: int) -> None:
    """Writes the indexer of a layer from the normed `x` and the latent query `query`."""
    s, model = section.kernels.shapes, section.kernels.model
    reads = (query, x, x, x)
    names = ("q", "w", "k", "gate")
    for name, read, (n_in, n_out) in zip(names, reads, indexer_products(model, spec), strict=False):
        section.weights.add_matrix(n_in, n_out)
        product = Product(f"attention.indexer_{name}", read, f"indexer.{name}", n_in, n_out, False, module)
        section.linear(product, s.tokens)
        section.tape.ops[-1].backward = []
        section.tape.ops[-1].gradless = True
    section.weights.vectors.append(indexer_vectors(model, spec))
    keys = "indexer.k"
    if model.compressed:
        keys = pooled_entries(section, "indexer", spec.head_dim, s.tokens, module)
    _scores(section, spec, keys, module)


def pooled_entries(section: Section, name: str, width: int, tokens: int, module: int) -> str:
    """Writes entries of `width` elements as means of the tokens of `name`.k by the weights in `name`.gate, and their
    norm; returns their name."""
    kernels, spec = section.kernels, section.kernels.model.compressed
    assert spec is not None
    made, size = tokens // spec.rate * width, kernels.shapes.act_bytes
    reads, pooled, y = (f"{name}.k", f"{name}.gate"), f"{name}.pooled", f"{name}.entries"
    elements, makes, stack = tokens * width * spec.series, ((pooled, made * size),), kernels.stack
    section.pointwise(
        f"attention.{name}.pool", "pooled_entries", elements, stack.activation, reads, makes, reads, module
    )
    norm, makes = kernels.norm_pattern, ((y, made * size),)
    section.pointwise(f"attention.{name}.norm", norm, made, stack.norm, (pooled,), makes, (pooled,), module)
    return y


def _scores(section: Section, spec: IndexerSpec, keys: str, module: int) -> None:
    kernels, s, compressed = section.kernels, section.kernels.shapes, section.kernels.model.compressed
    seq, width = kernels.plan.seq_len, spec.head_dim
    read = seq // 2 if compressed is None else max(1, round(compressed.mean_entries(seq)))  # the causal half
    batch = kernels.plan.micro_batch * spec.heads
    scores, dk, dq = (
        kernels.ops.gemm(f"attention.indexer{role}", s.seq, n, k, batch, 0, kernels.wide_dtype)
        for role, n, k in (("", read, width), (".dk", width, read), (".dq", width, read))
    )
    chosen = s.tokens * spec.top_k * _SCORE_BYTES
    choice = kernels.traffic("attention.indexer_top_k", s.tokens * read * _SCORE_BYTES, chosen, 2)
    reads = ("indexer.q", keys, "indexer.w")
    section.tape.add(
        TapeOp(
            "attention.indexer",
            "attention",
            module,
            [*on_compute(scores), *choice],
            on_compute(dk, dq),
            reads=reads,
            saves=reads,
            makes=(("indexer.chosen", chosen),),
        )
    )
