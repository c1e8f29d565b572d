"""Lines: the time of a transfer as the smooth minimum of straight lines, one for each protocol that it may use.

Every line is latency + bytes x seconds per byte, so the time grows continuously with the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from forerun.core.program.types import F64

N_LINES = 8
"""lines of one transfer; unused ones never win"""


@dataclass(frozen=True, slots=True)
class Lines:
    """Up to N_LINES protocols of one collective over one group."""

    latency_s: tuple[float, ...]
    s_per_byte: tuple[float, ...]

    def columns(self) -> tuple[list[float], list[float]]:
        """Returns both columns, padded to N_LINES."""
        missing = N_LINES - len(self.latency_s)
        return [*self.latency_s, *[inf] * missing], [*self.s_per_byte, *[0.0] * missing]

    def seconds(self, size_bytes: F64) -> F64:
        """Returns the seconds of transfers of `size_bytes` (any shape)."""
        latency, slope = self.columns()
        return smooth_minimum_s(np.array(latency), np.array(slope), size_bytes)


FREE = Lines((0.0,), (0.0,))
"""a transfer among one rank"""


def smooth_minimum_s(latency_s: F64, s_per_byte: F64, size_bytes: F64) -> F64:
    """Returns the seconds of transfers of `size_bytes` (n,) over lines (n, N_LINES): (sum t^-8)^(-1/8) of each row.

    The power is the one that the constants of the lines were fitted with (cost profiles). A row with a line of no
    time at all is free.
    """
    time_s = latency_s + size_bytes[..., None] * s_per_byte
    with np.errstate(divide="ignore"):
        power: F64 = 1.0 / time_s
        for _ in range(3):
            power *= power
        total: F64 = 1.0 / np.sqrt(np.sqrt(np.sqrt(power.sum(axis=-1))))
    return total
