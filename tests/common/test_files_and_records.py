"""Files that appear whole or not at all, folders, and records that stay."""

import os
import sqlite3
import stat
from pathlib import Path

import pytest

from forerun.common import records
from forerun.common.admission import parse_json, read_json, read_text
from forerun.common.errors import ForerunError
from forerun.common.files import make_folder, whole_file, whole_files
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


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path):
    (tmp_path / "there").write_bytes(b"old")
    (tmp_path / "link").symlink_to("there")
    with whole_file(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_bytes() == b"new"


def test_a_device_stays_a_device_and_other_names_of_a_file_stay(tmp_path):
    with whole_file("/dev/null") as file:
        file.write(b"new")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    (tmp_path / "a").write_bytes(b"old and longer")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    with whole_file(tmp_path / "a") as file:
        file.write(b"new")
    assert (tmp_path / "b").read_bytes() == b"new"
    with pytest.raises(ForerunError, match="/dev/full: can't be written: No space left"), whole_file("/dev/full") as f:
        f.write(b"new")
    with pytest.raises(ForerunError, match="can't be written: it is a folder"), whole_file(tmp_path):
        pass


def test_nobody_can_guess_where_a_file_is_written_first(tmp_path):
    names = set()
    for _ in range(3):
        with whole_file(tmp_path / "result") as file:
            names |= {one.name for one in tmp_path.iterdir()} - {"result"}
            assert stat.S_IMODE(Path(file.name).stat().st_mode) == 0o600
    assert len(names) == 3


def test_a_new_file_has_the_usual_mode_and_an_old_one_keeps_its_own(tmp_path):
    with whole_file(tmp_path / "new") as file:
        file.write(b"")
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "new").chmod(0o640)
    with whole_file(tmp_path / "new") as file:
        file.write(b"x")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_a_set_of_files_appears_together_or_not_at_all(tmp_path):
    (tmp_path / "b").mkdir()

    def write():
        with whole_files() as files:
            for name in ("a", "b"):
                with files.open(tmp_path / name, executable=True) as file:
                    file.write(b"x")
                    assert not (tmp_path / "a").exists()

    with pytest.raises(ForerunError, match="b: can't be written: it is a folder"):
        write()
    assert [one.name for one in tmp_path.iterdir()] == ["b"]
    (tmp_path / "b").rmdir()
    write()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b"]
    assert (tmp_path / "a").stat().st_mode & 0o100


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


def test_a_pipe_is_no_file_of_records(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ForerunError, match="pipe: can't be read: it is a pipe"):
        Records(tmp_path / "pipe", "runs")


def test_a_record_that_no_run_wrote_is_told(tmp_path):
    path = tmp_path / "runs.sqlite"
    with Records(path, "runs") as store:
        store.add([("a", 1)])
    for record in ('{"x": NaN}', "[", '{"x": 1, "x": 2}', b"blob"):
        with sqlite3.connect(path) as base:
            base.execute("UPDATE runs SET record = ?", [record])
        with Records(path, "runs") as store, pytest.raises(ForerunError, match="can't be used"):
            store.all()


def test_records_are_kept_in_a_log_beside_the_file_while_it_is_open(tmp_path):
    path = tmp_path / "runs.sqlite"
    with Records(path, "runs") as store:
        store.add([("a", 1)])
        assert (tmp_path / "runs.sqlite-wal").exists()
        assert store._base.execute("PRAGMA synchronous").fetchone() == (1,)
    assert not (tmp_path / "runs.sqlite-wal").exists()
    with pytest.raises(ForerunError, match="can't be used"):
        store.add([("b", 1)])
