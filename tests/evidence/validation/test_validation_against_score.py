"""Our figures against the independent scorer of the published measurements, on made-up predictions."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from measured_rows import prediction
from published import MEASUREMENTS, SCORE, needs_measurements

from forerun.evidence.validation import metrics
from forerun.evidence.validation.report import Report, build_report
from forerun.evidence.validation.rows import Measurement, read_measurements
from forerun.evidence.validation.run import RowResult, write_predictions
from forerun.evidence.validation.tables import percent

pytestmark = needs_measurements
FIGURES = re.compile(r"^ +(?P<label>.+?) +(?P<covered>\d+)/(?P<total>\d+) +(?P<figures>\S+(?: +\S+){0,4})$")


def made_up(rows: list[Measurement]) -> Iterator[RowResult]:
    """Predictions off by a wide spread, a tenth of the rows without any, one in eight refused."""
    dice = random.Random(20240611)
    for row in rows:
        time = (metrics.measured_time_s(row) or 1.0) * dice.lognormvariate(-0.05, 0.15)
        memory = (row.peak_mem_gib or 30.0) * dice.lognormvariate(0.02, 0.2)
        made = prediction(time, memory, memory * 1.1, fits=dice.random() > 0.125)
        yield RowResult(row, reason="left out") if dice.random() < 0.1 else RowResult(row, prediction=made)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, str]:
    """Our report, and the scorer's text on the CSV file that we wrote."""
    results = list(made_up(read_measurements(MEASUREMENTS)))
    path = tmp_path_factory.mktemp("score") / "predictions.csv"
    write_predictions(path, results)
    command = [sys.executable, str(SCORE), str(MEASUREMENTS), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return build_report(results), done.stdout


def scored(text: str) -> dict[tuple[str, str], tuple[str, ...]]:
    """(section, label) -> covered, total and the five figures as printed."""
    section, found = "", {}
    for line in text.splitlines():
        if line and not line.startswith(" "):
            section = line
        matched = FIGURES.match(line)
        if matched:
            found[section, matched["label"]] = (matched["covered"], matched["total"], *matched["figures"].split())
    return found


def printed(stats: dict[str, Any]) -> tuple[str, ...]:
    figures = [
        percent(stats[name], signed=name == "signed") for name in ("mape", "median", "p90", "signed", "within_10")
    ]
    return (str(stats["compared"]), str(stats["total"]), *(figures if stats["compared"] else ["-"]))


def compare(ours: dict[str, dict[str, Any]], theirs: dict[str, tuple[str, ...]]) -> None:
    assert theirs
    assert {name: printed(stats) for name, stats in ours.items()} == theirs


def section(text: str, title: str) -> dict[str, tuple[str, ...]]:
    return {label: figures for (name, label), figures in scored(text).items() if name == title}


def test_step_time_by_tier(both: tuple[Report, str]) -> None:
    compare(both[0]["step_time"], section(both[1], "STEP TIME"))


@pytest.mark.parametrize("tier", ["tier A", "tiers A+B"])
def test_step_time_by_class(both: tuple[Report, str], tier: str) -> None:
    compare(both[0]["step_time_by_class"][tier], section(both[1], f"STEP TIME by parallelism class, {tier}"))


def test_step_time_by_device(both: tuple[Report, str]) -> None:
    compare(both[0]["step_time_by_device"]["tiers A+B"], section(both[1], "STEP TIME by gpu, tiers A+B"))


def test_step_time_by_source(both: tuple[Report, str]) -> None:
    title = "STEP TIME by source, all tiers (tier A rows marked in brackets)"
    theirs = {label.split(" [")[0]: figures for label, figures in section(both[1], title).items()}
    compare(both[0]["step_time_by_source"]["all tiers"], theirs)


def test_memory(both: tuple[Report, str]) -> None:
    title = "PEAK MEMORY (allocated against peak_allocated_gib; reserved, nvidia-smi against peak_reserved_gib)"
    ours = {f"{kind}, {tier}": stats for kind, table in both[0]["memory"].items() for tier, stats in table.items()}
    ours |= {
        f"{kind}, {name}": stats for kind, table in both[0]["memory_by_source"].items() for name, stats in table.items()
    }
    compare({name: stats for name, stats in ours.items() if stats["total"]}, section(both[1], title))


def test_out_of_memory(both: tuple[Report, str]) -> None:
    oom, text = both[0]["out_of_memory"], both[1]
    assert f"not to fit: {oom['oom_found']} of {oom['oom_judged']} judged ({oom['oom_rows']} oom rows" in text
    assert f"predicted not to fit: {oom['ok_refused']} of {oom['ok_judged']} judged ({oom['ok_rows']} ok rows" in text
    assert oom["ok_refused"] > 0


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("source, model, device, count", "source, model, gpu, count"), ("same workload", "same workload")],
)
def test_regret(both: tuple[Report, str], ours: str, theirs: str) -> None:
    groups = both[0]["regret"][ours]
    line = next(line for line in both[1].splitlines() if line.strip().startswith(f"{theirs} "))
    expected = (
        f"groups ranked {groups['groups_ranked']}/{groups['groups_total']}: mean regret {percent(groups['mean'])}, "
        f"worst {percent(groups['worst'])}, among covered rows {percent(groups['mean_covered'])}, "
        f"median Spearman {groups['median_spearman']:.2f}"
    )
    assert expected in line
    assert groups["worst"] > 0


def test_headline(both: tuple[Report, str]) -> None:
    report, text = both
    time, memory = report["step_time"]["tier A"], report["memory"]["allocated"]["tier A"]
    regret = report["regret"]["source, model, device, count"]["mean"]
    assert text.splitlines()[-1] == (
        f"score: tierA_time_mape={percent(time['mape'])} covered={time['compared']}/{time['total']} "
        f"mem_alloc_mape={percent(memory['mape'])} regret={percent(regret)}"
    )
