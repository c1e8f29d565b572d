"""The event history as a table."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from random_programs import N_OPS, program, random_programs

from forerun.analysis.history import COLUMNS, History, RunIteration
from forerun.engine.simulate import simulate
from forerun.program.builder import BlockBuilder
from forerun.program.types import Phase, Program, Stream
from forerun.program.unfold import unfold

COSTS = st.lists(st.integers(0, 50), min_size=N_OPS, max_size=N_OPS)


def iteration(what: Program, durations: list[int], issues: list[int], start_ps: int = 0) -> RunIteration:
    flat, issue = unfold(what), np.array(issues, np.int64)
    padded = np.array([*durations, *[0] * (N_OPS - len(durations))], np.int64)
    none = np.zeros(N_OPS)
    timeline = simulate(flat, padded, issue, none, none, np.zeros(N_OPS, bool))
    return RunIteration(start_ps, what, flat, timeline, issue)


def test_rows_tell_when_each_node_and_each_launch_starts_and_ends() -> None:
    block = BlockBuilder()
    gather = block.node(0, Stream.GATHER)
    block.node(1, after=[gather], phase=Phase.BACKWARD)
    history = History([iteration(program([block.build("b")], [[0]]), [100, 30], [0, 7, 0, 0, 0, 0], start_ps=1000)])
    rows = history.to_rows()
    shown = [(row["time_ps"], row["event"], row["stream"], row["op"], row["duration_ps"]) for row in rows]
    assert shown == [
        (1000, "start", "gather", "op0", 100),
        (1000, "start", "host", "op1", 7),
        (1007, "end", "host", "op1", 7),
        (1100, "start", "compute", "op1", 30),
        (1100, "end", "gather", "op0", 100),
        (1130, "end", "compute", "op1", 30),
    ]
    assert rows[-1] == {
        "iteration": 0,
        "time_ps": 1130,
        "event": "end",
        "rank_class": "class 0",
        "stream": "compute",
        "op": "op1",
        "phase": "backward",
        "micro_batch": 0,
        "layer": 0,
        "block": "b",
        "module": "m",
        "duration_ps": 30,
        "node": 1,
    }


@given(random_programs(), COSTS, COSTS)
def test_rows_are_in_order_and_every_start_has_its_end(what: Program, durations: list[int], issues: list[int]) -> None:
    first = iteration(what, durations, issues)
    length = first.timeline.end_of_step_ps
    rows = History([first, iteration(what, durations, issues, start_ps=length)]).to_rows()
    assert [row["time_ps"] for row in rows] == sorted(row["time_ps"] for row in rows)
    begun: dict[tuple[object, ...], int] = {}
    for row in rows:
        key = row["iteration"], row["rank_class"], row["stream"], row["node"]
        if row["event"] == "start":
            assert key not in begun
            begun[key] = row["time_ps"]
        else:
            assert row["time_ps"] - begun.pop(key) == row["duration_ps"]
    assert begun == {}
    launches = int((first.issue_ps[first.flat.op] > 0).sum())
    assert len(rows) == 4 * (len(first.flat) + launches)
    half = len(rows) // 2
    for one, other in zip(rows[:half], rows[half:], strict=True):
        assert {**one, "iteration": 1, "time_ps": one["time_ps"] + length} == other


def test_a_stream_keeps_its_order_where_nodes_take_no_time() -> None:
    block = BlockBuilder()
    for _ in range(2):
        block.node(0)
    rows = History([iteration(program([block.build("b")], [[0]]), [0], [0] * N_OPS)]).to_rows()
    assert [(row["node"], row["event"]) for row in rows] == [(0, "start"), (0, "end"), (1, "start"), (1, "end")]


def test_a_dataframe_has_the_same_rows() -> None:
    block = BlockBuilder()
    block.node(0, Stream.GATHER)
    block.node(1)
    history = History([iteration(program([block.build("b")], [[0, 0]]), [5, 3], [1] * N_OPS)])
    frame = history.to_dataframe()
    assert tuple(frame.columns) == COLUMNS
    assert frame.to_dict("records") == history.to_rows()
    assert frame["stream"].dtype == "category"


def test_no_iterations_are_an_empty_table() -> None:
    assert History([]).to_rows() == []
    assert tuple(History([]).to_dataframe().columns) == COLUMNS
