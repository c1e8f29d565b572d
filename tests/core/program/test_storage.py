from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from random_programs import program, random_programs

from forerun.common.errors import ForerunError
from forerun.core.program.builder import BlockBuilder
from forerun.core.program.storage import load, save
from forerun.core.program.types import Program


def small() -> Program:
    block = BlockBuilder()
    block.node(0, record=1)
    return dataclasses.replace(program([block.build("b")], [[0, 0]]), meta={"model": "tiny", "layers": 2})


def assert_same(a: Program, b: Program) -> None:
    assert (a.groups, a.channels, a.modules, a.meta) == (b.groups, b.channels, b.modules, b.meta)
    rows = [(a.ops, b.ops), *zip(a.blocks, b.blocks, strict=True), *zip(a.rank_classes, b.rank_classes, strict=True)]
    for one, other in rows:
        for field in dataclasses.fields(one):
            x, y = getattr(one, field.name), getattr(other, field.name)
            if isinstance(x, np.ndarray):
                assert x.dtype == y.dtype, field.name
                np.testing.assert_array_equal(x, y, err_msg=field.name)
            else:
                assert x == y, field.name


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(random_programs())
def test_what_is_saved_is_loaded(tmp_path: Path, saved: Program) -> None:
    save(saved, tmp_path / "program.npz")
    assert_same(load(tmp_path / "program.npz"), saved)
    assert [p.name for p in tmp_path.iterdir()] == ["program.npz"]


def test_meta_survives(tmp_path: Path) -> None:
    save(small(), tmp_path / "p.npz")
    assert load(tmp_path / "p.npz").meta == {"model": "tiny", "layers": 2}


def test_meta_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ForerunError, match="meta can't be saved"):
        save(dataclasses.replace(small(), meta={"f": object()}), tmp_path / "p.npz")
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_file_gives_one_line_wherever_it_is_cut(tmp_path: Path) -> None:
    save(small(), tmp_path / "p.npz")
    whole = (tmp_path / "p.npz").read_bytes()
    cut = tmp_path / "cut.npz"
    for length in range(0, len(whole), 97):
        cut.write_bytes(whole[:length])
        with pytest.raises(ForerunError) as caught:
            load(cut)
        assert str(cut) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_flipped_byte_never_escapes_as_another_error(tmp_path: Path) -> None:
    save(small(), tmp_path / "p.npz")
    whole = bytearray((tmp_path / "p.npz").read_bytes())
    damaged = tmp_path / "damaged.npz"
    refused = 0
    for place in range(0, len(whole), 31):
        changed = bytearray(whole)
        changed[place] ^= 0xFF
        damaged.write_bytes(changed)
        try:
            load(damaged)
        except ForerunError:
            refused += 1
    assert refused > 0


def rewritten(path: Path, **header: object) -> Path:
    """The file with entries of its header replaced."""
    with np.load(path) as file:
        arrays = dict(file)
    text = json.dumps({**json.loads(arrays["header"].tobytes()), **header})
    arrays["header"] = np.frombuffer(text.encode(), np.uint8)
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"version": 2}, "format version 2, this forerun reads 1"),
        ({"format": "other"}, "not a saved Program"),
        ({"blocks": "b"}, "damaged or not a saved Program"),
        ({"blocks": ["b", "c"]}, "damaged or not a saved Program"),
        ({"meta": []}, "damaged or not a saved Program"),
        ({"rank_classes": [{"name": "x", "n_ranks": 1, "colour": 3}]}, "damaged or not a saved Program"),
        ({"op_names": ["a"]}, "column name has 1 entries, not 6"),
    ],
)
def test_foreign_headers_are_refused(tmp_path: Path, header: dict[str, object], message: str) -> None:
    save(small(), tmp_path / "p.npz")
    with pytest.raises(ForerunError, match=message):
        load(rewritten(tmp_path / "p.npz", **header))


@pytest.mark.parametrize("content", [b"", b"{}", b"PK\x03\x04 no zip", b"\x93NUMPY"])
def test_foreign_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign.npz"
    path.write_bytes(content)
    with pytest.raises(ForerunError, match="not a saved Program"):
        load(path)


def test_other_arrays_and_pickles_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.zeros(3))
    np.savez(tmp_path / "many.npz", a=np.zeros(3))
    np.savez(tmp_path / "pickle.npz", header=np.array([{"format": "forerun-program"}], dtype=object))
    for name in ("one.npy", "many.npz", "pickle.npz"):
        with pytest.raises(ForerunError, match="not a saved Program"):
            load(tmp_path / name)


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ForerunError, match=r"none\.npz: can't be read: No such file"):
        load(tmp_path / "none.npz")
    with pytest.raises(ForerunError, match=r"p\.npz: can't be written: No such file"):
        save(small(), tmp_path / "no folder" / "p.npz")
    (tmp_path / "file").write_text("")
    with pytest.raises(ForerunError, match=r"p\.npz: can't be written: Not a directory"):
        save(small(), tmp_path / "file" / "p.npz")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(ForerunError, match=r"can't be written"):
        save(small(), tmp_path / "folder.npz")
