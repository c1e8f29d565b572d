"""Random well-formed Programs for property tests, and short ways to write one by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from forerun.core.program.builder import BlockBuilder, OpTableBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import N_CATEGORIES, Block, Channel, OpTable, Program, RankClass, Stream

N_OPS = 6
N_SLOTS = 3
# Mostly two streams, so that nodes run beside each other and one after the other.
STREAMS = st.sampled_from([Stream.COMPUTE, Stream.COMPUTE, Stream.GATHER, Stream.GATHER, *Stream])


def op_table(n_ops: int = N_OPS) -> OpTable:
    ops = OpTableBuilder()
    for i in range(n_ops):
        ops.memory(f"op{i}", 100.0 * i, 50.0)
    return ops.build()


def rank_class(name: str, blocks: Sequence[int]) -> RankClass:
    steps = np.array(blocks, np.int32)
    numbers = np.arange(len(steps), dtype=np.int32)
    return RankClass(name, 1, steps, numbers, numbers, np.zeros(N_CATEGORIES, np.int64))


def program(blocks: Sequence[Block], sequences: Sequence[Sequence[int]], channels: Sequence[Channel] = ()) -> Program:
    return Program(
        ops=op_table(),
        blocks=tuple(blocks),
        rank_classes=tuple(rank_class(f"class {i}", s) for i, s in enumerate(sequences)),
        groups=(CommGroup("tp", 8, 1, 8),),
        channels=tuple(channels),
        modules=("m",),
    )


@st.composite
def plain_blocks(draw: st.DrawFn, name: str, sync: bool = True) -> Block:
    """A block of some nodes with predecessors, event slots and tensors, and no channel."""
    block = BlockBuilder()
    for i in range(draw(st.integers(1, 6))):
        after = draw(st.lists(st.integers(0, i - 1), max_size=2)) if i and draw(st.booleans()) else []
        node = block.node(
            draw(st.integers(0, N_OPS - 1)),
            draw(STREAMS),
            after=after,
            wait=draw(st.lists(st.integers(0, N_SLOTS - 1), max_size=2)) if draw(st.booleans()) else [],
            record=draw(st.integers(-1, N_SLOTS - 1)),
            sync=sync and draw(st.integers(0, 7)) == 0,
        )
        if draw(st.booleans()):
            block.tensor(draw(st.integers(0, 1000)), draw(st.integers(0, N_CATEGORIES - 1)), node, -1)
    return block.build(name)


def transfer_block(channel: int, stream: int, slot: int) -> Block:
    """One node that meets on `channel`: it waits for an event and records it."""
    block = BlockBuilder()
    block.node(channel % N_OPS, stream, wait=(slot,), record=slot, channel=channel)
    return block.build(f"transfer {channel}")


@st.composite
def random_programs(draw: st.DrawFn) -> Program:
    """Up to three rank classes that run random blocks and meet on channels, without deadlock.

    Every meeting is put at the end of the sequences of its members at once, so all classes see them in one order.
    """
    n_classes = draw(st.integers(1, 3))
    blocks = [draw(plain_blocks(f"block {i}")) for i in range(draw(st.integers(1, 3)))]
    n_plain = len(blocks)
    channels = []
    if n_classes > 1:
        for i in range(draw(st.integers(1, 3))):
            members = draw(st.lists(st.integers(0, n_classes - 1), min_size=2, max_size=n_classes, unique=True))
            channels.append(Channel(f"channel {i}", tuple(members)))
            blocks.append(transfer_block(i, draw(STREAMS), draw(st.integers(0, N_SLOTS - 1))))
    sequences: list[list[int]] = [[] for _ in range(n_classes)]
    for _ in range(draw(st.integers(1, 12))):
        if channels and draw(st.booleans()):
            meeting = draw(st.integers(0, len(channels) - 1))
            for member in channels[meeting].members:
                sequences[member].append(n_plain + meeting)
        else:
            sequences[draw(st.integers(0, n_classes - 1))].append(draw(st.integers(0, n_plain - 1)))
    return program(blocks, sequences, channels)


def as_single_blocks(folded: Program) -> Program:
    """The same Program with the sequence of every rank class written out as one block."""
    blocks = []
    for number, owner in enumerate(folded.rank_classes):
        out = BlockBuilder()
        for index in owner.block:
            block, base = folded.blocks[index], len(out)
            for i in range(len(block)):
                preds = block.pred[block.pred_ptr[i] : block.pred_ptr[i + 1]].tolist()
                out.node(
                    int(block.op[i]),
                    int(block.stream[i]),
                    after=[base + p for p in preds if p >= 0],
                    wait=[-1 - p for p in preds if p < 0],
                    record=int(block.record[i]),
                    channel=int(block.channel[i]),
                    sync=bool(block.sync[i]),
                )
        blocks.append(out.build(f"all of class {number}"))
    return program(blocks, [[i] for i in range(len(blocks))], folded.channels)
