"""Reads a config.json of a family that Forerun does not know from the model that Hugging Face transformers builds.

A separate process builds the model on the meta device and prints its parameters. The layers are recognised by the names
and shapes that decoders have in common; parameters that no part of a layer explains are an error, so that a count is
exact or not given. Small parameters that are left over in a layer are counted as such.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from forerun.common.errors import at
from forerun.describe.model.families import Values
from forerun.describe.model.fields import Fields
from forerun.describe.model.layer_lists import each_layer
from forerun.describe.model.layer_parameters import kind_parameters
from forerun.describe.model.parameters import parameter_count
from forerun.describe.model.spec import MLASpec, ModelSpec, MoESpec

_LAYER = re.compile(r"(?:^|.*\.)(?:layers|h|blocks)\.(\d+)\.(.+)")
_LONGEST_S = 300
_SHOWN_CHARACTERS = 160
_MOST_LEFT_OVER = 0.01
"""share of a layer's parameters that may be of no known part: scales, small gates"""
Shapes = Mapping[str, tuple[int, ...]]
_QUERY, _KEY = (rf"\.{word}(_proj|_linear)?\.weight$" for word in ("q", "k"))
_FUSED = r"\.(qkv_proj|query_key_value|Wqkv)\.weight$"
_LATENT = r"\.kv_b_proj\.weight$"
_ATTENTION_GATE = r"(attn|attention)\w*\.gate_proj\.weight$"
_OUT = r"(attn|attention|mixer)\w*\.(o_proj|out_proj|dense|wo)\.weight$"
_GATE, _UP, _DOWN = r"\.(gate_proj|w1)\.weight$", r"\.(up_proj|w3|fc1)\.weight$", r"\.(down_proj|w2|fc2)\.weight$"
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")
_RECURRENCE = r"\.(A_log|dt_bias|time_decay)$"
_PAIRS = r"\.lambda_[qk]\d$"
"""parameters of differential attention, whose heads work in pairs"""
_UNKNOWN, _OTHER_TASKS = 3, 4
_REFUSED = {
    _UNKNOWN: "the installed transformers does not know it either",
    _OTHER_TASKS: "the installed transformers has no model of it for causal language modelling",
}
"""exit codes of the process that builds a model, and their messages"""
_EXPERT = re.compile(r"\.experts\.")


def spec_from_transformers(config: Fields, name: str) -> ModelSpec:
    """Returns the model that the installed transformers builds of a config.json.

    Raises ForerunError, in one line, where transformers is not installed, does not know the model_type, or builds
    layers with parts that are not recognised.
    """
    model_type = config.text("model_type")
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        raise config.error(
            "model_type",
            f"{model_type!r} is not known; with torch and transformers installed it is read by building it",
        )
    return recognised(_built(config), config, name)


