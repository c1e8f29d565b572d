"""Reads the model of a torchtitan configuration: one of torchtitan's flavors, or the literals of a module beside it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from forerun.common.admission import read_text
from forerun.common.errors import ForerunError, at
from forerun.common.shipped import shipped_data
from forerun.describe.model.catalog import load_model
from forerun.describe.model.fields import Fields
from forerun.describe.model.spec import MLASpec, ModelSpec, MoESpec
from forerun.describe.model.spec_file import read_spec
from forerun.describe.recipe.words import words_of

_TOOL = "torchtitan-0.2"
_PLAIN = {"mlp": "swiglu", "norm": "rmsnorm", "position": "rope"}


def model_of(fields: Fields, path: Path) -> tuple[ModelSpec | None, str, str]:
    """Returns the model that [model] names, its attention, and the reason if there is no model.

    A module that `experimental.custom_import` names is read beside the file, and never run.
    """
    family, flavor = fields.text("model.name", "llama3"), fields.text("model.flavor", "debugmodel")
    module = fields.text("experimental.custom_import", "")
    if module:
        beside = path.parent / f"{module.replace('.', '/')}.py"
        if not beside.is_file():
            return None, "", f"{family} {flavor} is defined in the module {module}, which is not beside the file"
        return _of_module(beside, flavor)
    entry = shipped_data(__package__, "torchtitan_flavors.yaml").get(family, {}).get(flavor)
    if entry is None:
        return None, "", f"Forerun does not know the sizes of torchtitan's {family} {flavor}"
    name = f"torchtitan-{family}-{flavor}"
    sizes = entry["model"]
    model = load_model(sizes) if isinstance(sizes, str) else read_spec(Fields(sizes, name), name)
    return model, entry.get("attention", "sdpa"), ""


def _of_module(path: Path, flavor: str) -> tuple[ModelSpec | None, str, str]:
    """Returns the model of the one call in a module whose name ends in ModelArgs and whose arguments are literals."""
    text = read_text(path)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ForerunError(f"{path}: not a Python module; is it cut short?") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node).endswith("ModelArgs")]
    if len(calls) != 1:
        return None, "", f"{path} has {len(calls)} calls of ModelArgs where one is read"
    try:
        arguments = _arguments(calls[0])
    except ValueError:
        return None, "", f"{path} computes the arguments of {_name(calls[0])}, and only literals are read"
    values = Fields(arguments, str(path))
    return spec_of(values, _name(calls[0]), flavor), values.text("attn_type", "sdpa"), ""


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _arguments(call: ast.Call) -> dict[str, Any]:
    """Returns the keyword arguments of a call. Raises ValueError for any that is not a literal."""
    if call.args or any(each.arg is None for each in call.keywords):
        raise ValueError
    return {str(each.arg): _literal(each.value) for each in call.keywords}


def _literal(node: ast.expr) -> Any:
    inner = isinstance(node, ast.Call) and _name(node).endswith("Args")
    return _arguments(node) if isinstance(node, ast.Call) and inner else ast.literal_eval(node)


def spec_of(values: Fields, kind: str, name: str) -> ModelSpec:
    """Returns the model of torchtitan's arguments of the class `kind`."""
    sizes = words_of(_TOOL).sizes
    found: dict[str, Any] = {
        field: values.integer(sizes[field]) for field in ("hidden", "n_layers", "n_heads", "vocab")
    }
    found["n_kv_heads"] = values.integer(sizes["n_kv_heads"], found["n_heads"])
    found |= {"name": name, "rope_theta": values.number("rope_theta")}
    if kind.startswith("DeepSeekV3"):
        mla = _mla(values)
        found |= {"ffn_hidden": values.integer("inter_dim"), "head_dim": mla.v_head_dim, "mla": mla}
        found["moe"] = _moe(values, values.integer("n_dense_layers", 1, 0))
    elif kind.startswith("Qwen3"):
        found |= {"ffn_hidden": values.integer("hidden_dim"), "head_dim": values.integer("head_dim", 128)}
        found |= {"qk_norm": values.flag("qk_norm", True), "tied_embeddings": values.flag("enable_weight_tying")}
        found["moe"] = _moe(values, 0) if values.flag("moe_enabled") else None
    else:
        found |= {"ffn_hidden": _feed_forward(values, found["hidden"]), "head_dim": found["hidden"] // found["n_heads"]}
    with at(values.place):
        return ModelSpec(**found, **_PLAIN)  # type: ignore[arg-type]


def _feed_forward(values: Fields, hidden: int) -> int:
    """Returns the width to which llama3 rounds. Source: torchtitan 0.2.2, models/llama3/model/model.py, FeedForward."""
    width, multiple = 2 * 4 * hidden // 3, values.integer("multiple_of", 256)
    factor = values.number("ffn_dim_multiplier")
    width = width if factor is None else int(factor * width)
    return -(-width // multiple) * multiple


def _mla(values: Fields) -> MLASpec:
    sizes = words_of(_TOOL).sizes
    names = ("kv_lora_rank", "qk_nope_dim", "qk_rope_dim", "v_head_dim")
    rank = values.integer(sizes["mla.q_lora_rank"], 0, 0)
    widths: dict[str, Any] = {name: values.integer(sizes[f"mla.{name}"]) for name in names}
    return MLASpec(q_lora_rank=rank or None, **widths)


def _moe(values: Fields, n_dense_layers: int) -> MoESpec:
    sizes, inside = words_of(_TOOL).sizes, values.section("moe_args")
    if inside is None:
        raise values.error("moe_args", "is missing")
    width = values.integer("moe_inter_dim")
    balanced = not inside.present("load_balance_coeff") or inside.stated("load_balance_coeff")
    return MoESpec(
        n_experts=inside.integer(sizes["moe.n_experts"]),
        top_k=inside.integer(sizes["moe.top_k"], 1),
        expert_ffn=width,
        shared_ffn=width * inside.integer("num_shared_experts", 1, 0),
        n_dense_layers=n_dense_layers,
        router_bias=balanced,
        n_groups=inside.integer(sizes["moe.n_groups"], 1),
        top_groups=inside.integer(sizes["moe.top_groups"], 1),
    )
