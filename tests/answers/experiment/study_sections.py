"""Sections of experiments for studies, quick to simulate."""

from __future__ import annotations

from typing import Any

MODEL = {
    "model_type": "transformer", "num_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1024,
    "sequence_length": 512,
}  # fmt: skip


def sections(hardware: dict[str, Any] | None = None, network: dict[str, Any] | None = None, **training: Any) -> Any:
    """Two nodes of 8 A100 unless the arguments say otherwise."""
    return {
        "name": "study",
        "hardware": {"gpu_model": "A100", **(hardware or {})},
        "model": dict(MODEL),
        "training": {"batch_size_per_gpu": 8, "num_nodes": 2, "num_iterations": 10, **training},
        "network": network or {},
    }
