"""Times of whole runs worked out by hand, with and without a clock: hosts, meetings, company, shared links."""

from __future__ import annotations

import numpy as np
import pytest
from random_programs import N_OPS, program

from forerun.common.errors import ForerunError
from forerun.core.engine.actors import OpCosts, nodes_of
from forerun.core.engine.contention import run_contended
from forerun.core.engine.dataflow import run_dataflow
from forerun.core.engine.sharing import FULL, LinkDemand, crowded_links, joined_demand, links_of, used_pairs
from forerun.core.engine.simulate import Timeline, simulate
from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import N_STREAMS, Channel, Program, Stream
from forerun.core.program.unfold import unfold

pytestmark = pytest.mark.compiles(10)


def costs_of(
    durations: list[int],
    issues: list[int],
    slow_compute: float = 0,
    slow_network: float = 0,
    network: tuple[int, ...] = (),
) -> OpCosts:
    """Op i takes `durations[i]`, and its launch `issues[i]`."""
    duration, issue = (np.array([*column, *[0] * (N_OPS - len(column))], np.int64) for column in (durations, issues))
    slow = (np.full(N_OPS, value, np.float64) for value in (slow_compute, slow_network))
    return OpCosts(duration, issue, *slow, np.isin(np.arange(N_OPS), network))


def both_ways(what: Program, costs: OpCosts) -> Timeline:
    """The run without a clock, after checking that the one with a clock has the same times."""
    flat = unfold(what)
    nodes = nodes_of(flat)
    *plain, stuck = run_dataflow(nodes, costs)
    *clocked, stuck_too = run_contended(nodes, costs, links_of(None, N_OPS, len(flat.class_names)))
    assert stuck == stuck_too is False
    for one, other in zip(plain, clocked, strict=True):
        np.testing.assert_array_equal(one, other)
    return Timeline(*plain)


def test_a_class_is_done_when_its_host_is() -> None:
    """The host launches two kernels in 10 + 200 and the second ends at once; another class ends with its kernel."""
    slow, fast = BlockBuilder(), BlockBuilder()
    slow.node(0)
    slow.node(1)
    fast.node(2)
    what = program([slow.build("slow"), fast.build("fast")], [[0], [1]])
    timeline = both_ways(what, costs_of([50, 0, 500], [10, 200, 1]))
    assert timeline.class_end_ps.tolist() == [210, 501]
    assert timeline.end_of_step_ps == 501


def test_a_host_waits_for_its_node_and_then_launches_what_follows() -> None:
    """Launches end at 5, 10 and, as the second node ends at 35, at 40; each node runs for 10, the second for 25."""
    block = BlockBuilder()
    block.node(0)
    block.node(1, Stream.GATHER, sync=True)
    block.node(0)
    timeline = both_ways(program([block.build("b")], [[0]]), costs_of([10, 25], [5, 5]))
    assert timeline.issue_end_ps.tolist() == [5, 10, 40]
    assert timeline.start_ps.tolist() == [5, 10, 40]
    assert timeline.end_ps.tolist() == [15, 35, 50]


def test_three_classes_meet_twice_when_the_last_of_them_is_ready() -> None:
    """Class i works for 10 (i + 1), meets, works again and meets again; the meeting takes 7."""
    blocks = []
    for i in range(3):
        block = BlockBuilder()
        for _ in range(2):
            work = block.node(i)
            meet = block.node(3, Stream.TP, after=[work], channel=0)
        block.node(i, after=[meet])
        blocks.append(block.build(str(i)))
    what = program(blocks, [[0], [1], [2]], [Channel("all", (0, 1, 2))])
    timeline = both_ways(what, costs_of([10, 20, 30, 7], [0, 0, 0, 0]))
    starts = timeline.start_ps.reshape(3, 5)
    assert starts[:, 1].tolist() == [30] * 3
    assert starts[:, 2].tolist() == [10, 20, 30]  # compute does not wait for the meeting
    assert starts[:, 3].tolist() == [60] * 3
    assert starts[:, 4].tolist() == [67] * 3
    assert timeline.class_end_ps.tolist() == [77, 87, 97]


def test_several_wait_for_one_node_and_one_waits_for_several() -> None:
    block = BlockBuilder()
    first = block.node(0, Stream.GATHER)
    others = [block.node(op, stream, after=[first]) for op, stream in ((1, Stream.TP), (2, Stream.CP), (3, Stream.EP))]
    block.node(4, after=others)
    timeline = both_ways(program([block.build("b")], [[0]]), costs_of([10, 5, 30, 20, 1], [0] * 5))
    assert timeline.start_ps.tolist() == [0, 10, 10, 10, 40]
    assert timeline.end_of_step_ps == 41


