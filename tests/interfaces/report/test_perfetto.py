from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_programs import N_OPS, program, random_programs

import forerun
from forerun.answers.analysis.history import RunIteration
from forerun.common.errors import ForerunError
from forerun.core.engine.simulate import Timeline, simulate
from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import Channel, FlatProgram, Program, Stream
from forerun.core.program.unfold import unfold
from forerun.interfaces.report.perfetto import write_run_trace, write_trace

NANOSECOND = Decimal("0.001")
ISSUE_PS = np.array([0, 1, 5, 70, 1_000_001, 3], np.int64)
DURATION_PS = np.array([0, 123_456_789_012, 7, 1_000_000, 999_999, 250], np.int64)


def simulated(what: Program) -> tuple[FlatProgram, Timeline]:
    flat = unfold(what)
    none = np.zeros(N_OPS)
    return flat, simulate(flat, DURATION_PS, ISSUE_PS, none, none, np.zeros(N_OPS, bool))


def trace(path: Path, what: Program) -> tuple[dict[str, Any], FlatProgram, Timeline]:
    flat, timeline = simulated(what)
    write_trace(path, what, flat, timeline, ISSUE_PS)
    return json.loads(path.read_text(), parse_float=Decimal), flat, timeline


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(random_programs())
def test_slices_are_sorted_and_never_overlap_on_a_thread(tmp_path: Path, what: Program) -> None:
    data, flat, timeline = trace(tmp_path / "trace.json", what)
    threads = defaultdict(list)
    named = set()
    for event in data["traceEvents"]:
        key = event["pid"], event["tid"]
        if event["ph"] == "X":
            threads[key].append((event["ts"], event["ts"] + event["dur"]))
        elif event["name"] == "thread_name":
            named.add(key)
    assert set(threads) <= named
    for slices in threads.values():
        assert slices == sorted(slices)
        assert all(a[1] <= b[0] for a, b in pairwise(slices))
    on_device = [e for e in data["traceEvents"] if e["ph"] == "X" and e["cat"] != "host"]
    assert len(on_device) == len(flat)
    assert sum(e["dur"] for e in on_device) * 1000 == int((timeline.end_ps // 1000 - timeline.start_ps // 1000).sum())
    assert sorted(e["ts"] * 1000 for e in on_device) == sorted((timeline.start_ps // 1000).tolist())


def nanoseconds(time_us: Decimal) -> int:
    """A time as Perfetto's importer reads it: a double, rounded to whole nanoseconds."""
    return math.floor(float(time_us) * 1000.0 + 0.5)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(random_programs(), st.lists(st.integers(0, 5000), min_size=N_OPS, max_size=N_OPS))
def test_slices_do_not_overlap_where_times_are_whole_nanoseconds(
    tmp_path: Path, what: Program, duration_ps: list[int]
) -> None:
    flat, none = unfold(what), np.zeros(N_OPS)
    durations = np.array(duration_ps, np.int64)
    timeline = simulate(flat, durations, ISSUE_PS, none, none, np.zeros(N_OPS, bool))
    write_trace(tmp_path / "trace.json", what, flat, timeline, ISSUE_PS)
    ends: dict[tuple[int, int], int] = defaultdict(int)
    for event in json.loads((tmp_path / "trace.json").read_text(), parse_float=Decimal)["traceEvents"]:
        if event["ph"] == "X":
            thread, start = (event["pid"], event["tid"]), nanoseconds(event["ts"])
            assert start >= ends[thread]
            ends[thread] = start + nanoseconds(event["dur"])


def test_a_slice_says_what_ran(tmp_path: Path) -> None:
    send, receive = BlockBuilder(), BlockBuilder()
    send.node(1, Stream.PP_SEND, channel=0)
    receive.node(1, Stream.PP_RECV, channel=0)
    two = program([send.build("send"), receive.build("receive")], [[0, 0], [1, 1]], [Channel("pipe", (0, 1))])
    data, _, _ = trace(tmp_path / "t.json", two)
    slices = [e for e in data["traceEvents"] if e["ph"] == "X" and e["cat"] == "forward"]
    assert [(e["pid"], e["tid"]) for e in slices] == [(1, 101 + Stream.PP_SEND)] * 2 + [(2, 201 + Stream.PP_RECV)] * 2
    second = slices[1]
    assert second["name"] == "op1"
    assert (str(second["ts"]), str(second["dur"])) == ("123456.789", "123456.789")
    expected = {"micro_batch": 1, "layer": 1, "block": "send", "module": "m", "channel": "pipe", "kind": "memory"}
    assert expected.items() <= second["args"].items()
    names = {e["args"]["name"] for e in data["traceEvents"] if e["ph"] == "M" and "name" in e["args"]}
    assert names == {"class 0", "class 1", "pp_send", "pp_recv", "host"}


def test_a_folder_that_is_not_there_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    block = BlockBuilder()
    block.node(0)
    what = program([block.build("b")], [[0]])
    flat, timeline = simulated(what)
    with pytest.raises(ForerunError, match=r"gone.t\.json: can't be written: No such file"):
        write_trace(tmp_path / "gone" / "t.json", what, flat, timeline, ISSUE_PS)
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(random_programs(), random_programs())
def test_a_run_is_its_steps_one_after_the_other(tmp_path: Path, first: Program, second: Program) -> None:
    alone, steps, begin = [], [], 10**9 + 1
    for number, what in enumerate((first, second)):
        data, flat, timeline = trace(tmp_path / f"{number}.json", what)
        steps.append(RunIteration(begin, what, flat, timeline, ISSUE_PS))
        for event in data["traceEvents"]:
            if event["ph"] == "X":
                alone.append({**event, "ts": event["ts"] + Decimal(begin) / 10**6})
        begin += timeline.end_of_step_ps
    write_run_trace(tmp_path / "run.json", iter(steps), {"what": "two steps"})
    run = json.loads((tmp_path / "run.json").read_text(), parse_float=Decimal)
    assert run["otherData"] == {"what": "two steps"}
    slices = [event for event in run["traceEvents"] if event["ph"] == "X"]
    inside = [event for event in slices if event["cat"] != "iteration"]
    times = ("ts", "dur")
    assert [{**event, "ts": 0, "dur": 0} for event in inside] == [{**event, "ts": 0, "dur": 0} for event in alone]
    assert all(abs(a[key] - b[key]) <= NANOSECOND for a, b in zip(inside, alone, strict=True) for key in times)
    marks = [event for event in slices if event["cat"] == "iteration"]
    assert [(mark["name"], mark["ts"]) for mark in marks] == [
        ("iteration 0", Decimal(steps[0].start_ps // 1000) / 1000),
        ("iteration 1", Decimal(steps[1].start_ps // 1000) / 1000),
    ]
    assert marks[0]["ts"] + marks[0]["dur"] == marks[1]["ts"]
    names = [json.dumps(event) for event in run["traceEvents"] if event["ph"] == "M"]
    assert len(names) == len(set(names))
    named = {(event["pid"], event["tid"]) for event in run["traceEvents"] if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in slices} <= named


def test_a_name_that_ends_in_gz_is_compressed_and_holds_the_same(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("step.json", "step.json.gz", "again.json.gz")]
    simulation = forerun.simulate("llama-3.1-8b", forerun.Plan(seq_len=1024, pp=2, n_microbatches=2), "h100-sxm")
    flat, timeline, issue_ps = simulation.flat, simulation.timeline, simulation.costs.issue_ps
    for path in paths:
        write_trace(path, simulation.program, flat, timeline, issue_ps)
    plain, packed, again = (path.read_bytes() for path in paths)
    assert gzip.decompress(packed) == plain
    assert packed == again
    assert len(packed) < len(plain) / 5
    events = json.loads(plain)["traceEvents"]
    for kind, key in (("process_name", ("pid",)), ("thread_name", ("pid", "tid"))):
        named = {tuple(each[part] for part in key) for each in events if each["ph"] == "M" and each["name"] == kind}
        assert named >= {tuple(each[part] for part in key) for each in events if each["ph"] == "X"}
    for each in events:
        assert each["ph"] in ("M", "X")
        assert isinstance(each["name"], str)
        assert isinstance(each["pid"], int)
        assert isinstance(each["tid"], int)
        if each["ph"] == "X":
            assert each["ts"] >= 0
            assert each["dur"] >= 0
