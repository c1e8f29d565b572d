"""A block of attention and feed-forward that several layers share (`SharedBlockSpec`).

The first layer that has the block holds its weights; layers that have it again compute it, and their gradients add to
those of the first one.
"""

from __future__ import annotations

from forerun.describe.model.layer_parameters import adapter_products, block_of
from forerun.describe.model.shared_block import SharedBlockSpec
from forerun.sources.symbolic.attention import attention
from forerun.sources.symbolic.feed_forward import feed_forward
from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.products import ATTENTION, ATTENTION_NORM, FFN, FFN_NORM, Product
from forerun.sources.symbolic.weights import Weights

EMBEDDED = "embedded"
"""the embedding, which the first layer of all has made"""


def with_shared_block(section: Section, spec: SharedBlockSpec, x: str) -> str:
    """Writes the block on the stream `x` and the sum of its result with `x`; returns the sum's name."""
    kernels, s = section.kernels, section.kernels.shapes
    model, elements = kernels.model, s.tokens_sp * s.hidden
    block = Section(kernels.of_layer(block_of(model)), section.tape, Weights() if spec.again else section.weights)
    made = (("both", 2 * elements * s.act_bytes),)
    section.pointwise("block.concat", "copy", 2 * elements, "composed", (x, EMBEDDED), made, module=ATTENTION)
    block.norm("block.norm", "both", "both.normed", s.tokens_sp, ATTENTION_NORM, 2 * s.hidden)
    attention(block, "both.normed", "block.attention", ATTENTION)
    block.norm("block.ffn_norm", "block.attention", "block.normed", s.tokens_sp, FFN_NORM)
    feed_forward(block, "block.normed", "block.y", FFN, prefix="block")
    for number, (low, up) in enumerate(adapter_products(model)):
        read = "both.normed" if low[0] > s.hidden else "block.normed"
        _adapter(section, f"block.adapter{number}", read, low, up)
    section.weights.add_matrix(s.hidden, s.hidden)
    section.linear(Product("block.out", "block.y", "block.out", s.hidden, s.hidden, False, FFN), s.tokens_sp)
    makes = (("block.sum", elements * kernels.stream_bytes),)
    section.pointwise(
        "block.sum", "residual", elements, kernels.stack.residual, (x, "block.out"), makes, module=ATTENTION
    )
    return "block.sum"


def _adapter(section: Section, name: str, x: str, low: tuple[int, int], up: tuple[int, int]) -> None:
    """Writes the two products of an adapter and the sum with the product beside it; every tensor-parallel rank has the
    adapter whole."""
    tokens, style = section.kernels.shapes.tokens_sp, section.kernels.stack.residual
    for role, read, (n_in, n_out) in (("low", x, low), ("up", f"{name}.low", up)):
        section.weights.add_matrix(n_in, n_out)
        section.linear(Product(f"{name}.{role}", read, f"{name}.{role}", n_in, n_out, False, FFN), tokens)
    section.pointwise(f"{name}.sum", "residual", tokens * up[1], style, (f"{name}.up",), (), module=FFN)
