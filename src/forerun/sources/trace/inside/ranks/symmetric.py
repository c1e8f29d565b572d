"""Results of collectives on real or known data, computed as if every peer held the same data as this rank.

Sums are multiplied by the group's size, gathers repeat, and averages leave a value as it is. An all-to-all receives
from every peer the same data that this rank sends to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from forerun.sources.trace.inside.values import forget

_Op: Any = dist.ReduceOp


def reduced(value: torch.Tensor, op: Any, size: int) -> Any:
    """Returns `size` equal values reduced by `op` (a ReduceOp)."""
    if op == _Op.SUM or op == _Op.PREMUL_SUM:
        return value | value if value.dtype == torch.bool else value * size
    if op == _Op.PRODUCT:
        return value & value if value.dtype == torch.bool else value**size
    if op == _Op.BXOR:
        return value if size % 2 else torch.zeros_like(value)
    return value


def own_chunk(value: Any, sizes: Sequence[int], rank: int, outputs: Sequence[int]) -> torch.Tensor:
    """Returns the result of an all-to-all on rank `rank`. `value` is cut into `sizes` along dim 0, and the rank expects
    `outputs`.

    Every peer sends this rank's own chunk, repeated or cut to the expected length.
    """
    chunk = value.split(list(sizes))[rank]
    parts = []
    for length in outputs:
        if chunk.shape[0] == 0 and length:
            parts.append(value.new_zeros((length, *value.shape[1:])))
        else:
            times = -(-length // max(1, chunk.shape[0]))
            parts.append(chunk.repeat(times, *[1] * (chunk.dim() - 1))[:length] if times else chunk[:0])
    return torch.cat(parts) if parts else value[:0]


class Values:
    """Reads and writes the known values of tensors."""

    def __init__(self, known: Callable[[Any], Any] | None, keep: Callable[[Any, Any], None] | None) -> None:
        self._known, self._keep = known, keep

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the real data of `tensor`, None if it is not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.device.type == "cpu" else None
        return None if self._known is None else self._known(tensor)

    def put(self, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        """Makes `tensor` hold `value`; None makes its data unknown."""
        held = self.of(tensor)
        if value is None:
            forget(tensor)
        elif held is not None:
            held.copy_(value.reshape(held.shape))
        elif self._keep is not None:
            self._keep(tensor, value.reshape(tensor.shape).to(tensor.dtype).clone())

    def settle(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        answer: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    ) -> None:
        """Fills `outputs` with the results of `answer` for the values of `inputs`, if all of these are known."""
        values = [self.of(t) for t in inputs]
        real = [v for v in values if v is not None]
        with _disable_current_modes(), torch.no_grad():
            if len(real) < len(values):
                for tensor in outputs:
                    forget(tensor)
                return
            for tensor, result in zip(outputs, answer(real), strict=True):
                self.put(tensor, result)
