"""A run in windows is the whole run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_programs import N_OPS, as_single_blocks, program, random_programs

from forerun.common.errors import ForerunError
from forerun.core.engine.simulate import simulate
from forerun.core.engine.windows import Finished, WindowedRun, simulate_in_windows
from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import Channel, Program, Stream
from forerun.core.program.unfold import unfold

COSTS = st.lists(st.integers(0, 10**6), min_size=N_OPS, max_size=N_OPS)
FEW = st.lists(st.integers(0, 3), min_size=N_OPS, max_size=N_OPS)
NETWORK = st.lists(st.booleans(), min_size=N_OPS, max_size=N_OPS)
SLOW = st.lists(st.sampled_from([0.0, 0.1, 0.37, 1.0, 3.0]), min_size=N_OPS, max_size=N_OPS)


def arrays(*columns: list[Any]) -> tuple[np.ndarray[Any, Any], ...]:
    types = (np.int64, np.int64, np.float64, np.float64, np.bool_)
    return tuple(np.array(column, dtype) for column, dtype in zip(columns, types, strict=True))


def in_windows(
    what: Program, costs: tuple[np.ndarray[Any, Any], ...], window_nodes: int
) -> tuple[WindowedRun, list[Finished]]:
    parts: list[Finished] = []
    return simulate_in_windows(what, *costs, finished=parts.append, window_nodes=window_nodes), parts


def assert_same(what: Program, costs: tuple[np.ndarray[Any, Any], ...], window_nodes: int) -> None:
    flat = unfold(what)
    whole = simulate(flat, *costs)
    run, parts = in_windows(what, costs, window_nodes)
    np.testing.assert_array_equal(run.class_end_ps, whole.class_end_ps)
    assert run.n_nodes == len(flat)
    for c in range(len(what.rank_classes)):
        mine = [part for part in parts if part.rank_class == c]
        assert [part.first for part in mine] == np.cumsum([0, *map(len, mine)])[:-1].tolist()
        nodes = slice(flat.class_ptr[c], flat.class_ptr[c + 1])
        for name in ("op", "stream", "phase", "step", "module"):
            got = np.concatenate([getattr(part, name) for part in mine] or [np.zeros(0)])
            np.testing.assert_array_equal(got, getattr(flat, name)[nodes], err_msg=name)
        for name in ("start_ps", "end_ps", "issue_end_ps"):
            got = np.concatenate([getattr(part, name) for part in mine] or [np.zeros(0)])
            np.testing.assert_array_equal(got, getattr(whole, name)[nodes], err_msg=name)


@given(random_programs(), COSTS | FEW, COSTS | FEW, SLOW, SLOW, NETWORK, st.integers(1, 20))
def test_windows_of_any_size_give_the_times_of_the_whole_run(
    what: Program,
    durations: list[int],
    issues: list[int],
    slow_compute: list[float],
    slow_network: list[float],
    network: list[bool],
    window_nodes: int,
) -> None:
    assert_same(what, arrays(durations, issues, slow_compute, slow_network, network), window_nodes)


@given(random_programs(), COSTS | FEW, COSTS | FEW, st.integers(1, 20))
def test_windows_without_contention_too(
    what: Program, durations: list[int], issues: list[int], window_nodes: int
) -> None:
    none = [0.0] * N_OPS
    assert_same(what, arrays(durations, issues, none, none, [False] * N_OPS), window_nodes)
    assert_same(as_single_blocks(what), arrays(durations, issues, none, none, [False] * N_OPS), window_nodes)


def long_program(steps: int) -> Program:
    """Compute that waits for gathers, which wait for compute two steps before; a reduction at the very end."""
    gather, compute, last = BlockBuilder(), BlockBuilder(), BlockBuilder()
    gather.node(1, Stream.GATHER, wait=(0,), record=1)
    for i in range(4):
        compute.node(0, wait=(1,) if i == 0 else (), record=0 if i == 3 else -1)
    last.node(2, Stream.REDUCE, wait=(0,))
    blocks = [gather.build("gather"), compute.build("compute"), last.build("last")]
    return program(blocks, [[0, *[1, 0] * steps, 1, 2]])


@pytest.mark.parametrize("slow", [0.0, 0.5])
@pytest.mark.parametrize("issue", [0, 10, 70])
def test_a_window_stays_small_however_long_the_program_and_far_ahead_the_host(slow: float, issue: int) -> None:
    costs = arrays([50, 80, 30, 0, 0, 0], [issue] * N_OPS, [slow] * N_OPS, [0.0] * N_OPS, [False, True, True] * 2)
    most = [in_windows(long_program(steps), costs, window_nodes=100)[0].most_nodes for steps in (100, 1000, 10000)]
    assert max(most) <= 200
    assert_same(long_program(100), costs, window_nodes=100)


@pytest.mark.parametrize("slow", [0.0, 0.5])
def test_a_rank_class_that_waits_does_not_fill_the_window(slow: float) -> None:
    """The second class can do nothing until the first is through."""
    work, wait, go, more = (BlockBuilder() for _ in range(4))
    for i in range(3):
        work.node(0, record=1 if i == 2 else -1)
    go.node(1, Stream.PP_SEND, wait=(1,), channel=0)
    wait.node(1, Stream.PP_RECV, channel=0, record=0)
    more.node(2, wait=(0,))
    blocks = [work.build("work"), go.build("go"), wait.build("wait"), more.build("more")]
    two = program(blocks, [[0] * 3000 + [1], [2] + [3] * 9000], [Channel("c", (0, 1))])
    costs = arrays([5, 5, 5, 0, 0, 0], [1] * N_OPS, [slow] * N_OPS, [0.0] * N_OPS, [False] * 5 + [True])
    assert in_windows(two, costs, window_nodes=200)[0].most_nodes <= 1000
    assert_same(two, costs, window_nodes=200)


@pytest.mark.parametrize("slow", [0.0, 0.5])
def test_a_receive_that_is_posted_long_before_its_send_does_not_fill_the_window(slow: float) -> None:
    """Two stages, all forwards before all backwards: the gradients' stream is idle through the first half."""
    forward, send, receive, backward = ([BlockBuilder(), BlockBuilder()] for _ in range(4))
    for stage in range(2):
        for block, record in ((forward[stage], 0), (backward[stage], 1)):
            block.node(0, wait=(2,) if block in (forward[1], backward[0]) else ())
            block.node(0, record=record)
    send[0].node(1, Stream.PP_SEND, wait=(0,), channel=0)
    receive[1].node(1, Stream.PP_RECV, record=2, channel=0)
    send[1].node(1, Stream.PP_SEND_GRAD, wait=(1,), channel=1)
    receive[0].node(1, Stream.PP_RECV_GRAD, record=2, channel=1)
    blocks = [b.build(str(i)) for i, b in enumerate([*forward, *send, *receive, *backward])]
    f0, f1, s0, s1, r0, r1, b0, b1 = range(8)
    sequences = [[f0, s0] * 2000 + [r0, b0] * 2000, [r1, f1] * 2000 + [b1, s1] * 2000]
    two = program(blocks, sequences, [Channel("forward", (0, 1)), Channel("backward", (1, 0))])
    costs = arrays([50, 5, 5, 0, 0, 0], [1] * N_OPS, [slow] * N_OPS, [0.0] * N_OPS, [False] * 5 + [True])
    assert in_windows(two, costs, window_nodes=200)[0].most_nodes <= 500
    assert_same(two, costs, window_nodes=200)


