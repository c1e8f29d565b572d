"""Explorations: what is simulated, kept, written and reported."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest
from dse_files import POINTS, SMALL, changed, write

from forerun.astrasim.astra.replay import replay
from forerun.astrasim.astra.statistics import RankStatistics
from forerun.astrasim.dse.definition import read_exploration
from forerun.astrasim.dse.evaluate import Evaluator, Failed, Figures, figures_of
from forerun.astrasim.dse.explore import NAME, evaluator_of, explore
from forerun.astrasim.dse.result import results_by_pair
from forerun.astrasim.dse.tables import CSV_NAME, PARQUET_NAME
from forerun.astrasim.dse.terms import Terms
from forerun.astrasim.dse.workload import traces_of
from forerun.common.errors import ForerunError
from forerun.common.units import GIB
from forerun.common.workers import Workers
from forerun.interfaces.report.exploration import exploration_record


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The small exploration, and what one process found."""
    folder = tmp_path_factory.mktemp("small")
    exploration = read_exploration(write(folder, SMALL))
    return exploration, explore(exploration, folder / "out", Workers(1)), folder / "out"


def of(tmp_path, *changes):
    return read_exploration(write(tmp_path, changed(*changes)))


def test_a_point_is_the_replay_of_its_generated_traces(small):
    exploration, explored, _ = small
    assert len(explored.rows) == explored.computed == POINTS
    machine = exploration.machines["torus"]
    for row in explored.rows[::7]:
        traces = traces_of(exploration.workloads["tiny"].args(row.point.strategy))
        alone = replay(list(traces), traces.groups, machine, fold=False)
        assert row.figures == figures_of(alone, exploration.workloads["tiny"].axes(row.point.strategy))
        assert row.figures.time_ns == alone.wall_ns
        assert row.peak_memory_gib == max(rank.peak_memory_bytes for rank in alone.statistics) / GIB


def replayed(**of_rank):
    """A replay of two ranks, of which the second ends last and the first needs the most memory."""
    usual = {"exposed_communication": 1, "wall_time": 2, "gpu_time": 3, "comm_time": 4}
    share = {"compute_bound_pct": 5.0, "avg_compute_util_pct": 6.0, "avg_mem_util_pct": 7.0, "avg_op_intensity": 8.0}
    last = RankStatistics(wall_cycles_finished=90, peak_memory_bytes=10, **{**usual, **share, **of_rank})
    first = RankStatistics(80, 11, 12, 13, 14, 15.0, 16.0, 17.0, 18.0, 20)
    ranks = first, last
    finish_ns, peaks = np.array([80, 90]), np.array([20, 10])
    return SimpleNamespace(
        statistics=ranks, statistics_of=ranks.__getitem__, finish_ns=finish_ns, peak_memory_bytes=peaks
    )


def test_figures_are_of_the_rank_that_ends_last_and_memory_of_the_one_that_needs_most(monkeypatch):
    monkeypatch.setattr("forerun.astrasim.dse.evaluate.terms_of", lambda *arguments: arguments[1:])
    result = replayed()
    assert figures_of(result, ("dp",)) == Figures(
        90, 1, 3, 4, 5.0, 6.0, 7.0, 8.0, 20, (1, 0, ("dp",)), result.statistics[0]
    )
    nothing = dict.fromkeys(("compute_bound_pct", "avg_compute_util_pct", "avg_mem_util_pct", "avg_op_intensity"))
    found = figures_of(replayed(**nothing), ())
    assert [getattr(found, name) for name in nothing] == [0.0] * 4


def test_two_processes_find_the_same(small, tmp_path):
    exploration, explored, folder = small
    again = explore(exploration, tmp_path / "two", Workers(2))
    assert again.rows == explored.rows
    assert (tmp_path / "two" / CSV_NAME).read_text() == (folder / CSV_NAME).read_text()


def test_a_broken_run_goes_on(tmp_path, monkeypatch):
    exploration = of(tmp_path)

    def interrupt(done, total):
        assert total == POINTS
        if done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        explore(exploration, tmp_path / "out", Workers(1), progress=interrupt)
    assert not (tmp_path / "out" / CSV_NAME).exists()
    explored = explore(exploration, tmp_path / "out", Workers(1))
    assert (explored.known, explored.computed) == (10, POINTS - 10)
    fresh = explore(exploration, tmp_path / "other", Workers(1))
    assert fresh.rows == explored.rows


