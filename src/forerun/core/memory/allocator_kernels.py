"""The rules of PyTorch's CUDA caching allocator, compiled.

A request takes the first free block of its pool that is large enough, in the order of (stream, size, address), or else
asks CUDA for a segment. The rules are those of c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13; its functions are
named where they are followed.
"""

from __future__ import annotations

from forerun.common.jit import inlined, kernel
from forerun.core.memory.cuda_segments import SMALL_SIZE, more_memory, return_garbage, return_oversize, return_unused
from forerun.core.memory.heap import (
    ADDRESS,
    ALLOCATED,
    ASKED_LARGE,
    DIVISIONS,
    EXPANDABLE,
    FREE,
    GARBAGE,
    IN_USE,
    LARGE,
    MAX_SPLIT,
    NEXT,
    NON_SPLIT_ROUNDING,
    NONE,
    OWNER,
    PEAK_IN_USE,
    PEAK_RESERVED,
    PENDING,
    RESERVED,
    RESERVED_AT_PEAK,
    RETRIES,
    SIZE,
    SLOTS,
    SMALL,
    STATE,
    STREAM,
    UNLIMITED,
    UNMAPPED,
    Heap,
    first_place,
    give_to_pool,
    insert,
    new_block,
    put_after,
    remove,
)
from forerun.core.program.types import I8, I32, I64

MIN_BLOCK = 512

# kinds of events
ALLOC, RELEASE, RELEASE_LATER, READY = range(4)


@kernel
def round_size(size: int, divisions: int) -> int:
    """Returns the bytes of the block that a request of `size` gets (round_size, roundup_power2_next_division)."""
    if size < MIN_BLOCK:
        return MIN_BLOCK
    if divisions > 1 and size > MIN_BLOCK * divisions:
        power = MIN_BLOCK
        while power * 2 <= size:
            power *= 2
        if power == size:
            return size
        step = power
        while divisions > 1:
            divisions //= 2
            step //= 2
        if step == 0:
            return power * 2
        return (size + step - 1) // step * step
    return (size + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK


@kernel
def _expandable_size(heap: Heap, block: int) -> int:
    size: int = heap.blocks[SIZE, block]
    after: int = heap.blocks[NEXT, block]
    return size + heap.blocks[SIZE, after] if after != NONE and heap.blocks[STATE, after] == UNMAPPED else size


@inlined
def _take_free(heap: Heap, pool: int, stream: int, size: int) -> int:
    """Returns the free block that serves a request, out of its pool; NONE if there is none (get_free_block)."""
    heap.counts[ASKED_LARGE + pool] += 1
    place = first_place(heap, pool, stream, size, 0)
    if place == heap.counts[pool] or heap.blocks[STREAM, heap.lists[pool, place]] != stream:
        return NONE
    if heap.rules[EXPANDABLE]:  # a block that can grow counts as large as it can become
        while (
            place + 1 < heap.counts[pool]
            and heap.blocks[STREAM, heap.lists[pool, place + 1]] == stream
            and _expandable_size(heap, heap.lists[pool, place + 1]) < _expandable_size(heap, heap.lists[pool, place])
        ):
            place += 1
    block: int = heap.lists[pool, place]
    if size < heap.rules[MAX_SPLIT] and heap.blocks[SIZE, block] >= heap.rules[MAX_SPLIT]:
        return NONE
    if size >= heap.rules[MAX_SPLIT] and heap.blocks[SIZE, block] >= size + heap.rules[NON_SPLIT_ROUNDING]:
        return NONE
    remove(heap, block)
    return block


@kernel
def _find(heap: Heap, pool: int, stream: int, size: int) -> int:
    """Returns a block of at least `size` out of the pool or from CUDA, NONE if memory is short (malloc)."""
    block = _take_free(heap, pool, stream, size)
    if block != NONE:
        return block
    if heap.rules[GARBAGE] and heap.counts[RESERVED] > heap.rules[GARBAGE] and not heap.rules[EXPANDABLE]:
        return_garbage(heap)
    block = more_memory(heap, pool, stream, size)
    limited = heap.rules[MAX_SPLIT] < UNLIMITED and not heap.rules[EXPANDABLE]
    if block == NONE and limited and return_oversize(heap, pool, stream, size):
        block = more_memory(heap, pool, stream, size)
    if block == NONE:
        return_unused(heap)
        heap.counts[RETRIES] += 1
        block = more_memory(heap, pool, stream, size)
    return block


@kernel
def _allocate(heap: Heap, wanted: int, stream: int) -> int:
    """Returns the block that serves a request, NONE if memory is short (malloc, alloc_found_block)."""
    size = round_size(wanted, heap.rules[DIVISIONS])
    pool = SMALL if size <= SMALL_SIZE else LARGE
    block = _find(heap, pool, stream, size)
    if block == NONE:
        return NONE
    rest = heap.blocks[SIZE, block] - size
    always = pool == SMALL or heap.rules[EXPANDABLE] != 0
    if rest >= MIN_BLOCK if always else size < heap.rules[MAX_SPLIT] and rest > SMALL_SIZE:  # should_split
        remaining = new_block(heap, block, rest, heap.blocks[ADDRESS, block] + size, FREE)
        put_after(heap, block, remaining)
        heap.blocks[SIZE, block] = size
        insert(heap, remaining)
    heap.blocks[STATE, block] = ALLOCATED
    heap.counts[IN_USE] += heap.blocks[SIZE, block]
    return block


@kernel
def _note_peaks(heap: Heap) -> None:
    heap.counts[PEAK_RESERVED] = max(heap.counts[PEAK_RESERVED], heap.counts[RESERVED])
    if heap.counts[IN_USE] >= heap.counts[PEAK_IN_USE]:
        heap.counts[PEAK_IN_USE], heap.counts[RESERVED_AT_PEAK] = heap.counts[IN_USE], heap.counts[RESERVED]


@kernel
def run(heap: Heap, kind: I8, tensor: I32, size: I64, stream: I8, place: I64, first: int, last: int) -> int:
    """Follows events `first` to `last`; `place` is the block of each tensor.

    Returns the number of the first event that was not followed: `last`, or one for which there are too few slots, or
    -1 - its number where the device is out of memory.
    """
    for event in range(first, last):
        which = tensor[event]
        if kind[event] == ALLOC:
            if heap.counts[SLOTS] < 8 + 2 * (heap.counts[LARGE] + heap.counts[SMALL]):
                return event
            block = _allocate(heap, size[which], stream[which])
            if block == NONE:
                return -1 - event
            place[which] = block
            heap.blocks[OWNER, block] = which
            _note_peaks(heap)
            continue
        block = place[which]
        if kind[event] == READY:  # out of memory, the allocator may have waited for it before
            if heap.blocks[STATE, block] == PENDING and heap.blocks[OWNER, block] == which:
                give_to_pool(heap, block)
            place[which] = NONE
            continue
        heap.counts[IN_USE] -= heap.blocks[SIZE, block]
        if kind[event] == RELEASE:
            give_to_pool(heap, block)
            place[which] = NONE
        else:
            heap.blocks[STATE, block] = PENDING
    return last
