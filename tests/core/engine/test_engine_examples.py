"""Examples small enough to check by hand: streams, host, sync, contention, rendezvous, deadlock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from random_programs import N_OPS, program

from forerun.common.errors import ForerunError
from forerun.core.engine.simulate import Timeline, simulate
from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import Block, Channel, Program, Stream
from forerun.core.program.unfold import unfold

COMPUTE, GATHER, REDUCE = Stream.COMPUTE, Stream.GATHER, Stream.REDUCE


def run(
    what: Program | Block,
    durations: Sequence[int],
    issue: int = 0,
    slow_compute: float = 0,
    slow_network: float = 0,
    network_ops: Sequence[int] = (),
) -> Timeline:
    """Simulate; op i takes durations[i], every op the same host time and slow-down."""
    flat = unfold(what if isinstance(what, Program) else program([what], [[0]]))
    padded = np.zeros(N_OPS, np.int64)
    padded[: len(durations)] = durations
    network = np.isin(np.arange(N_OPS), network_ops)
    slow = np.full(N_OPS, float(slow_compute)), np.full(N_OPS, float(slow_network))
    return simulate(flat, padded, np.full(N_OPS, issue), *slow, network)


def test_streams_overlap_and_events_order_them() -> None:
    block = BlockBuilder()
    gather = block.node(0, GATHER)
    block.node(1, COMPUTE)
    block.node(1, COMPUTE, after=[gather])
    block.node(2, REDUCE)
    timeline = run(block.build("b"), [100, 30, 7])
    assert timeline.start_ps.tolist() == [0, 0, 100, 0]
    assert timeline.end_ps.tolist() == [100, 30, 130, 7]
    assert timeline.end_of_step_ps == 130


def test_short_kernels_wait_for_the_host() -> None:
    block = BlockBuilder()
    for _ in range(4):
        block.node(0)
    timeline = run(block.build("launch bound"), [3], issue=10)
    assert timeline.issue_end_ps.tolist() == [10, 20, 30, 40]
    assert timeline.start_ps.tolist() == [10, 20, 30, 40]
    assert timeline.end_of_step_ps == 43


def test_host_may_end_after_its_kernels() -> None:
    block = BlockBuilder()
    block.node(0)
    assert run(block.build("b"), [0], issue=10).class_end_ps.tolist() == [10]


def test_host_runs_ahead_until_a_sync() -> None:
    block = BlockBuilder()
    block.node(0)
    block.node(0, sync=True)
    block.node(0)
    timeline = run(block.build("b"), [100], issue=10)
    assert timeline.issue_end_ps.tolist() == [10, 20, 220]
    assert timeline.start_ps.tolist() == [10, 110, 220]


def test_event_slot_means_its_last_record_before() -> None:
    block = BlockBuilder()
    block.node(0, GATHER, record=0)
    block.node(1, REDUCE, record=0)
    block.node(2, COMPUTE, wait=[0, 1])
    block.node(3, GATHER, record=0)
    timeline = run(block.build("b"), [100, 30, 1, 1])
    assert timeline.start_ps.tolist() == [0, 0, 30, 100]


def test_event_slots_order_repeated_blocks() -> None:
    block = BlockBuilder()
    block.node(0, COMPUTE, wait=[0])
    block.node(1, GATHER, record=0)
    timeline = run(program([block.build("b")], [[0, 0, 0]]), [10, 50])
    assert timeline.start_ps[::2].tolist() == [0, 50, 100]


def test_contention_stretches_both_sides_while_they_overlap() -> None:
    block = BlockBuilder()
    block.node(0, COMPUTE)
    block.node(1, GATHER)
    # Together until the network has done its 600 at half speed (1200); compute has done 1200 / 1.5 = 800 of 1000.
    timeline = run(block.build("b"), [1000, 600], slow_compute=0.5, slow_network=1.0, network_ops=[1])
    assert timeline.end_ps.tolist() == [1400, 1200]


def test_contention_starts_and_stops_in_the_middle() -> None:
    block = BlockBuilder()
    first = block.node(0, REDUCE)
    block.node(1, COMPUTE)
    block.node(2, GATHER, after=[first])
    # Compute is alone until 300, then needs 1.25 for one while the gather moves at half speed for 2 * 200 = 400:
    # 300 + 320 done at 700, 380 left alone.
    timeline = run(block.build("b"), [300, 1000, 200], slow_compute=0.25, slow_network=1.0, network_ops=[2])
    assert timeline.start_ps.tolist() == [0, 0, 300]
    assert timeline.end_ps.tolist() == [300, 1080, 700]


def test_every_node_beside_a_long_one_is_slowed() -> None:
    block = BlockBuilder()
    for _ in range(3):
        block.node(0, COMPUTE)
    block.node(1, GATHER)
    timeline = run(block.build("b"), [100, 1000], slow_compute=0.5, slow_network=1.0, network_ops=[1])
    # 3 x 150 beside each other; the gather has done 225 by then.
    assert timeline.end_ps.tolist() == [150, 300, 450, 1225]


def test_two_network_streams_do_not_slow_each_other() -> None:
    block = BlockBuilder()
    block.node(0, GATHER)
    block.node(0, REDUCE)
    timeline = run(block.build("b"), [100], slow_compute=1, slow_network=1, network_ops=[0])
    assert timeline.end_ps.tolist() == [100, 100]


def test_network_op_on_the_compute_stream_does_not_slow_itself() -> None:
    block = BlockBuilder()
    block.node(0, COMPUTE)
    timeline = run(block.build("b"), [100], slow_compute=1, slow_network=1, network_ops=[0])
    assert timeline.end_ps.tolist() == [100]


def test_a_transfer_between_classes_is_outside_contention() -> None:
    send, receive = BlockBuilder(), BlockBuilder()
    send.node(0, COMPUTE)
    send.node(1, Stream.PP_SEND, channel=0)
    receive.node(1, Stream.PP_RECV, channel=0)
    two = program([send.build("s"), receive.build("r")], [[0], [1]], [Channel("c", (0, 1))])
    timeline = run(two, [100, 60], slow_compute=1, slow_network=1, network_ops=[2])
    assert timeline.end_ps.tolist() == [100, 60, 60]


def test_a_collective_between_classes_slows_compute_of_each_from_its_start() -> None:
    early, late = BlockBuilder(), BlockBuilder()
    early.node(0)
    early.node(1, REDUCE, channel=0)
    late.node(2)
    late.node(1, REDUCE, after=[0], channel=0)
    late.node(3)
    two = program([early.build("e"), late.build("l")], [[0], [1]], [Channel("c", (0, 1))])
    timeline = run(two, [100, 60, 50, 90], slow_compute=1, network_ops=[1])
    # Both sides meet at 50 until 110; 60 at half speed do 30 of the work.
    assert timeline.start_ps.tolist() == [0, 50, 0, 50, 50]
    assert timeline.end_ps.tolist() == [130, 110, 50, 110, 170]


def test_a_meeting_of_the_network_is_slowed_by_the_compute_of_its_own_class() -> None:
    quiet, busy = BlockBuilder(), BlockBuilder()
    quiet.node(1, REDUCE, channel=0)
    busy.node(0)
    busy.node(1, REDUCE, channel=0)
    two = program([quiet.build("q"), busy.build("b")], [[0], [1]], [Channel("c", (0, 1))])
    timeline = run(two, [1000, 60], slow_network=1, network_ops=[1])
    assert timeline.end_ps.tolist() == [60, 1000, 120]


def one_forward_one_backward(microbatches: int) -> Program:
    """Two stages: op 0 forward, 1 backward, 2 transfer. Stage 0 runs one forward ahead."""
    activation, gradient = Channel("activation", (0, 1)), Channel("gradient", (1, 0))

    def forward(stage: int) -> Block:
        block = BlockBuilder()
        if stage == 0:
            node = block.node(0)
            block.node(2, Stream.PP_SEND, after=[node], channel=0)
        else:
            node = block.node(2, Stream.PP_RECV, channel=0)
            block.node(0, after=[node])
        return block.build(f"forward {stage}")

    def backward(stage: int) -> Block:
        block = BlockBuilder()
        if stage == 1:
            node = block.node(1)
            block.node(2, Stream.PP_SEND, after=[node], channel=1)
        else:
            node = block.node(2, Stream.PP_RECV, channel=1)
            block.node(1, after=[node])
        return block.build(f"backward {stage}")

    blocks = [forward(0), backward(0), forward(1), backward(1)]
    first = [0] + [0, 1] * (microbatches - 1) + [1]
    return program(blocks, [first, [2, 3] * microbatches], [activation, gradient])


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
def test_one_forward_one_backward_has_the_known_length(microbatches: int) -> None:
    forward, backward = 100, 200
    free = run(one_forward_one_backward(microbatches), [forward, backward, 0])
    # Narayanan et al. 2021, section 2.2: m (tf + tb) + (p - 1) (tf + tb).
    assert free.end_of_step_ps == (microbatches + 1) * (forward + backward)


def test_transfers_lengthen_the_pipeline() -> None:
    # One batch: forward 100, move 10, forward 100, backward 200, move 10, backward 200.
    timeline = run(one_forward_one_backward(1), [100, 200, 10])
    assert timeline.end_of_step_ps == 620
    assert timeline.start_ps.tolist() == [0, 100, 410, 420, 100, 110, 210, 410]


def test_members_of_a_meeting_start_together() -> None:
    early, late = BlockBuilder(), BlockBuilder()
    early.node(1, Stream.TP, channel=0)
    late.node(0)
    late.node(2, Stream.TP, after=[0], channel=0)
    timeline = run(program([early.build("e"), late.build("l")], [[0], [1]], [Channel("c", (0, 1))]), [50, 5, 9])
    assert timeline.start_ps.tolist() == [50, 0, 50]
    assert timeline.end_ps.tolist() == [55, 50, 59]


def test_crossed_sends_on_streams_of_their_own_are_no_deadlock() -> None:
    blocks = []
    for sent, received in ((0, 1), (1, 0)):
        block = BlockBuilder()
        block.node(0, Stream.PP_SEND, channel=sent)
        block.node(0, Stream.PP_RECV, channel=received)
        blocks.append(block.build(f"send {sent}"))
    channels = [Channel("right", (0, 1)), Channel("left", (1, 0))]
    assert run(program(blocks, [[0], [1]], channels), [10]).end_of_step_ps == 10


@pytest.mark.parametrize("slow", [0.0, 0.5])
def test_deadlock_names_class_step_op_and_channel(slow: float) -> None:
    blocks = []
    for first, second in ((0, 1), (1, 0)):
        block = BlockBuilder()
        block.node(3, Stream.TP, channel=first)
        block.node(4, Stream.TP, channel=second)
        blocks.append(block.build(f"{first} first"))
    channels = [Channel("red", (0, 1)), Channel("blue", (0, 1))]
    crossed = program(blocks, [[0], [1]], channels)
    with pytest.raises(ForerunError) as caught:
        run(crossed, [1] * N_OPS, slow_compute=slow, network_ops=[5])
    text = str(caught.value)
    assert text == (
        "deadlock: these nodes never run: class 'class 0' step 0 node 0 (op 3, stream 3) on channel 'red'; "
        "class 'class 1' step 0 node 0 (op 3, stream 3) on channel 'blue'"
    )


def test_deadlock_of_a_host_that_waits_for_a_meeting() -> None:
    waits, late = BlockBuilder(), BlockBuilder()
    waits.node(0, Stream.PP_SEND, channel=0, sync=True)
    waits.node(0, Stream.PP_RECV, channel=1)
    late.node(0, Stream.PP_SEND, channel=1, sync=True)
    late.node(0, Stream.PP_RECV, channel=0)
    channels = [Channel("there", (0, 1)), Channel("back", (0, 1))]
    with pytest.raises(ForerunError, match=r"deadlock: .*'there'.*'back'"):
        run(program([waits.build("w"), late.build("l")], [[0], [1]], channels), [1])


@pytest.mark.parametrize("column", range(5))
def test_columns_of_the_wrong_length_are_refused(column: int) -> None:
    block = BlockBuilder()
    block.node(0)
    flat = unfold(program([block.build("b")], [[0]]))
    costs = [
        np.zeros(N_OPS, np.int64),
        np.zeros(N_OPS, np.int64),
        np.zeros(N_OPS),
        np.zeros(N_OPS),
        np.zeros(N_OPS, bool),
    ]
    costs[column] = costs[column][:-1]
    with pytest.raises(ForerunError, match=f"has {N_OPS - 1} entries, the program has {N_OPS} ops"):
        simulate(flat, *costs)


def test_a_class_without_steps_is_done_at_once() -> None:
    block = BlockBuilder()
    block.node(0)
    timeline = run(program([block.build("b")], [[], [0]]), [5])
    assert timeline.class_end_ps.tolist() == [0, 5]
