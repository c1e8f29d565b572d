"""Checks the sizes that are recorded: each tensor's when it is recorded, and their sum when a step ends.

A size that wrapped around to a small number would pass for a smaller program.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from forerun.common.errors import ForerunError
from forerun.common.units import GIB
from forerun.core.program.types import OpTable

ROUND = 512
"""The smallest block of the caching allocator, in bytes."""
MOST_DEVICES = 64
"""The largest tensor, as a multiple of the device's memory. A program that needs more memory than the device has is
traced to learn how much, but a single tensor beyond this limit is taken for a fault."""
MOST_BYTES = 1 << 50
"""The largest tensor where the device is not known."""
_PARTS = ("flops", "bytes_read", "bytes_written", "bytes_comm")


def rounded(size_bytes: int, most_bytes: int) -> int:
    """Returns the bytes that the caching allocator takes for `size_bytes`.

    Raises:
        ForerunError: the size is negative or beyond the limit.
    """
    if type(size_bytes) is not int or not 0 <= size_bytes <= most_bytes:
        raise ForerunError(
            f"a tensor has {size_bytes} bytes: at most {most_bytes / GIB:.0f} GiB are traced, {MOST_DEVICES} times the"
            " memory of the device; if that is no fault of the program, trace it on a larger --device"
        )
    return -(-size_bytes // ROUND) * ROUND


def check_lives(lives: Iterable[tuple[str, int, int]], allocated_bytes: int) -> None:
    """Compares the recorded sizes of the storages that are alive with the storages themselves.

    `lives` holds for each storage the kernel that made it, the bytes recorded and the bytes it has.

    Raises:
        ForerunError: they differ, or don't add up to `allocated_bytes`.
    """
    total = 0
    for name, known, size in lives:
        if known != -(-size // ROUND) * ROUND:
            raise ForerunError(
                f"the tracer lost count of memory: {known} bytes recorded of a tensor of {name}, {size} there"
            )
        total += known
    if total != allocated_bytes:
        raise ForerunError(f"the tracer lost count of memory: {allocated_bytes} bytes recorded, {total} in tensors")


def check_ops(ops: OpTable) -> None:
    """Refuses operations of negative or infinite size.

    Raises:
        ForerunError: the message names the first one.
    """
    for part in _PARTS:
        column = getattr(ops, part)
        wrong = np.flatnonzero(~(np.isfinite(column) & (column >= 0)))
        if len(wrong):
            raise ForerunError(f"the tracer recorded {column[wrong[0]]:g} {part} of {ops.name[wrong[0]]}")
