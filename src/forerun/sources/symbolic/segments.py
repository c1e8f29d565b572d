"""Cuts the passes of a unit at its exchanges of tokens, so that two passes can run side by side.

A *segment* ends with the launch of an exchange, and the next segment of the same pass waits for it. Segments of a
forward pass and of another micro batch's backward pass take turns on the compute stream, so that either's exchanges go
on while the other computes (DualPipe, arXiv 2412.19437, section 3.2.1; Megatron-Core's combined_1f1b).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import TypeVar

import numpy as np

from forerun.core.program.types import I8, Block, Stream

FORWARD_EXCHANGE, BACKWARD_EXCHANGE = 0, 1
"""event slots that the exchanges of a cut pass record"""
_EP = int(Stream.EP)

T = TypeVar("T")


def cut(block: Block, slot: int) -> list[Block]:
    """Returns the pieces of `block` between its exchanges; the last node of all but the last piece records `slot`.

    What a later node waits for in an earlier piece is either an exchange, or before it on its own stream.
    """
    ends = _ends_of_pieces(block.stream)
    bounds = [0, *ends, len(block)]
    if len(bounds) == 2:
        return [block]
    places = np.searchsorted(np.array(bounds[1:]), np.arange(len(block)), side="right").tolist()
    return [_piece(block, slot, bounds, places, number) for number in range(len(bounds) - 1)]


def _ends_of_pieces(stream: I8) -> list[int]:
    """Returns the first node after each exchange, or after several exchanges in a row, within a block."""
    here = stream == Stream.EP
    return (np.flatnonzero(here[:-1] & ~here[1:]) + 1).tolist() if len(stream) else []


def _piece(block: Block, slot: int, bounds: Sequence[int], places: Sequence[int], number: int) -> Block:
    first, last = bounds[number], bounds[number + 1]
    pred, pred_ptr = [], [0]
    for node in range(first, last):
        before = block.pred[block.pred_ptr[node] : block.pred_ptr[node + 1]].tolist()
        waits = {-1 - slot for other in before if 0 <= other < first and block.stream[other] == Stream.EP}
        pred += [other - first if other >= 0 else other for other in before if other < 0 or other >= first]
        pred += sorted(waits)
        pred_ptr.append(len(pred))
    record = block.record[first:last].copy()
    if number < len(bounds) - 2:
        record[-1] = slot
    tensors = [
        (size, category, alloc - first if starts else -1, free - first if ends else -1)
        for size, category, alloc, free in zip(
            block.tensor_bytes.tolist(),
            block.tensor_category.tolist(),
            block.tensor_alloc.tolist(),
            block.tensor_free.tolist(),
            strict=True,
        )
        for starts, ends in [(alloc >= 0 and places[alloc] == number, free >= 0 and places[free] == number)]
        if starts or ends
    ]
    columns = np.array(tensors, np.int64).reshape(-1, 4)
    return Block(
        name=f"{block.name}.{number + 1}",
        op=block.op[first:last],
        stream=block.stream[first:last],
        phase=block.phase[first:last],
        module=block.module[first:last],
        pred_ptr=np.array(pred_ptr, np.int32),
        pred=np.array(pred, np.int32),
        record=record,
        channel=block.channel[first:last],
        sync=block.sync[first:last],
        tensor_bytes=columns[:, 0].copy(),
        tensor_category=columns[:, 1].astype(np.int8),
        tensor_alloc=columns[:, 2].astype(np.int32),
        tensor_free=columns[:, 3].astype(np.int32),
    )


def exchanges_tokens(block: Block) -> bool:
    """Returns whether `block` has an exchange of tokens."""
    return _EP in block.stream.tobytes()


def segments(pieces: Iterable[T], exchanges: Callable[[T], bool]) -> list[list[T]]:
    """Groups the pieces of a pass so that each group but the last ends with a piece that `exchanges` tokens."""
    groups: list[list[T]] = [[]]
    for piece in pieces:
        groups[-1].append(piece)
        if exchanges(piece):
            groups.append([])
    return groups


def in_turns(forward: Sequence[Sequence[T]], backward: Sequence[Sequence[T]]) -> list[T]:
    """Returns the blocks of the segments of a forward and a backward pass in the order in which the host issues them.

    The pass with more segments begins; of equally many, the backward pass.
    """
    pairs = (forward, backward) if len(forward) > len(backward) else (backward, forward)
    return [block for pair in zip_longest(*pairs, fillvalue=()) for segment in pair for block in segment]
