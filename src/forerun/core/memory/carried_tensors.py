"""Finds the tensors that a block frees and an earlier block left, in compiled code.

A block names a tensor that it takes over by bytes and category alone. The newest tensor of that size of the block's own
layer and micro batch is taken, or else the newest of any layer. If there is none, the newest run of consecutive tensors
with that total size is taken. Otherwise the oldest tensors are taken, the last of them possibly in part; such a tensor
counts as two from the start.

Tensors of one key (category and bytes, with or without layer and micro batch) are a stack. A hash table finds the stack
by its first tensor. Tensors of one category are a list in the order in which they were left.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.common.jit import kernel
from forerun.core.program.types import I8, I32, I64, N_CATEGORIES

NONE = -1

# kinds of keys: with layer and micro batch, and without
OWN, ANY = range(2)

# rows of `links`: neighbours in the list of a category, what lies below in the stack of either key, and the top of the
# stack whose first tensor this is
OLDER, NEWER, BELOW, TOP = 0, 1, 2, 4
_N_LINKS = 6

# rows of `ends`
OLDEST, NEWEST = range(2)

_PRIME = 0x9E3779B1  # Knuth's multiplicative hash: 2**32 over the golden ratio


class CarriedTensors(NamedTuple):
    """All tensors of a step: those that are still allocated, and those that are freed. Pieces that were cut off follow
    the tensors.
    """

    size: I64
    """(capacity,) bytes of each tensor as it was left"""
    final: I64
    """(capacity,) the same; less where a piece was cut off"""
    category: I8
    """(capacity,)"""
    microbatch: I32
    """(capacity,)"""
    layer: I32
    """(capacity,)"""
    died: I64
    """(capacity,) row at which each tensor was freed, NONE for one that was not"""
    source: I32
    """(capacity,) the tensor that a piece is of; a tensor's own number"""
    links: I32
    """(6, capacity) tensors, NONE for none"""
    ends: I32
    """(2, N_CATEGORIES) tensors, NONE for none"""
    slots: I32
    """(2, a power of two) first tensor of each stack, by the hash of its key; NONE if there is none"""
    counts: I64
    """(1,) tensors and pieces"""


def no_carried_tensors(n_tensors: int, n_left: int, n_pieces: int) -> CarriedTensors:
    """Returns space for `n_tensors`. Of these, `n_left` outlive their blocks and at most `n_pieces` are cut."""
    capacity = n_tensors + n_pieces
    n_slots = 1 << (2 * (n_left + n_pieces)).bit_length()
    return CarriedTensors(
        size=np.empty(capacity, np.int64),
        final=np.empty(capacity, np.int64),
        category=np.empty(capacity, np.int8),
        microbatch=np.empty(capacity, np.int32),
        layer=np.empty(capacity, np.int32),
        died=np.empty(capacity, np.int64),
        source=np.arange(capacity, dtype=np.int32),
        links=np.empty((_N_LINKS, capacity), np.int32),
        ends=np.full((2, N_CATEGORIES), NONE, np.int32),
        slots=np.full((2, n_slots), NONE, np.int32),
        counts=np.array([n_tensors], np.int64),
    )


@kernel
def _slot(left: CarriedTensors, which: int, category: int, size: int, microbatch: int, layer: int) -> int:
    """Returns the slot of the first tensor of a key, or the free slot where it belongs."""
    mixed = (size ^ (size >> 9)) * _PRIME + category
    if which == OWN:
        mixed = ((mixed ^ microbatch) * _PRIME ^ layer) * _PRIME
    mask = left.slots.shape[1] - 1
    place: int = (mixed ^ (mixed >> 15)) & mask
    while True:
        first = left.slots[which, place]
        if first == NONE or (
            left.size[first] == size
            and left.category[first] == category
            and (which == ANY or (left.microbatch[first] == microbatch and left.layer[first] == layer))
        ):
            return place
        place = (place + 1) & mask


