"""Which step of a script is profiled, and what the script finds as its own: with stand-ins of CUDA and its profiler."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from forerun.common.errors import ForerunError  # noqa: E402
from forerun.evidence.measure import profiled  # noqa: E402

SCRIPT = """
import os, sys
from pathlib import Path
import torch
import beside  # a module in the script's own folder

assert __name__ == "__main__"
said = [sys.argv, os.environ["RANK"], os.environ["MASTER_PORT"]]
Path(sys.argv[1]).write_text(repr(said))
first, second = (torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1) for _ in range(2))
for number in range({steps}):
    beside.log.append(f"step {{number}}")
    first.step()
    second.step()
"""


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the profiler and CUDA are asked for, in order."""
    log: list[str] = []

    class Profile:
        def __init__(self, activities: Any) -> None:
            pass

        def start(self) -> None:
            log.append("start")

        def stop(self) -> None:
            log.append("stop")

        def export_chrome_trace(self, path: str) -> None:
            kernel = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2}
            Path(path).write_text(json.dumps({"traceEvents": [kernel]}))

    monkeypatch.setattr(profiled, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: log.append(f"device {device}"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: log.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7 << 20)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return log


def _script(folder: Path, monkeypatch: pytest.MonkeyPatch, log: list[str], steps: int) -> str:
    module: Any = type(sys)("beside")
    module.log = log
    (folder / "beside.py").write_text("raise RuntimeError('the stand-in goes first')")
    monkeypatch.setitem(sys.modules, "beside", module)
    path = folder / "train.py"
    path.write_text(SCRIPT.format(steps=steps))
    return str(path)


@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_the_wanted_step_of_the_first_optimizer_is_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[str], wanted: int
) -> None:
    script = _script(tmp_path, monkeypatch, events, 9)
    before = list(sys.argv), list(sys.path)
    kernels, peak_bytes = profiled.profiled_step(script, [str(tmp_path / "said")], wanted)
    begin, end = ["synchronize", "reset", "start"], ["synchronize", "stop"]
    steps = [f"step {number}" for number in range(wanted)]
    assert events == ["device 0", *steps[:-1], *begin, steps[-1], *end]
    assert ([kernel.name for kernel in kernels], peak_bytes) == (["k"], 7 << 20)
    assert (sys.argv, sys.path) == before
    assert (tmp_path / "said").read_text() == repr([[script, str(tmp_path / "said")], "0", "29500"])
    assert os.environ["WORLD_SIZE"] == "1"
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()  # nothing is left in torch


def test_a_script_finds_modules_in_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    script = _script(tmp_path, monkeypatch, events, 1)
    (tmp_path / "beside.py").write_text("log = []\n")
    monkeypatch.delitem(sys.modules, "beside")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert profiled.profiled_step(script, [str(tmp_path / "said")], 1)[1] == 7 << 20
    assert sys.path[0] == ""
    sys.modules.pop("beside", None)


def test_a_script_that_ends_too_soon_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    script = _script(tmp_path, monkeypatch, events, 2)
    with pytest.raises(ForerunError, match=r"train\.py: ended after 2 optimizer steps; step 3 was to be profiled"):
        profiled.profiled_step(script, [str(tmp_path / "said")], 3)
