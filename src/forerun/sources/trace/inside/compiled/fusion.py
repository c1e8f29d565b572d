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
from dataclasses import dataclass, field, replace
from enum import IntEnum

MULTIPROCESSORS = 132
"""of an H100"""
_THREADS = 2048
_WARP = 32
_BLOCK_THREADS = 8 * _WARP
_MOST_PER_THREAD = 512
_UNSPLIT_INNER = 8192
_ROWS_PER_THREAD = 4
_COLUMNS_PER_BLOCK = 128
_PARTIAL_BYTES = 4
_REUSED_READS = 4
"""reads up to which an op that is read several times is computed again"""
_MOST_READS = 8
_MOST_OPS = 30
_OPS_PER_NODE = 2
"""of Inductor's, for an op and a conversion or constant"""
_LARGEST_GROUP = 64
_DISTANT = 64
_PAIRS_OF_A_BUFFER = 64
_LEAST_SHARED_BYTES = 10
_ROUNDS = 10
_MIXED_ELEMENTS = 5 * 2**20
_MIXED_ROWS = 4096
_MIXED_COLUMNS = 16384
_MIXED_READS = 10


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
class _Group:
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
    before: set[_Group] = field(default_factory=set)
    """The groups that have to run before it."""
    size: int = 1
    rank: int = 0
    """Its position in an order in which all groups can run."""
    fused_into: _Group | None = None

    @property
    def fixed(self) -> bool:
        return self.kind in (Kind.TEMPLATE, Kind.EXTERN)


@dataclass(frozen=True, slots=True)
class _Inlined:
    """The cost of computing an op inside the op that reads it."""

    reads: dict[Access, None]
    before: frozenset[_Group]
    nodes: dict[int, None]
    ops: int


def fuse(nodes: Sequence[FusionNode]) -> list[FusionGroup]:
    """Returns the kernels of a region in an order in which they can run. Ops that nothing reads are left out.

    `nodes` are in program order. A storage that is written twice is changed in place; one that is read before it is
    written is an input of the region. The time is proportional to the ops and the buffers that they share.
    """
    fusing = _Fusing(_Lowering(nodes).groups)
    for _ in range(_ROUNDS):
        if not fusing.round():
            break
    return _described(fusing.groups())


# -- from ops to buffers -------------------------------------------------------------------------------------------


