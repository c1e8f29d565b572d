"""write_snapshot: the memory of a rank over a step as PyTorch's memory snapshot, for pytorch.org/memory_viz.

The file has the form that `torch.cuda.memory._dump_snapshot` pickles and torch/cuda/_memory_viz.py reads: plain dicts,
lists, numbers and text. Addresses come from a first-fit allocator in one segment that grows; the caching allocator's
own segments are not modelled.
"""

from __future__ import annotations

import pickle
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.common.files import whole_file
from forerun.common.units import PS_PER_US
from forerun.core.program.types import Block, Category, FlatProgram, Program

if TYPE_CHECKING:
    from forerun.core.engine.simulate import Timeline

_BASE = 0x7F0000000000
_ALIGN = 512
"""the caching allocator rounds sizes up to multiples of this; the snapshot also has the requested sizes"""

Event = dict[str, Any]


def write_snapshot(path: str | Path, program: Program, flat: FlatProgram, timeline: Timeline, rank_class: int) -> None:
    """Writes the memory events of one rank class to `path`. The file appears whole or not at all.

    `flat` and `timeline` are of the unfolded `program`: an event has the time at which the host issues its node. What
    lives through the step is allocated before it.

    Raises ForerunError if the file can't be written.
    """
    content = snapshot(program, flat, timeline, rank_class)
    with whole_file(path) as file:
        pickle.dump(content, file, protocol=4)


