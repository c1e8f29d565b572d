"""Nested tensors of jagged layout.

Their ragged size is a number of its own for each tensor of offsets. torch keeps such numbers of real offsets in a
table, and asks the mode of fake ones for a symbol, which a mode of static shapes does not have. The offsets of a traced
program have numbers as real ones, in the table and where torch looks for those of fake ones. The longest and the
shortest sequence, which torch keeps as the shape of a tensor without elements, are fake like the other parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nested._internal import nested_tensor
from torch.nested._internal.nested_int import NestedIntNode

from forerun.sources.trace.inside.unseen import rebind


def install(fake: Any) -> None:
    """Makes nested tensors of tensors of the mode `fake`."""
    own, keep = nested_tensor.get_tensor_symint, nested_tensor._store_val_in_tensor
    known: Any = nested_tensor._tensor_symint_registry
    module: Any = nested_tensor
    tensor_class: Any = torch.Tensor

    def number(*, nt_tensor_id: int) -> Any:
        node: Any = NestedIntNode(nt_tensor_id, 1)
        return torch.SymInt(node)

    def ragged_size(tensor: Any, *, coeff: int = 1) -> Any:
        if not isinstance(tensor, FakeTensor) or tensor.fake_mode is not fake:
            return own(tensor, coeff=coeff)
        if tensor not in known:
            memo = tensor.nested_int_memo  # A compiled function gives its results the size -1.
            if not isinstance(memo, torch.SymInt):
                memo = number(nt_tensor_id=module._tensor_id_counter)
                module._tensor_id_counter += 1
            known[tensor] = tensor.nested_int_memo = memo
        return known[tensor]

    def kept(value: int) -> torch.Tensor:
        made: torch.Tensor = fake.from_tensor(keep(value), static_shapes=True)
        return made

    rebind({id(own): ragged_size, id(keep): kept})
    fake.create_symbolic_nested_int = number
    tensor_class.nested_int_memo = property(known.get)  # torch copies it from real offsets to fake ones
