"""The console command `forerun run`."""

from __future__ import annotations

import csv
import json

from forerun.interfaces.cli.main import run


def test_a_run_is_printed_with_its_parts(capsys):
    assert run(["run", "bloom-176b", "--runs", "6"]) == 0
    shown = capsys.readouterr().out
    for words in ("goodput", "Where the time goes", "hardware", "saves twice as often", "UNPRODUCTIVE_CHECKPOINT_SAVE"):
        assert words in shown


def test_files_and_json_hold_the_same_run(tmp_path, capsys):
    table, page = tmp_path / "runs.csv", tmp_path / "run.html"
    arguments = ["--runs", "5", "--seed", "3", "--no-gains", "--json", "--csv", str(table), "--report", str(page)]
    assert run(["run", "bloom-176b", *arguments]) == 0
    record = json.loads(capsys.readouterr().out)
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == record["runs"] == 5
    goodputs = [float(row["goodput"]) for row in rows]
    assert min(goodputs) <= record["goodput"]["p50"] <= max(goodputs)
    assert record["gains"] == []
    text = page.read_text()
    assert "bloom-176b" in text
    assert "forerun run bloom-176b --runs 5 --seed 3" in text


def test_a_users_file_is_read_and_mistakes_name_it(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("gpus: 8\ndays: 1\nstep: {seconds: 1, tokens: 8K}\ncheckpoint: {blocking_s: 1, load_s: 1}\n")
    assert run(["run", str(file), "--runs", "3", "--no-gains"]) == 0
    assert "8 GPUs in 1 nodes" in capsys.readouterr().out
    file.write_text("gpus: 8\ndayz: 1\n")
    assert run(["run", str(file)]) == 2
    assert "mine.yaml: unknown key 'dayz'; did you mean days?" in capsys.readouterr().err
    assert run(["run", "lama-3-405b"]) == 2
    assert "did you mean llama-3-405b" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_said_before_any_work(tmp_path, capsys):
    for option in ("--csv", "--report"):
        assert run(["run", "bloom-176b", option, str(tmp_path / "none" / "x")]) == 2
        shown = capsys.readouterr()
        assert "there is no folder" in shown.err
        assert not shown.out
