"""The lifetimes of the tensors in a rank class's step, and the streams that they belong to.

Rows count the events of memory, in the order of the host. Streams are FSDP's: sums of gradients come from the stream of
the reductions, buffers of all-gathers from that of the gathers, everything else from the stream of the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.common.jit import kernel
from forerun.core.memory.carried_tensors import NONE, CarriedTensors, add, free, no_carried_tensors
from forerun.core.program.types import I8, I32, I64, Block, Category, Collective, Phase, Program, RankClass, Stream

_NOTHING = np.zeros(0, np.int8)  # the narrowest type, so that columns keep their own


@dataclass(frozen=True, slots=True)
class TensorLifetimes:
    """The tensors of a step, and the pieces of those that go in parts, (n,)."""

    size: I64
    category: I8
    stream: I8
    born: I64
    """row"""
    died: I64
    """row; the last row of all for tensors that nobody frees"""
    n_rows: int
    optimizer: int
    """row before which the optimizer works for the first time; the last one where it never does"""


def tensor_lifetimes(program: Program, rank_class: RankClass) -> TensorLifetimes:
    """Returns the tensors of one step of `rank_class`."""
    used = np.flatnonzero(np.bincount(rank_class.block, minlength=len(program.blocks)))
    place = np.zeros(len(program.blocks), np.int32)
    place[used] = np.arange(len(used))
    steps, some = place[rank_class.block], [program.blocks[number] for number in used.tolist()]
    streams, optimizes = _streams_and_optimizers(program, some)
    blocks = _block_lifetimes(some, streams)
    outlive = np.diff(_starts(blocks.died == NONE)[blocks.first])
    made, taken = np.diff(blocks.first), np.diff(blocks.first_taken)
    left = no_carried_tensors(int(made[steps].sum()), int(outlive[steps].sum()), int(taken[steps].sum()))
    stream, born = np.empty(len(left.size), np.int8), np.empty(len(left.size), np.int64)
    n_rows = _follow(blocks, steps, rank_class.microbatch, rank_class.layer, left, stream, born)
    n, first = int(left.counts[0]), np.flatnonzero(optimizes[steps])[:1]
    optimizer = int(blocks.n_rows[steps[: first[0]]].sum()) if len(first) else n_rows
    return TensorLifetimes(left.final[:n], left.category[:n], stream[:n], born[:n], left.died[:n], n_rows, optimizer)


class _BlockLifetimes(NamedTuple):
    """The tensors that some blocks make, and those of earlier blocks that they free, block after block.

    Rows count from a block's start.
    """

    first: I64
    """(blocks + 1,) first tensor of each"""
    size: I64
    category: I8
    stream: I8
    born: I64
    died: I64
    """row; NONE for one that outlives the block"""
    first_taken: I64
    """(blocks + 1,) first tensor that each takes"""
    taken_row: I64
    taken_size: I64
    taken_category: I8
    n_rows: I64
    """(blocks,)"""


def _block_lifetimes(blocks: Sequence[Block], streams: I8) -> _BlockLifetimes:
    """Returns lifetimes, in which node i allocates at 2 i and frees at 2 i + 1. Simultaneous events stay in the order
    of the tensors.
    """
    n = len(blocks)
    owner = np.repeat(np.arange(n), [len(block.tensor_bytes) for block in blocks])
    size = _column(blocks, "tensor_bytes").astype(np.int64, copy=False)  # so that no blocks compile nothing anew
    category = _column(blocks, "tensor_category")
    alloc, freed_at = _column(blocks, "tensor_alloc"), _column(blocks, "tensor_free")
    made, freed = np.flatnonzero((size > 0) & (alloc >= 0)), np.flatnonzero((size > 0) & (freed_at >= 0))
    owners = np.concatenate([owner[made], owner[freed]])
    moment = np.concatenate([2 * alloc[made].astype(np.int64), 2 * freed_at[freed].astype(np.int64) + 1])
    n_rows = np.bincount(owners, minlength=n)
    row = np.empty(len(moment), np.int64)
    row[np.argsort(moment + owners * (moment.max(initial=0) + 1), kind="stable")] = np.arange(len(moment))
    row -= _starts(n_rows)[owners]
    died = np.full(len(size), NONE, np.int64)
    died[freed] = row[len(made) :]
    taken = freed[alloc[freed] < 0]
    taken = taken[np.lexsort((died[taken], owner[taken]))]
    return _BlockLifetimes(
        first=_starts(np.bincount(owner[made], minlength=n)),
        size=size[made],
        category=category[made],
        stream=streams[made],
        born=row[: len(made)],
        died=died[made],
        first_taken=_starts(np.bincount(owner[taken], minlength=n)),
        taken_row=died[taken],
        taken_size=size[taken],
        taken_category=category[taken],
        n_rows=n_rows,
    )


def _streams_and_optimizers(program: Program, blocks: Sequence[Block]) -> tuple[I8, npt.NDArray[np.bool_]]:
    """Returns the stream on which each tensor of `blocks` is allocated, and which of them are the optimizer's.

    A forward that waits for collectives gathers parameters, anything else reduces gradients.
    """
    n, category = len(blocks), _column(blocks, "tensor_category")
    owner = np.repeat(np.arange(n), [len(block) for block in blocks])
    phase, stream = _column(blocks, "phase"), _column(blocks, "stream")
    is_collective = program.ops.collective[_column(blocks, "op")] != Collective.NONE.value
    beside = is_collective & ((stream == Stream.GATHER.value) | (stream == Stream.REDUCE.value))
    waits = np.bincount(owner[beside], minlength=n) > 0
    only_forward = np.bincount(owner[phase != Phase.FORWARD.value], minlength=n) == 0
    of_tensor = np.repeat(np.arange(n), [len(block.tensor_bytes) for block in blocks])
    gathered = (category == Category.UNSHARDED.value) | (category == Category.COMMUNICATION.value)
    streams = np.full(len(category), Stream.COMPUTE, np.int8)
    streams[gathered & (waits & only_forward)[of_tensor]] = Stream.GATHER
    streams[(category == Category.GRADIENT.value) & (waits & ~only_forward)[of_tensor]] = Stream.REDUCE
    return streams, np.bincount(owner[phase == Phase.OPTIMIZER.value], minlength=n) > 0


def _column(blocks: Sequence[Block], name: str) -> npt.NDArray[Any]:
    return np.concatenate([_NOTHING, *(getattr(block, name) for block in blocks)])


def _starts(counts: I64) -> I64:
    """Returns the start of each run, and the end of the last one."""
    return np.concatenate(([0], np.cumsum(counts)))


@kernel
def _follow(
    blocks: _BlockLifetimes, steps: I32, microbatch: I32, layer: I32, left: CarriedTensors, stream: I8, born: I64
) -> int:
    """Runs all steps: fills `left`, and the stream and the row of birth of each tensor. Returns the number of rows."""
    row = tensor = 0
    for step in range(len(steps)):
        block, tag = steps[step], (microbatch[step], layer[step])
        for i in range(blocks.first_taken[block], blocks.first_taken[block + 1]):
            free(left, blocks.taken_size[i], blocks.taken_category[i], tag[0], tag[1], row + blocks.taken_row[i])
        for i in range(blocks.first[block], blocks.first[block + 1]):
            stream[tensor], born[tensor] = blocks.stream[i], row + blocks.born[i]
            if blocks.died[i] == NONE:
                add(left, tensor, blocks.size[i], blocks.category[i], tag[0], tag[1])
            else:
                left.final[tensor], left.category[tensor] = blocks.size[i], blocks.category[i]
                left.died[tensor] = row + blocks.died[i]
            tensor += 1
        row += blocks.n_rows[block]
    for each in range(left.counts[0]):
        stream[each], born[each] = stream[left.source[each]], born[left.source[each]]
        if left.died[each] == NONE:
            left.died[each] = row
    return row
