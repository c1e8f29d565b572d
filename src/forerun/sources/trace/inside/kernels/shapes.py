"""Finds shapes of results where torch has no fake version of an operator, by running it on zeros on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from forerun.common.errors import ForerunError
from forerun.sources.trace.inside.values import known_value

_MOST_ELEMENTS = 1 << 26
_installed: list[Any] = []


def install() -> None:
    """Registers the output shapes of kernels that only CUDA has, for the rest of the process."""
    library: Any = torch.library.Library("aten", "IMPL")
    library.impl("_thnn_fused_gru_cell", _gru_cell, "Meta")
    library.impl("_thnn_fused_gru_cell_backward", _gru_cell_backward, "Meta")
    _installed.append(library)


def tried_on_cpu(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the result of `func` for zeros, or for known values of fakes: real tensors of which only the shapes
    count.

    Raises:
        ForerunError: the arguments are too large to try, or the CPU has no such kernel.
    """
    size = 0

    def on_cpu(value: Any) -> Any:
        nonlocal size
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor):
            return value
        size += value.numel()
        if size > _MOST_ELEMENTS:
            raise ForerunError(
                f"{func}: torch has no fake version of it, and its inputs are too large to run it on the CPU; register"
                " one with torch.library.register_fake"
            )
        known = known_value(value)
        return torch.zeros(value.shape, dtype=value.dtype) if known is None else known.clone()

    with _disable_current_modes(), torch.no_grad():
        try:
            return func(*tree_map(on_cpu, args), **tree_map(on_cpu, kwargs))
        except (NotImplementedError, RuntimeError) as error:
            reason = str(error).partition("\n")[0].partition(". ")[0]
            raise ForerunError(
                f"{func}: torch has no fake version of it, and it doesn't run on the CPU ({reason}); register one with"
                " torch.library.register_fake"
            ) from error


def _gru_cell(
    input_gates: Any, hidden_gates: Any, hx: Any, input_bias: Any = None, hidden_bias: Any = None
) -> tuple[Any, Any]:
    return torch.empty_like(hx), hx.new_empty((hx.shape[0], hx.shape[1] * 5))


def _gru_cell_backward(grad_hy: Any, workspace: Any, has_bias: bool) -> tuple[Any, ...]:
    batch, hidden = grad_hy.shape
    gates = [workspace.new_empty((batch, 3 * hidden)) for _ in range(2)]
    biases = [workspace.new_empty(3 * hidden) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(grad_hy), *biases)
