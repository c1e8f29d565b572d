"""Refuses compiled code that torch gives no gradient for an input that a collective still computes.

This module imports AOTAutograd, so only `backend.py` imports it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from forerun.sources.trace.inside.refusal import Refusal

_schemas: Any = importlib.import_module("torch._functorch._aot_autograd.schemas")
_WAITS_ITSELF = any(field.name == "act_input_indices" for field in fields(_schemas.ViewAndMutationMeta))
"""Whether AOTAutograd waits for such inputs before it asks which of them need a gradient."""


def refuse_unfinished(inputs: Sequence[Any]) -> None:
    """Raises Refusal where AOTAutograd would lose the gradient of one of `inputs`: it waits for the input, and the
    tensor that it gets needs no gradient. On GPUs the backward pass then fails, or leaves weights without gradients."""
    for position, value in enumerate(inputs):
        if _WAITS_ITSELF and isinstance(value, AsyncCollectiveTensor) and value.requires_grad:
            raise Refusal(
                f"input {position + 1} of a compiled function, {tuple(value.shape)}, is an AsyncCollectiveTensor, which"
                f" a collective still computes, and torch {torch.__version__} computes no gradient for it, on"
                " GPUs neither; hand the function a finished tensor, for instance x.clone()"
            )