@pytest.mark.parametrize("slow", [0.0, 0.5])
def test_a_deadlock_is_named_as_in_the_whole_run(slow: float) -> None:
    blocks = []
    for first, second in ((0, 1), (1, 0)):
        block = BlockBuilder()
        block.node(3, Stream.TP, channel=first)
        block.node(4, Stream.TP, channel=second)
        blocks.append(block.build(f"{first} first"))
    plain = BlockBuilder()
    plain.node(0)
    blocks.append(plain.build("plain"))
    channels = [Channel("red", (0, 1)), Channel("blue", (0, 1))]
    crossed = program(blocks, [[2] * 50 + [0], [2] * 20 + [1]], channels)
    costs = arrays([1] * N_OPS, [0] * N_OPS, [slow] * N_OPS, [0.0] * N_OPS, [False] * 5 + [True])
    with pytest.raises(ForerunError) as whole:
        simulate(unfold(crossed), *costs)
    with pytest.raises(ForerunError) as windowed:
        in_windows(crossed, costs, window_nodes=10)
    assert str(windowed.value) == str(whole.value)


def test_members_with_different_numbers_of_nodes_on_a_channel_are_refused() -> None:
    block = BlockBuilder()
    block.node(0, channel=0)
    odd = program([block.build("b")], [[0], [0, 0]], [Channel("odd", (0, 1))])
    with pytest.raises(ForerunError, match="channel 'odd' joins"):
        in_windows(odd, arrays([1] * N_OPS, [0] * N_OPS, [0.0] * N_OPS, [0.0] * N_OPS, [False] * N_OPS), 10)