@kernel
def _enter(left: CarriedTensors, tensor: int, size: int, category: int, microbatch: int, layer: int) -> None:
    """Puts a tensor on top of both its stacks: that of its own layer and micro batch, and that of any."""
    left.size[tensor] = left.final[tensor] = size
    left.category[tensor], left.microbatch[tensor], left.layer[tensor] = category, microbatch, layer
    left.died[tensor] = NONE
    for which in (OWN, ANY):
        slot = _slot(left, which, category, size, microbatch, layer)
        first = left.slots[which, slot]
        if first == NONE:
            left.slots[which, slot] = first = tensor
            left.links[TOP + which, first] = NONE
        left.links[BELOW + which, tensor] = left.links[TOP + which, first]
        left.links[TOP + which, first] = tensor


@kernel
def _join(left: CarriedTensors, category: int, older: int, newer: int) -> None:
    """Makes `older` and `newer` neighbours in the list of a category; NONE stands for either end of the list."""
    if older == NONE:
        left.ends[OLDEST, category] = newer
    else:
        left.links[NEWER, older] = newer
    if newer == NONE:
        left.ends[NEWEST, category] = older
    else:
        left.links[OLDER, newer] = older


@kernel
def _put_after(left: CarriedTensors, tensor: int, older: int) -> None:
    """Puts a tensor into the list of its category after `older`, or at the start where `older` is NONE."""
    category = left.category[tensor]
    newer = left.ends[OLDEST, category] if older == NONE else left.links[NEWER, older]
    _join(left, category, older, tensor)
    _join(left, category, tensor, newer)


@kernel
def _die(left: CarriedTensors, tensor: int, row: int) -> None:
    """Frees `tensor` at `row` and takes it out of the list. The stacks drop it when it comes to their top."""
    left.died[tensor] = row
    _join(left, left.category[tensor], left.links[OLDER, tensor], left.links[NEWER, tensor])


@kernel
def add(left: CarriedTensors, tensor: int, size: int, category: int, microbatch: int, layer: int) -> None:
    """Adds `tensor`, which a block of this micro batch and layer leaves behind."""
    _enter(left, tensor, size, category, microbatch, layer)
    _put_after(left, tensor, left.ends[NEWEST, category])


@kernel
def free(left: CarriedTensors, size: int, category: int, microbatch: int, layer: int, row: int) -> None:
    """Frees `size` bytes at `row` for a block of this micro batch and layer, as far as they are there."""
    for which in (OWN, ANY):
        first = left.slots[which, _slot(left, which, category, size, microbatch, layer)]
        while first != NONE and left.links[TOP + which, first] != NONE:
            tensor = left.links[TOP + which, first]
            left.links[TOP + which, first] = left.links[BELOW + which, tensor]
            if left.died[tensor] == NONE:
                _die(left, tensor, row)
                return
    if not _free_run(left, size, category, row):
        _free_oldest(left, size, category, row)


@kernel
def _free_run(left: CarriedTensors, wanted: int, category: int, row: int) -> bool:
    """Frees the newest neighbours in the list that have `wanted` bytes together, and returns whether there are any."""
    last = left.ends[NEWEST, category]
    older, total = last, 0  # `older` is the first one before those that are counted, up to `last`
    while last != NONE:
        while total < wanted and older != NONE:
            total += left.size[older]
            older = left.links[OLDER, older]
        if total < wanted:
            return False
        if total == wanted:
            while last != older:
                before = left.links[OLDER, last]
                _die(left, last, row)
                last = before
            return True
        total -= left.size[last]
        last = left.links[OLDER, last]
    return False


@kernel
def _free_oldest(left: CarriedTensors, wanted: int, category: int, row: int) -> None:
    """Frees the oldest tensors that have `wanted` bytes together, the last one in part."""
    tensor = left.ends[OLDEST, category]
    while tensor != NONE and wanted > 0:
        newer = left.links[NEWER, tensor]
        if left.size[tensor] > wanted:
            _cut(left, tensor, wanted)
        wanted -= left.final[tensor]
        _die(left, tensor, row)
        tensor = newer


@kernel
def _cut(left: CarriedTensors, tensor: int, size: int) -> None:
    """Keeps `size` bytes of a tensor as itself, and the rest as a piece in its place."""
    piece = left.counts[0]
    left.counts[0] += 1
    rest = left.size[tensor] - size
    _enter(left, piece, rest, left.category[tensor], left.microbatch[tensor], left.layer[tensor])
    _put_after(left, piece, tensor)
    left.final[tensor] = size
    left.source[piece] = left.source[tensor]
