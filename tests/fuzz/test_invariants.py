"""What must hold for every plan, over random plans; and that the checks would notice."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

import invariants  # noqa: E402
from random_plans import random_setups  # noqa: E402


@pytest.mark.parametrize("number", [12, pytest.param(250, marks=pytest.mark.long)])
def test_better_hardware_is_never_slower_and_folding_changes_nothing(number):
    problems = [problem for setup in random_setups(number, 20 + number) for problem in invariants.violations(setup)]
    assert not problems


def test_the_checks_would_notice(monkeypatch):
    (setup,) = random_setups(1, 0)
    monkeypatch.setitem(invariants.BETTER, "links half as fast", invariants.with_links(0.5, 10.0))
    monkeypatch.setitem(invariants.BETTER, "products slower", invariants.with_rate("gemm", 0.5))
    assert any(problem.startswith("products slower: ") for problem in invariants.violations(setup))
    one = invariants.predicted(setup)
    for wrong in (
        {"step_time_low_s": 2 * one.step_time_s},
        {"mfu": 1.5},
        {"peak_reserved_gib": one.peak_allocated_gib / 2},
        {"memory_by_category_gib": {}},
    ):
        assert [*invariants.wrong_figures(replace(one, **wrong))]


def test_neither_hash_seeds_nor_threads_change_a_prediction():
    command = [sys.executable, str(FOLDER / "invariants.py"), "10", "--seed", "5", "--digest"]
    digests = {
        subprocess.run(command, env=os.environ | environment, check=True, capture_output=True, text=True).stdout
        for environment in (
            {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
            {"PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "2"},
        )
    }
    assert len(digests) == 1