def snapshot(program: Program, flat: FlatProgram, timeline: Timeline, rank_class: int) -> dict[str, Any]:
    """Returns the snapshot of one rank class as a dict of plain data."""
    rank = _Rank()
    cls = program.rank_classes[rank_class]
    for category in Category:
        if cls.resident_bytes[category]:
            rank.leave(rank.alloc(int(cls.resident_bytes[category]), category, "lives through the step", cls.name, 0))
    node = int(flat.class_ptr[rank_class])
    for step, number in enumerate(cls.block.tolist()):
        block = program.blocks[number]
        times = (timeline.issue_end_ps[node : node + len(block)] // PS_PER_US).tolist() or [rank.now_us]
        layer = int(cls.layer[step])
        where = f"{block.name}{f' of layer {layer}' if layer >= 0 else ''}, micro batch {int(cls.microbatch[step])}"
        _step(rank, program, block, times, where)
        node += len(block)
    return {
        "segments": [rank.segment()],
        "device_traces": [rank.events],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _step(rank: _Rank, program: Program, block: Block, times_us: list[int], where: str) -> None:
    """Writes the allocations before and the frees after each node of a block."""
    allocs: dict[int, list[int]] = {}
    frees: dict[int, list[int]] = {}
    for tensor, (alloc, free) in enumerate(zip(block.tensor_alloc.tolist(), block.tensor_free.tolist(), strict=True)):
        if alloc >= 0:
            allocs.setdefault(alloc, []).append(tensor)
        if free >= 0:
            frees.setdefault(free, []).append(tensor)
    mine: dict[int, _Live] = {}
    for node in sorted({*allocs, *frees}):
        now_us = times_us[min(node, len(times_us) - 1)]
        op = program.ops.name[int(block.op[node])] if node < len(block) else "after the block"
        module = (
            program.modules[block.module[node]]
            if node < len(block) and block.module[node] < len(program.modules)
            else ""
        )
        for tensor in allocs.get(node, ()):
            category = Category(int(block.tensor_category[tensor]))
            place = f"{where}, {module}" if module else where
            mine[tensor] = rank.alloc(int(block.tensor_bytes[tensor]), category, op, place, now_us)
        for tensor in frees.get(node, ()):
            if tensor in mine:
                rank.free(mine.pop(tensor), now_us)
            else:
                category = Category(int(block.tensor_category[tensor]))
                rank.free_bytes(int(block.tensor_bytes[tensor]), category, now_us)
    for live in mine.values():
        rank.leave(live)


@dataclass(eq=False, slots=True)
class _Live:
    """A tensor that is allocated."""

    address: int
    size: int
    category: Category
    frames: list[dict[str, Any]]


@dataclass
class _Rank:
    """The memory of one rank: allocated blocks, freed ones, and the gaps between them."""

    events: list[Event] = field(default_factory=list)
    now_us: int = 0
    _live: dict[int, _Live] = field(default_factory=dict)
    """by address"""
    _left: dict[Category, list[_Live]] = field(default_factory=lambda: {category: [] for category in Category})
    """tensors that outlive their block, the oldest first"""
    _gaps: list[tuple[int, int]] = field(default_factory=list)
    """(address, bytes) of free memory below the top, by address; no two touch"""
    _top: int = _BASE

    def alloc(self, size: int, category: Category, op: str, where: str, now_us: int) -> _Live:
        """Allocates a tensor that the op makes."""
        frames = [
            {"filename": category.name.lower(), "line": 0, "name": op},
            {"filename": where, "line": 0, "name": category.name.lower()},
        ]
        live = _Live(self._find(_rounded(size)), size, category, frames)
        self._live[live.address] = live
        self._event("alloc", live, now_us)
        return live

    def free(self, live: _Live, now_us: int) -> None:
        """Frees a tensor."""
        del self._live[live.address]
        self._event("free_requested", live, now_us)
        self._event("free_completed", live, now_us)
        self._give_back(live.address, _rounded(live.size))

    def leave(self, live: _Live) -> None:
        """Notes that a tensor outlives its block."""
        self._left[live.category].append(live)

    def free_bytes(self, size: int, category: Category, now_us: int) -> None:
        """Frees so many bytes of earlier blocks: the newest tensor of this size, or else the oldest tensors."""
        left = self._left[category]
        same = next((live for live in reversed(left) if live.size == size), None)
        if same is not None:
            left.remove(same)
            self.free(same, now_us)
            return
        while size > 0 and left:
            oldest = left.pop(0)
            self.free(oldest, now_us)
            if oldest.size > size:  # a part of it goes
                op, where = oldest.frames[0]["name"], oldest.frames[1]["filename"]
                left.insert(0, self.alloc(oldest.size - size, category, op, where, now_us))
            size -= oldest.size

    def segment(self) -> dict[str, Any]:
        """Returns the memory segment at the end of the step."""
        blocks: list[dict[str, Any]] = []
        pieces: list[tuple[int, int, _Live | None]] = [(address, size, None) for address, size in self._gaps]
        pieces += [(address, _rounded(live.size), live) for address, live in self._live.items()]
        for address, size, live in sorted(pieces, key=lambda piece: piece[0]):
            blocks.append(
                {
                    "address": address,
                    "size": size,
                    "requested_size": live.size if live else 0,
                    "state": "active_allocated" if live else "inactive",
                    "frames": live.frames if live else [],
                }
            )
        allocated = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
        return {
            "device": 0,
            "address": _BASE,
            "total_size": self._top - _BASE,
            "allocated_size": allocated,
            "active_size": allocated,
            "requested_size": sum(block["requested_size"] for block in blocks),
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": True,
            "frames": [],
            "blocks": blocks,
        }

    def _event(self, action: str, live: _Live, now_us: int) -> None:
        self.now_us = max(self.now_us, now_us)
        self.events.append(
            {
                "action": action,
                "addr": live.address,
                "size": live.size,
                "stream": 0,
                "time_us": self.now_us,
                "frames": live.frames,
            }
        )

    def _find(self, size: int) -> int:
        """Returns the first gap that is large enough, or the top."""
        for i, (address, gap) in enumerate(self._gaps):
            if gap >= size:
                self._gaps[i : i + 1] = [(address + size, gap - size)] if gap > size else []
                return address
        address = self._top
        if self._gaps and sum(self._gaps[-1]) == self._top:  # the last gap grows
            address, _ = self._gaps.pop()
        self._top = address + size
        return address

    def _give_back(self, address: int, size: int) -> None:
        i = bisect_left(self._gaps, (address, 0))
        if i < len(self._gaps) and self._gaps[i][0] == address + size:
            size += self._gaps.pop(i)[1]
        if i > 0 and sum(self._gaps[i - 1]) == address:
            address, before = self._gaps.pop(i - 1)
            size += before
        insort(self._gaps, (address, size))


def _rounded(size: int) -> int:
    return max(_ALIGN, -(-size // _ALIGN) * _ALIGN)
