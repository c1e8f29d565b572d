"""What a rank class of a Program asks the caching allocator for, and what the allocator makes of some steps of it.

Order is the host's. What lives through the step is there before the first one, except for the optimizer's states, which
torch.optim makes in its first step, out of what the activations left. A Program says how much that is, not in which
tensors: it is split as the gradients are, and is one buffer where the step makes none (Megatron-LM's flat buffers).

Streams are FSDP's: sums of gradients come from the stream of the reductions, buffers of all-gathers from that of the
gathers, everything else from the stream of the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from forerun.memory.allocator_settings import AllocatorSettings
from forerun.memory.caching_allocator import ALLOC, FREE, CachingAllocator, Events, Replayed
from forerun.memory.left import Left
from forerun.program.types import I8, I64, N_STREAMS, Block, Category, Collective, Phase, Program, RankClass, Stream

PRIVATE_POOL = N_STREAMS
"""stands for a stream: blocks of a private pool, as those of a stream, serve nobody else"""
_OPTIMIZER_STATES = 2
"""tensors that Adam keeps for each parameter"""
_STEPS = 3
"""the first fills the cache, the optimizer's states go into it, and the next ones find it so"""
_NOTHING = np.zeros(0, np.int64)
_NOTHING_SMALL = np.zeros(0, np.int8)


@dataclass(frozen=True, slots=True)
class StepEvents:
    """Allocations and frees of one step, and of what lives through all of them, of the same tensors."""

    step: Events
    optimizer: int
    """event of the step before which the optimizer works for the first time"""
    before: Events
    """what is there before the first step"""
    states: Events
    """what the optimizer makes in the first step"""


