"""Random programs: the engine against slow simulators, folding, order of classes, monotonicity."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import N_OPS, as_single_blocks, random_programs
from reference import contended, longest_path

from forerun.core.engine.actors import OpCosts, nodes_of
from forerun.core.engine.contention import run_contended
from forerun.core.engine.sharing import links_of
from forerun.core.engine.simulate import Timeline, simulate
from forerun.core.program.types import FlatProgram, Program
from forerun.core.program.unfold import unfold
from forerun.core.program.validate import problems

DURATIONS = st.lists(st.integers(0, 50), min_size=N_OPS, max_size=N_OPS)
NETWORK = st.lists(st.booleans(), min_size=N_OPS, max_size=N_OPS)
SLOW = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0]), min_size=N_OPS, max_size=N_OPS)


def run(
    flat: FlatProgram,
    durations: list[int],
    issues: list[int],
    slow_compute: list[float] | None = None,
    slow_network: list[float] | None = None,
    network: list[bool] | None = None,
) -> Timeline:
    none = [0.0] * N_OPS
    return simulate(
        flat,
        np.array(durations, np.int64),
        np.array(issues, np.int64),
        np.array(slow_compute or none),
        np.array(slow_network or none),
        np.array(network or [False] * N_OPS),
    )


def forced_through_events(flat: FlatProgram, durations: list[int], issues: list[int], network: list[bool]) -> Timeline:
    """The contended engine where `simulate` would take the fast path."""
    none = np.zeros(N_OPS)
    costs = OpCosts(np.array(durations, np.int64), np.array(issues, np.int64), none, none, np.array(network))
    *columns, stuck = run_contended(nodes_of(flat), costs, links_of(None, N_OPS, len(flat.class_names)))
    assert not stuck
    return Timeline(*columns)


def assert_same(a: Timeline, b: Timeline) -> None:
    for column in ("start_ps", "end_ps", "issue_end_ps", "class_end_ps"):
        np.testing.assert_array_equal(getattr(a, column), getattr(b, column))


@given(random_programs())
def test_random_programs_are_well_formed(program: Program) -> None:
    assert problems(program) == []


@given(random_programs(), DURATIONS, DURATIONS, NETWORK)
def test_fast_path_equals_event_engine_equals_relaxation(
    program: Program, durations: list[int], issues: list[int], network: list[bool]
) -> None:
    flat = unfold(program)
    fast = run(flat, durations, issues)
    assert_same(fast, forced_through_events(flat, durations, issues, network))
    start, end, issued = longest_path(flat, durations, issues)
    assert fast.start_ps.tolist() == start
    assert fast.end_ps.tolist() == end
    assert fast.issue_end_ps.tolist() == issued


@given(random_programs(), DURATIONS, DURATIONS, SLOW, SLOW, NETWORK)
def test_contention_matches_exact_fractions(
    program: Program,
    durations: list[int],
    issues: list[int],
    slow_compute: list[float],
    slow_network: list[float],
    network: list[bool],
) -> None:
    flat = unfold(program)
    scale = 10**6
    durations, issues = [d * scale for d in durations], [d * scale for d in issues]
    timeline = run(flat, durations, issues, slow_compute, slow_network, network)
    exact = [Fraction(s) for s in slow_compute], [Fraction(s) for s in slow_network]
    start, end = contended(flat, durations, issues, *exact, network)
    # Half a picosecond is lost at each change of speed, at most two changes an event.
    tolerance = 8 * len(flat)
    for got, want in ((timeline.start_ps, start), (timeline.end_ps, end)):
        assert max(abs(int(g) - w) for g, w in zip(got, want, strict=True)) <= tolerance


@given(random_programs(), DURATIONS, DURATIONS, SLOW, SLOW, NETWORK)
def test_repeated_blocks_equal_one_long_block(
    program: Program,
    durations: list[int],
    issues: list[int],
    slow_compute: list[float],
    slow_network: list[float],
    network: list[bool],
) -> None:
    folded, single = unfold(program), unfold(as_single_blocks(program))
    for column in ("class_ptr", "op", "stream", "pred_ptr", "pred", "meeting", "meeting_size", "sync"):
        np.testing.assert_array_equal(getattr(folded, column), getattr(single, column), err_msg=column)
    costs = (durations, issues, slow_compute, slow_network, network)
    assert_same(run(folded, *costs), run(single, *costs))


@given(random_programs(), DURATIONS, DURATIONS, SLOW, SLOW, NETWORK, st.randoms(use_true_random=False))
def test_order_of_classes_does_not_matter(
    program: Program,
    durations: list[int],
    issues: list[int],
    slow_compute: list[float],
    slow_network: list[float],
    network: list[bool],
    random: Random,
) -> None:
    order = list(range(len(program.rank_classes)))
    random.shuffle(order)
    place = {old: new for new, old in enumerate(order)}
    shuffled = dataclasses.replace(
        program,
        rank_classes=tuple(program.rank_classes[old] for old in order),
        channels=tuple(
            dataclasses.replace(c, members=tuple(place[m] for m in c.members)) for c in reversed(program.channels)
        ),
        blocks=tuple(
            dataclasses.replace(
                b, channel=np.where(b.channel >= 0, len(program.channels) - 1 - b.channel, -1).astype(np.int16)
            )
            for b in program.blocks
        ),
    )
    costs = (durations, issues, slow_compute, slow_network, network)
    flat, other = unfold(program), unfold(shuffled)
    a, b = run(flat, *costs), run(other, *costs)
    for old, new in place.items():
        here = slice(flat.class_ptr[old], flat.class_ptr[old + 1])
        there = slice(other.class_ptr[new], other.class_ptr[new + 1])
        np.testing.assert_array_equal(a.start_ps[here], b.start_ps[there])
        np.testing.assert_array_equal(a.end_ps[here], b.end_ps[there])
        assert a.class_end_ps[old] == b.class_end_ps[new]


@given(random_programs(), DURATIONS, DURATIONS, st.integers(0, N_OPS - 1), st.integers(0, 30))
def test_longer_ops_never_end_a_node_earlier(
    program: Program, durations: list[int], issues: list[int], op: int, extra: int
) -> None:
    flat = unfold(program)
    longer = list(durations)
    longer[op] += extra
    assert (run(flat, longer, issues).end_ps >= run(flat, durations, issues).end_ps).all()


@given(random_programs(), DURATIONS, SLOW, NETWORK)
def test_contention_only_stretches_compute_and_network_nodes(
    program: Program, durations: list[int], slow: list[float], network: list[bool]
) -> None:
    flat = unfold(program)
    scaled = [d * 1000 for d in durations]
    timeline = run(flat, scaled, [0] * N_OPS, slow, slow, network)
    took = timeline.end_ps - timeline.start_ps
    nominal = np.array(scaled)[flat.op]
    assert (took >= nominal - 1).all()
    assert (took <= nominal * (1 + np.array(slow)[flat.op]) + len(flat)).all()
    untouched = ~np.array(network)[flat.op] & ((flat.meeting >= 0) | (flat.stream != 0))
    np.testing.assert_array_equal(took[untouched], nominal[untouched])


@settings(max_examples=20)
@given(random_programs(), st.sampled_from(["duration_ps", "issue_ps", "slow_compute", "slow_network"]))
def test_negative_costs_are_refused(program: Program, column: str) -> None:
    flat = unfold(program)
    costs = {
        "duration_ps": np.ones(N_OPS, np.int64),
        "issue_ps": np.ones(N_OPS, np.int64),
        "slow_compute": np.zeros(N_OPS),
        "slow_network": np.zeros(N_OPS),
        "network_op": np.ones(N_OPS, bool),
    }
    costs[column][2] = -1
    with pytest.raises(ValueError, match=f"{column} of op 2 is -1"):
        simulate(flat, **costs)
