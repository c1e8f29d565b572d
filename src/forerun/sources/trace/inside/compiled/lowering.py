"""Lowers the ops of a compiled region: decides which ops write a buffer and which are computed inside their readers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

from forerun.sources.trace.inside.compiled.groups import Access, FusionNode, Group, Kind
from forerun.sources.trace.inside.data_files import read_data

_FILE = "compiled/inductor.yaml"
_REDUCTIONS: dict[str, int] = read_data(_FILE)["reductions"]
_INLINING: dict[str, int] = read_data(_FILE)["inlining"]


@dataclass(frozen=True, slots=True)
class _Inlined:
    """The cost of computing an op inside the op that reads it."""

    reads: dict[Access, None]
    before: frozenset[Group]
    nodes: dict[int, None]
    ops: int


class Lowering:
    """Decides for each op whether it is computed inside the ops that read it or writes a buffer."""

    def __init__(self, nodes: Sequence[FusionNode]) -> None:
        self.nodes = nodes
        self.groups: list[Group] = []
        self._kept = [node.kept for node in nodes]
        self._readers: list[list[int]] = [[] for _ in nodes]
        self._sources: list[list[tuple[Access, int]]] = [[] for _ in nodes]
        """For each op: its reads, and the op that wrote each (-1: an input of the region)."""
        self._writes: list[list[Access]] = [[] for _ in nodes]
        self._changed: set[int] = set()
        """The storages that are written more than once, or after they were read."""
        storages = (access.storage for node in nodes for access in (*node.reads, *node.writes))
        self._new_storages = count(1 + max(storages, default=0))
        self._follow_storages()
        self._inlined: dict[int, _Inlined] = {}
        self._made: dict[int, Group] = {}
        self._touched: dict[int, list[Group]] = {}
        for index in range(len(nodes)):
            self._lower(index)

    def _follow_storages(self) -> None:
        """Finds the op that wrote each input of an op. A storage that is changed in place gets a new number for each
        content.
        """
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
                    content[storage] = next(self._new_storages)
                writer[storage] = index
                self._writes[index].append(replace(access, storage=content.get(storage, storage)))

    def _lower(self, index: int) -> None:
        node = self.nodes[index]
        fixed = node.kind in (Kind.TEMPLATE, Kind.EXTERN)
        if node.kind == Kind.VIEW or not (fixed or self._kept[index] or self._readers[index]):
            return
        reads: dict[Access, None] = {}
        before: set[Group] = set()
        members: dict[int, None] = {}
        ops = _INLINING["ops_per_node"]
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
        most = _INLINING["reused_reads"] if len(set(readers)) > 1 else _INLINING["most_reads"]
        return len(reads) <= most and ops <= _INLINING["most_ops"]

    def _make(self, index: int, reads: dict[Access, None], before: set[Group], members: dict[int, None]) -> None:
        node = self.nodes[index]
        whole = (node.numel, node.reduced)
        space = whole if node.kind == Kind.REDUCTION else (node.numel, 1)
        outer = node.kind == Kind.REDUCTION and not node.inner
        splits = _splits(node) if node.kind == Kind.REDUCTION else 1
        writes = dict.fromkeys(self._writes[index], self._kept[index])
        if splits > 1:
            partial = Access(next(self._new_storages), node.numel * splits * _REDUCTIONS["partial_bytes"])
            stage = (node.numel * splits, -(-node.reduced // splits))
            at = len(self.groups)
            first = Group(node.kind, stage, outer, whole, reads, {partial: False}, dict(members), at, at, before)
            self.groups.append(first)
            reads, before, space, outer, whole = {partial: None}, {first}, (node.numel, splits), False, (0, 0)
        # Inductor fuses what goes over one tensor of a list with the part of the list's kernel that made the tensor.
        size, at = 0 if node.of_list else 1, len(self.groups)
        group = Group(node.kind, space, outer, whole, reads, writes, members, at, at, before, size)
        for access in (*node.reads, *node.writes):
            if access.storage in self._changed:
                group.before |= {other for other in self._touched.get(access.storage, ()) if other is not group}
                self._touched.setdefault(access.storage, []).append(group)
        self.groups.append(group)
        self._made[index] = group


def _splits(node: FusionNode) -> int:
    """Returns how many parts the first stage of a reduction has; 1 if one stage fills the device."""
    limits = _REDUCTIONS
    multiprocessors, warp, most_per_thread = limits["multiprocessors"], limits["warp"], limits["most_per_thread"]
    device_threads, block_threads = multiprocessors * limits["threads"], limits["block_warps"] * warp
    inner = node.inner or node.numel == 1
    if inner:
        if node.numel >= 2 * multiprocessors or node.reduced <= limits["unsplit_inner"]:
            return 1
        threads, blocks = block_threads, device_threads // (2 * block_threads)
        blocks = -(-blocks // node.numel)
    else:
        if node.reduced <= warp or node.numel >= multiprocessors * limits["many_outputs"]:
            return 1
        threads, blocks = limits["rows_per_thread"], device_threads // block_threads
        blocks = -(-blocks // -(-node.numel // limits["columns_per_block"]))
    total, least, most = node.numel * node.reduced, warp * device_threads, most_per_thread * device_threads
    if total < least or (inner and total == least):
        per_thread = warp
    elif total < most:
        near = limits["near_even_inner" if inner else "near_even_outer"]
        per_thread = _even(node.reduced, -(-node.reduced // (threads * blocks)), near)
    else:
        per_thread = _even(node.reduced, most_per_thread, limits["near_even_most"])
    return -(-node.reduced // (per_thread * threads))


def _even(length: int, size: int, near: int) -> int:
    """Returns the divisor of `length` next to `size`, at least a warp; `size` where none is nearer than `near`."""
    divisors = [one for one in range(max(1, size - near + 1), size + near) if length % one == 0]
    return max(_REDUCTIONS["warp"], min(divisors, key=lambda one: abs(one - size))) if divisors else size
