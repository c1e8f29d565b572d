"""A small question, and how its answer is read."""

from __future__ import annotations

import json
from typing import Any

from starlette.testclient import TestClient

TOKEN = "a token"
BASE = "http://127.0.0.1:8765"
QUESTION: dict[str, Any] = {
    "model": "gpt2-small",
    "cluster": "h100-sxm",
    "gpus": 8,
    "seq_len": 1024,
    "global_batch": 64,
    "fixed": {"stack": "torchtitan", "pp": "1,2"},
}
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "vocab_size": 32000,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
"""the config.json of a small Llama"""


def events(client: TestClient, call: str, question: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines that a stream answers."""
    with client.stream("POST", f"/api/{call}", json=question) as answer:
        assert answer.status_code == 200, answer.read()
        return [json.loads(line) for line in answer.iter_lines()]