def _built(config: Fields) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter of the model that transformers builds, by name."""
    words = [sys.executable, "-m", __name__]
    content = json.dumps({key: config.value(key) for key in config.names()})
    try:
        done = subprocess.run(words, input=content, capture_output=True, text=True, timeout=_LONGEST_S, check=False)
    except subprocess.TimeoutExpired:
        raise config.error("model_type", f"takes transformers more than {_LONGEST_S} s to build") from None
    if done.returncode in _REFUSED:
        why = f"{config.text('model_type')!r} is not known, and {_REFUSED[done.returncode]}"
        raise config.error("model_type", f"{why}; describe the model in a YAML file (docs/cli.md)")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1][:_SHOWN_CHARACTERS]
        unknown = f"{config.text('model_type')!r} is not known, and the installed transformers doesn't build it"
        raise config.error("model_type", f"{unknown}: {last}")
    shapes: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return {parameter: tuple(shape) for parameter, shape in shapes.items()}


def recognised(shapes: Shapes, config: Fields, name: str) -> ModelSpec:
    """Returns the model with these parameters. Raises ForerunError for parameters that no part explains."""
    layers: dict[int, dict[str, tuple[int, ...]]] = {}
    outer: dict[str, tuple[int, ...]] = {}
    for parameter, shape in shapes.items():
        found = _LAYER.fullmatch(parameter)
        if found:
            layers.setdefault(int(found[1]), {})["." + found[2]] = shape
        else:
            outer[parameter] = shape
    vocab = config.integer("vocab_size")
    tables = [shape for shape in outer.values() if len(shape) == 2 and shape[0] == vocab]
    if not layers or not tables:
        raise config.error("model_type", "makes no model with layers and an embedding that are recognised")
    hidden, n_heads = tables[0][1], config.integer("num_attention_heads", 1)
    head_dim = config.integer("head_dim", hidden // n_heads)
    windows = _windows(config, len(layers))
    if len(windows) != len(layers):
        words = f"has {len(windows)} entries, but transformers builds {len(layers)} layers"
        raise config.error("layer_types", words)
    kinds = [
        _layer(layers[number], hidden, head_dim, config) | {"sliding_window": width}
        for number, width in zip(sorted(layers), windows, strict=True)
    ]
    attention = next((kind for kind in kinds if kind["n_heads"]), kinds[0])
    sparse = next((kind["moe"] for kind in kinds if kind["moe"]), None)
    values = attention | {
        "n_layers": len(layers),
        "hidden": hidden,
        "head_dim": head_dim,
        "vocab": vocab,
        "moe": sparse,
    }
    biased = any(parameter.endswith("norm.bias") for parameter in outer)
    whole = {
        "tied_embeddings": len(tables) == 1,
        "norm": "layernorm" if biased else "rmsnorm",
        "norm_bias": biased,
        "norm_weight": any("norm" in parameter for parameter in shapes),
    }

    def spec_of() -> ModelSpec:
        changes = [{key: value for key, value in kind.items() if value != values[key]} for kind in kinds]
        with at(config.place):
            return ModelSpec(name=name, **(values | whole | each_layer(changes)))  # type: ignore[arg-type]

    spec = spec_of()
    left = _left_over(spec, layers)
    if left:
        for kind, number in zip(kinds, left, strict=True):
            kind["other_parameters"] = number
        values["other_parameters"] = max(left)
        note = f"{config.place}: up to {max(left):,} parameters of a layer are of no known part; they take no time"
        spec = replace(spec_of(), notes=(note,))
    _check(spec, layers, shapes, config)
    return spec


def _left_over(spec: ModelSpec, layers: Mapping[int, Shapes]) -> list[int]:
    """Returns the parameters of each layer that its parts leave over; empty if none are, or too many."""
    built = [sum(map(prod, layers[number].values())) for number in sorted(layers)]
    left = [size - sum(kind_parameters(spec.layer(place)).values()) for place, size in enumerate(built)]
    small = all(0 <= over <= _MOST_LEFT_OVER * size for over, size in zip(left, built, strict=True))
    return left if small and any(left) else []


def _windows(config: Fields, layers: int) -> list[int | None]:
    """Returns the window of each layer: parameters do not show it, so that the file's common keys have to say it."""
    width = config.integer("sliding_window") if config.stated("sliding_window") else None
    words = config.items("layer_types") or ["full_attention"] * layers
    return [width if word == "sliding_attention" else None for word in words]


def _layer(shapes: Shapes, hidden: int, head_dim: int, config: Fields) -> Values:
    """Returns the fields of ModelSpec that the parameters of one layer show."""

    def rows(pattern: str) -> int:
        return next((shape[0] for name, shape in shapes.items() if re.search(pattern, name) and len(shape) > 1), 0)

    def has(pattern: str) -> bool:
        return any(re.search(pattern, name) for name in shapes)

    if has(_RECURRENCE):
        raise config.error("model_type", "makes layers with a recurrence, which only Forerun's own families describe")
    if has(_PAIRS):
        raise config.error("model_type", "makes differential attention, which only Forerun's own families describe")
    query, key, fused = rows(_QUERY), rows(_KEY), rows(_FUSED)
    read = next((shape[1] for name, shape in shapes.items() if re.search(_OUT, name)), 0)
    if fused:
        query, key = read, (fused - read) // 2
    plain = {name: shape for name, shape in shapes.items() if "expert" not in name}
    width = next((shape[1] for name, shape in plain.items() if re.search(_DOWN, name) and len(shape) == 2), 0)
    outside = [shape for name, shape in shapes.items() if re.search(r"norm\w*\.weight$", name) and "attn." not in name]
    norms = outside.count((hidden,))
    normed = next((shape[0] for name, shape in shapes.items() if re.search(r"q_(layer)?norm\.weight$", name)), 0)
    halves = bool(query or has(_LATENT)) + bool(width or has(r"\.experts\."))
    return {
        "n_heads": (read or query) // head_dim,
        "n_kv_heads": (key or query or read) // head_dim,
        "ffn_hidden": width,
        "mlp": "swiglu" if has(_GATE) or has(r"gate_up_proj") else "gelu",
        "qkv_bias": has(_QUERY.replace("weight", "bias")) or has(_FUSED.replace("weight", "bias")),
        "out_bias": has(_OUT.replace("weight", "bias")),
        "mlp_bias": has(_DOWN.replace("weight", "bias")) or has(r"experts\.down_proj_bias"),
        "attention_gate": bool(read) and read in (query / 2, rows(_ATTENTION_GATE)),
        "sinks": has(r"\.sinks$"),
        "qk_norm": normed > 0,
        "qk_norm_over": "head" if normed in (0, head_dim) else "all_heads",
        "norm_place": "both" if norms == 2 * halves else "before",
        "moe": _experts(shapes, hidden, config),
        "other_parameters": 0,
        "mla": None,
    } | _latent(shapes, config)


