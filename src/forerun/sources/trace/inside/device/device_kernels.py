"""Operations that have a kernel of their own on CUDA, which a build of torch for the CPU doesn't know.

Where a device has no kernel for an operation that is also composed of others, autograd takes it apart before a
dispatch mode sees it: RMSNorm would be seven kernels that keep five tensors. An entry for the device keeps it whole.
The entry is never called: fake tensors are answered before.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten
OWN_KERNELS = frozenset({aten._fused_rms_norm.default, aten.silu_backward.default, aten.mish_backward.default})
"""those with both a CUDA kernel and `CompositeImplicitAutograd` in native_functions.yaml of torch 2.13"""
_installed: list[Any] = []
"""libraries whose registrations must outlive the function that makes them"""


def install() -> None:
    """Keep these operations whole on CUDA tensors; for good."""
    library: Any = torch.library.Library("aten", "IMPL")
    for op in OWN_KERNELS:
        library.impl(op._schema.name, _no_data, "CUDA")
    _installed.append(library)


def _no_data(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a tensor of the virtual device has no data to compute with")
