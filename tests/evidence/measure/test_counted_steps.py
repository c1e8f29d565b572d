"""Which steps of a script a harness times: on a clock and a memory of our own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from forerun.evidence.measure import step_on_gpu  # noqa: E402
from forerun.evidence.measure.run_script import run_script  # noqa: E402


class Stages:
    """Memory that grows by a MiB a step and forgets nothing."""

    def __init__(self) -> None:
        self.most, self.restarts, self.found = 0, 0, [("model made", 1, 70)]

    def most_bytes(self) -> int:
        self.most += 1
        return self.most

    def restart(self) -> None:
        self.restarts += 1


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a counter of steps whose n-th call of the clock says n squared."""

    def make(warm_up: int, timed: int) -> Any:
        calls: list[int] = []

        def clock() -> float:
            calls.append(0)
            return float(len(calls) ** 2)

        monkeypatch.setattr(step_on_gpu, "time", SimpleNamespace(perf_counter=clock))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        return step_on_gpu._Steps(warm_up, timed, Stages())  # type: ignore[arg-type]

    return make


def _ends(steps: Any, call: Any) -> int:
    """How often `call` is possible before the steps are measured."""
    for number in range(1, 50):
        try:
            call()
        except step_on_gpu._Measured:
            return number
    raise AssertionError(f"no end after {steps.done} steps")


def test_steps_after_the_warm_up_are_timed(counted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = counted(2, 3)
    optimizer = object()
    assert _ends(steps, lambda: steps.stepped(optimizer, None, None)) == 5
    # the clock is read at the end of a step and at the begin of the next: 5 - 4, 7 - 6, 9 - 8, squared
    assert steps.times_s == [25 - 16, 49 - 36, 81 - 64]
    assert (steps.peaks, steps.stages.restarts, steps.done) == ([1, 2, 3], 4, 5)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    found = step_on_gpu._medians(steps)
    assert (found.step_s, found.fastest_s, found.slowest_s, found.steps) == (13, 9, 17, 3)
    assert (found.peak_bytes, found.device, found.stages) == (2, "a GPU", (("model made", 70),))


def test_only_the_first_optimizer_counts(counted: Any) -> None:
    steps, first = counted(0, 3), object()
    steps.stepped(first, None, None)
    steps.stepped(object(), None, None)
    assert steps.done == 1


def test_backward_passes_count_where_no_optimizer_steps(counted: Any) -> None:
    steps = counted(1, 2)
    assert _ends(steps, steps.backward_begins) == 4  # the first begins the first step
    steps = counted(1, 2)
    steps.stepped(object(), None, None)
    for _ in range(9):
        steps.backward_begins()
    assert steps.done == 1


def test_marks_go_before_everything_else(counted: Any) -> None:
    steps, optimizer = counted(0, 3), object()
    steps.stepped(optimizer, None, None)
    steps.stepped(optimizer, None, None)
    assert len(steps.times_s) == 2
    steps.marked()
    assert (steps.done, len(steps.times_s), len(steps.peaks)) == (1, 1, 1)
    for _ in range(5):
        steps.stepped(optimizer, None, None)
        steps.backward_begins()
    assert steps.done == 1
    assert _ends(steps, steps.marked) == 2
    assert steps.done == 3


def test_what_is_compiled_counts_nothing(counted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = counted(0, 3)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    steps.stepped(object(), None, None)
    assert steps.done == 0


@pytest.mark.parametrize("ends", ["pass", "raise SystemExit(3)"])
def test_a_script_runs_as_python_would_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import sys\nsys.told.append((__name__, sys.argv, sys.path[:2]))\n{ends}\n")
    told: list[object] = []
    monkeypatch.setattr(sys, "told", told, raising=False)
    monkeypatch.setattr(sys, "argv", ["forerun", "measure"])
    monkeypatch.setattr(sys, "path", ["first", "second"])
    try:
        run_script(str(script), ["--lr", "1"])
    except SystemExit:
        assert ends != "pass"
    assert told == [("__main__", [str(script), "--lr", "1"], [str(tmp_path), "second"])]
    assert (sys.argv, sys.path) == (["forerun", "measure"], ["first", "second"])
