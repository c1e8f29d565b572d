"""The parameters of a unit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Gathering:
    """Divides the weights of a unit into three parts by the time for which their unsharded parameters are kept."""

    held: Weights
    """kept from the forward pass to the end of the backward pass"""
    again: Weights
    """freed after the forward pass, and gathered again in the backward pass"""
    once: Weights
    """kept for the forward pass alone"""


class Matrix(NamedTuple):
    """The shape of a matrix of a layer on one rank, or of the `batch` equal matrices of its experts."""

    rows: int
    columns: int
    batch: int = 1
    expert: bool = False

    @property
    def elements(self) -> int:
        return self.rows * self.columns * self.batch


@dataclass(slots=True)
class Weights:
    """Elements of the parameters that one rank holds before any data-parallel sharding."""

    matrices: list[int] = field(default_factory=list)
    vectors: list[int] = field(default_factory=list)
    experts: list[int] = field(default_factory=list)
    """matrices of local experts, which fewer ranks shard"""
    shapes: list[Matrix] = field(default_factory=list)
    """shapes of the matrices of layers and experts; embedding and head have none"""
    shared: list[int] = field(default_factory=list)
    """the `vectors` that every tensor-parallel rank holds whole and uses for a part of the tokens"""
    frozen: list[int] = field(default_factory=list)
    """matrices of layers that are not trained, which may be kept in 4 bits"""
    frozen_wide: list[int] = field(default_factory=list)
    """other parameters that are not trained: embedding, head, norms and biases"""
    frozen_experts: list[int] = field(default_factory=list)
    """matrices of local experts that are not trained"""
    wide: int = 0
    """elements of `matrices` that no product reads in fp8: embedding and head"""
    beyond: int = 0
    """elements by which gradients exceed the weights until they are reduced"""
    surplus: int = 0
    """elements by which gradients exceed the weights (negative: fall short) where a person states their size"""

    def drop_tied(self, elements: int) -> None:
        """Removes the head's matrix, the last one of `elements`, which is also the embedding's."""
        if elements in self.matrices:
            del self.matrices[len(self.matrices) - 1 - self.matrices[::-1].index(elements)]
            self.wide -= elements
        else:
            self.frozen_wide.remove(elements)

    @staticmethod
    def joined(parts: Iterable[Weights]) -> Weights:
        """Returns all weights of `parts`."""
        whole = Weights()
        for part in parts:
            whole.matrices += part.matrices
            whole.vectors += part.vectors
            whole.experts += part.experts
            whole.shapes += part.shapes
            whole.frozen += part.frozen
            whole.frozen_wide += part.frozen_wide
            whole.frozen_experts += part.frozen_experts
            whole.shared += part.shared
            whole.wide += part.wide
            whole.surplus += part.surplus
        return whole

    def freeze(self) -> None:
        """Turns all weights into frozen ones."""
        if self.wide:
            self.frozen_wide += [*self.matrices, *self.vectors]
        else:
            self.frozen += self.matrices
            self.frozen_wide += self.vectors
        self.frozen_experts += self.experts
        self.matrices, self.vectors, self.experts, self.shapes, self.shared = [], [], [], [], []
        self.wide = self.beyond = self.surplus = 0

    def add_matrix(self, n_in: int, n_out: int) -> None:
        """Adds the matrix of a linear layer."""
        self.matrices.append(n_in * n_out)
        self.shapes.append(Matrix(n_out, n_in))

    def add_experts(self, n_in: int, n_out: int, batch: int) -> None:
        """Adds the matrices of one linear layer of `batch` experts."""
        self.experts.append(batch * n_in * n_out)
        self.shapes.append(Matrix(n_out, n_in, batch, True))

    @property
    def dense(self) -> int:
        return sum(self.matrices) + sum(self.vectors)

    @property
    def expert(self) -> int:
        return sum(self.experts)

    @property
    def total(self) -> int:
        return self.dense + self.expert

    @property
    def freezes(self) -> bool:
        """Returns whether some parameters are not trained."""
        return bool(self.frozen or self.frozen_wide or self.frozen_experts)

    @property
    def held(self) -> int:
        """Returns the elements of all parameters, trained or frozen."""
        return self.total + sum(self.frozen) + sum(self.frozen_wide) + sum(self.frozen_experts)

    @property
    def gradients(self) -> int:
        """Returns the elements of the gradients."""
        return self.total + self.surplus

    @property
    def gradient_ratio(self) -> float:
        """Returns the elements of the gradients over those of the weights."""
        return self.gradients / max(1, self.total)

    @property
    def tensors(self) -> list[int]:
        return [*self.matrices, *self.vectors, *self.experts]
