"""Which sizes a recording may have: those of the fakes, and none that no tensor has.

A size that has wrapped around would pass for a smaller program. So each is checked where it is recorded, and what
lives is summed up again when a step ends.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from forerun.common.errors import ForerunError
from forerun.common.units import GIB
from forerun.core.program.types import OpTable

ROUND = 512
"""bytes: the caching allocator's smallest block"""
MOST_DEVICES = 64
"""devices whose memory a single tensor may fill. Programs that need more memory than there is are traced to learn how
much; one that makes a tensor beyond this is taken for a fault."""
MOST_BYTES = 1 << 50
"""of a tensor, where the device is not known"""
_PARTS = ("flops", "bytes_read", "bytes_written", "bytes_comm")


def rounded(size_bytes: int, most_bytes: int) -> int:
    """Bytes that the caching allocator takes for `size_bytes`.

    Raises:
        ForerunError: no tensor has that size.
    """
    if type(size_bytes) is not int or not 0 <= size_bytes <= most_bytes:
        raise ForerunError(
            f"a tensor of {size_bytes} bytes: at most {most_bytes / GIB:.0f} GiB are traced, {MOST_DEVICES} times the"
            " memory of the device; if the program means it, trace it on a larger --device"
        )
    return -(-size_bytes // ROUND) * ROUND


def check_lives(lives: Iterable[tuple[str, int, int]], allocated_bytes: int) -> None:
    """Hold what is recorded of the storages that live to the storages themselves.

    `lives` are the kernel that made each, the bytes recorded and the bytes it has.

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
    """Refuse operations of negative or infinite size.

    Raises:
        ForerunError: names the first one.
    """
    for part in _PARTS:
        column = getattr(ops, part)
        wrong = np.flatnonzero(~(np.isfinite(column) & (column >= 0)))
        if len(wrong):
            raise ForerunError(f"the tracer recorded {column[wrong[0]]:g} {part} of {ops.name[wrong[0]]}")
