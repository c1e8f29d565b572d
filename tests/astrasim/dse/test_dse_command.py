"""`forerun dse`: what it prints, writes and ends with."""

import json

import pytest
from command_here import run_here
from dse_files import POINTS, changed, write


@pytest.fixture
def dse(tmp_path):
    def run(data, *arguments):
        path = write(tmp_path, data)
        return run_here(tmp_path, "dse", path, "--out", tmp_path / "out", *arguments)

    return run


def test_the_report_names_the_best_points_the_front_and_the_trends(dse, tmp_path):
    done = dse(changed(("memory_limit_gib", 0.004)), "--jobs", "1")
    assert done.returncode == 0, done.stderr
    for words in ("tiny on torus: 8 NPUs, 40 points", "Fastest, memory unlimited", "Fastest within 0.004 GiB"):
        assert words in done.stdout
    for words in ("Pareto front", "Trend of each axis", "weight sharded", f"{POINTS} simulated", "points/s"):
        assert words in done.stdout
    assert (tmp_path / "out" / "results.csv").is_file()


def test_a_second_run_knows_everything(dse):
    assert dse(changed(), "--no-plot").returncode == 0
    record = json.loads(dse(changed(), "--json", "--no-plot", "--top", "1").stdout)
    assert (record["simulated"], record["known"], record["failed"]) == (0, POINTS, 0)
    assert len(record["pairs"][0]["best"]) == 1


def test_the_plot_is_a_picture(dse, tmp_path):
    pytest.importorskip("matplotlib")
    assert dse(changed(("memory_limit_gib", 0.004)), "--plot").returncode == 0
    assert (tmp_path / "out" / "pareto.png").read_bytes().startswith(b"\x89PNG")


def test_it_says_why_in_sentences_and_as_data(dse):
    done = dse(changed(("memory_limit", "0.004 GB")), "--no-plot")
    assert "Fastest within 0.004 GB" in done.stdout
    sentences = [line for line in done.stdout.split("\nWhy\n")[1].splitlines() if line.startswith("- ")]
    record = json.loads(dse(changed(("memory_limit", "0.004 GB")), "--json", "--no-plot").stdout)["pairs"][0]
    assert sentences == [f"- {reason['text']}" for reason in record["reasons"]]
    assert len(sentences) > 5
    assert record["memory_limit"] == "0.004 GB"


def test_points_and_the_release_may_be_options(dse, tmp_path):
    (tmp_path / "points.txt").write_text("8_1_1_1_0\n1_4_2_1_1\n")
    done = dse(changed(), "--no-plot", "--points", str(tmp_path / "points.txt"), "--release", "2025-03")
    assert "2 points: 2 simulated" in done.stdout
    metrics = json.loads((tmp_path / "out" / "tiny_torus.json").read_text())
    assert list(metrics) == ["8_1_1_1_0", "1_4_2_1_1"]
    again = dse(changed(("issue_order", "march-2025")), "--no-plot", "--points", str(tmp_path / "out/tiny_torus.json"))
    assert "0 simulated, 2 known from before" in again.stdout
    other = dse(changed(), "--no-plot", "--points", str(tmp_path / "points.txt"), "--issue-order", "ascending")
    assert "2 simulated" in other.stdout
    assert dse(changed(), "--release", "2017-01").returncode == 2


def test_bad_input_is_one_line_and_writes_nothing(dse, tmp_path):
    done = dse(changed(("plan.dp", 3)))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "plan: no dp x tp x sp" in done.stderr
    assert not (tmp_path / "out").exists()


def test_nothing_that_fits_is_said_by_the_exit_code(dse):
    done = dse(changed(("memory_limit_gib", 1e-9)), "--no-plot")
    assert done.returncode == 3
    assert "0 of 40 points fit" in done.stdout
