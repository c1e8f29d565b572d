"""Rates of the kernels of recurrences: linear attention and state-space models.

Training kernels cut the sequence into chunks. Within a chunk they compute products as attention does, and between
chunks they carry the state, so their FLOPs are products of small matrices at a small share of the device's peak.
`scan.yaml` has that share for each rule and architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from forerun.common.errors import UnknownName
from forerun.common.shipped import shipped_data
from forerun.core.program.kinds import Scan


@dataclass(frozen=True, slots=True)
class ScanRates:
    """The constants of the kernels of one rule."""

    chunk: int
    """tokens of a chunk; 1: the state goes from token to token"""
    inside: tuple[float, float]
    """products within a chunk, as multiples of key_dim and of value_dim"""
    states: float
    """products with the state, as multiples of key_dim x value_dim"""
    backward: float
    """FLOPs of the backward kernels over those of the forward kernels"""
    kernels: int
    share: Mapping[str, float]
    """share of the peak in 16 bits (of tf32 for operands of 4 bytes), by architecture"""

    def on(self, architecture: str) -> float:
        """Returns the share of the peak that the kernels reach on an architecture."""
        return self.share.get(architecture, self.share["default"])

    def flops(self, shape: Scan[int]) -> float:
        """Returns the FLOPs that the kernels execute."""
        inside = self.chunk * (self.inside[0] * shape.key_dim + self.inside[1] * shape.value_dim)
        each = 2.0 * (inside + self.states * shape.key_dim * shape.value_dim)
        return shape.batch * shape.seq * shape.heads * each * (self.backward if shape.backward else 1.0)


@cache
def scan_rates(rule: str) -> ScanRates:
    """Returns the constants of the kernels of a rule. Raises UnknownName for a rule without kernels."""
    known = shipped_data(__package__, "scan.yaml")["rules"]
    if rule not in known:
        raise UnknownName("rule of a recurrence", rule, sorted(known))
    entry = known[rule]
    return ScanRates(
        entry["chunk"],
        tuple(entry["inside"]),
        entry["states"],
        entry["backward"],
        entry["kernels"],
        entry["share"],
    )
