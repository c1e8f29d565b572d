"""Dropout is the model's where its file says so, else the framework's; its masks stay until the backward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

import forerun

from .cases import CLUSTER, DENSE, plan

TOKENS = 4 * 2048
SCORES = 4 * DENSE.n_heads * 2048 * 2048
"""attention's probabilities of a layer and micro batch"""


def kept_bytes(stack: str = "megatron-core", attention: str = "naive", **dropout: bool) -> float:
    """The bytes that a layer's activations take at the peak."""
    p = plan(micro_batch=4, attention=attention, stack=stack, zero_stage=0, optimizer="sgd")

    def peak(layers: int) -> float:
        return forerun.predict(replace(DENSE, n_layers=layers, **dropout), p, CLUSTER).peak_allocated_gib * 2**30  # type: ignore[arg-type]

    return (peak(8) - peak(4)) / 4


def test_dropped_probabilities_stay_with_one_byte_a_mask_beside_those_of_the_softmax() -> None:
    plain = kept_bytes(attention_dropout=False)
    assert kept_bytes(attention_dropout=True) - plain == pytest.approx((2 + 1) * SCORES, rel=0.01)


def test_each_half_of_a_layer_keeps_a_mask_of_its_dropped_output() -> None:
    added = kept_bytes(hidden_dropout=True) - kept_bytes(hidden_dropout=False)
    assert added == pytest.approx(2 * TOKENS * DENSE.hidden, rel=0.01)


def test_flash_attention_makes_its_mask_anew() -> None:
    assert kept_bytes(attention="flash2", attention_dropout=True) == kept_bytes(attention="flash2")


@pytest.mark.parametrize(("stack", "drops"), [("megatron-core", False), ("megatron-lm", True)])
def test_a_model_that_says_nothing_has_the_recipes_dropout(stack: str, drops: bool) -> None:
    stated = {"attention_dropout": drops, "hidden_dropout": drops}
    assert kept_bytes(stack) == kept_bytes(stack, **stated)
