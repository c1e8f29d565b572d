"""Memory that the caching allocator asks CUDA for and gives back: segments, whole or expandable, compiled.

The rules are those of c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13; its functions are named where they are
followed.
"""

from __future__ import annotations

from forerun.common.jit import kernel
from forerun.core.memory.heap import (
    ADDRESS,
    ADDRESS_SPACE,
    ALLOWED,
    ASKED_LARGE,
    AVAILABLE,
    BORN,
    EXPANDABLE,
    FREE,
    GARBAGE,
    LARGE,
    MALLOCS,
    MAX_SPLIT,
    NEXT,
    NEXT_ADDRESS,
    NONE,
    ORIGIN,
    PENDING,
    POOL,
    PREVIOUS,
    RESERVED,
    RETURNED,
    SEGMENTS,
    SIZE,
    SMALL,
    STATE,
    STREAM,
    UNMAPPED,
    UNMAPPED_LARGE,
    Heap,
    drop,
    first_place,
    give_to_pool,
    insert,
    merge,
    new_block,
    put_after,
    remove,
)

SMALL_SIZE = 1 << 20
"""largest request of the small pool"""
SMALL_BUFFER = 2 << 20
LARGE_BUFFER = 20 << 20
MIN_LARGE_ALLOC = 10 << 20
"""requests from here on get a segment of their own size"""
ROUND_LARGE = 2 << 20


