"""Files that appear whole or not at all, folders, and records that stay."""

import sqlite3

import pytest

from forerun.common import records
from forerun.common.admission import parse_json, read_json, read_text
from forerun.common.errors import ForerunError
from forerun.common.files import make_folder, whole_file
from forerun.common.records import Records


def test_a_folder_is_made_with_those_around_it_and_may_be_there(tmp_path):
    inner = tmp_path / "a" / "b"
    assert make_folder(inner) == inner
    assert make_folder(inner).is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ForerunError, match="file: can't be made a folder: File exists"):
        make_folder(tmp_path / "file")


def test_a_whole_file_replaces_the_old_one_only_at_the_end(tmp_path):
    path = tmp_path / "result"
    path.write_bytes(b"old")
    with whole_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert [one.name for one in tmp_path.iterdir()] == ["result"]


def test_a_block_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "result"
    path.write_bytes(b"old")

    def write_half():
        with whole_file(path) as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["result"]


def test_a_file_that_cannot_be_written_or_read_is_named(tmp_path):
    with pytest.raises(ForerunError, match="missing/result: can't be written"), whole_file(tmp_path / "missing/result"):
        pass
    with pytest.raises(ForerunError, match="nothing: can't be read: No such file"):
        read_text(tmp_path / "nothing")
    (tmp_path / "latin").write_bytes(b"ab\xff")
    with pytest.raises(ForerunError, match=r"latin: not UTF-8 text \(byte 2\)"):
        read_text(tmp_path / "latin")


def test_json_is_read_and_its_errors_name_the_line(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, 2]}')
    assert read_json(path) == {"a": [1, 2]}
    with pytest.raises(ForerunError, match="here: key 'a' is given twice"):
        parse_json('{"b": {"a": 1, "a": 2}}', "here")
    with pytest.raises(ForerunError, match="here, line 2: not JSON"):
        parse_json("{\n,", "here")
    with pytest.raises(ForerunError, match="here: not JSON: a number is too long"):
        parse_json("1" * 5000, "here")


def test_records_stay_and_the_first_of_a_key_counts(tmp_path):
    path = tmp_path / "runs.sqlite"
    with Records(path, "runs") as store:
        store.add([("a", {"x": 1}), ("b", [2])])
        store.add([("a", "other")])
    with Records(path, "runs") as store:
        assert store.all() == {"a": {"x": 1}, "b": [2]}
        assert store.of(["b", "c"]) == {"b": [2]}


@pytest.mark.parametrize("at_once", [1, 2, 3, 500])
def test_many_keys_are_asked_in_several_queries(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(records, "_ASKED_AT_ONCE", at_once)
    with Records(tmp_path / "runs.sqlite", "runs") as store:
        store.add((str(n), n) for n in range(7))
        assert store.of([str(n) for n in range(7)]) == {str(n): n for n in range(7)}


def test_a_file_of_others_is_left_alone_and_the_error_names_their_tables(tmp_path):
    path = tmp_path / "theirs.sqlite"
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE theirs (x)")
    with pytest.raises(
        ForerunError, match=r"theirs\.sqlite: can't be used \(it holds the tables theirs instead of runs"
    ):
        Records(path, "runs")


def test_records_are_kept_in_a_log_beside_the_file_while_it_is_open(tmp_path):
    path = tmp_path / "runs.sqlite"
    with Records(path, "runs") as store:
        store.add([("a", 1)])
        assert (tmp_path / "runs.sqlite-wal").exists()
        assert store._base.execute("PRAGMA synchronous").fetchone() == (1,)
    assert not (tmp_path / "runs.sqlite-wal").exists()
    with pytest.raises(ForerunError, match="can't be used"):
        store.add([("b", 1)])
