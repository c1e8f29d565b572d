"""Operator fusion: which ops of a compiled region Inductor runs as one kernel, and how many bytes each kernel moves.

The rules are those of torch 2.13's lowering and scheduler (torch/_inductor: ir.StorageBox, choices.py, scheduler.py),
applied to plain data:

1. A pointwise op is computed inside the ops that read it, once for each reader, unless its value is kept, a library
   kernel reads it, or it is too large to compute again. Every other op writes a buffer.
2. A reduction with few outputs runs in two stages, so that it fills the device.
3. Kernels that share a buffer (producer and consumer, or two readers) are fused where both iterate over the same
   elements, most shared bytes first. A reduction of n rows of r elements is fused with pointwise ops over n * r and
   over n elements, and with other reductions of that shape. Sums of a large matrix over its rows and over its columns
   share one pass.
4. A buffer that only its own kernel reads is never written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forerun.sources.trace.inside.compiled.groups import Access, FusionGroup, FusionNode, Group, Kind
from forerun.sources.trace.inside.compiled.lowering import Lowering
from forerun.sources.trace.inside.data_files import read_data

_FILE = "compiled/inductor.yaml"
_FUSION: dict[str, int] = read_data(_FILE)["fusion"]
_MIXED: dict[str, int] = read_data(_FILE)["mixed_order"]


def fuse(nodes: Sequence[FusionNode]) -> list[FusionGroup]:
    """Returns the kernels of a region in an order in which they can run. Ops that nothing reads are left out.

    `nodes` are in program order. A storage that is written twice is changed in place; one that is read before it is
    written is an input of the region. The time is proportional to the ops and the buffers that they share.
    """
    fusing = _Fusing(Lowering(nodes).groups)
    for _ in range(_FUSION["rounds"]):
        if not fusing.round():
            break
    return _described(fusing.groups())


class _Fusing:
    """Fuses groups round by round and keeps them in an order in which they can run."""

    def __init__(self, groups: list[Group]) -> None:
        self._at: list[Group | None] = list(groups)
        for rank, group in enumerate(groups):
            group.rank = rank

    def groups(self) -> list[Group]:
        """Returns the groups in order."""
        return [group for group in self._at if group is not None]

    def round(self) -> bool:
        """Fuses all pairs that share a buffer and can be fused, best first, and returns whether there were any."""
        groups = self.groups()
        pairs: dict[tuple[int, int], tuple[bool, int, int]] = {}
        position = {group: i for i, group in enumerate(groups)}
        for sharing in _by_buffer(groups):
            for i, one in enumerate(sharing):
                for other in sharing[i + 1 : i + 1 + _FUSION["pairs_of_a_buffer"]]:
                    key = (position[one], position[other])
                    if key not in pairs and _same_elements(one, other):
                        shared = _shared_bytes(one, other)
                        pairs[key] = (one.kind == other.kind and shared > 0, shared, -_distance(one, other))
        fused = False
        for i, j in sorted(pairs, key=pairs.__getitem__, reverse=True):
            one, other = _current(groups[i]), _current(groups[j])
            if one is not other:
                first, second = (one, other) if one.rank < other.rank else (other, one)
                fused |= _can_fuse(first, second) and self._fuse(first, second)
        return fused

    def _fuse(self, first: Group, second: Group) -> bool:
        """Fuses both groups, unless a third one has to run between them. Groups that need `first` move behind
        `second`."""
        between = [group for group in self._at[first.rank + 1 : second.rank] if group is not None]
        needing = {first}
        ahead: list[Group] = []
        for group in between:
            if needing.isdisjoint(_before(group)):
                ahead.append(group)
            else:
                needing.add(group)
        if not (needing - {first}).isdisjoint(_before(second)):
            return False
        start, end = first.rank, second.rank
        _join(first, second)
        order = [*ahead, first, *(group for group in between if group in needing)]
        self._at[start : end + 1] = [*order, *[None] * (end + 1 - start - len(order))]
        for rank, group in enumerate(order, start):
            group.rank = rank
        return True


def _distance(one: Group, other: Group) -> int:
    return max(abs(one.first - other.last), abs(other.first - one.last))


def _by_buffer(groups: Iterable[Group]) -> list[list[Group]]:
    touching: dict[int, dict[Group, None]] = {}
    for group in groups:
        if not group.fixed:
            for access in (*group.reads, *group.writes):
                touching.setdefault(access.storage, {})[group] = None
    return [list(sharing) for sharing in touching.values() if len(sharing) > 1]


def _current(group: Group) -> Group:
    while group.fused_into is not None:
        if group.fused_into.fused_into is not None:
            group.fused_into = group.fused_into.fused_into
        group = group.fused_into
    return group


def _shared_bytes(one: Group, other: Group) -> int:
    small, large = (
        (one, other) if len(one.reads) + len(one.writes) <= len(other.reads) + len(other.writes) else (other, one)
    )
    return sum(a.size_bytes for a in {**small.reads, **small.writes} if a in large.reads or a in large.writes)


def _same_elements(one: Group, other: Group) -> bool:
    """Returns whether both iterate over the same elements, or over rows and columns of one large matrix."""
    if one.kind == other.kind == Kind.REDUCTION:
        return (one.space == other.space and one.outer == other.outer) or _mixed(one, other)
    if one.kind == other.kind:
        return one.space == other.space
    reduction, pointwise = (one, other) if one.kind == Kind.REDUCTION else (other, one)
    outputs, reduced = reduction.space
    return pointwise.space[0] == outputs or (not reduction.outer and pointwise.space[0] == outputs * reduced)


def _mixed(one: Group, other: Group) -> bool:
    """Returns whether both are sums over rows and over columns of one matrix (scheduler.MixOrderReduction)."""
    row, column = (one, other) if other.outer else (other, one)
    if row.outer or not column.outer or row.space != row.whole or column.whole != (row.space[1], row.space[0]):
        return False
    rows, columns = row.space
    large = (
        rows * columns >= _MIXED["elements"]
        and rows >= max(2 * columns, _MIXED["rows"])
        and columns <= _MIXED["columns"]
    )
    read = [access for access in column.reads if access in row.reads or access in row.writes]
    return large and bool(read) and len({**row.reads, **column.reads}) <= _MIXED["reads"]


def _can_fuse(first: Group, second: Group) -> bool:
    """Returns whether both may become one kernel, as far as the two groups alone decide it."""
    if first.size + second.size > _FUSION["largest_group"] or not _same_elements(first, second):
        return False
    mixed = first.kind == second.kind == Kind.REDUCTION and first.space != second.space
    if first not in _before(second):
        near = (
            _distance(first, second) <= _FUSION["distant"]
            and _shared_bytes(first, second) >= _FUSION["least_shared_bytes"]
        )
        return mixed or near
    made = {access.storage for access in first.writes}
    return not mixed and all(access in first.writes for access in second.reads if access.storage in made)


def _before(group: Group) -> set[Group]:
    """Returns the groups that have to run before `group`, after all fusions so far."""
    if any(other.fused_into is not None for other in group.before):
        group.before = {_current(other) for other in group.before} - {group}
    return group.before


def _join(one: Group, other: Group) -> None:
    """Fuses `other` into `one`."""
    if other.kind == Kind.REDUCTION and (one.kind != Kind.REDUCTION or one.outer):
        one.space, one.whole, one.outer = other.space, other.whole, other.outer
    one.kind = max(one.kind, other.kind)
    one.reads |= other.reads
    one.writes |= other.writes
    one.nodes |= other.nodes
    one.before = (_before(one) | _before(other)) - {one, other}
    one.first, one.last = min(one.first, other.first), max(one.last, other.last)
    one.size += other.size
    other.fused_into = one


# -- the result ------------------------------------------------------------------------------------------------------


def _described(groups: list[Group]) -> list[FusionGroup]:
    readers: dict[int, set[Group]] = {}
    for group in groups:
        for access in group.reads:
            readers.setdefault(access.storage, set()).add(group)
    found = []
    for group in groups:
        own = {access.storage for access in group.writes}
        read = [access for access in group.reads if access.storage not in own]
        written = [
            access
            for access, kept in group.writes.items()
            if kept or group.fixed or readers.get(access.storage, set()) - {group}
        ]
        found.append(
            FusionGroup(tuple(sorted(group.nodes)), group.kind, _total(read), sum(a.size_bytes for a in written))
        )
    return found


def _total(accesses: Iterable[Access]) -> int:
    """Returns the bytes of distinct accesses. An access inside another one of the same storage counts nothing."""
    by_storage: dict[int, list[Access]] = {}
    for access in accesses:
        by_storage.setdefault(access.storage, []).append(access)
    total = 0
    for own in by_storage.values():
        own.sort(key=lambda access: -access.size_bytes)
        counted: list[Access] = []
        for access in own:
            if not any(_within(access, other) for other in counted):
                counted.append(access)
        total += sum(access.size_bytes for access in counted)
    return total


def _within(access: Access, other: Access) -> bool:
    start, end = other.offset, other.offset + other.size_bytes
    return start <= access.offset and access.offset + access.size_bytes <= end
