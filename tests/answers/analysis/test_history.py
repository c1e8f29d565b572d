"""The event history as a table."""

from __future__ import annotations

import sys
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_programs import N_OPS, program, random_programs

from forerun.answers.analysis.history import COLUMNS, KINDS, History, RunIteration
from forerun.answers.analysis.predict import simulate as simulate_plan
from forerun.common.errors import ForerunError, UnknownName
from forerun.core.engine.simulate import simulate
from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import Phase, Program, Stream
from forerun.core.program.unfold import unfold
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan

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
        "kind": "compute",
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


def test_every_class_counts_its_own_nodes() -> None:
    blocks = [BlockBuilder(), BlockBuilder()]
    for number, block in enumerate(blocks):
        for _ in range(2 + number):
            block.node(0)
    both = program([block.build("b") for block in blocks], [[0], [1]])
    rows = History([iteration(both, [5], [0] * N_OPS)]).to_rows()
    counted = [(row["rank_class"], row["node"]) for row in rows if row["event"] == "start"]
    assert sorted(counted) == [("class 0", 0), ("class 0", 1), ("class 1", 0), ("class 1", 1), ("class 1", 2)]


def test_a_dataframe_has_the_same_rows() -> None:
    block = BlockBuilder()
    block.node(0, Stream.GATHER)
    block.node(1)
    history = History([iteration(program([block.build("b")], [[0, 0]]), [5, 3], [1] * N_OPS)])
    frame = history.to_dataframe()
    assert tuple(frame.columns) == COLUMNS
    assert frame.to_dict("records") == history.to_rows()
    assert frame["stream"].dtype == "category"


def test_events_are_the_rows_and_kinds_part_them() -> None:
    block = BlockBuilder()
    block.node(0, Stream.GATHER)
    block.node(1)
    history = History([iteration(program([block.build("b")], [[0, 0]]), [5, 3], [1] * N_OPS)])
    events = list(history.events())
    assert [asdict(each) for each in events] == history.to_rows()
    assert all(each.timestamp == each.time_ps / 1e12 for each in events)
    by_kind = {kind: list(history.events(kind)) for kind in KINDS}
    assert sum(map(len, by_kind.values())) == len(events)
    assert by_kind["host"]
    for kind, some in by_kind.items():
        assert {each.kind for each in some} <= {kind}
        starts, ends = list(history.events(f"{kind}_start")), list(history.events(f"{kind}_end"))
        assert {each.event_type for each in starts} <= {f"{kind}_start"}
        assert len(starts) == len(ends) == len(some) / 2
    with pytest.raises(UnknownName, match="communication_start"):
        history.events("kernels")


def test_without_pandas_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ForerunError, match=r"needs pandas: pip install 'forerun\[data\]'; events\(\) works without"):
        History([]).to_dataframe()


def test_no_iterations_are_an_empty_table() -> None:
    assert History([]).to_rows() == []
    assert tuple(History([]).to_dataframe().columns) == COLUMNS


def test_a_step_alone_begins_at_time_zero() -> None:
    simulation = simulate_plan(load_model("gpt2-small"), Plan(seq_len=128), load_cluster("h100-sxm"))
    events = History([RunIteration.of(simulation)]).to_rows()
    assert events[0]["time_ps"] == 0
    assert max(event["time_ps"] for event in events) == simulation.timeline.end_of_step_ps
