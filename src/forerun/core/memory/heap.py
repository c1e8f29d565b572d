"""Blocks of the caching allocator, and the lists in which they wait, on plain arrays, compiled.

Memory is a set of *segments* that CUDA gave; a segment is a row of *blocks*, each free or in use. Free blocks wait in a
pool, in the order of (stream, size, address). A block is the number of its column in `Heap.blocks`, a slot that is used
again. Functions of c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13 are named where they are followed.
"""

from __future__ import annotations

from typing import NamedTuple

from forerun.common.jit import inlined, kernel
from forerun.core.program.types import I64

# rows of `blocks`
SIZE, ADDRESS, STREAM, PREVIOUS, NEXT, STATE, POOL, BORN, ORIGIN, OWNER = range(10)
"""BORN: how often its pool had been asked when the block was freed; ORIGIN: where its expandable segment starts; OWNER:
the tensor that it was last given to"""
N_FIELDS = 10

# values of STATE
FREE, ALLOCATED, PENDING, UNMAPPED = range(4)
"""PENDING: freed by its owner while another stream still uses it"""

# rows of `lists`, and the `counts` that hold their lengths: pools, what is not mapped of them, unused slots
LARGE, SMALL, UNMAPPED_LARGE, UNMAPPED_SMALL, SLOTS = range(5)
N_LISTS = 5

# the other `counts`
RESERVED, IN_USE, PEAK_RESERVED, PEAK_IN_USE, RESERVED_AT_PEAK, SEGMENTS = range(5, 11)
MALLOCS, RETURNED, RETRIES, NEXT_ADDRESS, ASKED_LARGE, ASKED_SMALL = range(11, 17)
"""IN_USE: bytes of ALLOCATED blocks; RESERVED_AT_PEAK: held when most was IN_USE, the last time; MALLOCS: how often
CUDA gave memory; RETURNED: how often it got some back"""
N_COUNTS = 17

# entries of `rules`
EXPANDABLE, MAX_SPLIT, NON_SPLIT_ROUNDING, DIVISIONS, AVAILABLE, ALLOWED, GARBAGE, ADDRESS_SPACE = range(8)
"""AVAILABLE: bytes that CUDA has; ALLOWED: bytes that the process may take of them; GARBAGE: bytes above which unused
segments are returned, 0 for never
"""
N_RULES = 8

NONE = -1
UNLIMITED = 1 << 62


class Heap(NamedTuple):
    """The state of the allocator."""

    blocks: I64
    """(N_FIELDS, slots)"""
    lists: I64
    """block numbers, (N_LISTS, slots)"""
    counts: I64
    """(N_COUNTS,)"""
    rules: I64
    """(N_RULES,)"""


@kernel
def first_place(heap: Heap, which: int, stream: int, size: int, address: int) -> int:
    """Returns the first place of a list whose block is not before (stream, size, address).

    Lists of unmapped blocks ignore the size.
    """
    by_size = which <= SMALL
    low, high = 0, heap.counts[which]
    while low < high:
        middle = (low + high) // 2
        block: int = heap.lists[which, middle]
        if heap.blocks[STREAM, block] != stream:
            before = heap.blocks[STREAM, block] < stream
        elif by_size and heap.blocks[SIZE, block] != size:
            before = heap.blocks[SIZE, block] < size
        else:
            before = heap.blocks[ADDRESS, block] < address
        if before:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def _list_of(heap: Heap, block: int) -> int:
    """Returns the list in which a free or unmapped block waits."""
    pool: int = heap.blocks[POOL, block]
    return pool + UNMAPPED_LARGE if heap.blocks[STATE, block] == UNMAPPED else pool


@inlined
def insert(heap: Heap, block: int) -> None:
    """Puts a block into its list, in the order of (stream, size, address)."""
    which = _list_of(heap, block)
    place = first_place(heap, which, heap.blocks[STREAM, block], heap.blocks[SIZE, block], heap.blocks[ADDRESS, block])
    for i in range(heap.counts[which], place, -1):
        heap.lists[which, i] = heap.lists[which, i - 1]
    heap.lists[which, place] = block
    heap.counts[which] += 1
    heap.blocks[BORN, block] = heap.counts[ASKED_LARGE + heap.blocks[POOL, block]]


@inlined
def remove(heap: Heap, block: int) -> None:
    """Takes a block out of its list."""
    which = _list_of(heap, block)
    place = first_place(heap, which, heap.blocks[STREAM, block], heap.blocks[SIZE, block], heap.blocks[ADDRESS, block])
    heap.counts[which] -= 1
    for i in range(place, heap.counts[which]):
        heap.lists[which, i] = heap.lists[which, i + 1]


@kernel
def new_block(heap: Heap, like: int, size: int, address: int, state: int) -> int:
    """Returns a new block of the stream, pool and segment of block `like`, in no list and without neighbours."""
    heap.counts[SLOTS] -= 1
    block: int = heap.lists[SLOTS, heap.counts[SLOTS]]
    heap.blocks[SIZE, block], heap.blocks[ADDRESS, block], heap.blocks[STATE, block] = size, address, state
    heap.blocks[PREVIOUS, block] = heap.blocks[NEXT, block] = NONE
    if like != NONE:
        for field in (STREAM, POOL, ORIGIN):
            heap.blocks[field, block] = heap.blocks[field, like]
    return block


@kernel
def drop(heap: Heap, block: int) -> None:
    """Makes the slot of a block free for another one."""
    heap.lists[SLOTS, heap.counts[SLOTS]] = block
    heap.counts[SLOTS] += 1


@kernel
def put_after(heap: Heap, block: int, other: int) -> None:
    """Makes `other` the next block of its segment after `block`."""
    after = heap.blocks[NEXT, block]
    heap.blocks[PREVIOUS, other], heap.blocks[NEXT, other], heap.blocks[NEXT, block] = block, after, other
    if after != NONE:
        heap.blocks[PREVIOUS, after] = other


@kernel
def merge(heap: Heap, block: int, other: int) -> None:
    """Makes the neighbour `other` part of `block` where both are free, or both unmapped (try_merge_blocks)."""
    if other == NONE or heap.blocks[STATE, other] == ALLOCATED or heap.blocks[STATE, other] == PENDING:
        return
    if (heap.blocks[STATE, other] == UNMAPPED) != (heap.blocks[STATE, block] == UNMAPPED):
        return
    remove(heap, other)
    if heap.blocks[PREVIOUS, block] == other:
        before = heap.blocks[PREVIOUS, other]
        heap.blocks[ADDRESS, block], heap.blocks[PREVIOUS, block] = heap.blocks[ADDRESS, other], before
        if before != NONE:
            heap.blocks[NEXT, before] = block
    else:
        after = heap.blocks[NEXT, other]
        heap.blocks[NEXT, block] = after
        if after != NONE:
            heap.blocks[PREVIOUS, after] = block
    heap.blocks[SIZE, block] += heap.blocks[SIZE, other]
    drop(heap, other)


@kernel
def give_to_pool(heap: Heap, block: int) -> None:
    """Frees a block and merges it with its free neighbours (free_block)."""
    heap.blocks[STATE, block] = FREE
    merge(heap, block, heap.blocks[PREVIOUS, block])
    merge(heap, block, heap.blocks[NEXT, block])
    insert(heap, block)
