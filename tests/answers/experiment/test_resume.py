"""Studies that are broken off go on from where they were, and failing disks leave what there was."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from study_sections import sections

from forerun.answers.experiment.comparison import compare
from forerun.answers.experiment.description.read import read_experiment
from forerun.answers.experiment.result import ScalePoint, Variant
from forerun.answers.experiment.scaling import scale
from forerun.answers.experiment.store import Store
from forerun.common.errors import ForerunError
from forerun.common.workers import Workers

SCRIPT = Path(__file__).parent / "slow_study.py"
N_POINTS = 8
"""six scales and two variants that can run"""
REQUEST = read_experiment(sections())


def command(folder: Path, pause_s: float) -> list[str]:
    return [sys.executable, str(SCRIPT), str(folder), str(pause_s)]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def simulated(text: str) -> int:
    return text.count("simulated")


def test_a_killed_study_ends_with_the_same_files(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    done = subprocess.run(command(whole, 0), capture_output=True, text=True, check=True)
    assert simulated(done.stdout) == N_POINTS
    expected = files_of(whole)
    assert len(expected) == N_POINTS + 2

    victim = subprocess.Popen(command(broken, 60), stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None
    assert "simulated 1 6" in victim.stdout.readline()
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    kept = files_of(broken)
    assert len(kept) == 1
    assert kept.items() < expected.items()
    (broken / "points" / ".forerun-half.tmp").write_bytes(b"{")  # as a process that is killed while it writes leaves

    resumed = subprocess.run(command(broken, 0), capture_output=True, text=True, check=True)
    assert simulated(resumed.stdout) == N_POINTS - 1
    assert files_of(broken) == expected


def test_points_depend_on_the_experiment(tmp_path: Path) -> None:
    todo: list[int] = []

    def count(data: Any) -> int:
        todo.append(0)
        scale(read_experiment(data), [1, 2], folder=tmp_path, progress=lambda done, _: todo.__setitem__(-1, done))
        return todo[-1]

    assert count(sections()) == 2
    assert count(sections()) == 0
    assert count(sections() | {"name": "renamed"}) == 0
    assert count(sections() | {"thresholds": {"efficiency": 0.5}}) == 0
    assert count(sections(num_iterations=11)) == 2
    assert count(sections(seed=4)) == 2
    assert count(sections(hardware={"network_bandwidth_gbps": 77.0})) == 2
    assert count(sections() | {"prices": {"dollars_per_gpu_hour": 2.5}}) == 2


def test_what_is_kept_is_what_was_found(tmp_path: Path) -> None:
    first = compare(REQUEST, precisions=("fp32",), topologies=("ring",), folder=tmp_path)
    assert compare(REQUEST, precisions=("fp32",), topologies=("ring",), folder=tmp_path) == first
    assert compare(REQUEST, precisions=("fp32",), topologies=("ring",)) == first


def test_a_full_disk_is_one_line_and_leaves_earlier_results(tmp_path: Path) -> None:
    scale(REQUEST, [1, 2], folder=tmp_path)
    before = files_of(tmp_path)

    def small_files() -> None:  # as much as a point of a scaling study takes, not as a variant with its prediction
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    failed = subprocess.run(command(tmp_path, 0), capture_output=True, text=True, preexec_fn=small_files)
    assert failed.returncode == 1
    (line,) = failed.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path / 'points'}")
    assert "can't be written: File too large" in line
    after = files_of(tmp_path)
    assert before.items() <= after.items()
    assert all(name.endswith(".json") for name in after)


def test_a_disk_that_fills_up_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = scale(REQUEST, [1, 2, 4], folder=tmp_path / "whole")
    open_path = Path.open

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> int:
            self.file.write(data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(path: Path, mode: str = "r", *more: Any, **kwargs: Any) -> Any:
        file = open_path(path, mode, *more, **kwargs)
        full = "w" in mode and len(list((tmp_path / "broken" / "points").glob("*.json"))) == 2
        return Full(file) if full else file

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(ForerunError, match="can't be written: No space left on device") as caught:
        scale(REQUEST, [1, 2, 4], folder=tmp_path / "broken", workers=Workers(1))
    assert "\n" not in str(caught.value)
    kept = files_of(tmp_path / "broken")
    assert len(kept) == 2
    assert kept.items() < files_of(tmp_path / "whole").items()
    monkeypatch.undo()
    assert scale(REQUEST, [1, 2, 4], folder=tmp_path / "broken") == expected
    assert files_of(tmp_path / "broken") == files_of(tmp_path / "whole")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file", Path("/proc/forerun-study")):
        with pytest.raises(ForerunError, match=f"{folder}/points: can't be written"):
            scale(REQUEST, [1], folder=folder)


def test_files_that_are_no_points(tmp_path: Path) -> None:
    store = Store(ScalePoint, tmp_path)
    for text in ("", "{", "[]", "{}", '{"point": 3}', '{"point": {"num_nodes": "many"}}'):
        (tmp_path / "points" / "abc.json").write_text(text)
        with pytest.raises(ForerunError, match=r"abc\.json: this file is not a point of a study; remove it"):
            store.known("abc")
    assert store.known("other") is None
    (tmp_path / "points" / "folder.json").mkdir()
    with pytest.raises(ForerunError, match=r"folder\.json: can't be read"):
        store.known("folder")


def test_without_a_folder_nothing_is_kept() -> None:
    store = Store(Variant, None)
    store.keep("abc", "label", Variant("a", "b", None, 0.0, {}, None))
    assert store.known("abc") is None
