"""A matrix product with weights, as the parts of a layer ask for it."""

from __future__ import annotations

from typing import NamedTuple

ATTENTION_NORM, ATTENTION, FFN_NORM, FFN = 1, 2, 3, 4
"""module numbers within a layer"""


class Product(NamedTuple):
    """A matrix product y = x W, with or without a bias."""

    name: str
    x: str
    y: str
    n_in: int
    n_out: int
    bias: bool
    module: int
    """number of the module that its kernels count to"""
    groups: int = 1
    """such products side by side: each reads `n_in` columns of its own and makes `n_out`"""

    @property
    def elements(self) -> int:
        """Returns the elements of the weights of all groups."""
        return self.n_in * self.n_out * self.groups
