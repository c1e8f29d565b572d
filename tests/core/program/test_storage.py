from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from random_programs import program, random_programs

from forerun.common.errors import ForerunError
from forerun.core.cost.op_costs import durations_ps
from forerun.core.program.builder import BlockBuilder
from forerun.core.program.kinds import (
    Attention,
    Delay,
    Details,
    Direction,
    Gemm,
    GemmRole,
    HostCopy,
    OpKind,
    TokenExchange,
    Transfer,
)
from forerun.core.program.storage import load, save
from forerun.core.program.types import Program
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import KernelRates


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
        ({"version": 3}, "format version 3, this forerun reads 1 to 2"),
        ({"format": "other"}, "not a saved Program"),
        ({"blocks": "b"}, "header: blocks: input should be a valid list, got 'b'"),
        ({"blocks": ["b", "c"]}, "damaged or not a saved Program"),
        ({"meta": []}, "header: meta: expected keys and values"),
        ({"rank_classes": [{"name": "x", "n_ranks": 1, "colour": 3}]}, "unknown key 'rank_classes.0.colour'"),
        ({"rank_classes": [{"name": "x", "n_ranks": "1"}]}, "n_ranks: input should be a valid integer"),
        ({"rank_classes": [{"name": "x", "n_ranks": 2**40}]}, "n_ranks: input should be less than or equal to"),
        ({"channels": [{"name": "x", "members": [[0]]}]}, "members"),
        ({"meta": {"a": float("inf")}}, "meta.a: the number inf is not finite"),
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


# -- files of earlier versions -------------------------------------------------------------------------------------

SAVED_BEFORE = Path(__file__).parent / "saved_before"


def test_a_program_of_version_1_is_read_with_every_figure_in_its_own_column() -> None:
    ops = load(SAVED_BEFORE / "program_version_1.npz").ops
    kinds = [OpKind.GEMM] * 3 + [OpKind.ATTENTION, OpKind.MEMORY, OpKind.COLLECTIVE] + [OpKind.P2P] * 3
    assert ops.kind.tolist() == [*kinds, *[OpKind.HOST_COPY] * 3, OpKind.DELAY]
    assert [ops.details_of(row) for row in range(len(ops))] == [
        Gemm(4096, 1024, 512, batch=2, role=GemmRole.DGRAD, kernels=2),
        Gemm(512, 1024, 4096, role=GemmRole.WGRAD, accumulate_bytes=4),
        Gemm(6272, 64, 576, operand_bytes=900000, result_bytes=802816),
        Attention(2, 8, 2, 1024, 2048, 128, causal=1, backward=1, v_head_dim=64),
        Details(),
        TokenExchange(0, 0, 0, 0, 0),
        *(Transfer(way) for way in (Direction.OUT, Direction.IN, Direction.EITHER)),
        *(HostCopy(way) for way in (Direction.IN, Direction.OUT, Direction.EITHER)),
        Delay(123456789),
    ]
    assert (ops.kernel[3], ops.dtype[3]) == ("flash3", "")
    assert (set(ops.kernel) - {"flash3"}, ops.dtype[4]) == ({""}, "fp32")
    assert (ops.flops[-1], ops.bytes_read[-1], ops.bytes_written[-1]) == (7, 0, 11)


def test_a_program_of_version_1_takes_the_time_of_its_kernels() -> None:
    """Picoseconds at the clock that 700 W leave."""
    program = load(SAVED_BEFORE / "program_version_1.npz")
    time_ps, _ = durations_ps(program.ops, program.groups, load_cluster("h100-sxm"), KernelRates())
    products, moves = [20172206, 9579567, 4219212, 106760673], [59664597] * 3 + [29531250] * 2 + [49062500]
    assert time_ps.tolist() == [*products, 3539471, 287904808, *moves, 123456789]


def test_columns_are_found_by_name_wherever_they_stand(tmp_path: Path) -> None:
    """A file whose kinds have their columns in another order, or lack one that is new, reads the same."""
    saved = load(SAVED_BEFORE / "program_version_1.npz")
    save(saved, tmp_path / "p.npz")
    with np.load(tmp_path / "p.npz") as file:
        arrays = dict(file)
    header = json.loads(arrays["header"].tobytes())
    header["op_details"] = {kind: names[::-1] for kind, names in header["op_details"].items()}
    for row, kind in enumerate(saved.ops.kind.tolist()):
        width = len(header["op_details"][OpKind(kind).name])
        arrays["ops.details"][row, :width] = arrays["ops.details"][row, :width][::-1].copy()
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(tmp_path / "p.npz", **arrays)
    assert_same(load(tmp_path / "p.npz"), saved)


def test_a_column_of_a_later_version_is_refused(tmp_path: Path) -> None:
    save(small(), tmp_path / "p.npz")
    with pytest.raises(ForerunError, match="damaged or not a saved Program"):
        load(rewritten(tmp_path / "p.npz", op_details={"GEMM": ["m", "colour"]}))
