"""Recordings on disk: what was saved comes back; what is damaged or forged is refused in one line."""

import json
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_steps import Options, training_step

from forerun.common.errors import ForerunError
from forerun.core.program.kinds import Attention, Delay, Direction, Gemm, Transfer
from forerun.sources.trace.recording import Recording, load_recording, save_recording

STEP = training_step(2, Options())


def test_what_was_saved_comes_back(tmp_path):
    save_recording(STEP, tmp_path / "a.npz")
    loaded = load_recording(tmp_path / "a.npz")
    for field in fields(Recording):
        one, other = getattr(STEP, field.name), getattr(loaded, field.name)
        if field.name == "ops":
            assert one.rows() == other.rows()
        elif isinstance(one, np.ndarray):
            assert np.array_equal(one, other), field.name
        else:
            assert json.loads(json.dumps(one)) == json.loads(json.dumps(other)), field.name


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("op", 10_000),
        ("module", -1),
        ("phase", 9),
        ("wait", 1 << 30),
        ("tensor_free", 1 << 30),
        ("tensor_category", -4),
    ],
)
def test_a_number_outside_its_table_is_refused(tmp_path, column, value):
    wrong = getattr(STEP, column).copy()
    wrong[0] = np.array(value).astype(wrong.dtype)
    save_recording(replace(STEP, **{column: wrong}), tmp_path / "a.npz")
    with pytest.raises(ForerunError, match=f"damaged or not a recording .*{column}"):
        load_recording(tmp_path / "a.npz")


def test_columns_of_different_lengths_are_refused(tmp_path):
    save_recording(replace(STEP, stream=STEP.stream[1:]), tmp_path / "a.npz")
    with pytest.raises(ForerunError, match="different lengths"):
        load_recording(tmp_path / "a.npz")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 1 << 20), value=st.integers(0, 255), cut=st.booleans())
def test_damaged_files_give_one_error(tmp_path, place, value, cut):
    path = tmp_path / "a.npz"
    save_recording(STEP, path)
    data = bytearray(path.read_bytes())
    data[place % len(data)] = value
    path.write_bytes(bytes(data[: place % len(data)] if cut else data))
    with suppress(ForerunError):
        load_recording(path)  # nothing else may come out of it


def test_objects_are_never_unpickled(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, header=np.array([{"format": "forerun-recording"}], dtype=object))
    with pytest.raises(ForerunError, match="not a recording"):
        load_recording(path)


def test_a_recording_of_version_1_is_read_with_every_figure_in_its_own_column():
    path = Path(__file__).parents[2] / "core" / "program" / "saved_before" / "recording_version_1.npz"
    ops = load_recording(path).ops
    assert ops.name == ("norm", "attention", "mm", "send", "recv", "synchronize")
    assert [ops.details_of(row) for row in range(1, 6)] == [
        Attention(2, 8, 2, 1024, 1024, 128, causal=1, backward=0, v_head_dim=128),
        Gemm(64, 32, 16),
        Transfer(Direction.OUT),
        Transfer(Direction.IN),
        Delay(77),
    ]
    assert ops.kernel == ("", "cudnn", "", "", "", "")
    assert ops.bytes_read[5] == 0
