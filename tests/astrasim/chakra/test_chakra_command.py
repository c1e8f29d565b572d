"""`forerun chakra` as a user runs it."""

import json
import subprocess
import sys

import pytest
from trace_building import collective, comp, recv, send, write, write_run

from forerun.interfaces.cli.main import run


@pytest.fixture
def prefix(tmp_path):
    return write_run(tmp_path, [comp(1), send(2, 1), collective(3, "a")], [recv(2, 0), collective(3, "a")])


@pytest.fixture
def groups(tmp_path):
    path = tmp_path / "groups.json"
    path.write_text('{"a": [0, 1]}')
    return path


def test_validate_finds_nothing(prefix, groups, capsys):
    assert run(["chakra", "validate", str(prefix), "--comm-groups", str(groups)]) == 0
    assert capsys.readouterr().out == "no problems\n"


def test_validate_finds_faults(prefix, capsys):
    write(prefix.with_name("w.1.et"), [comp(4, name="gemm", data=[6]), collective(3, "a")])
    assert run(["chakra", "validate", str(prefix)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "error: rank 1, node 4 (gemm): depends on node 6, which is not in the trace",
        "error: rank 0, node 2 (node2): send of 8 bytes with tag 5 to rank 1 has no receive",
        "2 errors, 0 warnings",
    ]
    assert run(["chakra", "validate", str(prefix), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["errors"] == 2
    assert record["findings"][0] == {
        "severity": "error",
        "kind": "dependency",
        "rank": 1,
        "node": 4,
        "name": "gemm",
        "message": "depends on node 6, which is not in the trace",
    }


def test_warnings_alone_are_no_failure(prefix, capsys):
    write(prefix.with_name("w.1.et"), [recv(2, 0), collective(3, "a", comm_size=9)])
    assert run(["chakra", "validate", str(prefix)]) == 0
    assert "0 errors, 1 warnings" in capsys.readouterr().out


def test_info(prefix, capsys):
    assert run(["chakra", "info", str(prefix)]) == 0
    text = capsys.readouterr().out
    assert "all_reduce" in text
    assert run(["chakra", "info", str(prefix), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [rank["nodes"] for rank in record["ranks"]] == [3, 2]
    assert record["overall"]["nodes_by_type"] == {"collective": 2, "comp": 1, "recv": 1, "send": 1}


def test_one_file_of_all_ranks(tmp_path, capsys):
    write(tmp_path / "w.ALL_RANKS.et", [comp(1)])
    assert run(["chakra", "info", str(tmp_path), "--ranks", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["overall"]["nodes"] == 3


def test_convert_there_and_back(prefix, tmp_path, capsys):
    source = prefix.with_name("w.0.et")
    assert run(["chakra", "convert", str(source), str(tmp_path / "a.jsonl.gz")]) == 0
    assert run(["chakra", "convert", str(tmp_path / "a.jsonl.gz"), str(tmp_path / "b.et")]) == 0
    assert capsys.readouterr().out.endswith("b.et: 3 nodes\n")
    assert (tmp_path / "b.et").read_bytes() == source.read_bytes()
    assert run(["chakra", "convert", str(source), "-"]) == 0
    first, *others = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"metadata": {"version": "0.0.4"}}
    assert [one["id"] for one in others] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["validate", "nowhere/w"], "nowhere: can't be read"),
        (["validate", "w"], "w: no traces"),
        (["validate", "bad.et"], "bad.et: does not begin with metadata"),
        (["info", "bad.et"], "bad.et: does not begin with metadata"),
        (["validate", "good.et", "--comm-groups", "bad.et"], "bad.et, line 1: not JSON"),
        (["convert", "bad.et", "x.json"], "bad.et: does not begin with metadata"),
        (["convert", "good.et", "x.xml"], "x.xml: unknown form"),
        (["convert", "good.et", "nowhere/x.json"], "can't be written"),
        (["convert", "good.et"], "Missing argument"),
        (["inspect"], "No such command"),
        ([], "Missing command"),
    ],
)
def test_bad_input_is_one_line_and_code_2(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "good.et", [comp(1)])
    (tmp_path / "bad.et").write_bytes(b"\x04\n\x7fxx")
    assert run(["chakra", *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.et", "good.et"]


def test_the_console_command_knows_it(prefix):
    command = [
        sys.executable,
        "-c",
        "from forerun.interfaces.cli.main import main; main()",
        "chakra",
        "info",
        str(prefix),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "collectives" in done.stdout
