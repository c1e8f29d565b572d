"""Attention whose queries and output come from experts (JetMoE): each token chooses some, of n_kv_heads queries each.

The experts are whole on every rank.
"""

from __future__ import annotations

from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.products import Product
from forerun.sources.symbolic.shapes import ceil_div


def queries_of_experts(section: Section, x: str, module: int) -> None:
    """Writes the router, the queries of the experts that tokens choose, and keys and values for all of them."""
    kernels, s, experts = section.kernels, section.kernels.shapes, section.kernels.model.attention_experts
    inside, style = s.kv_heads * s.head_dim, kernels.stack.moe
    section.weights.add_matrix(s.hidden, experts)
    router = Product("attention.router", x, "attention.scores", s.hidden, experts, False, module)
    section.linear(router, s.tokens, keeps_input=True)
    makes, reads = (("attention.weights", _rows(section) * 8),), ("attention.scores",)
    section.pointwise("attention.route", "router", s.tokens * experts, style, reads, makes, reads, module)
    _moved(section, "attention.permute", x, "q.sent", s.hidden, module)
    _grouped(section, Product("attention.q", "q.sent", "q.sorted", s.hidden, inside, False, module, experts))
    _moved(section, "attention.unpermute", "q.sorted", "q", inside, module)
    outs = [("attention.k", "k", inside), ("attention.v", "v", inside)]
    section.column("attention.kv", x, s.hidden, outs, False, module)


def output_of_experts(section: Section, o: str, y: str, module: int) -> None:
    """Writes the output products of the chosen experts and their weighted sum."""
    kernels, s, experts = section.kernels, section.kernels.shapes, section.kernels.model.attention_experts
    inside = s.kv_heads * s.head_dim
    _moved(section, "attention.out_permute", o, "o.sent", inside, module)
    _grouped(section, Product("attention.out", "o.sent", "o.sorted", inside, s.hidden, False, module, experts))
    elements, makes = _rows(section) * s.hidden, ((y, s.tokens_sp * s.hidden * s.act_bytes),)
    reads = ("o.sorted", "attention.weights")
    section.pointwise("attention.combine", "combine", elements, kernels.stack.moe, reads, makes, reads, module)


def _rows(section: Section) -> int:
    """Returns the pairs of a token and an expert that it chooses."""
    return section.kernels.shapes.tokens * section.kernels.shapes.heads // section.kernels.shapes.kv_heads


def _moved(section: Section, name: str, x: str, y: str, width: int, module: int) -> None:
    """Writes copies of rows in the order of experts, or back."""
    elements, size = _rows(section) * width, section.kernels.shapes.act_bytes
    style = section.kernels.stack.moe
    section.pointwise(name, "permute", elements, style, (x,), ((y, elements * size),), module=module)


def _grouped(section: Section, product: Product) -> None:
    """Writes a product of each expert with its share of the rows."""
    section.weights.add_matrix(product.n_in, product.n_out * product.groups)
    section.linear(product, ceil_div(_rows(section), product.groups))