def test_a_changed_file_computes_what_is_new(tmp_path):
    explore(of(tmp_path, ("plan.dp", [1, 2])), tmp_path / "out", Workers(1))
    before = len(of(tmp_path, ("plan.dp", [1, 2])).points)
    more = explore(of(tmp_path), tmp_path / "out", Workers(1))
    assert (more.known, more.computed) == (before, POINTS - before)
    renamed = of(tmp_path, ("workloads.tiny", None), ("workloads.new", SMALL["workloads"]["tiny"]))
    assert explore(renamed, tmp_path / "out", Workers(1)).computed == 0
    limited = of(tmp_path, ("memory_limit_gib", 1), ("bytes_per_element", 2))
    assert explore(limited, tmp_path / "out", Workers(1)).computed == 0


@pytest.mark.parametrize(
    "change",
    [
        ("workloads.tiny.dff", 2048),
        ("systems.torus.system.peak-perf", 46),
        ("systems.torus.network.latency", 400.0),
        ("issue_order", "march-2025"),
    ],
)
def test_what_a_point_depends_on_makes_it_new(tmp_path, change):
    one = ("sampling", {"method": "grid", "points": 1})
    explore(of(tmp_path, one), tmp_path / "out", Workers(1))
    assert explore(of(tmp_path, one, change), tmp_path / "out", Workers(1)).computed == 1


def test_points_that_fail_are_rows(tmp_path):
    """halvingDoubling has no all-to-all, and needs powers of two."""
    bad = [f"systems.torus.system.{kind}-implementation" for kind in ("all-reduce", "all-gather")]
    explored = explore(of(tmp_path, *[(key, ["ring"] * 3) for key in bad]), tmp_path / "out", Workers(1))
    (pair,) = explored.pairs
    assert pair.failed
    assert pair.ranked, "groups smaller than the system need no implementation"
    assert len(pair.failed) + len(pair.ranked) == POINTS
    assert all("names 3 dimensions, the network has 2" in row.error for row in pair.failed)
    with (tmp_path / "out" / CSV_NAME).open() as file:
        statuses = [row["status"] for row in csv.DictReader(file)]
    assert statuses.count("error") == len(pair.failed)
    assert explore(of(tmp_path, *[(key, ["ring"] * 3) for key in bad]), tmp_path / "out", Workers(1)).computed == 0


def test_csv_and_parquet_are_equal(small):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    _, explored, folder = small
    text = pandas.read_csv(folder / CSV_NAME)
    typed = pandas.read_parquet(folder / PARQUET_NAME)
    assert list(text) == list(typed)
    assert len(text) == len(typed) == POINTS
    for name in text:
        if not text[name].isna().all():
            assert text[name].tolist() == typed[name].tolist(), name
    assert typed["time_ns"].tolist() == [row.figures.time_ns for row in explored.rows]
    assert str(typed["weight_sharded"].dtype) == "bool"


def test_the_metrics_are_those_of_rank_0_by_key(small):
    exploration, explored, folder = small
    metrics = json.loads((folder / "tiny_torus.json").read_text())
    plain = [row for row in explored.rows if not row.point.strategy.weight_sharded]
    assert len(metrics) == POINTS
    for row in plain[::5]:
        split, rank_0 = row.point.strategy, evaluator_of(exploration).replay(row.point).statistics[0]
        mine = metrics[f"{split.dp}_{split.tp}_{split.sp}_{split.pp}_{int(split.activation_recompute)}"]
        assert list(mine.values()) == [
            rank_0.wall_time, rank_0.gpu_time, rank_0.comm_time, rank_0.compute_bound_pct, rank_0.avg_compute_util_pct,
            rank_0.avg_mem_util_pct, rank_0.avg_op_intensity, rank_0.peak_memory_bytes,
            split.dp, split.tp, split.sp, split.pp, int(split.activation_recompute),
        ]  # fmt: skip


def test_pairs_of_one_file_name_are_refused(tmp_path):
    torus, tiny = SMALL["systems"]["torus"], SMALL["workloads"]["tiny"]
    names = [("systems", {"torus": torus, "b_torus": torus}), ("workloads", {"tiny_b": tiny, "tiny": tiny})]
    with pytest.raises(ForerunError, match=r"would both be written as tiny_b_torus.json"):
        explore(of(tmp_path, *names), tmp_path / "out", Workers(1))


def figures(time_ns, memory):
    of_rank = RankStatistics(time_ns, 0, time_ns, time_ns, 0, 0.0, 0.0, 0.0, 0.0, memory)
    terms = Terms(0, time_ns, (), 0, memory, 0)
    return Figures(time_ns, 0, time_ns, 0, 0.0, 0.0, 0.0, 0.0, memory, terms, of_rank)


