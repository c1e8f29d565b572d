"""PyTorch's memory snapshots (`torch.cuda.memory._dump_snapshot`), read without executing anything.

A snapshot has the segments of the caching allocator at its end, and the events before. Memory that was allocated before
the first event and still exists is in the segments. Memory that was freed since is in the events that free it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from forerun.common.errors import ForerunError
from forerun.common.shipped import shipped_data, validated
from forerun.sources.profile.plain_pickle import read_plain_pickle

UNKNOWN = "other"
_FILE = "memory_frames.yaml"
_LARGEST = 1 << 50
_GROWS, _SHRINKS = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
_LIBRARIES = re.compile(r"torch/|site-packages/|/python3|\.cpp|\.cu|\.h$|\?\?")


class Block(NamedTuple):
    """One allocation."""

    size: int
    category: str
    where: str
    """the innermost frame of the user's own code; empty if no frame was recorded"""


class Moment(NamedTuple):
    """Bytes after one event."""

    time_us: int
    allocated: int
    reserved: int


@dataclass(frozen=True)
class MemorySnapshot:
    """Holds the contents of a snapshot for one device."""

    path: str
    device: int
    moments: tuple[Moment, ...]
    """before the first event, and after each"""
    at_peak: tuple[Block, ...]
    """the allocations at the largest sum, the largest first"""
    peak: Moment
    peak_reserved: int
    inactive: int
    """bytes of segments that no tensor uses at the end"""
    largest_inactive: int
    """bytes of the largest such piece"""
    retries: int
    """events in which the device was out of memory"""


@dataclass(frozen=True)
class _Rule:
    category: str
    frames: str
    source: str


def read_memory_snapshot(path: str | Path) -> MemorySnapshot:
    """Reads the device of a snapshot with the most events.

    Raises ForerunError for a file that is not a snapshot; nothing of it is executed.
    """
    content = read_plain_pickle(path)
    if not isinstance(content, dict) or not {"segments", "device_traces"} <= set(content):
        raise ForerunError(f"{path}: not a memory snapshot: it has no segments and device_traces")
    traces = _list(content["device_traces"], path, "device_traces")
    events = [_list(one, path, "device_traces") for one in traces]
    device = max(range(len(events)), key=lambda number: len(events[number]), default=0)
    segments = [_dict(one, path, "segments") for one in _list(content["segments"], path, "segments")]
    mine = [one for one in segments if one.get("device", device) == device]
    if not mine and not (events and events[device]):
        raise ForerunError(f"{path}: the snapshot has no segments and no events")
    return _read(str(path), device, mine, [_dict(one, path, "events") for one in events[device]] if events else [])


def _read(path: str, device: int, segments: list[dict[str, Any]], events: list[dict[str, Any]]) -> MemorySnapshot:
    reserved = sum(_size(one, "total_size", path) for one in segments)
    last: dict[int, Block] = {}
    inactive = [0]
    for segment in segments:
        for block in (_dict(one, path, "blocks") for one in _list(segment.get("blocks", []), path, "blocks")):
            if block.get("state") == "active_allocated":
                last[_size(block, "address", path)] = _block(block, path)
            elif block.get("state") == "inactive":
                inactive.append(_size(block, "size", path))
    first = _at_begin(events, last, path)
    changes = [(_sign(one), _size(one, "size", path)) for one in events]
    reserved -= sum(size * sign[1] for sign, size in changes)
    moments = [Moment(_size(events[0], "time_us", path) if events else 0, _sum(first), reserved)]
    for number, (_, allocated) in enumerate(_walk(events, first, path)):
        sign, size = changes[number]
        reserved += size * sign[1]
        moments.append(Moment(_size(events[number], "time_us", path), allocated, reserved))
    peak = max(range(len(moments)), key=lambda number: moments[number].allocated)
    at_peak = dict(first)
    for number, (live, _) in enumerate(_walk(events, first, path)):
        if number == peak - 1:
            at_peak = dict(live)
            break
    return MemorySnapshot(
        path=path,
        device=device,
        moments=tuple(moments),
        at_peak=tuple(sorted(at_peak.values(), key=lambda block: -block.size)),
        peak=moments[peak],
        peak_reserved=max(moment.reserved for moment in moments),
        inactive=sum(inactive),
        largest_inactive=max(inactive),
        retries=sum(one.get("action") == "oom" for one in events),
    )


def _walk(events: list[dict[str, Any]], first: dict[int, Block], path: str) -> Iterator[tuple[dict[int, Block], int]]:
    """Yields the allocations after each event, as a dict that changes, and their bytes."""
    live, allocated = dict(first), _sum(first)
    for one in events:
        sign, address = _sign(one)[0], _size(one, "addr", path)
        if sign > 0:
            live[address] = _block(one, path)
            allocated += live[address].size
        elif sign < 0 and address in live:
            allocated -= live.pop(address).size
        yield live, allocated


def _sum(blocks: dict[int, Block]) -> int:
    return sum(block.size for block in blocks.values())


def _at_begin(events: list[dict[str, Any]], last: dict[int, Block], path: str) -> dict[int, Block]:
    """Returns the allocations before the first event."""
    seen: set[int] = set()
    first: dict[int, Block] = {}
    for one in events:
        sign = _sign(one)[0]
        address = _size(one, "addr", path)
        if sign < 0 and address not in seen:
            first[address] = Block(_size(one, "size", path), UNKNOWN, "before the first event")
        if sign:
            seen.add(address)
    return first | {address: block for address, block in last.items() if address not in seen}


def _sign(event: dict[str, Any]) -> tuple[int, int]:
    """Returns the signs of an event's changes of allocated and of reserved bytes: 1, 0 or -1."""
    action = event.get("action")
    allocated = 1 if action == "alloc" else -1 if action == "free_requested" else 0
    return allocated, 1 if action in _GROWS else -1 if action in _SHRINKS else 0


def _block(entry: dict[str, Any], path: str) -> Block:
    frames = entry.get("frames")
    texts = []
    for frame in frames if isinstance(frames, list) else []:
        about = _dict(frame, path, "frames")
        texts.append((str(about.get("filename", "")), str(about.get("name", "")), about.get("line", 0)))
    own = next((one for one in texts if not _LIBRARIES.search(one[0])), texts[0] if texts else None)
    where = "" if own is None else f"{own[0].rpartition('/')[2]}:{own[2]} {own[1]}"
    return Block(_size(entry, "size", path), category_of(tuple(f"{file} {name}" for file, name, _ in texts)), where)


@cache
def category_of(frames: tuple[str, ...]) -> str:
    """Returns the category of memory that a stack allocates."""
    for pattern, category in _rules():
        if any(pattern.search(frame.lower()) for frame in frames):
            return category
    return UNKNOWN


@cache
def _rules() -> list[tuple[re.Pattern[str], str]]:
    rules: list[_Rule] = validated(list[_Rule], shipped_data(__package__, _FILE), _FILE)
    return [(re.compile(one.frames), one.category) for one in rules]


def _list(value: Any, path: str | Path, what: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ForerunError(f"{path}: {what}: expected a list")
    return list(value)


def _dict(value: Any, path: str | Path, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ForerunError(f"{path}: {what}: expected entries by name")
    return value


def _size(entry: dict[str, Any], key: str, path: str) -> int:
    value = entry.get(key, 0)
    limit = (1 << 64) if key in ("addr", "address") else _LARGEST
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
        raise ForerunError(f"{path}: {key}: expected a number of bytes, got {value!r:.40}")
    return value
