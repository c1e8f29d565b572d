"""Traces of STAGE's first generation, node for node those of STAGE itself."""

import json
from pathlib import Path

import numpy as np
import pytest

from forerun.astrasim.chakra.groups import read_comm_groups
from forerun.astrasim.chakra.reader import read_rank
from forerun.astrasim.chakra.trace import NodeKind
from forerun.astrasim.chakra.traces import open_traces
from forerun.astrasim.stage.first_generation import generate, load_stage_args

REFERENCE = Path(__file__).parents[4] / "shared" / "golden"
SMALL = sorted(REFERENCE.glob("stage/small/*"))
FULL = sorted(REFERENCE.glob("stage/[ls]*_*"))
POINTS = sorted(REFERENCE.glob("dse/*_L4/*"))[::5]
LARGE = sorted(path.parent for path in REFERENCE.glob("dse/*/*/et_rank0.et.zst"))
COLUMNS = (
    *("node_id", "kind", "is_cpu", "duration_us", "num_ops", "tensor_size", "comm_type", "comm_size", "peer"),
    *("priority", "data_ptr", "data", "ctrl_ptr", "ctrl", "input_ptr", "output_ptr", "names"),
)


def tensors(trace, entries):
    return [(trace.tensor_names[entry], int(trace.tensor_bytes[entry])) for entry in entries]


def assert_same(ours, theirs):
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    for name in ("input_tensor", "output_tensor"):
        assert tensors(ours, getattr(ours, name)) == tensors(theirs, getattr(theirs, name))
    groups = [[trace.group_names[row] if row >= 0 else "" for row in trace.group] for trace in (ours, theirs)]
    assert groups[0] == groups[1]
    messages = (ours.kind == NodeKind.SEND) | (ours.kind == NodeKind.RECV)
    # STAGE counts tags from a number drawn anew in each run.
    assert len(set((theirs.comm_tag - ours.comm_tag)[messages].tolist())) <= 1
    assert not ours.comm_tag[~messages].any()
    return (theirs.comm_tag - ours.comm_tag)[messages][:1].tolist()


@pytest.mark.skipif(not SMALL, reason=f"no reference traces at {REFERENCE}")
@pytest.mark.parametrize("case", [*SMALL, *FULL, *POINTS], ids=lambda path: f"{path.parent.name}-{path.name}")
def test_every_node_of_every_rank_is_that_of_stage(case):
    traces = generate(load_stage_args(case / "stage_args.json"))
    theirs = open_traces(case, n_ranks=len(traces), names=True)
    assert len(theirs.available) == len(traces)
    starts = set()
    for rank in theirs.available:
        starts |= set(assert_same(traces.rank(rank, names=True), theirs[rank]))
    assert len(starts) <= 1
    assert list(traces.groups.items()) == list(read_comm_groups(case / "comm_group.json").items())


@pytest.mark.skipif(not LARGE, reason=f"no reference traces at {REFERENCE}")
@pytest.mark.parametrize("case", LARGE, ids=lambda path: path.parent.name)
def test_models_of_full_size_are_those_of_stage(case):
    traces = generate(load_stage_args(case / "stage_args.json"))
    assert_same(traces.rank(0, names=True), read_rank(case / "et_rank0.et.zst", names=True))
    assert traces.groups == {
        name: tuple(ranks) for name, ranks in json.loads((case / "comm_group.json").read_text()).items()
    }