@pytest.fixture
def invented(tmp_path):
    """Results whose figures are chosen: (time, GiB), or None for a failure."""

    def make(outcomes, limit=3.0, elements=1):
        exploration = of(
            tmp_path,
            ("memory_limit_gib", limit),
            ("bytes_per_element", elements),
            ("sampling", {"method": "grid", "points": len(outcomes)}),
        )
        found = [Failed("no") if one is None else figures(one[0], int(one[1] * GIB)) for one in outcomes]
        (pair,) = results_by_pair(exploration, found)
        return pair

    return make


def times(rows):
    return [row.figures.time_ns for row in rows]


def test_the_best_with_and_without_a_limit(invented):
    pair = invented([(10, 5), (20, 3), None, (30, 1), (15, 4)])
    assert times(pair.ranked) == [10, 15, 20, 30]
    assert times(pair.ranked_within_limit) == [20, 30]
    assert len(pair.failed) == 1


def test_bytes_per_element_count_for_the_limit(invented):
    pair = invented([(10, 2), (20, 1)], elements=2)
    assert times(pair.ranked_within_limit) == [20]
    assert [row.peak_memory_gib for row in pair.ranked] == [4.0, 2.0]
    assert [row.figures.peak_memory_bytes for row in pair.ranked] == [2 * GIB, GIB]


def test_the_front_is_what_nothing_beats(invented):
    pair = invented([(10, 5), (10, 6), (20, 5), (30, 2), (25, 3), (40, 2), (50, 1)])
    assert times(pair.pareto) == [10, 25, 30, 50]
    assert [row.peak_memory_gib for row in pair.pareto] == [5, 3, 2, 1]


def test_trends_are_of_the_points_with_a_value(small):
    _, explored, _ = small
    (pair,) = explored.pairs
    trends = {(row.axis, row.value): row for row in pair.trends}
    assert {axis for axis, _ in trends} == {"dp", "tp", "sp", "weight_sharded", "activation_recompute"}
    for (axis, value), row in trends.items():
        mine = [each.figures.time_ns for each in pair.rows if getattr(each.point.strategy, axis) == value]
        middle = sorted(mine)[len(mine) // 2 - 1 : len(mine) // 2 + 1]
        assert (row.points, row.best_ns) == (len(mine), min(mine))
        assert row.median_ns == (sum(middle) / 2 if len(mine) % 2 == 0 else sorted(mine)[len(mine) // 2])


def test_a_store_that_is_none_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / NAME).write_text("this is not a database, and far too long to be an empty one " * 20)
    with pytest.raises(ForerunError, match="choose another folder"):
        explore(of(tmp_path), tmp_path / "out", Workers(1))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ForerunError, match="can't be made a folder"):
        explore(of(tmp_path), tmp_path / "file" / "out", Workers(1))
    with pytest.raises(ForerunError, match="workers must be at least 1"):
        explore(of(tmp_path), tmp_path / "out", Workers(0))
    assert not (tmp_path / "out").exists()


def test_nothing_learnt_on_one_system_is_used_on_another(tmp_path):
    """Evaluators keep what collectives take, by system."""
    slow = {**SMALL["systems"]["torus"]["network"], "bandwidth": 5.0}
    exploration = of(tmp_path, ("systems.slow", {**SMALL["systems"]["torus"], "network": slow}))
    together = Evaluator(exploration.workloads, exploration.machines)
    for point in exploration.points[::9]:
        alone = Evaluator(exploration.workloads, exploration.machines)
        assert together.outcome(point) == alone.outcome(point)


def test_the_second_generation_is_explored(tmp_path):
    sizes = {"dvocal": 512, "dmodel": 256, "dff": 1024, "head": 8, "seq": 64, "batch": 64, "num_stacks": 2}
    second = {**sizes, "model_type": "moe", "micro_batch": 32, "experts": 4}
    exploration = of(
        tmp_path,
        ("workloads", {"moe": second}),
        ("plan", {"ep": [2], "pp": [2], "sp": 1}),
    )
    (pair,) = explore(exploration, tmp_path / "out", Workers(1)).pairs
    assert len(pair.ranked) == 2
    assert not pair.failed


def test_the_record_is_plain_data(small):
    _, explored, _ = small
    record = json.loads(json.dumps(exploration_record(explored, 3)))
    assert record["points"] == POINTS
    (pair,) = record["pairs"]
    assert len(pair["best"]) == 3
    assert pair["best"][0]["time_ns"] == min(row.figures.time_ns for row in explored.rows)
