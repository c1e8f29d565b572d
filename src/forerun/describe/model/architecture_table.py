"""Architecture tables: a YAML file of many models in a short form, as measurement collections keep them.

One entry: `n_layers, hidden, n_heads, ffn_hidden, vocab`, and where they differ from the default `n_kv_heads`
(n_heads), `head_dim` (hidden / n_heads), `mlp`, `norm`, `bias`, `tied_embeddings`, `pos_emb`, `max_positions`,
`qk_norm`, `moe`, `mla`, `attention`. Missing values follow the families that have the key:

* `bias: true` puts a bias on every matrix but the head, and on LayerNorm; with a gated feed-forward (the Llama block)
  only on the attention's matrices. `bias: mlp+layernorm only` puts it on the feed-forward and on LayerNorm alone.
* `pos_emb: alibi` brings BLOOM's norm after the embedding. An empty `pos_emb` means that positions are unknown; they
  then have no parameters.
* `attention: none` is a plain residual stack: feed-forward blocks without norms of their own, and one last norm.
* A learned position table without `max_positions` is as long as the sequence that is trained: see `sized_for`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

from forerun.common.errors import at
from forerun.describe.model.fields import Fields, read_yaml
from forerun.describe.model.spec import MLASpec, Mlp, ModelSpec, MoESpec, Norm
from forerun.describe.model.spec_file import even_head_dim

_POSITIONS = {
    "learned": "learned",
    "rope": "rope",
    "alibi": "alibi",
    "none": "none",
    "": "none",
    "sincos(no params)": "sinusoidal",
}
_FEED_FORWARD_BIAS = "mlp+layernorm only"
_WEIGHTLESS = re.compile(r"norms? without weights?", re.IGNORECASE)
_ABOUT = ("provenance", "n_params", "n_params_source", "n_params_active")


def load_architectures(path: str | Path) -> dict[str, ModelSpec]:
    """Returns the model of each entry of an architecture table, by name. ForerunError names file, entry and key."""
    path = Path(path)
    table = read_yaml(path)
    return {name: _entry(name, table.section(name) or Fields({}, f"{path}, in {name}")) for name in table.names()}


def spec_from_architecture(name: str, row: Mapping[str, object]) -> ModelSpec:
    """Returns the model of one entry. Raises ForerunError for an unknown, missing, mistyped or impossible key."""
    return _entry(name, Fields(row, f"architecture {name}"))


def sized_for(spec: ModelSpec, seq_len: int) -> ModelSpec:
    """Returns `spec`; a learned position table of unstated length gets `seq_len` rows."""
    if spec.position != "learned" or spec.max_positions:
        return spec
    return replace(spec, max_positions=seq_len)


def _entry(name: str, row: Fields) -> ModelSpec:
    row.expect("attention", "none")
    attention = not row.stated("attention")
    hidden, n_heads = row.integer("hidden"), row.integer("n_heads", least=1 if attention else 0)
    mla = _latent(row.section("mla"))
    values: dict[str, object] = {
        "n_layers": row.integer("n_layers"),
        "hidden": hidden,
        "n_heads": n_heads if attention else 0,
        "n_kv_heads": row.integer("n_kv_heads", n_heads, least=0),
        "head_dim": _head_dim(row, hidden, n_heads) if attention else 0,
        "ffn_hidden": row.integer("ffn_hidden"),
        "vocab": row.integer("vocab"),
        "mlp": row.text("mlp", "swiglu", get_args(Mlp)),
        "norm": row.text("norm", "rmsnorm", get_args(Norm)),
        "norm_weight": row.flag("norm_weight", not _WEIGHTLESS.search(row.text("provenance", ""))),
        "position": _POSITIONS[row.text("pos_emb", "rope", _POSITIONS)],
        "max_positions": row.integer("max_positions", 0),
        "tied_embeddings": row.flag("tied_embeddings"),
        "qk_norm": row.flag("qk_norm"),
        "block_norms": attention,
        "mla": mla,
        "moe": _experts(row.section("moe"), row.integer("n_layers")),
    }
    values |= _biases(row) | {"embedding_norm": values["position"] == "alibi"}
    row.finish(_ABOUT)
    with at(row.place):
        return ModelSpec(name=name, **values)  # type: ignore[arg-type]


def _head_dim(row: Fields, hidden: int, n_heads: int) -> int:
    return row.integer("head_dim") if row.stated("head_dim") else even_head_dim(row, hidden, n_heads)


def _biases(row: Fields) -> dict[str, object]:
    if row.is_text("bias"):
        row.text("bias", choices=(_FEED_FORWARD_BIAS,))
        return {"mlp_bias": True, "norm_bias": True}
    bias = row.flag("bias")
    gated = row.text("mlp", "swiglu") in ("swiglu", "geglu")
    layer_norm = row.text("norm", "rmsnorm") == "layernorm"
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bias and not gated, "norm_bias": bias and layer_norm}


def _latent(mla: Fields | None) -> MLASpec | None:
    if mla is None:
        return None
    spec = MLASpec(
        kv_lora_rank=mla.integer("kv_lora_rank"),
        qk_nope_dim=mla.integer("qk_nope_dim"),
        qk_rope_dim=mla.integer("qk_rope_dim"),
        v_head_dim=mla.integer("v_head_dim"),
        q_lora_rank=mla.integer("q_lora_rank") if mla.stated("q_lora_rank") else None,
    )
    mla.finish()
    return spec


def _experts(moe: Fields | None, n_layers: int) -> MoESpec | None:
    if moe is None:
        return None
    width = moe.integer("expert_ffn")
    shared = moe.integer("shared_ffn", width * moe.integer("n_shared", 0, least=0), least=0)
    capacity_factor = moe.number("capacity_factor")
    if moe.flag("pad_to_capacity") and capacity_factor is None:
        raise moe.error("pad_to_capacity", "needs a capacity_factor")
    n_experts, top_k, dense = moe.integer("n_experts"), moe.integer("top_k"), _dense_layers(moe, n_layers)
    moe.finish()
    with at(moe.place):
        return MoESpec(n_experts, top_k, width, shared, dense, capacity_factor=capacity_factor)


def _dense_layers(moe: Fields, n_layers: int) -> int:
    dense = moe.integer("dense_layers", 0, least=0)
    if moe.is_text("moe_layers"):
        moe.text("moe_layers", choices=("all",))
        expected = n_layers
    else:
        expected = moe.integer("moe_layers", n_layers - dense, least=0)
    if moe.stated("dense_layers") and dense + expected != n_layers:
        raise moe.error("dense_layers and moe_layers", f"are {dense} and {expected}, but there are {n_layers} layers")
    return n_layers - expected
