"""Keeps operators whole that have a CUDA kernel of their own, which a build of torch for the CPU doesn't have.

Where a device has no kernel for a composite operator, autograd decomposes it before a dispatch mode sees it: RMSNorm
would be seven kernels that save five tensors. Registering a kernel for the device keeps the operator whole. That kernel
is never called, because fake tensors are answered earlier.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten
OWN_KERNELS = frozenset({aten._fused_rms_norm.default, aten.silu_backward.default, aten.mish_backward.default})
"""The operators with both a CUDA kernel and `CompositeImplicitAutograd` in native_functions.yaml of torch 2.13."""
_installed: list[Any] = []
"""A library's registrations end when the library is deleted."""


def install() -> None:
    """Keeps these operators whole on CUDA tensors, for the rest of the process."""
    library: Any = torch.library.Library("aten", "IMPL")
    for op in OWN_KERNELS:
        library.impl(op._schema.name, _no_data, "CUDA")
    _installed.append(library)


def _no_data(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a tensor of the virtual device has no data to compute with")
