"""The ops of a compiled region and the groups of them that become kernels: the data that fusion works on."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class Kind(IntEnum):
    POINTWISE = 0
    REDUCTION = 1
    TEMPLATE = 2
    """Matrix products, attention and convolutions: kernels of their own."""
    EXTERN = 3
    """Collectives, copies, random numbers and sorts: kernels of their own."""
    VIEW = 4
    """An op without a kernel."""


@dataclass(frozen=True, slots=True)
class Access:
    """The bytes of one storage that an op reads or writes; `offset` tells slices of a storage apart."""

    storage: int
    size_bytes: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class FusionNode:
    """One op of a region."""

    name: str
    kind: Kind
    numel: int
    """The number of elements of its output."""
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    reduced: int = 1
    """How many elements a REDUCTION combines into one element of its output."""
    inner: bool = True
    """Whether a REDUCTION runs over the last dims, whose elements are neighbours in memory."""
    kept: bool = False
    """Whether its value is used after the region, or by the backward pass."""
    of_list: bool = False
    """Whether it goes over one tensor of a list that another op made, so that its `numel` is that op's."""


@dataclass(frozen=True, slots=True)
class FusionGroup:
    """One fused kernel."""

    nodes: tuple[int, ...]
    """The positions in the region of the ops that it computes. An op that is computed several times is in several
    groups."""
    kind: Kind
    read_bytes: int
    written_bytes: int


@dataclass(eq=False, slots=True)
class Group:
    """A kernel that fusion may still extend. It starts as one op with the ops that are computed inside it."""

    kind: Kind
    space: tuple[int, int]
    outer: bool
    """Whether it reduces over dims that are not the last ones."""
    whole: tuple[int, int]
    """The outputs and the elements reduced for each, before the reduction was split into stages."""
    reads: dict[Access, None]
    writes: dict[Access, bool]
    """Whether each access is kept."""
    nodes: dict[int, None]
    first: int
    last: int
    before: set[Group] = field(default_factory=set)
    """The groups that have to run before it."""
    size: int = 1
    rank: int = 0
    """Its position in an order in which all groups can run."""
    fused_into: Group | None = None

    @property
    def fixed(self) -> bool:
        return self.kind in (Kind.TEMPLATE, Kind.EXTERN)
