"""Tensors of a block: how each is computed from others, in which layout and at which cost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache

from forerun.astrasim.stage.sizes import ZERO, Size, number, product, size


class Kind(Enum):
    """Names how a tensor is made; the value is STAGE's letter (or word) for it."""

    HELD = "T"
    """there from the start: a weight, or a tensor that another block provides"""
    SAME = "I"
    """another tensor, in another layout"""
    PRODUCT = "M"
    SUM = "A"
    POINTWISE = "E"
    COMBINED = "E2"
    RESHAPED = "R"
    STRETCHED = "B"
    SLICED = "SLICE"
    CUSTOM = "CUSTOM"
    RECEIVED = "S"
    """sent by another pipeline stage"""


@dataclass(frozen=True, slots=True)
class Layout:
    """The part of a tensor that one rank holds: its local shape, and the dimensions over which it was summed.

    A rank that saw only a part of a summed dimension holds a partial sum.
    """

    shape: tuple[Size, ...]
    summed: tuple[Size, ...] = ()

    @property
    def elements(self) -> Size:
        return product(self.shape)


@cache
def layout(shape: str, summed: str = "") -> Layout:
    """Reads a layout such as `MicroBatch/dp, Seq/cp, Dmodel`."""
    return Layout(_sizes(shape), _sizes(summed))


def _sizes(text: str) -> tuple[Size, ...]:
    return tuple(size(part) for part in text.split(",")) if text else ()


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """Makes a tensor of its operands x1 and x2: the layouts that it wants them in, its own layout, its num_ops.

    Operations compare by identity: all copies of a block's tensor share one.
    """

    kind: Kind
    x1: Layout | None
    x2: Layout | None
    result: Layout
    num_ops: Size


@dataclass(slots=True)
class Tensor:
    """One tensor of a block; operands are names of others."""

    operation: Operation
    x1: str | None = None
    x2: str | None = None
    after: tuple[str, ...] = ()
    """tensors that must exist too, though their size doesn't matter"""
    gradient: str | None = None
    """the gradient of a weight"""

    @property
    def is_weight(self) -> bool:
        return self.gradient is not None


Operand = tuple[str, Layout]


@dataclass(slots=True)
class Block:
    """Tensors by name, in the order of their node ids."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def held(self, name: str, at: Layout) -> None:
        """Adds a tensor that another block provides (see `link`)."""
        self.tensors[name] = Tensor(Operation(Kind.HELD, at, None, at, ZERO))

    def weight(self, name: str, at: Layout, gradient: str) -> None:
        self.tensors[name] = Tensor(Operation(Kind.HELD, at, None, at, ZERO), gradient=gradient)

    def same(self, name: str, of: str, at: Layout) -> None:
        """Adds a tensor in the layout that consumers want: only communication may be needed."""
        self.tensors[name] = Tensor(Operation(Kind.SAME, at, None, at, ZERO), of)

    def product(self, name: str, letters: str, x1: Operand, x2: Operand) -> None:
        """Adds an einsum, which counts one operation for each multiply-add."""
        operands, result = letters.split("->")
        dims: dict[str, Size] = {}
        for names, (_, at) in zip(operands.split(","), (x1, x2), strict=True):
            for letter, dim in zip(names, at.shape, strict=True):
                assert dims.setdefault(letter, dim) == dim, f"{name}: dimension {letter} is {dims[letter]} and {dim}"
        summed = tuple(letter for letter in operands.split(",")[0] if letter not in result)
        out = Layout(tuple(dims[letter] for letter in result), tuple(dims[letter] for letter in summed))
        num_ops = out.elements * product(out.summed)
        self.tensors[name] = Tensor(Operation(Kind.PRODUCT, x1[1], x2[1], out, num_ops), x1[0], x2[0])

    def sum(self, name: str, x1: str, x2: str, at: Layout) -> None:
        self.tensors[name] = Tensor(Operation(Kind.SUM, at, at, at, at.elements), x1, x2)

    def pointwise(self, name: str, of: str, ops_per_element: int, at: Layout) -> None:
        cost = number(ops_per_element) * at.elements
        self.tensors[name] = Tensor(Operation(Kind.POINTWISE, at, None, at, cost), of)

    def combined(self, name: str, x1: str, x2: str, ops_per_element: int, at: Layout) -> None:
        cost = number(ops_per_element) * at.elements
        self.tensors[name] = Tensor(Operation(Kind.COMBINED, at, at, at, cost), x1, x2)

    def reshaped(self, name: str, of: Operand, to: Layout) -> None:
        self.tensors[name] = Tensor(Operation(Kind.RESHAPED, of[1], to, to, to.elements), of[0])

    def stretched(self, name: str, of: Operand, axis: int, factor: Size) -> None:
        """Adds a tensor in which one dimension is repeated or, below 1, averaged."""
        shape = of[1].shape
        to = replace(of[1], shape=(*shape[:axis], shape[axis] * factor, *shape[axis + 1 :]))
        self.tensors[name] = Tensor(Operation(Kind.STRETCHED, of[1], None, to, to.elements), of[0])

    def sliced(self, name: str, of: Operand, axis: int, length: Size, other: Operand | None = None) -> None:
        """Adds a tensor in which one dimension is cut to `length`, or filled up to it from `other`."""
        shape = of[1].shape
        to = replace(of[1], shape=(*shape[:axis], length, *shape[axis + 1 :]))
        x2, at = other or (None, None)
        self.tensors[name] = Tensor(Operation(Kind.SLICED, of[1], at, to, to.elements), of[0], x2)

    def custom(self, name: str, of: Operand, to: Layout, num_ops: Size, after: tuple[str, ...] = ()) -> None:
        self.tensors[name] = Tensor(Operation(Kind.CUSTOM, of[1], to, to, num_ops), of[0], after=after)

    def nest(self, prefix: str, inner: Block) -> None:
        """Adds a block's tensors, with `prefix` before their names."""

        def named(name: str | None) -> str | None:
            return None if name is None else prefix + name

        for name, tensor in inner.tensors.items():
            self.tensors[prefix + name] = Tensor(
                tensor.operation,
                named(tensor.x1),
                named(tensor.x2),
                tuple(prefix + other for other in tensor.after),
                named(tensor.gradient),
            )

    def link(self, source: str, held: str) -> None:
        """Provides the held tensor `held` by the tensor `source`."""
        assert source in self.tensors, f"{source} -> {held}"
        self.provided(held)
        self.tensors[held].x1 = source

    def provided(self, held: str) -> None:
        """Turns a held tensor into one that another block provides."""
        tensor = self.tensors[held]
        assert tensor.operation.kind is Kind.HELD, held
        tensor.operation = replace(tensor.operation, kind=Kind.SAME)

    def add_up(self, held: str, x1: str, x2: str) -> None:
        """Provides a held tensor as the sum of two tensors. Both are wanted in the held tensor's layout."""
        self.sum(held, x1, x2, self.tensors[held].operation.result)
