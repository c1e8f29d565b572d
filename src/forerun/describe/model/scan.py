"""ScanSpec: a mixer that carries a state of fixed size along the sequence, in place of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forerun.common.errors import ForerunError

Rule = Literal["mamba1", "mamba2", "gated_delta", "linear", "gated", "none"]
"""How the state follows from the token before: a selective scan of each channel (Mamba), chunks of products (Mamba-2),
the delta rule (Gated DeltaNet, Kimi Delta Attention), decayed sums (lightning attention, RWKV, mLSTM), a gate of each
channel (RG-LRU), or no state beside the convolution (LFM2)."""


@dataclass(frozen=True, slots=True)
class ScanSpec:
    """hidden -> `in_width` -> short causal convolution -> recurrence of `heads` states -> norm and gate -> hidden.

    Widths are in elements, and products have no bias unless `vectors` counts one.
    """

    rule: Rule
    heads: int
    key_dim: int
    """rows of a head's state (Mamba's state size)"""
    value_dim: int
    """columns of a head's state; heads x value_dim is the width that the output's product reads"""
    in_width: int
    """columns of all products that read the hidden state"""
    key_heads: int = 0
    """heads, or groups, of keys and queries; 0: as many as heads"""
    conv_channels: int = 0
    conv_taps: int = 0
    inner: tuple[tuple[int, int], ...] = ()
    """(rows, columns) of products between input and recurrence"""
    vectors: int = 0
    """elements of all other parameters: decays, biases, norms"""

    def __post_init__(self) -> None:
        if min(self.heads, self.key_dim, self.value_dim, self.in_width) < 1:
            raise ForerunError(f"scan: heads, key_dim, value_dim and in_width must be at least 1: {self}")
        if min(self.key_heads, self.conv_channels, self.conv_taps, self.vectors) < 0:
            raise ForerunError(f"scan: no size may be below 0: {self}")

    @property
    def out_width(self) -> int:
        """Returns the width that the product of the output reads."""
        return self.heads * self.value_dim

    def parameters(self, hidden: int) -> int:
        """Returns the elements of all parameters of the mixer in a model of width `hidden`."""
        products = self.in_width * hidden + self.out_width * hidden + sum(n * m for n, m in self.inner)
        return products + self.conv_channels * self.conv_taps + self.vectors

    def flops_per_token(self) -> float:
        """Returns the forward FLOPs of the recurrence, step by step: each state takes an outer product of key and value
        and gives a product with a query, and the delta rule reads it once more."""
        reads = {"none": 0, "gated": 1, "gated_delta": 3}.get(self.rule, 2)
        return 2.0 * reads * self.heads * self.key_dim * self.value_dim