@kernel
def segment_size(size: int) -> int:
    """Returns the bytes that CUDA is asked for to serve a block of `size` (get_allocation_size)."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return LARGE_BUFFER
    return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


@kernel
def _reserve(heap: Heap, size: int) -> None:
    heap.counts[RESERVED] += size
    heap.counts[MALLOCS] += 1


@kernel
def _new_segment(heap: Heap, pool: int, stream: int, size: int) -> int:
    """Returns a segment from CUDA as one block that is in no pool; NONE if memory is short (alloc_block)."""
    wanted = segment_size(size)
    if heap.counts[RESERVED] + wanted > min(heap.rules[AVAILABLE], heap.rules[ALLOWED]):
        return NONE
    block = new_block(heap, NONE, wanted, heap.counts[NEXT_ADDRESS], FREE)
    heap.blocks[STREAM, block], heap.blocks[POOL, block] = stream, pool
    heap.counts[NEXT_ADDRESS] += wanted
    heap.counts[SEGMENTS] += 1
    _reserve(heap, wanted)
    return block


@kernel
def _has_room(heap: Heap, block: int, size: int) -> bool:
    room = 0
    while (
        block != NONE and room < size and (heap.blocks[STATE, block] == FREE or heap.blocks[STATE, block] == UNMAPPED)
    ):
        room += heap.blocks[SIZE, block]
        block = heap.blocks[NEXT, block]
    return room >= size


@kernel
def _growing_block(heap: Heap, pool: int, stream: int, size: int) -> int:
    """Finds the block of an expandable segment that has room for `size`: a free block before an unmapped one, or an
    unmapped one (find_expandable_block).
    """
    which = UNMAPPED_LARGE + pool
    for place in range(first_place(heap, which, stream, 0, 0), heap.counts[which]):
        block: int = heap.lists[which, place]
        if heap.blocks[STREAM, block] != stream:
            break
        before = heap.blocks[PREVIOUS, block]
        if before != NONE and (heap.blocks[STATE, before] == FREE or heap.blocks[STATE, before] == UNMAPPED):
            block = before
        if _has_room(heap, block, size):
            return block
    piece = SMALL_BUFFER if pool == SMALL else LARGE_BUFFER
    space = (heap.rules[ADDRESS_SPACE] + piece - 1) // piece * piece
    block = new_block(heap, NONE, space, heap.counts[NEXT_ADDRESS], UNMAPPED)
    heap.blocks[STREAM, block], heap.blocks[POOL, block], heap.blocks[ORIGIN, block] = (
        stream,
        pool,
        heap.counts[NEXT_ADDRESS],
    )
    heap.counts[NEXT_ADDRESS] += space
    heap.counts[SEGMENTS] += 1
    insert(heap, block)
    return block


@kernel
def _map(heap: Heap, block: int, size: int) -> bool:
    """Puts memory behind the first `size` bytes of an unmapped block, and returns whether there was any (map_block)."""
    piece = SMALL_BUFFER if heap.blocks[POOL, block] == SMALL else LARGE_BUFFER
    mapped = (size + piece - 1) // piece * piece
    if heap.counts[RESERVED] + mapped > heap.rules[AVAILABLE]:
        return False
    remove(heap, block)
    heap.blocks[STATE, block] = FREE
    if mapped < heap.blocks[SIZE, block]:
        address = heap.blocks[ADDRESS, block] + mapped
        rest = new_block(heap, block, heap.blocks[SIZE, block] - mapped, address, UNMAPPED)
        put_after(heap, block, rest)
        heap.blocks[SIZE, block] = mapped
        insert(heap, rest)
    merge(heap, block, heap.blocks[PREVIOUS, block])
    merge(heap, block, heap.blocks[NEXT, block])
    insert(heap, block)
    _reserve(heap, mapped)
    return True


@kernel
def _grow(heap: Heap, pool: int, stream: int, size: int) -> int:
    """Returns a free block of an expandable segment that was made to hold `size`; NONE if memory is short
    (try_allocate_expandable_block)."""
    if heap.counts[RESERVED] + segment_size(size) > heap.rules[ALLOWED]:
        return NONE
    block = _growing_block(heap, pool, stream, size)
    if heap.blocks[STATE, block] == UNMAPPED and not _map(heap, block, min(heap.blocks[SIZE, block], size)):
        return NONE
    while heap.blocks[SIZE, block] < size:
        after = heap.blocks[NEXT, block]
        if after == NONE:  # the request is larger than all addresses of a segment
            return NONE
        if not _map(heap, after, min(size - heap.blocks[SIZE, block], heap.blocks[SIZE, after])):
            return NONE
        block = after
    remove(heap, block)
    return block


@kernel
def more_memory(heap: Heap, pool: int, stream: int, size: int) -> int:
    """Returns a block of at least `size` bytes, in no pool, that CUDA gives memory for; NONE if memory is short."""
    if heap.rules[EXPANDABLE]:
        return _grow(heap, pool, stream, size)
    return _new_segment(heap, pool, stream, size)


@kernel
def _return_segment(heap: Heap, block: int) -> None:
    """Gives a segment that is one free block back to CUDA (release_block)."""
    remove(heap, block)
    heap.counts[RESERVED] -= heap.blocks[SIZE, block]
    heap.counts[SEGMENTS] -= 1
    heap.counts[RETURNED] += 1
    drop(heap, block)


@kernel
def return_oversize(heap: Heap, pool: int, stream: int, size: int) -> bool:
    """Gives back unused oversize segments, as few as hold `size` (release_available_cached_blocks)."""
    key: int = max(size, heap.rules[MAX_SPLIT])
    place = first_place(heap, pool, stream, key, 0)
    if place < heap.counts[pool] and heap.blocks[STREAM, heap.lists[pool, place]] == stream:
        _return_segment(heap, heap.lists[pool, place])
        return True
    returned: int = 0
    while place > 0 and returned < key:
        place -= 1
        block: int = heap.lists[pool, place]
        if heap.blocks[SIZE, block] < heap.rules[MAX_SPLIT] or heap.blocks[STREAM, block] != stream:
            break
        returned += heap.blocks[SIZE, block]
        _return_segment(heap, block)
    return returned >= key


@kernel
def return_garbage(heap: Heap) -> None:
    """Gives back unused segments of the large pool, those of more than average age (garbage_collect_cached_blocks)."""
    target = heap.counts[RESERVED] - heap.rules[GARBAGE]
    returned, age, n = 0, 0, 0
    for place in range(heap.counts[LARGE]):
        block: int = heap.lists[LARGE, place]
        if heap.blocks[PREVIOUS, block] == NONE and heap.blocks[NEXT, block] == NONE:
            age += heap.counts[ASKED_LARGE] - heap.blocks[BORN, block]
            n += 1
    found = n > 0
    while returned < target and found and n > 0:
        found, limit, place = False, age / n, 0
        while place < heap.counts[LARGE]:
            block = heap.lists[LARGE, place]
            own = heap.counts[ASKED_LARGE] - heap.blocks[BORN, block]
            if heap.blocks[PREVIOUS, block] == NONE and heap.blocks[NEXT, block] == NONE and own >= limit:
                found = True
                returned += heap.blocks[SIZE, block]
                age -= own
                n -= 1
                _return_segment(heap, block)
            else:
                place += 1


@kernel
def _unmap(heap: Heap, block: int) -> bool:
    """Gives back the whole pieces inside a free block of an expandable segment (unmap_block).

    Returns whether there are any.
    """
    piece = SMALL_BUFFER if heap.blocks[POOL, block] == SMALL else LARGE_BUFFER
    address, size, origin = heap.blocks[ADDRESS, block], heap.blocks[SIZE, block], heap.blocks[ORIGIN, block]
    begin = origin + (address - origin + piece - 1) // piece * piece
    end = origin + (address + size - origin) // piece * piece
    if begin >= end:
        return False
    remove(heap, block)
    if address + size > end:
        rest = new_block(heap, block, address + size - end, end, FREE)
        put_after(heap, block, rest)
        insert(heap, rest)
    if begin > address:  # the piece before keeps its place in the row, `block` becomes what is unmapped
        rest = new_block(heap, block, begin - address, address, FREE)
        before = heap.blocks[PREVIOUS, block]
        heap.blocks[PREVIOUS, rest], heap.blocks[NEXT, rest], heap.blocks[PREVIOUS, block] = before, block, rest
        if before != NONE:
            heap.blocks[NEXT, before] = rest
        insert(heap, rest)
    heap.blocks[ADDRESS, block], heap.blocks[SIZE, block], heap.blocks[STATE, block] = begin, end - begin, UNMAPPED
    merge(heap, block, heap.blocks[PREVIOUS, block])
    merge(heap, block, heap.blocks[NEXT, block])
    insert(heap, block)
    heap.counts[RESERVED] -= end - begin
    heap.counts[RETURNED] += 1
    if heap.blocks[PREVIOUS, block] == NONE and heap.blocks[NEXT, block] == NONE:  # release_expandable_segment
        remove(heap, block)
        drop(heap, block)
        heap.counts[SEGMENTS] -= 1
    return True


@kernel
def return_unused(heap: Heap) -> None:
    """Gives everything back to CUDA that is not in use (release_cached_blocks, torch.cuda.empty_cache)."""
    for block in range(heap.blocks.shape[1]):
        if heap.blocks[STATE, block] == PENDING:  # the allocator waits for the streams
            give_to_pool(heap, block)
    for pool in (LARGE, SMALL):
        place = 0
        while place < heap.counts[pool]:
            block = heap.lists[pool, place]
            if heap.rules[EXPANDABLE]:  # what is left of a block goes anywhere in the list
                place = 0 if _unmap(heap, block) else place + 1
            elif heap.blocks[PREVIOUS, block] == NONE and heap.blocks[NEXT, block] == NONE:
                _return_segment(heap, block)
            else:
                place += 1
