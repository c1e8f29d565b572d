"""Tensors of a block: how each comes from others, in which layout, at which cost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache

from forerun.astrasim.stage.sizes import ZERO, Size, number, product, size


class Kind(Enum):
    """How a tensor comes about; the value is the letter (word) that STAGE writes for it."""

    HELD = "T"
    """there from the start: a weight, or what another block is to provide"""
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
    """What one rank holds of a tensor: its local shape, and the dimensions it was summed over (a rank that saw only a
    part of one of these holds a partial sum)."""

    shape: tuple[Size, ...]
    summed: tuple[Size, ...] = ()

    @property
    def elements(self) -> Size:
        return product(self.shape)


@cache
def layout(shape: str, summed: str = "") -> Layout:
    """Read `MicroBatch/dp, Seq/cp, Dmodel`."""
    return Layout(_sizes(shape), _sizes(summed))


def _sizes(text: str) -> tuple[Size, ...]:
    return tuple(size(part) for part in text.split(",")) if text else ()


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """How a tensor comes from its operands: the layouts it wants them in, the layout it comes out in, its num_ops.

    Compared by identity: all copies of a block's tensor share one.
    """

    kind: Kind
    first: Layout | None
    second: Layout | None
    result: Layout
    num_ops: Size


@dataclass(slots=True)
class Tensor:
    """One tensor of a block; operands are names of others."""

    operation: Operation
    first: str | None = None
    second: str | None = None
    after: tuple[str, ...] = ()
    """tensors that must be there too, though their size does not matter"""
    gradient: str | None = None
    """of a weight: the tensor that is its gradient"""

    @property
    def is_weight(self) -> bool:
        return self.gradient is not None


Operand = tuple[str, Layout]


@dataclass(slots=True)
class Block:
    """Tensors by name, in the order in which their nodes are numbered."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def held(self, name: str, at: Layout) -> None:
        """A tensor that some other block provides (see `link`)."""
        self.tensors[name] = Tensor(Operation(Kind.HELD, at, None, at, ZERO))

    def weight(self, name: str, at: Layout, gradient: str) -> None:
        self.tensors[name] = Tensor(Operation(Kind.HELD, at, None, at, ZERO), gradient=gradient)

    def same(self, name: str, of: str, at: Layout) -> None:
        """The same tensor as consumers want it: only communication may lie between."""
        self.tensors[name] = Tensor(Operation(Kind.SAME, at, None, at, ZERO), of)

    def product(self, name: str, letters: str, first: Operand, second: Operand) -> None:
        """An einsum; one operation a multiply-add."""
        operands, result = letters.split("->")
        dims: dict[str, Size] = {}
        for names, (_, at) in zip(operands.split(","), (first, second), strict=True):
            for letter, dim in zip(names, at.shape, strict=True):
                assert dims.setdefault(letter, dim) == dim, f"{name}: dimension {letter} is {dims[letter]} and {dim}"
        summed = tuple(letter for letter in operands.split(",")[0] if letter not in result)
        out = Layout(tuple(dims[letter] for letter in result), tuple(dims[letter] for letter in summed))
        num_ops = out.elements * product(out.summed)
        self.tensors[name] = Tensor(Operation(Kind.PRODUCT, first[1], second[1], out, num_ops), first[0], second[0])

    def sum(self, name: str, first: str, second: str, at: Layout) -> None:
        self.tensors[name] = Tensor(Operation(Kind.SUM, at, at, at, at.elements), first, second)

    def pointwise(self, name: str, of: str, ops_per_element: int, at: Layout) -> None:
        cost = number(ops_per_element) * at.elements
        self.tensors[name] = Tensor(Operation(Kind.POINTWISE, at, None, at, cost), of)

    def combined(self, name: str, first: str, second: str, ops_per_element: int, at: Layout) -> None:
        cost = number(ops_per_element) * at.elements
        self.tensors[name] = Tensor(Operation(Kind.COMBINED, at, at, at, cost), first, second)

    def reshaped(self, name: str, of: Operand, to: Layout) -> None:
        self.tensors[name] = Tensor(Operation(Kind.RESHAPED, of[1], to, to, to.elements), of[0])

    def stretched(self, name: str, of: Operand, axis: int, factor: Size) -> None:
        """One dimension repeated (or, below 1, averaged)."""
        shape = of[1].shape
        to = replace(of[1], shape=(*shape[:axis], shape[axis] * factor, *shape[axis + 1 :]))
        self.tensors[name] = Tensor(Operation(Kind.STRETCHED, of[1], None, to, to.elements), of[0])

    def sliced(self, name: str, of: Operand, axis: int, length: Size, other: Operand | None = None) -> None:
        """One dimension cut to `length`, or filled up to it from `other`."""
        shape = of[1].shape
        to = replace(of[1], shape=(*shape[:axis], length, *shape[axis + 1 :]))
        second_name, second = other or (None, None)
        self.tensors[name] = Tensor(Operation(Kind.SLICED, of[1], second, to, to.elements), of[0], second_name)

    def custom(self, name: str, of: Operand, to: Layout, num_ops: Size, after: tuple[str, ...] = ()) -> None:
        self.tensors[name] = Tensor(Operation(Kind.CUSTOM, of[1], to, to, num_ops), of[0], after=after)

    def nest(self, prefix: str, inner: Block) -> None:
        """Take over a block's tensors under `prefix.`."""
        for name, tensor in inner.tensors.items():
            self.tensors[f"{prefix}.{name}"] = Tensor(
                tensor.operation,
                _under(prefix, tensor.first),
                _under(prefix, tensor.second),
                tuple(f"{prefix}.{other}" for other in tensor.after),
                _under(prefix, tensor.gradient),
            )

    def link(self, source: str, held: str) -> None:
        """Provide a held tensor."""
        assert source in self.tensors, f"{source} -> {held}"
        self.provided(held)
        self.tensors[held].first = source

    def provided(self, held: str) -> None:
        """Make of a held tensor what another block provides."""
        tensor = self.tensors[held]
        assert tensor.operation.kind is Kind.HELD, held
        tensor.operation = replace(tensor.operation, kind=Kind.SAME)

    def add_up(self, held: str, first: str, second: str) -> None:
        """Provide a held tensor with the sum of two, each wanted in the held tensor's layout."""
        at = self.tensors[held].operation.result
        self.sum(held, first, second, at)


def _under(prefix: str, name: str | None) -> str | None:
    return None if name is None else f"{prefix}.{name}"
