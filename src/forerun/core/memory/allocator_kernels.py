"""The rules of PyTorch's CUDA caching allocator, compiled.

A request takes the first free block of its pool that is large enough, in the order of (stream, size, address), or else
asks CUDA for a segment. The rules are those of c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13; its functions are
named where they are followed.
"""

from __future__ import annotations

from forerun.common.jit import inlined, kernel
from forerun.core.memory.heap import (
    ADDRESS,
    ADDRESS_SPACE,
    ALLOCATED,
    ALLOWED,
    ASKED_LARGE,
    AVAILABLE,
    BORN,
    DIVISIONS,
    EXPANDABLE,
    FREE,
    GARBAGE,
    IN_USE,
    LARGE,
    MALLOCS,
    MAX_SPLIT,
    NEXT,
    NEXT_ADDRESS,
    NON_SPLIT_ROUNDING,
    NONE,
    ORIGIN,
    OWNER,
    PEAK_IN_USE,
    PEAK_RESERVED,
    PENDING,
    POOL,
    PREVIOUS,
    RESERVED,
    RESERVED_AT_PEAK,
    RETRIES,
    RETURNED,
    SEGMENTS,
    SIZE,
    SLOTS,
    SMALL,
    STATE,
    STREAM,
    UNLIMITED,
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
from forerun.core.program.types import I8, I32, I64

MIN_BLOCK = 512
SMALL_SIZE = 1 << 20
"""largest request of the small pool"""
SMALL_BUFFER = 2 << 20
LARGE_BUFFER = 20 << 20
MIN_LARGE_ALLOC = 10 << 20
"""requests from here on get a segment of their own size"""
ROUND_LARGE = 2 << 20

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
def segment_size(size: int) -> int:
    """Returns the bytes that CUDA is asked for to serve a block of `size` (get_allocation_size)."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return LARGE_BUFFER
    return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


@kernel
def _expandable_size(heap: Heap, block: int) -> int:
    size: int = heap.blocks[SIZE, block]
    after: int = heap.blocks[NEXT, block]
    return size + heap.blocks[SIZE, after] if after != NONE and heap.blocks[STATE, after] == UNMAPPED else size


@inlined
def _take_free(heap: Heap, pool: int, stream: int, size: int) -> int:
    """The free block that serves a request, out of its pool; NONE where there is none (get_free_block)."""
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
def _reserve(heap: Heap, size: int) -> None:
    heap.counts[RESERVED] += size
    heap.counts[MALLOCS] += 1


@kernel
def _new_segment(heap: Heap, pool: int, stream: int, size: int) -> int:
    """A segment from CUDA as one block that is in no pool; NONE where memory is short (alloc_block)."""
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
    """Returns where an expandable segment has room for `size`: a free block before an unmapped one, or an unmapped one
    (find_expandable_block)."""
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
    """Put memory behind the first `size` bytes of an unmapped block, and return whether there was any (map_block)."""
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
    """A free block of an expandable segment that was made to hold `size`; NONE where memory is short
    (try_allocate_expandable_block)."""
    if heap.counts[RESERVED] + segment_size(size) > heap.rules[ALLOWED]:
        return NONE
    block = _growing_block(heap, pool, stream, size)
    if heap.blocks[STATE, block] == UNMAPPED and not _map(heap, block, min(heap.blocks[SIZE, block], size)):
        return NONE
    while heap.blocks[SIZE, block] < size:
        after = heap.blocks[NEXT, block]
        if not _map(heap, after, min(size - heap.blocks[SIZE, block], heap.blocks[SIZE, after])):
            return NONE
        block = after
    remove(heap, block)
    return block


@kernel
def _more(heap: Heap, pool: int, stream: int, size: int) -> int:
    if heap.rules[EXPANDABLE]:
        return _grow(heap, pool, stream, size)
    return _new_segment(heap, pool, stream, size)


@kernel
def _return_segment(heap: Heap, block: int) -> None:
    """Give a segment that is one free block back to CUDA (release_block)."""
    remove(heap, block)
    heap.counts[RESERVED] -= heap.blocks[SIZE, block]
    heap.counts[SEGMENTS] -= 1
    heap.counts[RETURNED] += 1
    drop(heap, block)


@kernel
def _return_oversize(heap: Heap, pool: int, stream: int, size: int) -> bool:
    """Give back unused oversize segments, as few as hold `size` (release_available_cached_blocks)."""
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
def _return_garbage(heap: Heap) -> None:
    """Give back unused segments of the large pool, those of more than average age (garbage_collect_cached_blocks)."""
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
    """Give back the whole pieces inside a free block of an expandable segment (unmap_block).

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
    """Give everything back to CUDA that is not in use (release_cached_blocks, torch.cuda.empty_cache)."""
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


@kernel
def _find(heap: Heap, pool: int, stream: int, size: int) -> int:
    """Returns a block of at least `size` out of the pool or from CUDA, NONE where memory is short (malloc)."""
    block = _take_free(heap, pool, stream, size)
    if block != NONE:
        return block
    if heap.rules[GARBAGE] and heap.counts[RESERVED] > heap.rules[GARBAGE] and not heap.rules[EXPANDABLE]:
        _return_garbage(heap)
    block = _more(heap, pool, stream, size)
    limited = heap.rules[MAX_SPLIT] < UNLIMITED and not heap.rules[EXPANDABLE]
    if block == NONE and limited and _return_oversize(heap, pool, stream, size):
        block = _more(heap, pool, stream, size)
    if block == NONE:
        return_unused(heap)
        heap.counts[RETRIES] += 1
        block = _more(heap, pool, stream, size)
    return block


@kernel
def _allocate(heap: Heap, wanted: int, stream: int) -> int:
    """Returns the block that serves a request, NONE where memory is short (malloc, alloc_found_block)."""
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
    """Follow events `first` to `last`; `place` is the block of each tensor.

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
