from __future__ import annotations

import pytest
from random_programs import program

from forerun.common.errors import ForerunError
from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import Block, Channel, Stream
from forerun.core.program.unfold import unfold


def meeting_block(channel: int, count: int = 1) -> Block:
    block = BlockBuilder()
    for _ in range(count):
        block.node(0, Stream.TP, channel=channel)
    return block.build(f"meets {count}")


def test_slots_become_predecessors_within_the_class_only() -> None:
    block = BlockBuilder()
    block.node(0, wait=[1])
    block.node(1, after=[0], record=1)
    flat = unfold(program([block.build("b")], [[0, 0], [0]]))
    assert flat.class_ptr.tolist() == [0, 4, 6]
    assert flat.pred_ptr.tolist() == [0, 0, 1, 2, 3, 3, 4]
    edges = [flat.pred[flat.pred_ptr[i] : flat.pred_ptr[i + 1]].tolist() for i in range(6)]
    assert edges == [[], [0], [1], [2], [], [4]]
    assert flat.step.tolist() == [0, 0, 1, 1, 0, 0]


def test_the_kth_nodes_of_a_channel_meet() -> None:
    blocks = [meeting_block(0), meeting_block(0, 3), meeting_block(1)]
    channels = [Channel("x", (0, 1)), Channel("y", (1, 2))]
    flat = unfold(program(blocks, [[0, 0, 0], [2, 1], [2]], channels))
    assert flat.meeting.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert flat.meeting_size.tolist() == [2, 2, 2, 2]
    assert flat.meeting_channel.tolist() == [0, 0, 0, 1]
    assert flat.channel_names == ("x", "y")


def test_unequal_members_name_channel_and_counts() -> None:
    channels = [Channel("fine", (0, 1)), Channel("pipe 0>1", (0, 1))]
    with pytest.raises(ForerunError, match=r"'pipe 0>1' joins class 0, class 1.*found class 0: 2, class 1: 3"):
        unfold(program([meeting_block(1, 2), meeting_block(1, 3)], [[0], [1]], channels))


def test_a_class_that_is_no_member_may_not_meet() -> None:
    with pytest.raises(ForerunError, match=r"'pipe' joins class 0, class 1.*class 2: 1"):
        unfold(program([meeting_block(0)], [[0], [0], [0]], [Channel("pipe", (0, 1))]))


def test_an_empty_program_is_refused() -> None:
    with pytest.raises(ForerunError, match="0 blocks and 1 rank classes"):
        unfold(program([], [[]]))
