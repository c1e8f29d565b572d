"""What stragglers cost, against the published results for real traces and known answers for small ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from forerun.answers.stragglers.recorded_steps import read_steps
from forerun.answers.stragglers.replay import Replay
from forerun.answers.stragglers.study import straggler_costs
from forerun.common.errors import ForerunError
from forerun.interfaces.cli.main import run
from forerun.interfaces.report.page import Plot
from forerun.interfaces.report.straggler_costs import costs_document

GOLDEN = Path(__file__).parents[4] / "shared" / "golden_straggler"
TRACES = sorted(GOLDEN.glob("trace-*.parquet")) if GOLDEN.is_dir() else []
golden = pytest.mark.skipif(not TRACES, reason="the traces of real jobs are not here (../shared/golden_straggler)")
# (kind, number, stage, start, duration) of one step: two micro batches on two stages, forward 1 s, backward 2 s
STEP = [
    *(("forward-compute", i, 0, i, 1) for i in range(2)),
    *(("forward-compute", i, 1, (1, 4)[i], 1) for i in range(2)),
    *(("backward-compute", i, 1, (2, 5)[i], 2) for i in range(2)),
    *(("backward-compute", i, 0, (4, 7)[i], 2) for i in range(2)),
    *(("forward-send", i, 0, i + 1, 0) for i in range(2)),
    *(("forward-recv", i, 1, (0, 2)[i], (1, 0)[i]) for i in range(2)),
    *(("backward-send", i, 1, (4, 7)[i], 0) for i in range(2)),
    *(("backward-recv", i, 0, (1, 6)[i], (3, 1)[i]) for i in range(2)),
    *(("optimizer-clip-main-grad", 0, stage, (9, 7)[stage], (0, 2)[stage]) for stage in range(2)),
    *(("optimizer", 0, stage, 9, 1) for stage in range(2)),
]
COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "seq_id", "mc", "gmc", "start_ts", "duration")


def rows(slower: float = 1.0, steps: int = 2, replicas: int = 2) -> Iterator[dict[str, Any]]:
    """Steps whose last replica takes `slower` times as long for all it does."""
    for step in range(steps):
        for replica in range(replicas):
            times = slower if replica == replicas - 1 else 1.0
            for kind, number, stage, start_s, duration_s in STEP:
                chunk = (0, stage) if kind.endswith("compute") else (-1, -1)
                begin_s, end_s = times * start_s, times * (start_s + duration_s)
                if kind == "optimizer-clip-main-grad":
                    end_s = 9.0 * slower
                elif kind == "optimizer":
                    begin_s, end_s = 9.0 * slower, 9.0 * slower + times
                row = (replica, stage, 2 * replica + stage, 10 * step, kind, number, *chunk, begin_s, end_s - begin_s)
                yield dict(zip(COLUMNS, row, strict=True))


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


@golden
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_steps_of_real_jobs_are_replayed_as_published(path):
    published = json.loads((GOLDEN / f"{path.stem.replace('trace', 'result')}.json").read_text())
    recorded = read_steps(path)
    replay, costs = Replay(recorded), straggler_costs(recorded)
    assert replay.step_s(replay.work) == pytest.approx(recorded.step_s, rel=1e-6)
    for name, found in (("step_t_base", recorded.step_s), ("step_t_nodelay", costs.replayed_s)):
        assert dict(zip(map(str, recorded.steps), found, strict=True)) == pytest.approx(published[name], rel=1e-4)
    assert costs.replayed_s.mean() == pytest.approx(recorded.step_s.mean(), rel=0.02)
    assert list(published["step_t_noblk"].values()) == pytest.approx([costs.alike_s] * len(recorded.steps), rel=1e-4)
    assert costs.slowdown == pytest.approx(published["blocking_slowdown"], rel=1e-4)
    assert costs.delayed == pytest.approx(published["launch_slowdown"], rel=1e-4)


@golden
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_causes_in_real_jobs_are_those_published(path):
    published = json.loads((GOLDEN / f"{path.stem.replace('trace', 'result')}.json").read_text())
    costs = straggler_costs(read_steps(path))
    for name, found in (("optype", costs.by_operation), ("stage", costs.by_stage), ("dp_rank", costs.by_replica)):
        expected = published[f"blocking_decompose_by_{name}"]
        assert {str(key): value for key, value in found.items()} == pytest.approx(expected, rel=1e-4)
    for prefix, metric, found in (("ms", "Ms", costs.last_stage_share), ("mw", "Mw", costs.slowest_ranks_share)):
        file = GOLDEN / f"{path.stem.replace('trace', prefix)}.json"
        assert found == pytest.approx(json.loads(file.read_text())[metric], abs=1e-4)


def test_equal_ranks_cost_nothing(tmp_path):
    costs = straggler_costs(read_steps(write(tmp_path / "t.parquet", list(rows()))))
    assert costs.recorded.step_s.tolist() == costs.replayed_s.tolist() == [10.0, 10.0]
    assert costs.alike_s == 10.0
    assert costs.slowdown == costs.delayed == 1.0
    assert isnan(costs.last_stage_share)


def test_a_replica_of_half_the_speed_slows_all(tmp_path):
    """Means over both replicas make each step 15 s, the slow replica makes it 20 s."""
    costs = straggler_costs(read_steps(write(tmp_path / "t.parquet", list(rows(2.0)))))
    assert costs.replayed_s.tolist() == [20.0, 20.0]
    assert costs.alike_s == 15.0
    assert costs.by_replica == {1: pytest.approx(4 / 3), 0: 1.0}
    assert next(iter(costs.by_rank)) in (2, 3)
    assert costs.slowest_ranks[0] in (2, 3)


def test_a_slow_last_stage_is_found(tmp_path):
    """The first stage needs half the time of the last: 8.5 s a step, 7.75 s if both are alike, 7 s with a fast last."""
    records = list(rows())
    for row in records:
        if row["stage"] == 0 and row["optype"].endswith("compute"):
            row["duration"] *= 0.5
    costs = straggler_costs(read_steps(write(tmp_path / "t.parquet", records)))
    assert costs.slowdown == pytest.approx(8.5 / 7.75)
    assert next(iter(costs.by_stage)) == 1
    assert costs.last_stage_share == pytest.approx(2.0)


def test_late_operations_are_delays_not_stragglers(tmp_path):
    records = list(rows(replicas=1))
    for row in records:
        if row["optype"] == "optimizer":
            row["start_ts"] += 0.5
    recorded = read_steps(write(tmp_path / "t.parquet", records))
    costs, replay = straggler_costs(recorded), Replay(recorded)
    assert recorded.step_s.tolist() == replay.step_s(replay.work).tolist() == [10.5, 10.5]
    assert costs.replayed_s.tolist() == [10.0, 10.0]
    assert costs.slowdown == 1.0


def test_a_transfer_that_was_never_launched_holds_up_nothing(tmp_path):
    """Profilers record receives after the last pass that no rank sent."""
    records = list(rows(replicas=1))
    extra = next(row for row in records if row["optype"] == "forward-recv")
    records += [{**extra, "seq_id": 2, "step": step, "start_ts": 7.5, "duration": 0.25} for step in (0, 10)]
    assert straggler_costs(read_steps(write(tmp_path / "t.parquet", records))).replayed_s.tolist() == [10.0, 10.0]


def test_steps_that_lack_operations_are_left_out(tmp_path):
    recorded = read_steps(write(tmp_path / "t.parquet", list(rows(steps=3))[:-1]))
    assert recorded.steps == (0, 10)
    assert recorded.notes == ("1 of 3 steps lack operations and are left out.",)


def drop_column(records: list[dict[str, Any]]) -> None:
    for row in records:
        del row["seq_id"]


def unknown_kind(records: list[dict[str, Any]]) -> None:
    records[0]["optype"] = "sideways-compute"


def no_time(records: list[dict[str, Any]]) -> None:
    records[0]["duration"] = -1.0


def twice(records: list[dict[str, Any]]) -> None:
    records += records[:1] + [row for row in records if row["step"] == 10][:1]


def one_receive_less(records: list[dict[str, Any]]) -> None:
    records[:] = [row for row in records if (row["optype"], row["seq_id"]) != ("forward-recv", 1)]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (drop_column, "no column seq_id"),
        (unknown_kind, "unknown kind 'sideways-compute'"),
        (no_time, "column duration has values that are no times"),
        (twice, "no step has each operation once on each replica; step 0 has forward-compute 0 of stage 0 2 times"),
        (one_receive_less, "stage 0 has 2 forward-send, and stage 1 1 forward-recv"),
    ],
)
def test_what_is_wrong_in_a_trace_is_one_line(spoil, words, tmp_path):
    records = list(rows())
    spoil(records)
    path = write(tmp_path / "t.parquet", records)
    with pytest.raises(ForerunError) as error:
        Replay(read_steps(path))
    assert words in str(error.value)


def test_a_file_that_is_not_there_is_not_called_bad_parquet(tmp_path, capsys):
    assert run(["stragglers", str(tmp_path / "no.parquet")]) == 2
    assert "no.parquet: can't be read: there is no such file; check the path" in capsys.readouterr().err


def test_the_page_has_a_cell_for_each_stage_and_replica_of_which_the_slowest_is_the_darkest(tmp_path):
    costs = straggler_costs(read_steps(write(tmp_path / "t.parquet", list(rows(2.0, replicas=20)))))
    _, shown, _ = (part for part in costs_document(costs).parts if isinstance(part, Plot))
    (cells,) = shown.data
    assert sorted(zip(cells["x"], cells["base"], strict=True)) == [(x, y) for x in range(20) for y in range(2)]
    colours = dict(zip(cells["customdata"], cells["marker"]["color"], strict=True))
    slow = [words for words in colours if "replica 19" in words]
    assert {colours[words] for words in slow}.isdisjoint(colours[words] for words in colours if words not in slow)
    assert min(colours.values()) in {colours[words] for words in slow}
    named = dict(zip(shown.layout["yaxis"]["ticktext"], shown.layout["yaxis"]["tickvals"], strict=True))
    assert named == {"0": 1.5, "1": 0.5}, "stage 0 stands above"
    assert shown.layout["xaxis"]["tickvals"] == list(range(0, 20, 2))


def test_the_command_writes_figures_steps_and_a_page(tmp_path, capsys):
    path = write(tmp_path / "t.parquet", list(rows(2.0)))
    table, page = tmp_path / "steps.csv", tmp_path / "page.html"
    assert run(["stragglers", str(path), "--json", "--csv", str(table), "--report", str(page)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["slowdown"] == pytest.approx(4 / 3)
    assert np.loadtxt(table, delimiter=",", skiprows=1)[:, 1].tolist() == [20.0, 20.0]
    assert "Stages and replicas" in page.read_text()
    assert run(["stragglers", str(path)]) == 0
    assert "Stragglers slow it by 33.3%" in capsys.readouterr().out
    (tmp_path / "no.parquet").write_text("no")
    assert run(["stragglers", str(tmp_path / "no.parquet")]) == 2
    assert "can't be read as Parquet" in capsys.readouterr().err
