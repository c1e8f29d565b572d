"""PyTorch's CUDA caching allocator, replayed on a list of allocations and frees: reserved memory and fragmentation.

    replay(events, AllocatorSettings.parse("expandable_segments:True"), available_bytes).reserved_bytes

The rules are in `allocator_kernels` and `cuda_segments`, on the blocks of `heap`. What is taken as given: CUDA hands
out rising addresses and never one twice, and has `available_bytes` as a whole (no pages of its own are lost between
segments).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.core.memory import allocator_kernels as kernels
from forerun.core.memory import heap
from forerun.core.memory.allocator_settings import AllocatorSettings
from forerun.core.memory.cuda_segments import return_unused
from forerun.core.program.types import I8, I32, I64

ALLOC, FREE, FREE_LATER, READY = kernels.ALLOC, kernels.RELEASE, kernels.RELEASE_LATER, kernels.READY
"""kinds of events. FREE_LATER: its owner lets go of the tensor, which another stream still uses (record_stream); READY:
that stream is through"""

_FIRST_SLOTS = 1024


@dataclass(frozen=True, slots=True)
class Events:
    """Allocations and frees of tensors, in the order in which the host asks the allocator."""

    kind: I8
    """ALLOC, FREE, FREE_LATER or READY, (n,)"""
    tensor: I32
    """which tensor, (n,)"""
    size_bytes: I64
    """of each tensor, (n_tensors,)"""
    stream: I8
    """stream on which each tensor is allocated, (n_tensors,)"""

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay. Bytes of blocks, as torch.cuda.memory_stats counts them."""

    reserved_bytes: int
    """most that was ever held (torch.cuda.max_memory_reserved)"""
    allocated_bytes: int
    """most that was ever in use (torch.cuda.max_memory_allocated)"""
    reserved_at_peak_bytes: int
    """held when most was in use, the last time"""
    segments: int
    """pieces of memory, or of address space, that CUDA has given and not got back"""
    mallocs: int
    """how often CUDA was asked for memory and gave some"""
    returned: int
    """how often it got memory back"""
    retries: int
    """how often everything unused was given back because memory was short"""
    out_of_memory: bool
    """the events end where a request could not be served"""

    @property
    def fragmentation(self) -> float:
        """Returns the unused share of the reserved bytes at the moment of highest use."""
        return 1 - self.allocated_bytes / self.reserved_at_peak_bytes if self.reserved_at_peak_bytes else 0.0


class CachingAllocator:
    """The allocator of one device. It keeps its blocks from one call of `follow` to the next.

    Args:
        settings: the settings of PYTORCH_CUDA_ALLOC_CONF.
        available_bytes: bytes that CUDA can give; None for no limit.
    """

    def __init__(self, settings: AllocatorSettings | None = None, available_bytes: int | None = None) -> None:
        self._heap = heap.Heap(
            blocks=np.zeros((heap.N_FIELDS, 0), np.int64),
            lists=np.zeros((heap.N_LISTS, 0), np.int64),
            counts=np.zeros(heap.N_COUNTS, np.int64),
            rules=(settings or AllocatorSettings()).rules(available_bytes),
        )
        self._out_of_memory = False
        self._more_slots()

    def follow(self, events: Events, place: I64 | None = None) -> I64:
        """Serves `events`, to the end or to the first request that can't be served, and returns the place of each
        tensor.

        Give the places again with further events of the same tensors, so that one call can free tensors of another.
        """
        place = np.full(len(events.size_bytes), heap.NONE, np.int64) if place is None else place
        first = 0
        while first < len(events) and not self._out_of_memory:
            first = kernels.run(
                self._heap,
                *(events.kind, events.tensor, events.size_bytes, events.stream, place, first, len(events)),
            )
            self._out_of_memory = first < 0
            if 0 <= first < len(events):
                self._more_slots()
        return place

    def empty_cache(self) -> None:
        """Returns unused segments to CUDA (torch.cuda.empty_cache)."""
        return_unused(self._heap)

    @property
    def reserved_bytes(self) -> int:
        """Returns the bytes that the allocator holds now."""
        return int(self._heap.counts[heap.RESERVED])

    @property
    def allocated_bytes(self) -> int:
        """Returns the bytes that are in use now."""
        return int(self._heap.counts[heap.IN_USE])

    @property
    def result(self) -> Replayed:
        """Returns the counts since the start."""
        counts = self._heap.counts
        return Replayed(
            reserved_bytes=int(counts[heap.PEAK_RESERVED]),
            allocated_bytes=int(counts[heap.PEAK_IN_USE]),
            reserved_at_peak_bytes=int(counts[heap.RESERVED_AT_PEAK]),
            segments=int(counts[heap.SEGMENTS]),
            mallocs=int(counts[heap.MALLOCS]),
            returned=int(counts[heap.RETURNED]),
            retries=int(counts[heap.RETRIES]),
            out_of_memory=self._out_of_memory,
        )

    def blocks(self) -> list[tuple[int, int, int, bool]]:
        """Returns (address, bytes, stream, whether in use) of every block that has memory behind it, by address."""
        rows, unused = self._heap.blocks, self._heap.lists[heap.SLOTS, : self._heap.counts[heap.SLOTS]]
        taken = np.setdiff1d(np.arange(rows.shape[1]), unused)
        found = [
            (int(rows[heap.ADDRESS, i]), int(rows[heap.SIZE, i]), int(rows[heap.STREAM, i]), in_use)
            for i in taken.tolist()
            if rows[heap.STATE, i] != heap.UNMAPPED
            for in_use in (bool(rows[heap.STATE, i] != heap.FREE),)
        ]
        return sorted(found)

    def _more_slots(self) -> None:
        """Doubles the number of slots for blocks."""
        held, old = self._heap, self._heap.blocks.shape[1]
        added = max(_FIRST_SLOTS, old)
        blocks, lists = (
            np.concatenate([some, np.zeros((len(some), added), np.int64)], axis=1) for some in (held.blocks, held.lists)
        )
        unused = int(held.counts[heap.SLOTS])
        lists[heap.SLOTS, unused : unused + added] = np.arange(old + added - 1, old - 1, -1)
        held.counts[heap.SLOTS] += added
        self._heap = held._replace(blocks=blocks, lists=lists)


def replay(events: Events, settings: AllocatorSettings | None = None, available_bytes: int | None = None) -> Replayed:
    """Replays `events` on a new allocator and returns its state. See CachingAllocator."""
    allocator = CachingAllocator(settings, available_bytes)
    allocator.follow(events)
    return allocator.result
