"""What the result must not depend on: how classes, streams, edges and meetings are numbered, and equal classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from random_programs import N_OPS, N_SLOTS, STREAMS, plain_blocks, program, random_programs

from forerun.core.engine.simulate import Timeline, simulate
from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import N_STREAMS, Block, Channel, FlatProgram, Program, Stream
from forerun.core.program.unfold import unfold

COSTS = st.lists(st.integers(0, 10**6), min_size=N_OPS, max_size=N_OPS)
NETWORK = st.lists(st.booleans(), min_size=N_OPS, max_size=N_OPS)
SLOW = st.lists(st.sampled_from([0.0, 0.1, 0.37, 1.0, 3.0]), min_size=N_OPS, max_size=N_OPS)
COLLECTIVE = N_OPS - 1
RANDOM = st.randoms(use_true_random=False)


def run(
    flat: FlatProgram,
    durations: Sequence[int],
    issues: Sequence[int],
    slow_compute: Sequence[float],
    slow_network: Sequence[float],
    network: Sequence[bool],
) -> Timeline:
    slow = np.array(slow_compute, float), np.array(slow_network, float)
    return simulate(flat, np.array(durations, np.int64), np.array(issues, np.int64), *slow, np.array(network, bool))


# -- numbering ---------------------------------------------------------------------------------------------------------


def owners(flat: FlatProgram) -> list[int]:
    return np.repeat(np.arange(len(flat.class_ptr) - 1), np.diff(flat.class_ptr)).tolist()


def predecessors(flat: FlatProgram) -> list[list[int]]:
    return [flat.pred[a:b].tolist() for a, b in zip(flat.pred_ptr[:-1], flat.pred_ptr[1:], strict=True)]


def renumbered(flat: FlatProgram, order: Sequence[int], random: Random) -> FlatProgram:
    """`flat` with its nodes in `order` (old numbers, a class stays in one piece), edges and meetings in any order."""
    place = {old: new for new, old in enumerate(order)}
    preds = predecessors(flat)
    rows = [[place[p] for p in preds[old]] for old in order]
    for row in rows:
        random.shuffle(row)
    owner = owners(flat)
    sizes = [sum(owner[old] == c for old in order) for c in dict.fromkeys(owner[old] for old in order)]
    meetings = list(range(len(flat.meeting_size)))
    random.shuffle(meetings)
    number = np.array([*np.argsort(meetings), -1])
    take = np.array(order, np.int64)
    return dataclasses.replace(
        flat,
        class_ptr=np.cumsum([0, *sizes]),
        op=flat.op[take],
        stream=flat.stream[take],
        phase=flat.phase[take],
        step=flat.step[take],
        module=flat.module[take],
        sync=flat.sync[take],
        meeting=number[flat.meeting[take]].astype(np.int32),
        meeting_size=flat.meeting_size[meetings],
        meeting_channel=flat.meeting_channel[meetings],
        pred_ptr=np.cumsum([0, *(len(row) for row in rows)]),
        pred=np.array([p for row in rows for p in row], np.int32),
    )


def assert_same_nodes(flat: FlatProgram, other: FlatProgram, order: Sequence[int], costs: tuple) -> None:
    a, b = run(flat, *costs), run(other, *costs)
    np.testing.assert_array_equal(a.start_ps[list(order)], b.start_ps)
    np.testing.assert_array_equal(a.end_ps[list(order)], b.end_ps)
    assert a.end_of_step_ps == b.end_of_step_ps


@given(random_programs(), COSTS, COSTS, SLOW, SLOW, NETWORK, RANDOM)
def test_numbers_of_classes_edges_and_meetings_do_not_matter(
    what: Program,
    durations: list[int],
    issues: list[int],
    slow_compute: list[float],
    slow_network: list[float],
    network: list[bool],
    random: Random,
) -> None:
    flat = unfold(what)
    classes = list(range(len(flat.class_ptr) - 1))
    random.shuffle(classes)
    order = [i for c in classes for i in range(flat.class_ptr[c], flat.class_ptr[c + 1])]
    costs = (durations, issues, slow_compute, slow_network, network)
    assert_same_nodes(flat, renumbered(flat, order, random), order, costs)


@given(random_programs(), COSTS, COSTS, SLOW, SLOW, NETWORK, RANDOM)
def test_numbers_of_streams_do_not_matter(
    what: Program,
    durations: list[int],
    issues: list[int],
    slow_compute: list[float],
    slow_network: list[float],
    network: list[bool],
    random: Random,
) -> None:
    flat = unfold(what)
    others = [s for s in Stream if s != Stream.COMPUTE]
    random.shuffle(others)
    other = dataclasses.replace(flat, stream=np.array([Stream.COMPUTE, *others], np.int8)[flat.stream])
    costs = (durations, issues, slow_compute, slow_network, network)
    assert_same_nodes(flat, other, range(len(flat)), costs)


@given(random_programs(), COSTS, SLOW, SLOW, NETWORK, RANDOM)
def test_the_order_in_which_streams_are_filled_does_not_matter_to_a_host_that_costs_nothing(
    what: Program,
    durations: list[int],
    slow_compute: list[float],
    slow_network: list[float],
    network: list[bool],
    random: Random,
) -> None:
    flat = dataclasses.replace(unfold(what), sync=np.zeros(len(unfold(what)), np.int8))
    preds, order = predecessors(flat), []
    for c in range(len(flat.class_ptr) - 1):
        queues: list[list[int]] = [[] for _ in range(N_STREAMS)]
        for i in range(flat.class_ptr[c], flat.class_ptr[c + 1]):
            queues[flat.stream[i]].append(i)
        while any(queues):
            queue = random.choice([q for q in queues if q and all(p in order for p in preds[q[0]])])
            order.append(queue.pop(0))
    costs = (durations, [0] * N_OPS, slow_compute, slow_network, network)
    assert_same_nodes(flat, renumbered(flat, order, random), order, costs)


# -- equal classes -----------------------------------------------------------------------------------------------------


@st.composite
def steps_with_collectives(draw: st.DrawFn) -> tuple[list[Block], list[int], int]:
    """Blocks of which some are one collective on a channel, the order in which they run, and how many channels."""
    blocks = [draw(plain_blocks(f"block {i}")) for i in range(draw(st.integers(1, 3)))]
    n_channels = draw(st.integers(1, 3))
    for channel in range(n_channels):
        block = BlockBuilder()
        slot = draw(st.integers(0, N_SLOTS - 1))
        block.node(COLLECTIVE, draw(STREAMS), wait=(slot,), record=slot, channel=channel, sync=draw(st.booleans()))
        blocks.append(block.build(f"collective {channel}"))
    sequence = draw(st.lists(st.integers(0, len(blocks) - 1), min_size=1, max_size=12))
    return blocks, sequence, n_channels


def alone(blocks: list[Block], sequence: list[int]) -> FlatProgram:
    """One class whose collectives meet nobody."""
    blocks = [dataclasses.replace(block, channel=np.full(len(block), -1, np.int16)) for block in blocks]
    return unfold(program(blocks, [sequence]))


def together(blocks: list[Block], sequence: list[int], n_channels: int, n_classes: int) -> FlatProgram:
    """Classes that do the same, whose collectives meet."""
    channels = [Channel(f"channel {i}", tuple(range(n_classes))) for i in range(n_channels)]
    return unfold(program(blocks, [sequence] * n_classes, channels))


@given(steps_with_collectives(), st.integers(2, 4), COSTS, COSTS, SLOW, SLOW, NETWORK)
def test_equal_classes_that_meet_are_one_class_alone(
    steps: tuple[list[Block], list[int], int],
    n_classes: int,
    durations: list[int],
    issues: list[int],
    slow_compute: list[float],
    slow_network: list[float],
    network: list[bool],
) -> None:
    blocks, sequence, n_channels = steps
    costs = (durations, issues, slow_compute, slow_network, [*network[:COLLECTIVE], True])
    one = run(alone(blocks, sequence), *costs)
    all_of_them = run(together(blocks, sequence, n_channels, n_classes), *costs)
    for column in ("start_ps", "end_ps", "issue_end_ps", "class_end_ps"):
        np.testing.assert_array_equal(getattr(all_of_them, column), np.tile(getattr(one, column), n_classes))


@given(steps_with_collectives(), st.integers(1, 3), COSTS, COSTS, SLOW, NETWORK, st.lists(st.floats(0, 1), min_size=3))
def test_the_slowest_class_takes_its_own_time(
    steps: tuple[list[Block], list[int], int],
    n_fast: int,
    durations: list[int],
    issues: list[int],
    slow_compute: list[float],
    network: list[bool],
    speed: list[float],
) -> None:
    """The others have shorter kernels that nothing slows, so they come first to every meeting."""
    blocks, sequence, n_channels = steps
    network = [*network[:COLLECTIVE], True]
    slow = (durations, issues, slow_compute, [0.0] * N_OPS, network)
    one = run(alone(blocks, sequence), *slow)
    flat = together(blocks, sequence, n_channels, 1 + n_fast)
    apart = dataclasses.replace(flat, n_ops=N_OPS * (1 + n_fast), op=flat.op + N_OPS * np.array(owners(flat), np.int32))
    costs = tuple(list(column) for column in slow)
    for k in range(n_fast):
        faster = [d if net else int(d * speed[k]) for d, net in zip(durations, network, strict=True)]
        for column, more in zip(costs, (faster, issues, [0.0] * N_OPS, [0.0] * N_OPS, network), strict=True):
            column += more
    both = run(apart, *costs)
    n = len(one.start_ps)
    np.testing.assert_array_equal(both.start_ps[:n], one.start_ps)
    np.testing.assert_array_equal(both.end_ps[:n], one.end_ps)
    assert both.end_of_step_ps == one.end_of_step_ps
