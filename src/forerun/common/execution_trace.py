"""The format of PyTorch's execution traces (`ExecutionTraceObserver`), shared by all readers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

COMMUNICATION = "record_param_comms"
"""the operator that describes a collective"""
_ROOT = "[pytorch|profiler|execution_"


def is_root(name: str) -> bool:
    """Returns whether a node stands for the process or a thread, not for an operator."""
    return name.startswith(_ROOT)


def tensors(values: Any) -> Iterator[list[Any]]:
    """Yields the tensors in nested lists: [number, storage, offset, elements, bytes of an element, device]."""
    if not isinstance(values, list):
        return
    if len(values) == 6 and isinstance(values[5], str) and all(isinstance(value, int) for value in values[:5]):
        yield values
        return
    for value in values:
        yield from tensors(value)
