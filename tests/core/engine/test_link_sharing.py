"""Nodes of one rank class that use the same links at the same time share them."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import N_OPS, program, random_programs
from reference import class_of, contended

from forerun.common.errors import ForerunError
from forerun.core.engine.sharing import FULL, LinkDemand, crowded_links, pairs_of_program, used_pairs
from forerun.core.engine.simulate import Timeline, simulate
from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import Block, Channel, FlatProgram, Program, Stream
from forerun.core.program.unfold import unfold

COMPUTE, GATHER, REDUCE, EP = Stream.COMPUTE, Stream.GATHER, Stream.REDUCE, Stream.EP
N_LINKS = 3


def demand_of(shares: Sequence[Sequence[float]], receiving: Sequence[bool] | None = None) -> LinkDemand:
    """Op i asks for shares[i] of each link; ops that are not named ask for nothing."""
    parts = np.zeros((N_OPS, len(shares[0])), np.int64)
    parts[: len(shares)] = np.rint(np.array(shares) * FULL)
    return LinkDemand.of(parts, np.array(receiving or [False] * parts.shape[1]))


def run(
    what: Program | Block,
    durations: Sequence[int],
    demand: LinkDemand | None,
    slow_compute: float = 0,
    slow_network: float = 0,
    network_ops: Sequence[int] = (),
) -> Timeline:
    """Simulate; op i takes durations[i] alone."""
    flat = unfold(what if isinstance(what, Program) else program([what], [[0]]))
    padded = np.zeros(N_OPS, np.int64)
    padded[: len(durations)] = durations
    network = np.isin(np.arange(N_OPS), network_ops)
    slow = np.full(N_OPS, float(slow_compute)), np.full(N_OPS, float(slow_network))
    return simulate(flat, padded, np.zeros(N_OPS, np.int64), *slow, network, demand=demand)


def side_by_side(*streams: Stream) -> Block:
    """One node a stream: op i on streams[i]."""
    block = BlockBuilder()
    for op, stream in enumerate(streams):
        block.node(op, stream)
    return block.build("side by side")


# -- known answers -----------------------------------------------------------------------------------------------------


def test_two_that_fill_one_link_run_at_half_speed_until_the_shorter_ends() -> None:
    timeline = run(side_by_side(GATHER, EP), [1000, 600], demand_of([[1.0], [1.0]]))
    # 1200 for the shorter; the longer has done 600 by then and 400 are left.
    assert timeline.end_ps.tolist() == [1600, 1200]


def test_three_that_fill_one_link_run_at_a_third() -> None:
    timeline = run(side_by_side(GATHER, EP, REDUCE), [100, 100, 200], demand_of([[1.0]] * 3))
    assert timeline.end_ps.tolist() == [300, 300, 400]


def test_different_links_do_not_touch() -> None:
    timeline = run(side_by_side(GATHER, EP), [1000, 600], demand_of([[1.0, 0.0], [0.0, 1.0]]))
    assert timeline.end_ps.tolist() == [1000, 600]


def test_two_halves_of_a_link_do_not_touch() -> None:
    assert run(side_by_side(GATHER, EP), [1000, 600], demand_of([[0.5], [0.5]])).end_ps.tolist() == [1000, 600]


def test_what_is_asked_beyond_the_link_is_what_slows() -> None:
    # 0.75 + 0.5: at 1 / 1.25 until 750, when 400 of the first are left.
    timeline = run(side_by_side(GATHER, EP), [1000, 600], demand_of([[0.75], [0.5]]))
    assert timeline.end_ps.tolist() == [1150, 750]


def test_the_fullest_of_its_links_sets_the_pace_of_each() -> None:
    # Link 0: ops 0 and 1 ask for 1.5 of it. Link 1: ops 1 and 2 ask for 2. Op 1 is on both.
    timeline = run(side_by_side(GATHER, EP, REDUCE), [300, 100, 100], demand_of([[0.5, 0.0], [1.0, 1.0], [0.0, 1.0]]))
    assert timeline.end_ps.tolist() == [300 + 200 - 133, 200, 200]


def test_who_comes_later_shares_from_then_on() -> None:
    block = BlockBuilder()
    first = block.node(2, COMPUTE)
    block.node(0, GATHER)
    block.node(1, EP, after=[first])
    timeline = run(block.build("later"), [1000, 600, 300], demand_of([[1.0], [1.0]]))
    assert timeline.start_ps.tolist() == [0, 0, 300]
    assert timeline.end_ps.tolist() == [300, 1600, 1500]


def test_nodes_that_follow_at_once_leave_no_trace_of_the_change() -> None:
    block = BlockBuilder()
    block.node(0, GATHER)
    for _ in range(3):
        block.node(1, EP)
    timeline = run(block.build("follow"), [1000, 100], demand_of([[1.0], [1.0]]))
    assert timeline.end_ps.tolist() == [1300, 200, 400, 600]


def test_sharing_and_company_of_compute_multiply() -> None:
    block = side_by_side(COMPUTE, GATHER, EP)
    timeline = run(block, [10_000, 600, 600], demand_of([[0.0], [1.0], [1.0]]), 0.5, 1.0, [1, 2])
    # Both take 600 x 2 x 2; beside them compute does 2400 / 1.5 = 1600.
    assert timeline.end_ps.tolist() == [10_800, 2400, 2400]


def test_without_slowdowns_of_compute_links_are_shared_all_the_same() -> None:
    assert run(side_by_side(COMPUTE, GATHER, EP), [50, 60, 60], demand_of([[0.0], [1.0], [1.0]])).end_of_step_ps == 120


def test_a_send_and_a_receive_use_a_link_in_two_directions() -> None:
    block = side_by_side(Stream.PP_SEND, Stream.PP_RECV_GRAD, GATHER)
    both = demand_of([[1.0, 1.0], [1.0, 1.0]], [False, True])
    assert run(block, [100, 100], both).end_ps.tolist()[:2] == [100, 100]
    beside = demand_of([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], [False, True])
    assert run(block, [100, 100, 100], beside).end_ps.tolist() == [200, 200, 200]


# -- meetings ----------------------------------------------------------------------------------------------------------


def transfer_beside_a_gather() -> Program:
    """Class 0 sends op 0 to class 1, beside its own op 1."""
    send, receive = BlockBuilder(), BlockBuilder()
    send.node(0, Stream.PP_SEND, channel=0)
    send.node(1, GATHER)
    receive.node(0, Stream.PP_RECV, channel=0)
    return program([send.build("s"), receive.build("r")], [[0], [1]], [Channel("c", (0, 1))])


def test_a_transfer_that_is_slowed_at_one_end_is_slowed_at_the_other() -> None:
    timeline = run(transfer_beside_a_gather(), [100, 300], demand_of([[1.0], [1.0]]))
    assert timeline.start_ps.tolist() == [0, 0, 0]
    assert timeline.end_ps.tolist() == [200, 400, 200]


def test_what_slows_a_transfer_may_come_and_go_at_either_end() -> None:
    left, right = BlockBuilder(), BlockBuilder()
    left.node(0, Stream.PP_SEND, channel=0)
    left.node(1, GATHER)
    right.node(0, Stream.PP_RECV, channel=0)
    late = right.node(3, COMPUTE)
    right.node(2, GATHER, after=[late])
    two = program([left.build("l"), right.build("r")], [[0], [1]], [Channel("c", (0, 1))])
    # Half speed beside op 1 until 100; alone until 150 (at 100 done); beside op 2 for 50 more at half speed.
    timeline = run(two, [125, 50, 500, 150], demand_of([[1.0, 1.0]] * 3, [False, True]))
    assert timeline.end_ps.tolist() == [200, 100, 200, 150, 675]


def test_equal_classes_that_meet_take_the_times_of_one_alone() -> None:
    def blocks(channel: int) -> Block:
        block = BlockBuilder()
        start = block.node(3)
        block.node(0, REDUCE, after=[start], channel=channel)
        block.node(1, GATHER, after=[start])
        return block.build("b")

    demand, costs = demand_of([[0.9], [0.7]]), [700, 900, 0, 50]
    alone = run(blocks(-1), costs, demand)
    two = run(program([blocks(0)], [[0], [0]], [Channel("all", (0, 1))]), costs, demand)
    assert two.end_ps.tolist() == 2 * alone.end_ps.tolist()
    assert two.end_of_step_ps == 50 + 700 * 1.6 + 200


# -- which links are watched -------------------------------------------------------------------------------------------


def test_only_links_that_can_be_crowded_are_watched() -> None:
    flat = unfold(program([side_by_side(GATHER, EP, REDUCE)], [[0]]))
    used = used_pairs(flat.op, flat.stream, N_OPS)
    never = demand_of([[0.5, 1.0], [0.5, 0.0], [0.0, 0.0]])
    assert crowded_links(never, used) is None
    twice = demand_of([[1.0, 0.4, 1.0], [1.0, 0.7, 1.0], [0.0, 0.0, 0.1]])
    kept = crowded_links(twice, used)
    assert kept is not None
    np.testing.assert_array_equal(kept.share, twice.share[:, [2]])


def test_one_stream_never_crowds_a_link() -> None:
    block = BlockBuilder()
    for op in (0, 1, 0):
        block.node(op, GATHER)
    flat = unfold(program([block.build("b")], [[0]]))
    assert crowded_links(demand_of([[1.0], [1.0]]), used_pairs(flat.op, flat.stream, N_OPS)) is None


@pytest.mark.parametrize(("share", "what"), [(-1, "between 0 and"), (FULL + 1, "between 0 and")])
def test_a_demand_that_is_no_share_is_refused(share: int, what: str) -> None:
    demand = LinkDemand.of(np.full((N_OPS, 1), share), np.zeros(1, np.bool_))
    with pytest.raises(ForerunError, match=what):
        run(side_by_side(GATHER), [1], demand)


def test_a_demand_of_the_wrong_length_is_refused() -> None:
    demand = LinkDemand.of(np.zeros((N_OPS + 1, 1), np.int64), np.zeros(1, np.bool_))
    with pytest.raises(ForerunError, match=f"demand has {N_OPS + 1} rows"):
        run(side_by_side(GATHER), [1], demand)


# -- random programs ---------------------------------------------------------------------------------------------------

SCALE = 10**6
DURATIONS = st.lists(st.integers(0, 50), min_size=N_OPS, max_size=N_OPS)
NETWORK = st.lists(st.booleans(), min_size=N_OPS, max_size=N_OPS)
SLOW = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=N_OPS, max_size=N_OPS)
SHARES = st.sampled_from([0.0, 0.0, 0.25, 0.5, 0.75, 1.0])
DEMANDS = st.builds(
    demand_of,
    st.lists(st.lists(SHARES, min_size=N_LINKS, max_size=N_LINKS), min_size=N_OPS, max_size=N_OPS),
    st.lists(st.booleans(), min_size=N_LINKS, max_size=N_LINKS),
)


def columns(durations: list[int], issues: list[int], slow: list[float], network: list[bool]) -> tuple[np.ndarray, ...]:
    return (
        np.array(durations, np.int64) * SCALE,
        np.array(issues, np.int64) * SCALE,
        np.array(slow),
        np.array(slow),
        np.array(network),
    )


def asked_of(flat: FlatProgram, demand: LinkDemand) -> np.ndarray:
    """(nodes, links) what each node asks for, in parts of FULL."""
    return np.where(demand.carries[flat.stream], demand.share[flat.op], 0)


@given(random_programs(), DURATIONS, DURATIONS, SLOW, NETWORK, DEMANDS)
def test_sharing_matches_exact_fractions(
    what: Program, durations: list[int], issues: list[int], slow: list[float], network: list[bool], demand: LinkDemand
) -> None:
    flat = unfold(what)
    costs = columns(durations, issues, slow, network)
    timeline = simulate(flat, *costs, demand=demand)

    def asks(op: int, stream: int) -> list[Fraction]:
        return [Fraction(int(share), FULL) for share in demand.share[op] * demand.carries[stream]]

    exact = [Fraction(s) for s in slow]
    start, end = contended(flat, costs[0].tolist(), costs[1].tolist(), exact, exact, network, asks)
    tolerance = 16 * len(flat)
    for got, want in ((timeline.start_ps, start), (timeline.end_ps, end)):
        assert max(abs(int(g) - w) for g, w in zip(got, want, strict=True)) <= tolerance


@given(random_programs(), DURATIONS, DURATIONS, SLOW, NETWORK, DEMANDS)
def test_sharing_only_adds_time(
    what: Program, durations: list[int], issues: list[int], slow: list[float], network: list[bool], demand: LinkDemand
) -> None:
    flat, costs = unfold(what), columns(durations, issues, slow, network)
    took = simulate(flat, *costs, demand=demand)
    free = np.zeros(N_OPS)
    alone = simulate(flat, costs[0], costs[1], free, free, costs[4])
    assert (took.end_ps >= alone.end_ps - len(flat)).all()
    asks = asked_of(flat, demand).any(axis=1) | (flat.meeting >= 0)
    unslowed = simulate(flat, costs[0], costs[1], free, free, costs[4], demand=demand)
    lasted = unslowed.end_ps - unslowed.start_ps
    np.testing.assert_array_equal(lasted[~asks], costs[0][flat.op][~asks])


@given(random_programs(), DURATIONS, DURATIONS, DEMANDS)
def test_no_link_ever_carries_more_than_it_can(
    what: Program, durations: list[int], issues: list[int], demand: LinkDemand
) -> None:
    flat = unfold(what)
    free = np.zeros(N_OPS)
    costs = columns(durations, issues, [0.0] * N_OPS, [False] * N_OPS)
    timeline = simulate(flat, costs[0], costs[1], free, free, costs[4], demand=demand)
    owner, asked = np.array(class_of(flat)), asked_of(flat, demand)
    work = asked * costs[0][flat.op][:, None]
    for c in range(len(flat.class_names)):
        mine = owner == c
        times = np.unique(timeline.start_ps[mine])
        for begin in times:
            for end in np.unique(timeline.end_ps[mine & (timeline.end_ps >= begin)]):
                # What starts and ends in this time has put all of its bytes on its links in it.
                inside = mine & (timeline.start_ps >= begin) & (timeline.end_ps <= end)
                assert (work[inside].sum(axis=0) <= FULL * (end - begin + 4 * len(flat))).all()


@given(random_programs(), DURATIONS, DURATIONS, SLOW, NETWORK, DEMANDS, st.permutations(list(range(N_LINKS))))
def test_neither_the_order_of_links_nor_copies_of_them_matter(
    what: Program,
    durations: list[int],
    issues: list[int],
    slow: list[float],
    network: list[bool],
    demand: LinkDemand,
    order: list[int],
) -> None:
    flat, costs = unfold(what), columns(durations, issues, slow, network)
    again = LinkDemand(demand.share[:, [*order, 0]], demand.carries[:, [*order, 0]])
    a, b = simulate(flat, *costs, demand=demand), simulate(flat, *costs, demand=again)
    np.testing.assert_array_equal(a.end_ps, b.end_ps)


@settings(max_examples=30)
@given(random_programs(), DURATIONS, DURATIONS, DEMANDS)
def test_streams_of_one_kind_may_change_places(
    what: Program, durations: list[int], issues: list[int], demand: LinkDemand
) -> None:
    swapped = np.arange(len(Stream), dtype=np.int8)
    swapped[[GATHER, EP]] = [EP, GATHER]
    flat, costs = unfold(what), columns(durations, issues, [0.0] * N_OPS, [False] * N_OPS)
    other = FlatProgram(**{**{k: getattr(flat, k) for k in flat.__slots__}, "stream": swapped[flat.stream]})
    a, b = simulate(flat, *costs, demand=demand), simulate(other, *costs, demand=demand)
    np.testing.assert_array_equal(a.start_ps, b.start_ps)
    np.testing.assert_array_equal(a.end_ps, b.end_ps)


@given(random_programs())
def test_pairs_of_a_program_are_those_of_its_nodes_and_of_blocks_that_nobody_runs(what: Program) -> None:
    flat = unfold(what)
    in_run, in_blocks = used_pairs(flat.op, flat.stream, N_OPS), pairs_of_program(what)
    assert not (in_run & ~in_blocks).any()
