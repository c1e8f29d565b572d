"""Allocations: follows the memory of every storage on the virtual device, and at which node it begins and ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from forerun.core.program.types import Category, Phase
from forerun.sources.trace.inside import sizes


class Allocation:
    """One allocation: its bytes, the node before which it is made, the node after which it is freed."""

    __slots__ = ("alloc", "alloc_phase", "category", "free", "free_phase", "size")

    def __init__(self, size: int, alloc: int, phase: int, category: int) -> None:
        self.size, self.alloc, self.alloc_phase, self.category = size, alloc, phase, category
        self.free: int | None = None
        self.free_phase = -1

    def purpose(self) -> int:
        """Returns the category: as marked, else by the phases in which it is made and freed."""
        if self.category >= 0:
            return self.category
        if self.alloc_phase == Phase.FORWARD and self.free_phase in (Phase.BACKWARD, Phase.RECOMPUTE):
            return int(Category.ACTIVATION)
        return int(Category.TEMPORARY)


class _Storage:
    __slots__ = ("row", "watch")

    def __init__(self, watch: Any) -> None:
        self.watch = watch
        self.row: Allocation | None = None


class Allocations:
    """The allocations of one rank. `now()` returns the number of nodes so far and the current phase."""

    def __init__(self, now: Callable[[], tuple[int, int]]) -> None:
        self._now = now
        self._storages: dict[int, _Storage] = {}
        self._rows: list[Allocation] = []
        self.most_bytes = sizes.MOST_BYTES
        """The largest tensor; `World` sets it by the device."""
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.category = -1
        """The category of later allocations; -1 if later marks and phases determine it."""

    def start(self) -> None:
        """Starts a step. Tensors that exist now count as allocated before it."""
        self._rows = [storage.row for storage in self._storages.values() if storage.row is not None]
        for row in self._rows:
            row.alloc = -1

    @contextmanager
    def beforehand(self, category: Category) -> Iterator[None]:
        """Counts allocations of the block, for `category`, as made before the step, and what it frees as freed then."""
        known = len(self._rows)
        older = [row for row in self._rows if row.alloc < 0 and row.free is None]
        try:
            yield
        finally:
            for row in self._rows[known:]:
                row.alloc, row.category = -1, int(category)
            for row in older:
                if row.free is not None:
                    row.free = -1

    def allocated(self, storage: Any, size_bytes: int, node: int = -1) -> None:
        """Records that `storage` (an UntypedStorage of the device) has this many bytes from `node` on (-1: the next).

        0 bytes free it, as `resize_` does. It is also freed when the storage is deleted.

        Raises:
            ForerunError: the size is negative or beyond the limit.
        """
        key = storage._cdata
        known = self._storages.get(key)
        if known is None:
            known = self._storages[key] = _Storage(weakref.ref(storage, lambda _: self._gone(key)))
        size = sizes.rounded(size_bytes, self.most_bytes)
        if known.row is not None:
            if known.row.size == size:
                return
            self._release(known)
        if size:
            n_nodes, phase = self._now()
            known.row = Allocation(size, n_nodes if node < 0 else node, phase, self.category)
            self._rows.append(known.row)
            self.allocated_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def follows(self, storage: Any) -> bool:
        """Returns whether the memory of `storage` is recorded."""
        return storage._cdata in self._storages

    def is_older(self, storage: Any) -> bool:
        """Returns whether the memory of `storage` was allocated before the step."""
        known = self._storages.get(storage._cdata)
        return known is not None and known.row is not None and known.row.alloc < 0

    def workspace(self, size_bytes: int, node: int) -> None:
        """Records bytes that a kernel needs while it runs."""
        if node < 0:
            return
        size = sizes.rounded(size_bytes, self.most_bytes)
        row = Allocation(size, node, self._now()[1], self.category)
        row.free, row.free_phase = node, row.alloc_phase
        self._rows.append(row)
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes + size)

    def mark(self, storage: Any, category: Category) -> None:
        """Sets the category of `storage`; the first mark counts."""
        known = self._storages.get(storage._cdata)
        if known is not None and known.row is not None and known.row.category < 0:
            known.row.category = int(category)

    def _gone(self, key: int) -> None:
        known = self._storages.pop(key, None)
        if known is not None and known.row is not None:
            self._release(known)

    def _release(self, storage: _Storage) -> None:
        row, storage.row = storage.row, None
        assert row is not None
        n_nodes, phase = self._now()
        row.free, row.free_phase = n_nodes - 1, phase
        self.allocated_bytes -= row.size

    def of_step(self) -> list[Allocation]:
        """Returns the allocations of the step that are not empty."""
        return [row for row in self._rows if row.size and (row.free is None or row.free >= max(row.alloc, 0))]

    def alive(self, made_by: Sequence[str]) -> Iterator[tuple[str, int, int]]:
        """Yields for each living storage the kernel that made it, the bytes recorded and the bytes it has.

        `made_by` are the names of the step's nodes.
        """
        for known in list(self._storages.values()):
            storage, row = known.watch(), known.row
            if storage is not None:
                in_step = row is not None and 0 <= row.alloc < len(made_by)
                name = made_by[row.alloc] if row is not None and in_step else "an earlier step"
                yield name, 0 if row is None else row.size, storage.nbytes()