def test_a_node_starts_at_its_launch_even_where_its_stream_has_long_been_free() -> None:
    block = BlockBuilder()
    block.node(0, Stream.GATHER)
    block.node(1)
    block.node(0, Stream.GATHER)
    timeline = both_ways(program([block.build("b")], [[0]]), costs_of([3, 4], [10, 100]))
    assert timeline.start_ps.tolist() == [10, 110, 120]


def test_company_stretches_by_its_own_factors_until_one_of_them_is_done() -> None:
    """Together compute moves at 1 / 1.25 and the network at 1 / 2: 100 of the network take 200, in which compute does
    160 of its 400; alone it needs 240 more."""
    block = BlockBuilder()
    block.node(0)
    block.node(1, Stream.REDUCE)
    timeline = simulate(unfold(program([block.build("b")], [[0]])), *costs_of([400, 100], [0, 0], 0.25, 1.0, (1,)))
    assert timeline.end_ps.tolist() == [440, 200]


def demand_of(*share: float) -> LinkDemand:
    """Op i asks for `share[i]` of one link."""
    asked = np.zeros((N_OPS, 1), np.int64)
    asked[: len(share), 0] = np.rint(np.array(share) * FULL)
    return LinkDemand.of(asked, np.array([False]))


def test_a_meeting_goes_at_the_pace_of_the_class_whose_link_is_fuller() -> None:
    """In the second class another transfer fills the link too: both take twice as long, until the meeting has moved 60.
    The other one then has 40 left, which it moves alone."""
    alone, beside = BlockBuilder(), BlockBuilder()
    alone.node(0, Stream.TP, channel=0)
    alone.node(2, after=[0])
    beside.node(0, Stream.TP, channel=0)
    beside.node(1, Stream.GATHER)
    what = program([alone.build("alone"), beside.build("beside")], [[0], [1]], [Channel("c", (0, 1))])
    timeline = simulate(unfold(what), *costs_of([60, 100, 5], [0, 0, 0]), demand=demand_of(1, 1))
    assert timeline.end_ps.tolist() == [120, 125, 120, 160]


def test_a_member_that_ends_no_longer_slows_the_others() -> None:
    """Op 0 is shared by three transfers of one class that ask for half, half and all of a link."""
    block = BlockBuilder()
    for op, stream in ((0, Stream.TP), (1, Stream.CP), (2, Stream.EP)):
        block.node(op, stream)
    flat = unfold(program([block.build("b")], [[0]]))
    timeline = simulate(flat, *costs_of([30, 60, 120], [0, 0, 0]), demand=demand_of(0.5, 0.5, 1))
    # Load 2 until the first has done 30 at 60; then load 1.5 until the second has done its other 30 at 105; the third
    # has done 30 + 30 by then, and 60 are left.
    assert timeline.end_ps.tolist() == [60, 105, 165]


def test_demands_of_tables_side_by_side() -> None:
    one = demand_of(1, 0.5)
    joined = joined_demand([None, one], [3, N_OPS])
    assert joined is not None
    assert joined.share[:, 0].tolist() == [0, 0, 0, *one.share[:, 0].tolist()]
    np.testing.assert_array_equal(joined.carries, one.carries)
    assert joined_demand([None, None], [3, 4]) is None


def test_a_link_that_its_streams_just_fill_is_not_watched() -> None:
    """Two streams that ask for half each leave nothing over, and three or a larger share are too much."""
    streams = [Stream.TP, Stream.CP, Stream.EP]
    used = used_pairs(np.array([0, 0, 0], np.int32), np.array(streams, np.int8), N_OPS)
    assert used.shape == (N_OPS, N_STREAMS)
    assert used[0].sum() == 3
    assert (
        crowded_links(demand_of(1 / 2), used_pairs(np.zeros(2, np.int32), np.array(streams[:2], np.int8), N_OPS))
        is None
    )
    watched = crowded_links(demand_of(1 / 2), used)
    assert watched is not None
    assert watched.share[0, 0] == FULL // 2


def test_a_deadlock_lists_four_streams_and_counts_the_others() -> None:
    """Two classes whose six streams each wait for the other class in opposite orders."""
    streams = [Stream.TP, Stream.CP, Stream.EP, Stream.GATHER, Stream.REDUCE, Stream.COPY]
    blocks = []
    for order in (1, -1):
        block = BlockBuilder()
        for stream in streams:
            for channel in (0, 1)[::order]:
                block.node(0, stream, channel=2 * streams.index(stream) + channel)
        blocks.append(block.build(f"order {order}"))
    channels = [Channel(f"c{i}", (0, 1)) for i in range(12)]
    with pytest.raises(
        ForerunError, match=r"^deadlock: these nodes never run: class '.*' step 0 node 0 .* and 8 more streams$"
    ):
        simulate(unfold(program(blocks, [[0], [1]], channels)), *costs_of([1], [0]))