class _Lowering:
    """Decides for each op whether it is computed inside the ops that read it or writes a buffer."""

    def __init__(self, nodes: Sequence[FusionNode]) -> None:
        self.nodes = nodes
        self.groups: list[_Group] = []
        self._kept = [node.kept for node in nodes]
        self._readers: list[list[int]] = [[] for _ in nodes]
        self._sources: list[list[tuple[Access, int]]] = [[] for _ in nodes]
        """For each op: its reads, and the op that wrote each (-1: an input of the region)."""
        self._writes: list[list[Access]] = [[] for _ in nodes]
        self._changed: set[int] = set()
        """The storages that are written more than once, or after they were read."""
        self._next_storage = 1 + max((a.storage for n in nodes for a in (*n.reads, *n.writes)), default=0)
        self._follow_storages()
        self._inlined: dict[int, _Inlined] = {}
        self._made: dict[int, _Group] = {}
        self._touched: dict[int, list[_Group]] = {}
        for index in range(len(nodes)):
            self._lower(index)

    def _new_storage(self) -> int:
        self._next_storage += 1
        return self._next_storage - 1

    def _follow_storages(self) -> None:
        """Finds which op wrote what each op reads, and gives a storage that is changed in place a new number for each
        content."""
        writer: dict[int, int] = {}
        content: dict[int, int] = {}
        read: set[int] = set()
        for index, node in enumerate(self.nodes):
            if node.kind == Kind.VIEW:
                for access in node.reads:
                    if node.kept and access.storage in writer:
                        self._kept[writer[access.storage]] = True
                continue
            for access in node.reads:
                source = writer.get(access.storage, -1)
                storage = content.get(access.storage, access.storage)
                self._sources[index].append((replace(access, storage=storage), source))
                if source >= 0:
                    self._readers[source].append(index)
                else:
                    read.add(access.storage)
            for access in node.writes:
                storage = access.storage
                if storage in read or storage in writer:
                    self._changed.add(storage)
                    self._kept[index] |= storage in read
                    content[storage] = self._new_storage()
                writer[storage] = index
                self._writes[index].append(replace(access, storage=content.get(storage, storage)))

    def _lower(self, index: int) -> None:
        node = self.nodes[index]
        fixed = node.kind in (Kind.TEMPLATE, Kind.EXTERN)
        if node.kind == Kind.VIEW or not (fixed or self._kept[index] or self._readers[index]):
            return
        reads: dict[Access, None] = {}
        before: set[_Group] = set()
        members: dict[int, None] = {}
        ops = _OPS_PER_NODE
        for access, source in self._sources[index]:
            inside = self._inlined.get(source)
            if inside is None:
                reads[access] = None
                if source in self._made:
                    before.add(self._made[source])
            else:
                reads |= inside.reads
                before |= inside.before
                members |= inside.nodes
                ops += inside.ops
        members[index] = None
        ops += len(reads)
        if self._is_inlined(index, reads, ops):
            self._inlined[index] = _Inlined(reads, frozenset(before), members, ops)
            return
        self._make(index, reads, before, members)

    def _is_inlined(self, index: int, reads: dict[Access, None], ops: int) -> bool:
        node, readers = self.nodes[index], self._readers[index]
        if node.kind != Kind.POINTWISE or self._kept[index]:
            return False
        if any(self.nodes[reader].kind not in (Kind.POINTWISE, Kind.REDUCTION) for reader in readers):
            return False
        if any(access.storage in self._changed for access in (*node.reads, *node.writes)):
            return False
        most = _REUSED_READS if len(set(readers)) > 1 else _MOST_READS
        return len(reads) <= most and ops <= _MOST_OPS

    def _make(self, index: int, reads: dict[Access, None], before: set[_Group], members: dict[int, None]) -> None:
        node = self.nodes[index]
        whole = (node.numel, node.reduced)
        space = whole if node.kind == Kind.REDUCTION else (node.numel, 1)
        outer = node.kind == Kind.REDUCTION and not node.inner
        splits = _splits(node) if node.kind == Kind.REDUCTION else 1
        order = len(self.groups)
        writes = dict.fromkeys(self._writes[index], self._kept[index])
        if splits > 1:
            partial = Access(self._new_storage(), node.numel * splits * _PARTIAL_BYTES)
            stage = (node.numel * splits, -(-node.reduced // splits))
            first = _Group(node.kind, stage, outer, whole, reads, {partial: False}, dict(members), order, order, before)
            self.groups.append(first)
            order += 1
            reads, before, space, outer, whole = {partial: None}, {first}, (node.numel, splits), False, (0, 0)
        group = _Group(node.kind, space, outer, whole, reads, writes, members, order, order, before)
        for access in (*node.reads, *node.writes):
            if access.storage in self._changed:
                group.before |= {other for other in self._touched.get(access.storage, ()) if other is not group}
                self._touched.setdefault(access.storage, []).append(group)
        self.groups.append(group)
        self._made[index] = group


def _splits(node: FusionNode) -> int:
    """Returns how many parts the first stage of a reduction has (choices.reduction_split_factor); 1 where one stage
    fills the device."""
    least, most = _WARP * MULTIPROCESSORS * _THREADS, _MOST_PER_THREAD * MULTIPROCESSORS * _THREADS
    total = node.numel * node.reduced
    if node.inner or node.numel == 1:
        if node.numel >= 2 * MULTIPROCESSORS or node.reduced <= _UNSPLIT_INNER:
            return 1
        threads, blocks = _BLOCK_THREADS, MULTIPROCESSORS * _THREADS // (2 * _BLOCK_THREADS)
        blocks = -(-blocks // node.numel)
    else:
        if node.reduced <= _WARP or node.numel >= MULTIPROCESSORS * 64:
            return 1
        threads, blocks = _ROWS_PER_THREAD, MULTIPROCESSORS * _THREADS // _BLOCK_THREADS
        blocks = -(-blocks // -(-node.numel // _COLUMNS_PER_BLOCK))
    per_thread = _WARP if total <= least else _MOST_PER_THREAD
    if least < total < most:
        per_thread = max(_WARP, -(-node.reduced // (threads * blocks)))
    return -(-node.reduced // (per_thread * threads))


# -- fusion ----------------------------------------------------------------------------------------------------------


class _Fusing:
    """Fuses groups round by round and keeps them in an order in which they can run."""

    def __init__(self, groups: list[_Group]) -> None:
        self._at: list[_Group | None] = list(groups)
        for rank, group in enumerate(groups):
            group.rank = rank

    def groups(self) -> list[_Group]:
        """Returns the groups in order."""
        return [group for group in self._at if group is not None]

    def round(self) -> bool:
        """Fuses all pairs that share a buffer and can be fused, best first, and returns whether there were any."""
        groups = self.groups()
        pairs: dict[tuple[int, int], tuple[bool, int, int]] = {}
        position = {group: i for i, group in enumerate(groups)}
        for sharing in _by_buffer(groups):
            for i, one in enumerate(sharing):
                for other in sharing[i + 1 : i + 1 + _PAIRS_OF_A_BUFFER]:
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

    def _fuse(self, first: _Group, second: _Group) -> bool:
        """Fuses both groups, unless a third one has to run between them. Groups that need `first` move behind
        `second`."""
        between = [group for group in self._at[first.rank + 1 : second.rank] if group is not None]
        needing = {first}
        ahead: list[_Group] = []
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


def _distance(one: _Group, other: _Group) -> int:
    return max(abs(one.first - other.last), abs(other.first - one.last))


def _by_buffer(groups: Iterable[_Group]) -> list[list[_Group]]:
    touching: dict[int, dict[_Group, None]] = {}
    for group in groups:
        if not group.fixed:
            for access in (*group.reads, *group.writes):
                touching.setdefault(access.storage, {})[group] = None
    return [list(sharing) for sharing in touching.values() if len(sharing) > 1]


def _current(group: _Group) -> _Group:
    while group.fused_into is not None:
        if group.fused_into.fused_into is not None:
            group.fused_into = group.fused_into.fused_into
        group = group.fused_into
    return group


def _shared_bytes(one: _Group, other: _Group) -> int:
    small, large = (
        (one, other) if len(one.reads) + len(one.writes) <= len(other.reads) + len(other.writes) else (other, one)
    )
    return sum(a.size_bytes for a in {**small.reads, **small.writes} if a in large.reads or a in large.writes)


def _same_elements(one: _Group, other: _Group) -> bool:
    """Returns whether both iterate over the same elements, or over rows and columns of one large matrix."""
    if one.kind == other.kind == Kind.REDUCTION:
        return (one.space == other.space and one.outer == other.outer) or _mixed(one, other)
    if one.kind == other.kind:
        return one.space == other.space
    reduction, pointwise = (one, other) if one.kind == Kind.REDUCTION else (other, one)
    outputs, reduced = reduction.space
    return pointwise.space[0] == outputs or (not reduction.outer and pointwise.space[0] == outputs * reduced)


def _mixed(one: _Group, other: _Group) -> bool:
    """Returns whether both are sums over rows and over columns of one matrix (scheduler.MixOrderReduction)."""
    row, column = (one, other) if other.outer else (other, one)
    if row.outer or not column.outer or row.space != row.whole or column.whole != (row.space[1], row.space[0]):
        return False
    rows, columns = row.space
    large = rows * columns >= _MIXED_ELEMENTS and rows >= max(2 * columns, _MIXED_ROWS) and columns <= _MIXED_COLUMNS
    read = [access for access in column.reads if access in row.reads or access in row.writes]
    return large and bool(read) and len({**row.reads, **column.reads}) <= _MIXED_READS


def _can_fuse(first: _Group, second: _Group) -> bool:
    """Returns whether both may become one kernel, as far as the two groups alone decide it."""
    if first.size + second.size > _LARGEST_GROUP or not _same_elements(first, second):
        return False
    mixed = first.kind == second.kind == Kind.REDUCTION and first.space != second.space
    if first not in _before(second):
        near = _distance(first, second) <= _DISTANT and _shared_bytes(first, second) >= _LEAST_SHARED_BYTES
        return mixed or near
    made = {access.storage for access in first.writes}
    return not mixed and all(access in first.writes for access in second.reads if access.storage in made)


def _before(group: _Group) -> set[_Group]:
    """Returns the groups that have to run before `group`, after all fusions so far."""
    if any(other.fused_into is not None for other in group.before):
        group.before = {_current(other) for other in group.before} - {group}
    return group.before


def _join(one: _Group, other: _Group) -> None:
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


def _described(groups: list[_Group]) -> list[FusionGroup]:
    readers: dict[int, set[_Group]] = {}
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