def _latent(shapes: Shapes, config: Fields) -> Values:
    """Returns the fields of a layer whose queries, keys and values come from latent vectors, as DeepSeek names their
    projections; none for other layers."""

    def shape(word: str) -> tuple[int, ...]:
        return next((found for name, found in shapes.items() if re.search(rf"\.{word}\.weight$", name)), (0, 0))

    (down, _), (up, rank) = shape("kv_a_proj_with_mqa"), shape("kv_b_proj")
    if not down or not up:
        return {}
    heads, width = config.integer("num_attention_heads"), config.integer("v_head_dim")
    mla = MLASpec(rank, up // heads - width, down - rank, width, shape("q_a_proj")[0] or None)
    return {"n_heads": heads, "n_kv_heads": heads, "attention_gate": False, "mla": mla}


def _experts(shapes: Shapes, hidden: int, config: Fields) -> MoESpec | None:
    """Returns the experts of one layer, kept as a list of modules or as stacked matrices."""
    stacked = [shape for name, shape in shapes.items() if _EXPERT.search(name) and len(shape) == 3]
    apart = {name: shape for name, shape in shapes.items() if re.search(r"\.experts\.\d+\.", name)}
    if not stacked and not apart:
        return None
    down = {shape for name, shape in apart.items() if re.search(_DOWN, name)}
    count = stacked[0][0] if stacked else 1 + max(int(re.findall(r"\.experts\.(\d+)\.", name)[0]) for name in apart)
    width = min(prod(shape) // hidden for shape in ([shape[1:] for shape in stacked] or down))
    top_k = config.integer(config.first_of(*_TOP_K))
    shared = [shape for name, shape in shapes.items() if "shared_expert" in name and re.search(_DOWN, name)]
    biased = any(name.endswith(("correction_bias", "expert_bias", "router.bias")) for name in shapes)
    gated = any("shared_expert_gate" in name for name in shapes)
    return MoESpec(count, top_k, width, shared[0][1] if shared else 0, shared_gate=gated, router_bias=biased)


def _check(spec: ModelSpec, layers: Mapping[int, Shapes], shapes: Shapes, config: Fields) -> None:
    """Raises ForerunError if the parts of `spec` do not add up to the parameters."""
    for number in sorted(layers):
        built, found = sum(map(prod, layers[number].values())), sum(kind_parameters(spec.layer(number)).values())
        if built != found:
            names = ", ".join(sorted({name.strip(".") for name in layers[number]}))
            raise config.error(
                "model_type", f"makes layers that are not recognised: layer {number} has {built:,} parameters ({names})"
            )
    if parameter_count(spec) != sum(map(prod, shapes.values())):
        raise config.error("model_type", "makes parameters outside the layers that are not recognised")


def main() -> None:
    """Builds the model of the config.json on standard input, and prints the shapes of its parameters."""
    import torch
    import transformers

    content: dict[str, Any] = json.load(sys.stdin)
    if content["model_type"] not in transformers.CONFIG_MAPPING:
        raise SystemExit(_UNKNOWN)
    if transformers.CONFIG_MAPPING[content["model_type"]] not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise SystemExit(_OTHER_TASKS)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**content))  # type: ignore[no-untyped-call]
    model.tie_weights()
    biases = [item for item in model.named_buffers() if item[0].endswith(("correction_bias", "expert_bias"))]
    print(json.dumps({name: list(tensor.shape) for name, tensor in [*model.named_parameters(), *biases]}))


if __name__ == "__main__":
    main()
