"""Memory snapshots are read without executing anything, and tell what is allocated at the peak."""

import json
import os
import pickle
from contextlib import suppress

import pytest
from command_here import run_here
from hypothesis import given
from hypothesis import strategies as st

from forerun.common.errors import ForerunError
from forerun.sources.profile.memory_snapshot import category_of, read_memory_snapshot
from forerun.sources.profile.plain_pickle import read_plain_pickle

MIB = 1 << 20
FORWARD = [
    {"filename": "/site-packages/torch/nn/modules/linear.py", "line": 134, "name": "forward"},
    {"filename": "/home/me/train.py", "line": 12, "name": "loss"},
]
UPDATE = [{"filename": "/site-packages/torch/optim/adamw.py", "line": 90, "name": "_init_group"}]


def _event(action, addr, size, time_us, frames=()):
    entry = {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": time_us, "frames": list(frames)}
    return entry


def _snapshot():
    """100 MiB of a segment, of which 10 live before and after, 40 + 20 at the peak, and 20 at the end."""
    active = {"state": "active_allocated", "frames": []}
    blocks = [
        {"address": 0, "size": 10 * MIB, **active},
        {"address": 10 * MIB, "size": 40 * MIB, "state": "inactive", "frames": []},
        {"address": 50 * MIB, "size": 20 * MIB, **active, "frames": UPDATE},
        {"address": 70 * MIB, "size": 30 * MIB, "state": "inactive", "frames": []},
    ]
    events = [
        _event("free_requested", 200 * MIB, 5 * MIB, 1),
        _event("free_completed", 200 * MIB, 5 * MIB, 1),
        _event("segment_free", 200 * MIB, 6 * MIB, 1),
        _event("alloc", 10 * MIB, 40 * MIB, 2, FORWARD),
        _event("alloc", 50 * MIB, 20 * MIB, 3, UPDATE),
        _event("free_requested", 10 * MIB, 40 * MIB, 4),
        _event("free_completed", 10 * MIB, 40 * MIB, 4),
    ]
    segment = {"device": 0, "address": 0, "total_size": 100 * MIB, "allocated_size": 30 * MIB, "blocks": blocks}
    return {"segments": [segment], "device_traces": [events], "allocator_settings": {}}


def _write(path, content, protocol=4):
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_peak_and_what_is_there(tmp_path, protocol):
    found = read_memory_snapshot(_write(tmp_path / "a.pickle", _snapshot(), protocol))
    assert [moment.allocated // MIB for moment in found.moments] == [15, 10, 10, 10, 50, 70, 30, 30]
    assert [moment.reserved // MIB for moment in found.moments] == [106, 106, 106, 100, 100, 100, 100, 100]
    assert (found.peak.allocated, found.peak.time_us) == (70 * MIB, 3)
    blocks = [(one.size // MIB, one.category, one.where) for one in found.at_peak]
    assert blocks == [
        (40, "activation", "train.py:12 loss"),
        (20, "optimizer", "adamw.py:90 _init_group"),
        (10, "other", ""),
    ]
    assert (found.inactive, found.largest_inactive) == (70 * MIB, 40 * MIB)


def test_forerun_reads_its_own_snapshots_back(tmp_path):
    file = tmp_path / "a.pickle"
    plan = ["gpt2-small", "--cluster", "h100-sxm", "--dp-shard", "8", "--seq-len", "256"]
    assert run_here(None, "predict", *plan, "--memory-snapshot", file).returncode == 0
    done = run_here(None, "profile", "memory", file, "--model", *plan, "--json")
    record = json.loads(done.stdout)
    predicted = record["predicted"]
    assert record["peak_allocated_gib"] == pytest.approx(predicted["peak_allocated_gib"], rel=0.01)
    for name, size in predicted["by_category_gib"].items():
        if size > 0.01:
            assert record["by_category_gib"][name] == pytest.approx(size, rel=0.02), name
    shown = run_here(None, "profile", "memory", file)
    assert "Largest tensors at the peak" in shown.stdout


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**100), 2**100) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=30,
)


@given(content=plain, protocol=st.sampled_from([3, 4, 5]))
def test_plain_data_comes_back_as_it_was(tmp_path_factory, content, protocol):
    assert read_plain_pickle(_write(tmp_path_factory.mktemp("p") / "a", content, protocol)) == content


@given(content=plain, cut=st.floats(0, 1), byte=st.integers(0, 255))
def test_damaged_files_are_errors_or_data(tmp_path_factory, content, cut, byte):
    whole = bytearray(pickle.dumps(content, protocol=4))
    whole[int(cut * (len(whole) - 1))] = byte
    path = tmp_path_factory.mktemp("p") / "a"
    path.write_bytes(whole)
    with suppress(ForerunError):
        read_plain_pickle(path)


class _Attack:
    def __reduce__(self):
        return os.system, ("echo executed > executed",)


HOSTILE = {
    "a call": pickle.dumps(_Attack()),
    "a call of protocol 0": pickle.dumps(_Attack(), protocol=0),
    "nothing": b"",
    "no pickle": b"hello",
    "cut short": pickle.dumps(_snapshot())[:-40],
    "a huge length": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",
    "a huge memo": b"\x80\x03]r\xff\xff\xff\xff.",
    "another pickle": pickle.dumps([1, 2]),
    "no list": pickle.dumps({"segments": 1, "device_traces": 2}),
    "wrong sizes": pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": -5}]]}),
    "an unhashable key": b"\x80\x04}]]s.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_end_in_one_line_and_run_nothing(tmp_path, name):
    (tmp_path / "a.pickle").write_bytes(HOSTILE[name])
    done = run_here(tmp_path, "profile", "memory", "a.pickle")
    assert done.returncode == 2
    assert done.stderr.startswith("error: a.pickle")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "executed").exists()


FRAMES = {
    ("/torch/optim/adam.py step",): "optimizer",
    ("/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py foreach_all_gather",): "unsharded",
    ("/torch/nn/functional.py cross_entropy", "/torch/nn/modules/module.py _call_impl"): "logits",
    ("/torch/nn/modules/module.py _call_impl",): "activation",
    ("/torch/autograd/graph.py _engine_run_backward",): "gradient",
    ("model.py make",): "other",
}


@pytest.mark.parametrize("frames", FRAMES)
def test_frames_tell_the_category(frames):
    assert category_of(frames) == FRAMES[frames]
