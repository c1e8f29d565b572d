"""What `forerun plan` shows beside the best plan: ranges, fronts, heat maps, and why a plan is not the best."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest

from forerun.interfaces.cli.main import run

FEW = ("--cp", "1", "--pp", "1,2", "--zero-stage", "3", "--micro-batch", "1,4", "--pp-schedule", "1F1B")
WHERE = ("gpt2-small", "--cluster", "h100-sxm", "--seq-len", "512", "--workers", "1", *FEW)
ONE = ("--gpus", "8", "--global-batch", "32")


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """What one test simulated, others need not."""
    return tmp_path_factory.mktemp("store") / "plans.sqlite"


@pytest.fixture
def plan(capsys, monkeypatch, tmp_path, store):
    """`forerun plan ARGUMENTS` in an empty folder: exit code, what is printed, what is said of errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def ask(*arguments: str) -> tuple[int, str, str]:
        code = run(["plan", *WHERE, "--store", str(store), *arguments])
        return code, *capsys.readouterr()

    return ask


def test_a_range_has_a_row_for_each_search(plan, tmp_path):
    code, out, _ = plan("--gpus", "4..16", "--global-batch", "32,64", "--csv", "best.csv")
    assert code == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "best.csv").read_text())))
    assert [(row["n_gpus"], row["global_batch"]) for row in rows] == [
        (gpus, batch) for gpus in ("4", "8", "16") for batch in ("32", "64")
    ]
    assert [row["best"] for row in rows].count("yes") == 1
    best = next(row for row in rows if row["best"] == "yes")
    assert max(float(row["tokens_per_s"]) for row in rows) == float(best["tokens_per_s"])
    assert f"Best by tokens: {best['n_gpus']} GPUs, batch {best['global_batch']}: " in out
    assert "\n  16 GPUs, batch 64: FSDP=" in out
    assert "forerun predict gpt2-small" in out
    assert max(map(len, out.split("In detail:")[0].splitlines())) <= 80
    assert "..." not in out
    record = json.loads(plan("--gpus", "4..16", "--global-batch", "32,64", "--json")[1])
    assert [point["best"]["step_time_s"] for point in record["points"]] == [float(row["step_time_s"]) for row in rows]
    assert record["best"] == {"n_gpus": int(best["n_gpus"]), "global_batch": int(best["global_batch"])}
    assert record["objective"] == "tokens"


def test_a_range_of_gpus_is_best_by_time_unless_somebody_says_otherwise(plan):
    ranges = ("--gpus", "4,8", "--global-batch", "32", "--json")
    by_time, by_cost = (json.loads(plan(*ranges, *more)[1]) for more in ((), ("--objective", "cost")))
    assert (by_time["objective"], by_time["best"]["n_gpus"]) == ("time", 8)
    assert by_cost["best"]["n_gpus"] == 4


def test_a_range_in_which_nothing_fits_says_why(plan):
    code, out, _ = plan("--gpus", "2,4", "--global-batch", "32", "--memory-limit", "1")
    assert code == 3
    assert out.count("nothing fits: the nearest miss") == 2
    assert "Nothing fits anywhere." in out


def test_a_range_has_a_page_and_a_picture(plan, tmp_path):
    pytest.importorskip("matplotlib")
    code, *_ = plan(
        "--gpus",
        "4,8",
        "--global-batch",
        "32",
        "--objective",
        "cost",
        "--report",
        "r.html",
        "--pictures",
        "p",
        "--pareto",
    )
    assert code == 0
    headings = re.findall(r"<h2>(.*?)</h2>", (tmp_path / "r.html").read_text())
    assert headings[:3] == [
        "The best plan of each search",
        "Gain of more GPUs or larger batches",
        "The Pareto front",
    ]
    assert "Timeline of a step" in headings
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["range.png"]


def test_headroom_is_kept_free(plan):
    whole, tenth, eight = (
        json.loads(plan(*ONE, *more, "--json", "--tp", "1")[1])
        for more in ((), ("--headroom", "10%"), ("--headroom", "8"))
    )
    assert tenth["memory_limit_gib"] == pytest.approx(0.9 * whole["memory_limit_gib"])
    assert eight["memory_limit_gib"] == pytest.approx(whole["memory_limit_gib"] - 8, abs=1e-6)
    limited = json.loads(plan(*ONE, "--memory-limit", "40", "--headroom", "25%", "--json", "--tp", "1")[1])
    assert limited["memory_limit_gib"] == pytest.approx(30)


