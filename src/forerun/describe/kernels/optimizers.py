"""Optimizers by name, from `optimizers.yaml`: their states, the bytes that their kernels move, and their matrix
products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple

import pydantic

from forerun.common.errors import ForerunError, UnknownName
from forerun.describe.kernels.attention import named_entries

_STRICT = pydantic.ConfigDict(extra="forbid")
_FP32 = 4
TENSORS_PER_LAUNCH = 60
"""tensors that one multi-tensor kernel updates: the argument block of ATen/native/cuda/MultiTensorApply.cuh holds about
so many"""


@dataclass(frozen=True, slots=True)
class Unfused:
    """Bytes for each fp32 element, and kernels, where every operation is a kernel of its own."""

    read: float
    written: float
    kernels: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """States of one byte an element, with a scale for each block of `elements`."""

    elements: int
    scale_bytes: int
    least_elements: int
    """parameters of fewer elements keep states of moment_dtype"""

    @property
    def element_bytes(self) -> float:
        """Returns the bytes of an element with its share of the scale."""
        return 1 + self.scale_bytes / self.elements


@dataclass(frozen=True, slots=True)
class OfElements:
    """The work and the state of an optimizer for each element of a parameter."""

    tensors: int
    unfused: Unfused | None = None
    blocks: Blocks | None = None

    def state_bytes(self, elements: float, moment_bytes: int) -> float:
        """Returns the bytes of the states of a parameter of `elements`, whose moments have `moment_bytes` each."""
        if self.blocks is None or elements < self.blocks.least_elements:
            return elements * self.tensors * moment_bytes
        return elements * self.tensors * self.blocks.element_bytes

    def least_bytes(self, moment_bytes: int) -> float:
        """Returns the least bytes of the states of an element of any parameter."""
        return self.tensors * (moment_bytes if self.blocks is None else self.blocks.element_bytes)


class Work(NamedTuple):
    """`times` products of (m, k) by (k, n) in one step, on average over many steps."""

    m: int
    n: int
    k: int
    times: float

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.times


@dataclass(frozen=True, slots=True)
class Product:
    """A product over the sides of a matrix: its m, n and k as letters, s for the short side and l for the long one."""

    sides: str
    times: float = 1
    every: int = 1

    def __post_init__(self) -> None:
        if len(self.sides) != 3 or set(self.sides) - set("sl") or self.every < 1:
            raise ValueError(f"sides are three letters s or l, and every is at least 1, got {self.sides}, {self.every}")


@dataclass(frozen=True, slots=True)
class OfMatrices:
    """The work of an optimizer on whole matrices of layers; `optimizers.yaml` explains the keys."""

    dtype: str
    at_zero: Literal["owners", "flat"]
    at_fsdp: Literal["all_to_all", "shards", "never"]
    read: float
    written: float
    kernels: int
    tensors: int = 0
    sides: int = 0
    squares: int = 0
    block_side: int = 0
    largest_side: int = 0
    products: tuple[Product, ...] = ()

    __pydantic_config__ = _STRICT

    def blocks(self, rows: int, columns: int) -> Iterator[tuple[int, int, int]]:
        """Yields (rows, columns, number) of the equal blocks that a matrix is cut into; itself where it is not cut."""
        if not self.block_side:
            yield rows, columns, 1
            return
        for height, high in _cut(rows, self.block_side):
            for width, wide in _cut(columns, self.block_side):
                yield height, width, high * wide

    def _has_square(self, side: int) -> bool:
        return not self.largest_side or side <= self.largest_side

    def state_bytes(self, rows: float, columns: float, moment_bytes: int) -> float:
        """Returns the bytes of the states of a matrix."""
        kept = (rows * columns * self.tensors + (rows + columns) * self.sides) * moment_bytes
        if not self.squares:
            return kept
        for height, width, number in self.blocks(round(rows), round(columns)):
            square = sum(side * side for side in (height, width) if self._has_square(side))
            kept += number * square * self.squares * _FP32
        return kept

    def work(self, rows: int, columns: int) -> list[Work]:
        """Returns the products of a step on a matrix."""
        found = []
        for height, width, number in self.blocks(rows, columns):
            side = {"s": min(height, width), "l": max(height, width)}
            for product in self.products:
                twice = next(letter for letter in "sl" if product.sides.count(letter) > 1)
                if self._has_square(side[twice]):
                    m, n, k = (side[letter] for letter in product.sides)
                    found.append(Work(m, n, k, number * product.times / product.every))
        return found


def _cut(length: int, most: int) -> Iterator[tuple[int, int]]:
    """Yields (size, number) of the pieces of at most `most` that a side of `length` is cut into."""
    if length >= most:
        yield most, length // most
    if length % most:
        yield length % most, 1


@dataclass(frozen=True)
class Optimizer:
    """One entry of `optimizers.yaml`, which explains the keys."""

    name: str
    says: str
    source: str
    elements: OfElements
    matrices: OfMatrices | None = None
    names: dict[str, str] = field(default_factory=dict, hash=False)

    __pydantic_config__ = _STRICT

    @property
    def state_tensors(self) -> int:
        """Returns the number of tensors that the optimizer keeps for each parameter, for a matrix where those
        differ."""
        own = self.matrices
        return self.elements.tensors if own is None else own.tensors + 2 * (own.sides + own.squares)

    def least_state_bytes(self, moment_bytes: int) -> float:
        """Returns the least bytes of state of an element of any parameter, which no sharding undercuts."""
        least = self.elements.least_bytes(moment_bytes)
        return least if self.matrices is None else min(least, self.matrices.tensors * moment_bytes)


@cache
def optimizers() -> dict[str, Optimizer]:
    """Returns the optimizers by name. Raises ForerunError, which names the entry and its wrong key."""
    found = named_entries(Optimizer, "optimizers.yaml")
    for name, entry in found.items():
        if entry.matrices is not None and entry.elements.unfused is None:
            raise ForerunError(f"optimizers.yaml: {name}.elements: give it unfused, which other parameters follow")
    return found


def optimizer(name: str) -> Optimizer:
    """Returns the optimizer `name`. Raises UnknownName, which lists the known optimizers."""
    if name not in optimizers():
        raise UnknownName("optimizer", name, [*optimizers()])
    return optimizers()[name]


def optimizer_names(tool: str) -> dict[str, str]:
    """Returns the tool's name of each optimizer that it knows, by optimizer. `tool` is a key of the entries'
    `names`.
    """
    return {name: one.names[tool] for name, one in optimizers().items() if tool in one.names}
