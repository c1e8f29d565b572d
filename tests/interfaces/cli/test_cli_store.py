"""`forerun plan` with a store and with executors, as a user sees them."""

from __future__ import annotations

import csv
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from forerun.interfaces.cli.main import run

QUESTION = ("--cluster", "h100-sxm", "--gpus", "8", "--seq-len", "512", "--global-batch", "32")
SMALL = ("plan", "gpt2-small", *QUESTION, "--pp", "1", "--tp", "1,2", "--workers", "1")


def stored(path: Path) -> int:
    with closing(sqlite3.connect(path)) as base:
        return int(base.execute("SELECT COUNT(*) FROM plan").fetchone()[0])


def test_a_store_changes_neither_tables_nor_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed, written = [], []
    store = tmp_path / "plans.sqlite"
    for options in ([], ["--store", str(store)], ["--store", str(store)]):
        assert run([*SMALL, "--csv", str(tmp_path / "all.csv"), *options]) == 0
        printed.append(capsys.readouterr().out)
        written.append((tmp_path / "all.csv").read_bytes())
    assert printed[0] == printed[1] == printed[2]
    assert written[0] == written[1] == written[2]
    rows = list(csv.DictReader(written[0].decode().splitlines()))
    assert (
        stored(store) >= sum(row["step_time_s"] != "" for row in rows) > 10
    )  # other stacks and precisions are there too
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.csv", "plans.sqlite"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--store", "{folder}/none/plans.sqlite"], "plans.sqlite: can't be written: there is no folder"),
        (["--store", "{folder}"], "{folder}: can't be written: it is a folder"),
        (["--executor", "dask"], "executor must be local or ray, got 'dask'"),
        (["--ray-address", "10.0.0.1:6379"], "Ray address 10.0.0.1:6379 needs executor ray"),
    ],
)
def test_what_can_not_be_used_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run([*SMALL, *(each.format(folder=tmp_path) for each in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message.format(folder=tmp_path) in line


def test_programs_take_neither(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: Any = ["--store", str(tmp_path / "s"), "--executor", "ray", "--ray-address", "auto"]
    assert run(["plan", "--programs", str(tmp_path), "--cluster", "h100-sxm", *options]) == 2
    line = capsys.readouterr().err
    assert line == "error: --executor, --ray-address, --store: not with --programs; leave it out\n"
