"""What `forerun validate` judges, writes and prints, where stand-ins read rows and predict them."""

from __future__ import annotations

import json
from types import SimpleNamespace as Hand

import pytest
from command_here import run_here

from forerun.common.errors import ForerunError
from forerun.interfaces.cli import traced_options, validate
from forerun.interfaces.cli.traced_options import TracedOptions

FILES = ("validate", "a.csv", "b.csv", "--models", "m.yaml", "--hardware", "h.yaml")
ROWS = {
    "a.csv": [Hand(id="gpt-1", model="gpt", split="fit"), Hand(id="x", model="llama", split="test")],
    "b.csv": [Hand(id="y", model="gpt", split="test")],
}


@pytest.fixture
def judged(monkeypatch, tmp_path):
    """Runs the command; `judged.seen` holds what each of its parts is asked."""
    seen = {}

    def part(name, answer):
        def asked(*arguments, **named):
            seen[name] = arguments
            return answer(*arguments) if callable(answer) else answer

        monkeypatch.setattr(validate, name, asked)

    monkeypatch.setattr(validate, "read_measurements", lambda path: ROWS[str(path)])
    part("load_architectures", "models")
    part("read_hardware", "hosts")
    part("run", lambda rows, *_: [row.id for row in rows])
    part("run_with_anchors", lambda rows, *_: [row.id for row in rows][1:])
    part("read_left_out", "apart")
    part("judge_left_out", "of left out")
    part("build_report", lambda results, of: {"rows": {"faults": 0, "judged": results}, "left out": of})
    part("print_report", lambda report, out, **how: out.print(f"{report['rows']['judged']}"))
    part("write_predictions", None)
    part("write_validation_pictures", None)
    part("published_ranks", lambda rows, *_: [row.id for row in rows])
    part("print_ranks", lambda ranks, out: out.print(f"{ranks}"))
    part("ranks_record", lambda ranks: {"ranks": ranks})
    monkeypatch.setattr(TracedOptions, "judge", lambda own, *asked: seen.update(judge=asked))

    def command(*words):
        seen.clear()
        return run_here(tmp_path, *FILES, *words)

    command.seen = seen
    return command


def test_all_rows_of_all_files_are_judged_and_printed(judged):
    assert judged().stdout == "['gpt-1', 'x', 'y']\n"
    assert judged.seen["run"][1:3] == ("models", "hosts")
    assert judged.seen["build_report"] == (["gpt-1", "x", "y"], None)
    assert not {"write_predictions", "write_validation_pictures", "read_left_out"} & set(judged.seen)
    report = json.loads(judged("--json", "--split", "test", "--left-out", "t.yaml").stdout)
    assert (report["rows"]["judged"], report["left out"], "anchors" in report) == (["x", "y"], "of left out", False)
    assert judged.seen["judge_left_out"] == (["x", "y"], "apart")


def test_files_are_written_where_they_are_asked_for(judged, tmp_path):
    assert judged("--out", "all.csv", "--plots", "plots").returncode == 0
    every = ["gpt-1", "x", "y"]
    assert [(str(path), rows) for path, rows in (judged.seen["write_predictions"],)] == [("all.csv", every)]
    assert [(str(path), rows) for path, rows in (judged.seen["write_validation_pictures"],)] == [("plots", every)]


@pytest.mark.parametrize("choice", ["first", "best"])
def test_rows_that_are_measured_first_are_left_out_and_it_is_said(judged, choice):
    said, table = judged("--with-anchor", choice).stdout.splitlines()
    assert said == (
        f"Judged after one measured step of the same source, device and model ({choice}), which is left out:"
    )
    assert (table, judged.seen["run_with_anchors"][4]) == ("['x', 'y']", choice)
    assert json.loads(judged("--with-anchor", choice, "--json").stdout)["anchors"] == choice


def test_ranks_are_those_of_rows_in_whose_id_or_model_a_text_occurs(judged):
    assert judged("--rank").stdout == "['gpt-1', 'x', 'y']\n"
    assert judged.seen["published_ranks"][-1] == ("A", "B")
    assert judged("--rank", "--rank-rows", "gpt").stdout == "['gpt-1', 'y']\n"
    assert judged.seen["published_ranks"][-1] == ("A", "B", "C")
    assert judged("--rank", "--rank-rows", "x", "--split", "test").stdout == "['x']\n"
    assert json.loads(judged("--rank", "--rank-rows", "gpt-", "--json").stdout)["ranks"] == ["gpt-1"]
    assert "run" not in judged.seen


def test_programs_of_rows_are_traced_and_judged_alone(judged):
    assert judged("--traced", "--programs", "clones", "--json").stdout == ""
    rows, models, hosts, as_json = judged.seen["judge"]
    assert ([row.id for row in rows], models, hosts, as_json) == (["gpt-1", "x", "y"], "models", "hosts", True)
    assert "run" not in judged.seen


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--split", "none"), "--split none: a.csv, b.csv has no row of this split; choose another"),
        (("--with-anchor", "last"), "--with-anchor last: expected first or best"),
        (("--with-anchor", "best", "--left-out", "t"), "--left-out: its times were predicted without anchors; "),
        (
            ("--with-anchor", "best", "--split", "fit"),
            "--with-anchor: a.csv, b.csv has no two rows of the same source,",
        ),
        (("--traced",), "--traced: give the folder with your clones of the repositories: --programs FOLDER"),
    ],
)
def test_what_can_not_be_judged_is_one_line(judged, words, told, monkeypatch):
    if words == ("--traced",):
        monkeypatch.undo()
        monkeypatch.setattr(validate, "read_measurements", lambda path: ROWS[str(path)])
        for name in ("load_architectures", "read_hardware"):
            monkeypatch.setattr(validate, name, lambda path: None)
    done = judged(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {told}")
    assert done.stderr.count("\n") == 1


def test_traced_programs_are_those_of_rows_and_of_one_repository(monkeypatch, capsys):
    known = Hand(repositories=("titan", "nano"))
    monkeypatch.setattr(traced_options, "programs", lambda: known)
    monkeypatch.setattr(
        traced_options, "run_of_row", lambda _: {"gpt-1": Hand(repository="titan"), "y": Hand(repository="nano")}
    )
    monkeypatch.setattr(traced_options, "run", lambda rows, *_: [row.id for row in rows])
    monkeypatch.setattr(traced_options, "trace_rows", lambda rows, *asked: (rows, asked[3], asked[4]))
    monkeypatch.setattr(traced_options, "build_traced_report", lambda results: {"rows": results[0]})
    monkeypatch.setattr(traced_options, "markdown", lambda results: f"| {results[0]} |\n")
    monkeypatch.setattr(traced_options, "print_traced", lambda results, out: out.print(f"{results[0]} {results[2]}"))
    rows = [row for each in ROWS.values() for row in each]

    def judged(as_json=False, **options):
        TracedOptions(**{"programs": "clones", **options}).judge(rows, None, None, as_json)
        return capsys.readouterr().out

    assert judged() == "['gpt-1', 'y'] 1\n"
    assert judged(only="nano", trace_workers=3) == "['y'] 3\n"
    assert judged(only="titan", markdown=True) == "| ['gpt-1'] |\n"
    assert json.loads(judged(as_json=True, markdown=True))["rows"] == ["gpt-1", "y"]
    for options, told in (
        ({"only": "other"}, "no row has a program; known: titan, nano"),
        ({"programs": None}, "give the folder with your clones of the repositories"),
    ):
        with pytest.raises(ForerunError, match=f"--traced: {told}"):
            judged(**options)