def test_the_front_and_the_proof_are_told(plan):
    code, out, _ = plan(*ONE, "--pareto", "--top", "2")
    assert code == 0
    assert "Pareto front of step time and memory" in out
    assert re.search(r"The front is exact, after \d+ more plans were simulated\.", out)
    record = json.loads(plan(*ONE, "--pareto", "--top", "2", "--json")[1])
    assert record["front"]["exact_below_s"] is None
    assert record["front"]["places"][0] == record["best"]
    memory = [place["peak_reserved_gib"] for place in record["front"]["places"]]
    assert memory == sorted(memory, reverse=True)
    assert record["proof"][1:] in out


def test_why_is_one_line_about_the_plans_that_are_asked_about(plan, tmp_path):
    out = plan(*ONE, "--why", "tp=2, pp=1")[1]
    line = next(line for line in out.splitlines() if line.startswith("tp=2, pp=1: "))
    assert "such plans" in line
    record = json.loads(plan(*ONE, "--why", "tp=8", "--json")[1])
    assert record["why"]["plan"] is None
    assert record["why"]["text"].startswith("impossible, attention heads do not split over tp")
    best = record["best"]["plan"]
    (tmp_path / "mine.yaml").write_text(json.dumps(best))
    record = json.loads(plan(*ONE, "--why", "mine.yaml", "--json")[1])
    assert record["why"]["text"].startswith("rank 1 of ")
    assert record["why"]["plan"] == best


def test_heat_maps_are_those_that_were_asked_for(plan, tmp_path):
    pytest.importorskip("matplotlib")
    maps = ("--heat", "tp,pp", "--heat", "dp,micro-batch")
    assert plan(*ONE, "--report", "s.html", "--pictures", "p", *maps)[0] == 0
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == [
        *("heat-dp-micro_batch.png", "heat-tp-pp.png", "plans.png")
    ]
    text = (tmp_path / "s.html").read_text()
    assert "Least step time by tp and pp" in text
    assert "Least step time by dp and micro batch" in text


WRONG = [
    (("--gpus", "8..4", "--global-batch", "32"), "--gpus: expected a whole number, 64..1024 (doublings)"),
    (("--gpus", "8", "--global-batch", "x"), "--global-batch: expected a whole number"),
    (
        (*ONE, "--headroom", "much"),
        "--headroom: expected GiB (8), a size (8GB) or a share of the memory (10%), got 'much'",
    ),
    ((*ONE, "--why", "tq=1"), "--why tq=1: a plan has no field 'tq'"),
    ((*ONE, "--why", "tp=x"), "--tp: expected a whole number, got 'x'"),
    ((*ONE, "--why", "seq_len=1024,tp=2"), "seq_len is 1024, not the search's 512; leave it out"),
    ((*ONE, "--why", "gone.yaml"), "gone.yaml"),
    ((*ONE, "--heat", "tp,pp"), "--heat: give --report or --pictures"),
    ((*ONE, "--heat", "tp", "--pictures", "p"), "--heat tp: expected two axes, such as tp,pp"),
    ((*ONE, "--heat", "tp,tp", "--pictures", "p"), "--heat tp,tp: expected two axes"),
    ((*ONE, "--heat", "tp,qq", "--pictures", "p"), "--heat tp,qq: unknown axis 'qq'"),
    ((*ONE, "--heat", "tp,cp", "--pictures", "p"), "--heat tp,cp: cp is fixed to 1"),
    (("--gpus", "4,8", "--global-batch", "32", "--top", "3"), "--top is about one search"),
    (("--gpus", "4,8", "--global-batch", "32", "--why", "tp=2"), "--why is about one search"),
    (("--gpus", "4,8", "--global-batch", "32", "--heat", "tp,pp", "--pictures", "p"), "--heat is about one search"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(arguments[-2:]) for arguments, _ in WRONG])
def test_what_is_wrong_is_told_in_one_line(plan, arguments, message, tmp_path: Path):
    code, out, error = plan(*arguments)
    assert (code, out) == (2, "")
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
