"""Attention to a window and to compressed entries (`CompressedSpec`): its inputs, its keys and its output.

Tensor parallelism splits query heads and the groups of the output. Keys and entries are made once of a rank's own
tokens and gathered, as all heads read them.
"""

from __future__ import annotations

from forerun.describe.model.compressed import CompressedSpec
from forerun.sources.symbolic.indexer import indexer, pooled_entries
from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.products import Product
from forerun.sources.symbolic.shapes import ceil_div

KEYS = "keys"
"""keys, which are values too, and the entries behind them"""
_REACHED = "keys.inside"


def compressed_inputs(section: Section, spec: CompressedSpec, x: str, module: int) -> None:
    """Writes the queries, keys and entries of one layer from the normed input `x`."""
    kernels, s = section.kernels, section.kernels.shapes
    tokens, width, size = s.tokens_sp, s.head_dim, s.act_bytes
    chooser = kernels.model.indexer
    readers = 2 + 2 * (spec.rate > 0)  # an indexer passes no gradient on
    section.fan_out("attention.down", x, tokens * s.hidden, readers, module)
    _product(section, "attention.q_down", x, "q_low", s.hidden, spec.q_lora_rank, module)
    section.norm("attention.query_norm", "q_low", "q_normed", tokens, module, spec.q_lora_rank)
    queries = s.heads * width
    section.column("attention.q_up", "q_normed", spec.q_lora_rank, [("attention.q_up", "q", queries)], False, module)
    _product(section, "attention.kv_down", x, "kv", s.hidden, width, module)
    section.norm("attention.key_norm", "kv", "kv.normed", tokens, module, width)
    if spec.rate:
        for name in ("k", "gate"):
            made = spec.series * width
            _product(section, f"attention.entry_{name}", x, f"entry.{name}", s.hidden, made, module)
        section.weights.vectors += [width, spec.vectors(width)]
        entries = pooled_entries(section, "entry", width, tokens, module)
        made = (tokens + tokens // spec.rate) * width
        reads, makes = ("kv.normed", entries), ((KEYS, made * size),)
        section.pointwise("attention.keys", "copy", made, "fused", reads, makes, module=module)
    if chooser:
        indexer(section, chooser, x, "q_normed", module)
    reached = width + (ceil_div(width, spec.rate) if spec.rate else 0)
    section.enter("attention.keys.enter", key_source(spec), _REACHED, module, reached)
    elements, normed = s.tokens * queries, (("q.head_normed", s.tokens * queries * size),)
    style = kernels.stack.norm
    section.pointwise("attention.head_norm", "weightless_norm", elements, style, ("q",), normed, ("q",), module)
    rotated = s.tokens * spec.rope_dim * (s.heads + 1)
    turned = (("q.rotated", s.tokens * queries * size),)
    section.pointwise("attention.rope", "rope", rotated, kernels.stack.rope, ("q.head_normed",), turned, module=module)


def key_source(spec: CompressedSpec) -> str:
    """Returns the name of a rank's own keys, with its entries if the layer has them."""
    return KEYS if spec.rate else "kv.normed"


def key_name(section: Section, spec: CompressedSpec) -> str:
    """Returns the name of the keys that the attention kernel reads."""
    return _REACHED if section.sp else key_source(spec)


def keys_read(section: Section, spec: CompressedSpec, queries: int) -> int:
    """Returns the keys and entries that a query of a sequence of `queries` tokens reads, on average."""
    model = section.kernels.model
    most = model.indexer.top_k if model.indexer else None
    return max(1, round(spec.mean_keys(queries, model.sliding_window or queries, most)))


def grouped_output(section: Section, spec: CompressedSpec, o: str, y: str, module: int) -> None:
    """Writes the output of the attention's result `o`: rotated back, projected group by group, then as a whole."""
    kernels, s = section.kernels, section.kernels.shapes
    width, groups = s.heads * s.head_dim, ceil_div(spec.out_groups, section.tp)
    makes = (("o.rotated", s.tokens * width * s.act_bytes),)
    rotated = s.tokens * spec.rope_dim * s.heads
    section.pointwise("attention.rope_back", "rope", rotated, kernels.stack.rope, (o,), makes, module=module)
    n_in = width // groups
    section.weights.add_matrix(n_in, groups * spec.out_rank)
    product = Product("attention.out_groups", "o.rotated", "o.low", n_in, spec.out_rank, False, module, groups)
    section.linear(product, s.tokens)
    section.row("attention.out", "o.low", y, groups * spec.out_rank, s.hidden, kernels.model.out_bias, module)


def _product(section: Section, name: str, x: str, y: str, n_in: int, n_out: int, module: int) -> None:
    """Writes a product whose weights every tensor-parallel rank has whole."""
    section.weights.add_matrix(n_in, n_out)
    section.linear(Product(name, x, y, n_in, n_out, False, module), section.kernels.shapes.tokens_sp)
