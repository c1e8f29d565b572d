"""Makes reference_configs_v*.json: config.json contents of known models, and the parameters that transformers builds.

Run it with an environment that has torch and Hugging Face transformers, once for each generation:

    python tests/describe/model/reference_counts.py 4    # transformers 4.57
    python tests/describe/model/reference_counts.py 5    # transformers 5

`known_models.yaml` states the keys of every model that differ from its configuration class. A count is that of the
model for causal language modelling (or of images and text to text, or from sequence to sequence) on the meta device:
every parameter once, and the correction biases of routers, which are buffers. `active` leaves out of routed experts
the share that a token does not reach. `tower` is what is outside of the language model.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REFERENCE = "reference_configs_v{}.json"
_EXPERTS = re.compile(r"\.(experts\.(?!bias|router)|(block_sparse_moe|mlp)\.(input|output)_linear\.)")
_TOWER = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|multi_modal_projector|vision_projection|mm_projector|audio_tower"
    r"|embed_vision|embed_audio|connector|image_newline)(\.|$)"
)
_OWN_KV = re.compile(r"layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.")
_TOP_K = ("num_experts_per_tok", "moe_top_k", "moe_k", "moe_topk", "top_k_experts", "num_experts_per_token")
_EXPERTS_KEYS = (
    "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts", "n_experts", "num_routed_experts"
)  # fmt: skip


def counted(content: dict[str, Any]) -> dict[str, int]:
    """Returns the counts of the model that transformers builds of a config.json."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
        AutoModelForSpeechSeq2Seq,
    )

    config = AutoConfig.for_model(**content)
    text = config.get_text_config()
    last: Exception | None = None
    sequences = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq)
    for maker in (AutoModelForCausalLM, AutoModelForImageTextToText, *sequences):
        other = hasattr(config, "vision_config") or config.is_encoder_decoder
        if other and maker is AutoModelForCausalLM:
            continue
        try:
            with torch.device("meta"):
                model = maker.from_config(config)
            break
        except ValueError as error:
            last = error
    else:
        raise last or ValueError(content)
    model.tie_weights()
    biases = [item for item in model.named_buffers() if item[0].endswith(("correction_bias", "expert_bias"))]
    total, idle, tower = 0, Fraction(0), 0
    share = _idle_share(text)
    for name, parameter in [*model.named_parameters(), *biases]:
        size = parameter.numel() - _unread(name, parameter, text)
        total += size
        idle += size * share if _EXPERTS.search(name + ".") else 0
        tower += size if _TOWER.search(name) else 0
    found = {"total": total, "active": int(total - idle)}
    return found | ({"tower": tower} if tower else {})


def _idle_share(config: Any) -> Fraction:
    """Returns the share of routed experts that a token does not reach."""
    if getattr(config, "model_type", "") == "dbrx":
        config = config.ffn_config

    def first(keys: tuple[str, ...]) -> int:
        values = [getattr(config, key, None) for key in keys]
        found = next((value for value in values if value), 0)
        return found[0] if isinstance(found, list) else found

    chosen, experts = first(_TOP_K), first(_EXPERTS_KEYS) + _zero_experts(config)
    return 1 - Fraction(chosen, experts) if chosen and experts else Fraction(0)


def _zero_experts(config: Any) -> int:
    """Returns the number of experts that return the token."""
    if getattr(config, "model_type", "") == "zaya":
        return 1
    return getattr(config, "zero_expert_num", None) or 0


def _unread(name: str, parameter: Any, config: Any) -> int:
    """Returns the elements that nothing reads or trains: transformers 5 stacks rows for experts without weights too,
    transformers 4 makes keys and values in layers of Gemma 3n that read those of others, and Pegasus and Marian keep
    tables of sines among their parameters."""
    if config.model_type in ("pegasus", "marian") and name.endswith("embed_positions.weight"):
        return int(parameter.numel())
    found, shared = _OWN_KV.search(name), getattr(config, "num_kv_shared_layers", None) or 0
    if found and shared and int(found[1]) >= config.num_hidden_layers - shared:
        return int(parameter.numel())
    zero = _zero_experts(config)
    stacked = zero and name.endswith("experts.gate_up_proj")
    return (
        zero * parameter[0].numel()
        if stacked and len(parameter) == getattr(config, "n_routed_experts", 0) + zero
        else 0
    )


def main(generation: str, only: list[str]) -> None:
    import yaml
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    path = HERE / REFERENCE.format(generation)
    found = json.loads(path.read_text()) if path.exists() and only else {}
    for name, keys in yaml.safe_load((HERE / "known_models.yaml").read_text()).items():
        if keys["model_type"] not in CONFIG_MAPPING or (only and name not in only):
            continue
        try:
            content = AutoConfig.for_model(**keys).to_diff_dict()
            content = {"model_type": keys["model_type"]} | json.loads(json.dumps(content, default=str))
            found[name] = {"counts": counted(keys), "config": content}
            print(name, found[name]["counts"], flush=True)
        except Exception as error:
            print("FAILED", name, type(error).__name__, str(error)[:200], flush=True)
        gc.collect()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found))
    path.write_text("{\n" + lines + "\n}\n")
    print(f"transformers {__version__}: {len(found)} models")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
