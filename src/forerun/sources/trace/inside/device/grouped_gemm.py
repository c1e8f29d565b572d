"""Stands for the package grouped_gemm, whose extension installs only beside CUDA: products of experts on torch's own.

`gmm` is torch's grouped matrix product. `permute` and `unpermute` are the package's kernels, one pass over the tokens
each, so their cost follows from the bytes that they read and write. A function that is missing here is an
AttributeError by its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool = False, trans_b: bool = False) -> Tensor:
    """Returns the product of each group of rows of `a` with its matrix of `b`; `batch_sizes` has the rows of each.

    With `trans_a` it returns one matrix for each group: of the columns that both have, summed over the group's rows.
    """
    ends = batch_sizes.to(a.device).cumsum(0).to(torch.int32)
    grouped: Any = torch._grouped_mm
    left = a.t() if trans_a else a
    made: Tensor = grouped(left, b.transpose(-1, -2) if trans_b else b, offs=ends)
    return made


@torch.library.custom_op("grouped_gemm::permute", mutates_args=())
def _permute(input_act: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return _permuted(input_act, indices)


@torch.library.custom_op("grouped_gemm::unpermute", mutates_args=())
def _unpermute(input_act: Tensor, row_id_map: Tensor, probs: Tensor | None, choices: int) -> Tensor:
    return _unpermuted(input_act, row_id_map, probs, choices)


def _permuted(input_act: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    rows = indices.numel()
    return input_act.new_empty((rows, input_act.shape[1])), indices.new_empty((rows,), dtype=torch.int32)


def _unpermuted(input_act: Tensor, row_id_map: Tensor, probs: Tensor | None, choices: int) -> Tensor:
    return input_act.new_empty((row_id_map.numel() // choices, input_act.shape[1]))


_permute.register_fake(_permuted)
_unpermute.register_fake(_unpermuted)


def _keep_permuted(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1])
    ctx.choices = inputs[1].numel() // inputs[0].shape[0]


def _gradient_of_permute(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
    return _unpermute(grad.contiguous(), ctx.saved_tensors[0], None, ctx.choices), None


def _keep_unpermuted(ctx: Any, inputs: Any, output: Any) -> None:
    input_act, row_id_map, probs, ctx.choices = inputs
    ctx.save_for_backward(input_act, row_id_map, *(() if probs is None else (probs,)))


@torch.library.custom_op("grouped_gemm::unpermute_backward", mutates_args=())
def _unpermute_backward(
    grad: Tensor, input_act: Tensor, row_id_map: Tensor, probs: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _gradients(grad, input_act, row_id_map, probs)


def _gradients(grad: Tensor, input_act: Tensor, row_id_map: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input_act), grad.new_empty(()) if probs is None else torch.empty_like(probs)


_unpermute_backward.register_fake(_gradients)


def _gradient_of_unpermute(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
    input_act, row_id_map, *rest = ctx.saved_tensors
    probs = rest[0] if rest else None
    of_input, of_probs = _unpermute_backward(grad.contiguous(), input_act, row_id_map, probs)
    return of_input, None, None if probs is None else of_probs, None


_permute.register_autograd(_gradient_of_permute, setup_context=_keep_permuted)
_unpermute.register_autograd(_gradient_of_unpermute, setup_context=_keep_unpermuted)


def permute(input_act: Tensor, indices: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Returns the tokens in the order of the experts in `indices` (tokens, choices), and where each came from."""
    made: tuple[Tensor, Tensor] = _permute(input_act, indices)
    return made


def unpermute(input_act: Tensor, row_id_map: Tensor, probs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Returns the tokens in their first order, the results of each one's choices summed with the weights `probs`."""
    choices = 1 if probs is None else probs.numel() // probs.shape[0]
    made: Tensor = _unpermute(input_act, row_id_map, probs, choices)
    return made


FUNCTIONS = (gmm, permute, unpermute)
"""The functions of `grouped_gemm.ops`."""
