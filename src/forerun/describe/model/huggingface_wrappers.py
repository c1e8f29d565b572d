"""Models of images or sounds and text: `text_config` is the language model behind the tower (huggingface_towers)."""

from __future__ import annotations

from forerun.describe.model.families import WRAPPERS

WRAPPERS |= {
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "dots3_note": "dots3_note_text",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4_moe",
    "idefics3": "llama",
    "internvl": "qwen2",
    "kimi_k25": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "llama4": "llama4_text",
    "inkling_mm_model": "inkling_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "mistral3": "mistral",
    "mllama": "mllama_text_model",
    "paligemma": "gemma",
    "pixtral": "mistral",
    "qwen2_5_vl": "qwen2",
    "qwen2_audio": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "smolvlm": "llama",
    "voxtral": "llama",
}
