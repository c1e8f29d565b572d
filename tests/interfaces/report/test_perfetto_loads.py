"""Traces in Perfetto's own trace processor, the program that reads a file for its pages."""

import csv
import gzip
import io
import json
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import forerun
from forerun.interfaces.report.perfetto import write_trace

NAMES = (os.environ.get("FORERUN_TRACE_PROCESSOR", ""), "trace_processor_shell", "trace_processor")
PROCESSOR = next((found for name in NAMES if name and (found := shutil.which(name))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROCESSOR is None,
        reason="no trace processor: get https://get.perfetto.dev/trace_processor, name it in FORERUN_TRACE_PROCESSOR",
    ),
]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("perfetto") / "step.json.gz"
    plan = forerun.Plan(seq_len=2048, dp_shard=2, tp=2, pp=2, n_microbatches=4)
    one = forerun.simulate("llama-3.1-8b", plan, "h100-sxm")
    write_trace(path, one.program, one.flat, one.timeline, one.costs.issue_ps)
    return path


def ask(trace: Path, query: str) -> list[dict[str, str]]:
    """Returns the rows of a query in Perfetto's SQL."""
    assert PROCESSOR is not None
    file = trace.with_name("query.sql")
    file.write_text(query)
    done = subprocess.run([PROCESSOR, "-q", str(file), str(trace)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return list(csv.DictReader(io.StringIO(done.stdout)))


def events(trace: Path, phase: str) -> list[dict[str, object]]:
    everything = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event for event in everything if event["ph"] == phase]


def test_nothing_of_a_trace_is_dropped_or_doubted(trace: Path) -> None:
    assert ask(trace, "select name, value from stats where severity = 'error' and value > 0") == []
    rows = ask(trace, "select name, dur, depth from slice")
    # marks without a length lie in what starts at the same time
    assert {row["depth"] for row in rows if row["dur"] != "0"} == {"0"}
    read = Counter((row["name"], int(row["dur"])) for row in rows)
    assert read == Counter((str(each["name"]), round(1000 * float(str(each["dur"])))) for each in events(trace, "X"))


def test_processes_and_threads_have_their_names(trace: Path) -> None:
    query = (
        "select process.pid, process.name as process, thread.tid, thread.name as thread, count(*) as slices from slice"
        " join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)"
        " group by process.pid, process.name, thread.tid, thread.name"
    )
    read = {
        (int(row["pid"]), row["process"], int(row["tid"]), row["thread"]): int(row["slices"])
        for row in ask(trace, query)
    }
    named = {(each["name"], each["pid"], each["tid"]): each["args"] for each in events(trace, "M")}
    assert len(named) == len(events(trace, "M"))
    written: Counter[tuple[object, ...]] = Counter()
    for each in events(trace, "X"):
        process = named["process_name", each["pid"], each["pid"]]["name"]  # type: ignore[index]
        thread = named["thread_name", each["pid"], each["tid"]]["name"]  # type: ignore[index]
        written[each["pid"], process, each["tid"], thread] += 1
    assert read == written