def step_events(program: Program, rank_class: int, apart: Sequence[Category] = ()) -> StepEvents:
    """The events of one rank class. What a step leaves behind is freed at its end, as the next one makes it anew.

    Tensors of the categories `apart` come from a private pool, as those of CUDA graphs.
    """
    cls = program.rank_classes[rank_class]
    lives = _lives(program, cls)
    streams = np.where(np.isin(lives.category, apart), np.int8(PRIVATE_POOL), lives.stream)
    kept, states = [], []
    gradients = lives.size[lives.category == Category.GRADIENT]
    for category in Category:
        pieces = _split(int(cls.resident_bytes[category]), gradients)
        if category == Category.OPTIMIZER:
            states += [piece // _OPTIMIZER_STATES for piece in pieces for _ in range(_OPTIMIZER_STATES)]
        else:
            kept += pieces
    n = len(lives.size)
    size = np.concatenate([lives.size, np.array(kept + states, np.int64)])
    stream = np.concatenate([streams, np.full(len(kept) + len(states), Stream.COMPUTE, np.int8)])

    def allocations(first: int, count: int) -> Events:
        return Events(np.full(count, ALLOC, np.int8), np.arange(first, first + count, dtype=np.int32), size, stream)

    row = np.concatenate([lives.born, lives.died])
    order = np.argsort(row, kind="stable")
    kind = np.repeat(np.array([ALLOC, FREE], np.int8), n)[order]
    tensor = np.tile(np.arange(n, dtype=np.int32), 2)[order]
    return StepEvents(
        step=Events(kind, tensor, size, stream),
        optimizer=int(np.searchsorted(row[order], lives.optimizer)),
        before=allocations(n, len(kept)),
        states=allocations(n + len(kept), len(states)),
    )


def _split(size: int, like: I64) -> list[int]:
    """`size` bytes in pieces that are to each other as those of `like`."""
    ends = np.cumsum(like) if len(like) else np.ones(1, np.int64)
    edges = [0, *(size * end // int(ends[-1]) for end in ends.tolist())]
    return [last - first for first, last in pairwise(edges) if last > first]


def replay_steps(
    program: Program,
    rank_class: int,
    settings: AllocatorSettings | None = None,
    available_bytes: int | None = None,
    steps: int = _STEPS,
    apart: Sequence[Category] = (),
) -> tuple[Replayed, ...]:
    """What the allocator has done after each of some steps; the last is one that runs out of memory, if any does.

    Args:
        settings: what PYTORCH_CUDA_ALLOC_CONF says.
        available_bytes: what the device leaves to the allocator; None for as much as is wanted.
        apart: categories of tensors that come from a private pool.
    """
    events = step_events(program, rank_class, apart)
    allocator, step = CachingAllocator(settings, available_bytes), events.step
    place = allocator.follow(events.before)
    done: list[Replayed] = []
    while len(done) < steps and not (done and done[-1].out_of_memory):
        if done:
            allocator.follow(step, place)
        else:
            for part in (_part(step, 0, events.optimizer), events.states, _part(step, events.optimizer, len(step))):
                allocator.follow(part, place)
        done.append(allocator.result)
    return tuple(done)


def _part(events: Events, first: int, last: int) -> Events:
    return Events(events.kind[first:last], events.tensor[first:last], events.size_bytes, events.stream)


@dataclass(frozen=True, slots=True)
class _Lives:
    """The tensors of a step. Rows count what happens to memory, over all of the step."""

    size: I64
    category: I8
    stream: I8
    born: I64
    """row"""
    died: I64
    optimizer: int
    """row before which the optimizer works for the first time"""


@dataclass(frozen=True, slots=True)
class _BlockLives:
    """The tensors that a block makes, and what it takes of earlier ones. Rows count from its start."""

    size: I64
    category: I8
    stream: I8
    born: I64
    died: I64
    """row; -1 for one that outlives the block"""
    left: tuple[tuple[int, int, int], ...]
    """(tensor, bytes, category) of those that do"""
    taken: tuple[tuple[int, int, int], ...]
    """(row, bytes, category) of what earlier blocks left"""
    n_rows: int
    optimizes: bool


def _lives(program: Program, cls: RankClass) -> _Lives:
    steps = cls.block.tolist()
    blocks = {number: _block_lives(program, program.blocks[number]) for number in set(steps)}
    left, optimizer = Left(), None
    row = tensor = 0
    rows, tensors = [], []
    for number, microbatch, layer in zip(steps, cls.microbatch.tolist(), cls.layer.tolist(), strict=True):
        block, tag = blocks[number], (microbatch, layer)
        if block.optimizes and optimizer is None:
            optimizer = row
        for at, size, category in block.taken:
            left.free(size, category, tag, row + at)
        for made, size, category in block.left:
            left.add(tensor + made, size, category, tag)
        rows.append(row)
        tensors.append(len(block.size))
        row += block.n_rows
        tensor += len(block.size)
    left.free_all(row)
    starts = np.repeat(np.array(rows, np.int64), tensors)
    died = np.concatenate([_NOTHING, *(blocks[number].died for number in steps)])
    sizes = np.concatenate([_NOTHING, *(blocks[number].size for number in steps)])
    born = np.concatenate([_NOTHING, *(blocks[number].born for number in steps)]) + starts
    died = np.where(died >= 0, died + starts, row)
    whole = np.array([which for which in left.died if which >= 0], np.int64)
    died[whole] = [left.died[which] for which in whole.tolist()]
    sizes[whole] = [left.size[which] for which in whole.tolist()]
    pieces = range(-1, -1 - len(left.source), -1)
    origin = np.array([_whole(left.source, piece) for piece in pieces], np.int64)
    every = np.concatenate([np.arange(tensor), origin])
    return _Lives(
        np.concatenate([sizes, np.array([left.size[piece] for piece in pieces], np.int64)]),
        np.concatenate([_NOTHING_SMALL, *(blocks[number].category for number in steps)])[every],
        np.concatenate([_NOTHING_SMALL, *(blocks[number].stream for number in steps)])[every],
        born[every],
        np.concatenate([died, np.array([left.died[piece] for piece in pieces], np.int64)]),
        row if optimizer is None else optimizer,
    )


def _whole(source: list[int], piece: int) -> int:
    """The tensor that a piece, or a piece of a piece, was cut off from."""
    while piece < 0:
        piece = source[-1 - piece]
    return piece


def _block_lives(program: Program, block: Block) -> _BlockLives:
    """Node i allocates at 2 i and frees at 2 i + 1; what happens at once stays in the order of the tensors."""
    some = block.tensor_bytes > 0
    made = np.flatnonzero(some & (block.tensor_alloc >= 0))
    freed = np.flatnonzero(some & (block.tensor_free >= 0))
    moment = np.concatenate([2 * block.tensor_alloc[made], 2 * block.tensor_free[freed] + 1])
    row = np.empty(len(moment), np.int64)
    row[np.argsort(moment, kind="stable")] = np.arange(len(moment))
    died = np.full(len(some), -1, np.int64)
    died[freed] = row[len(made) :]
    size, category = block.tensor_bytes[made], block.tensor_category[made]
    left = np.flatnonzero(died[made] < 0)
    taken = freed[block.tensor_alloc[freed] < 0]
    taken = taken[np.argsort(died[taken])]
    return _BlockLives(
        size,
        category,
        _streams(program, block)[made],
        row[: len(made)],
        died[made],
        tuple(zip(left.tolist(), size[left].tolist(), category[left].tolist(), strict=True)),
        tuple(
            zip(
                *(died[taken].tolist(), block.tensor_bytes[taken].tolist(), block.tensor_category[taken].tolist()),
                strict=True,
            )
        ),
        len(moment),
        bool((block.phase == Phase.OPTIMIZER).any()),
    )


def _streams(program: Program, block: Block) -> I8:
    """The stream on which each tensor of the block is allocated: that of the gathers for what parameters are gathered
    in, that of the reductions for sums of gradients."""
    stream = np.full(len(block.tensor_bytes), Stream.COMPUTE, np.int8)
    collective = program.ops.collective[block.op]
    reduces = (collective != Collective.NONE) & np.isin(block.stream, (Stream.GATHER, Stream.REDUCE))
    if reduces.any() and np.isin(block.phase, (Phase.FORWARD,)).all():
        stream[np.isin(block.tensor_category, (Category.UNSHARDED, Category.COMMUNICATION))] = Stream.GATHER
    elif reduces.any():
        stream[block.tensor_category == Category.GRADIENT] = Stream.REDUCE
    return stream
