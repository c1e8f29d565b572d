"""Replay of execution traces against the reference's results: every figure of every rank, exact."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from forerun.astrasim.astra.case import read_case
from forerun.astrasim.astra.replay import replay

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
CASES = sorted(path.parent for path in GOLDEN.rglob("metrics.json"))
MARCH = sorted(path.parent for path in GOLDEN.rglob("march_metrics.json"))
pytestmark = pytest.mark.skipif(not CASES, reason="the reference results are not here")


def name(folder):
    return str(folder.relative_to(GOLDEN))


def expected(folder, build="stage_af2492b"):
    """System -> rank -> figures."""
    metrics = json.loads((folder / "metrics.json").read_text())
    if "builds" in metrics:
        return {folder.name: metrics["builds"][build]["per_rank"]}
    return {system: facts["per_rank"] for system, facts in metrics["systems"].items()}


def check(case, machine, figures, order="ascending", fold=True):
    statistics = replay(case.traces, case.comm_groups, machine, order, fold).statistics
    assert len(figures) == len(statistics)
    for rank, of_rank in figures.items():
        mine = asdict(statistics[int(rank)])
        assert {key: mine[key] for key in of_rank} == of_rank, f"rank {rank}"


@pytest.mark.parametrize("folder", CASES, ids=name)
def test_every_rank_of_a_case_is_exact(folder):
    case, figures = read_case(folder), expected(folder)
    assert case.machines.keys() == figures.keys()
    for system, machine in case.machines.items():
        check(case, machine, figures[system])


@pytest.mark.parametrize("folder", MARCH, ids=name)
def test_the_issue_order_of_march_2025_is_exact(folder):
    case = read_case(folder)
    (machine,) = case.machines.values()
    check(case, machine, json.loads((folder / "march_metrics.json").read_text())["per_rank"], "march-2025")


def test_the_sanity_check_is_exact():
    folder = GOLDEN / "stage" / "sanity_check_EXACT"
    case = read_case(folder)
    (machine,) = case.machines.values()
    check(case, machine, expected(folder, "march_95f0e2b_issue_order")[folder.name], "march-2025")
    figures = asdict(replay(case.traces, case.comm_groups, machine, "march-2025").statistics[0])
    target = json.loads((folder / "metrics.json").read_text())["target_from_notebook"]
    assert {key: figures[key] for key in target} == target


@pytest.mark.parametrize("folder", [folder for folder in CASES if "small" in folder.parts], ids=name)
def test_folded_and_unfolded_agree(folder):
    case, figures = read_case(folder), expected(folder)
    for system, machine in case.machines.items():
        check(case, machine, figures[system], fold=False)
