"""Compiled fp8 training keeps no input of a product that its backward pass computes anew while it casts it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import forerun

from .cases import CLUSTER, DENSE, plan

TOKENS = 4 * 2048


def kept_bytes(precision: str, **fields: object) -> float:
    """The bytes that a layer's activations take at the peak."""
    p = plan(micro_batch=4, precision=precision, zero_stage=0, optimizer="sgd", **fields)

    def peak(layers: int) -> float:
        return forerun.predict(replace(DENSE, n_layers=layers), p, CLUSTER).memory_by_category_gib["activation"] * 2**30

    return (peak(8) - peak(4)) / 4


def test_two_norms_and_the_activation_are_computed_anew() -> None:
    """The norms' inputs, and the two projections that the activation multiplies, are kept for their own gradients."""
    anew = TOKENS * (2 * DENSE.hidden + DENSE.ffn_hidden) * 2
    assert kept_bytes("bf16", compile=True) - kept_bytes("fp8", compile=True) == pytest.approx(anew, rel=0.01)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"compile": False}, id="eager"),
        pytest.param({"compile": True, "stack": "torchtitan-graph"}, id="without min-cut"),
    ],
)
def test_nothing_else_does(fields: dict[str, object]) -> None:
    assert kept_bytes("fp8", **fields) == pytest.approx(kept_bytes("bf16", **fields), rel=0.01)


def test_with_checkpoints_the_policy_decides() -> None:
    fields = {"compile": True, "activation_checkpointing": "selective"}
    assert kept_bytes("fp8", **fields) == pytest.approx(kept_bytes("bf16", **fields), rel=0.01)
