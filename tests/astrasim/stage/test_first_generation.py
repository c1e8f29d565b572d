"""Traces of STAGE's first generation: known figures, and what must hold for any flags."""

import json
from collections import Counter
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.astrasim.chakra.trace import CommType, NodeKind, RankTrace
from forerun.astrasim.chakra.validate import validate
from forerun.astrasim.stage.first_generation import StageArgs, generate, load_stage_args
from forerun.astrasim.stage.generated import write_traces
from forerun.common.errors import ForerunError

SMALL = StageArgs(din=96, dout=160, dmodel=64, dff=256, batch=16, seq=32, head=8, num_stacks=3)
UPDATE = "@1_COMP"
CASES = st.builds(
    StageArgs,
    dp=st.integers(1, 3),
    tp=st.integers(1, 3),
    sp=st.integers(1, 3),
    pp=st.integers(1, 5),
    weight_sharded=st.booleans(),
    activation_recompute=st.booleans(),
    din=st.integers(1, 99),
    dout=st.integers(1, 99),
    dmodel=st.integers(1, 99),
    dff=st.integers(1, 99),
    batch=st.integers(1, 99),
    seq=st.integers(1, 99),
    head=st.integers(1, 9),
    num_stacks=st.integers(3, 21),
)


def ranks_of(args, names=True):
    made = generate(args)
    return [made.rank(rank, names) for rank in range(len(made))]


def same(ours, theirs):
    for field in fields(RankTrace):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b, field.name
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, field.name


@given(CASES)
@settings(max_examples=60, deadline=None)
def test_copied_layers_are_layers_made_one_by_one(args):
    quick, slow = generate(args), generate(args, copy_layers=False)
    for rank in {0, len(quick) // 2, len(quick) - 1}:
        same(quick.rank(rank, names=True), slow.rank(rank, names=True))


@given(CASES)
@settings(max_examples=20, deadline=None)
def test_ids_are_unique_and_every_message_has_both_ends(args):
    traces = ranks_of(args, names=False)
    ids = np.concatenate([trace.node_id for trace in traces])
    assert len(np.unique(ids)) == len(ids)
    sent, received = Counter(), Counter()
    for rank, trace in enumerate(traces):
        for row in np.flatnonzero(trace.kind == NodeKind.SEND):
            sent[rank, int(trace.peer[row]), int(trace.comm_tag[row]), int(trace.comm_size[row])] += 1
        for row in np.flatnonzero(trace.kind == NodeKind.RECV):
            received[int(trace.peer[row]), rank, int(trace.comm_tag[row]), int(trace.comm_size[row])] += 1
    assert sent == received
    # Activations one way, gradients the other, between neighbours; with one stage there are none.
    assert len(sent) == (0 if args.pp == 1 else 2 * (args.num_stacks + 1) * args.ranks_a_stage)
    assert set(sent.values()) <= {1}


@given(CASES)
@settings(max_examples=20, deadline=None)
def test_groups_split_the_ranks_along_each_dimension(args):
    made = generate(args)
    names = list(made.groups)
    assert names == [str(number) for number in range(1, len(names) + 1)]
    start = 0
    for ranks in args.degrees.values():
        own = [made.groups[name] for name in names[start : start + args.n_ranks // ranks]]
        assert sorted(rank for group in own for rank in group) == list(range(args.n_ranks))
        assert {len(group) for group in own} == {ranks}
        start += len(own)
    for rank in range(args.n_ranks):
        trace = made.rank(rank)
        for name in made.group_names(rank):
            assert rank in made.groups[name]
        used = trace.group[trace.kind == NodeKind.COLLECTIVE]
        assert ((used >= 0) & (used < len(trace.group_names))).all()


@given(
    *[st.sampled_from([1, 2, 4])] * 3,
    st.sampled_from([1, 2, 3, 5]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_splitting_the_work_does_not_change_it(dp, tp, sp, pp, sharded, recompute):
    """Weights that are whole on every rank are updated on every one; all else is done once."""
    args = replace(SMALL, weight_sharded=sharded, activation_recompute=recompute)

    def work(some):
        update, rest = 0, 0
        for trace in ranks_of(some):
            is_update = np.array([name.endswith(UPDATE) for name in trace.names])
            update += int(trace.num_ops[is_update].sum())
            rest += int(trace.num_ops[~is_update].sum())
        return update, rest

    alone, split = work(args), work(replace(args, dp=dp, tp=tp, sp=sp, pp=pp))
    assert split[1] == alone[1]
    assert split[0] == alone[0] * (1 if sharded else dp * sp)


def test_operations_of_a_model_counted_by_hand():
    args = replace(SMALL, num_stacks=2)
    (trace,) = ranks_of(args)
    tokens, model, wide = args.batch * args.seq, args.dmodel, args.dff
    embeddings = 3 * tokens * model * (args.din + args.dout)
    projections = 3 * 3 * tokens * model * model
    scores = 2 * 3 * tokens * args.seq * model
    mlp = 2 * 3 * tokens * model * wide
    # Norms forward and backward, residual sums, sums of gradients, reshapes.
    small = tokens * model * (4 * 5 + 2 + 4 + 2)
    weights = model * (args.din + args.dout) + 2 * (3 * model * model + 2 * model * wide)
    assert trace.num_ops.sum() == embeddings + 2 * (projections + scores + mlp + small) + weights
    again = ranks_of(replace(args, activation_recompute=True))[0].num_ops.sum()
    assert again - trace.num_ops.sum() == 2 * tokens * model * (3 * model + args.seq + wide)


def collectives(trace):
    moved = Counter()
    for comm, size in zip(trace.comm_type, trace.comm_size, strict=True):
        if comm != CommType.NONE:
            moved[CommType(comm).name] += int(size)
    return moved


def test_data_parallel_ranks_reduce_the_weights_gradients_and_nothing_else():
    trace = ranks_of(replace(SMALL, dp=4))[0]
    model = SMALL.dmodel
    weights = model * (SMALL.din + SMALL.dout) + 3 * (3 * model * model + 2 * model * SMALL.dff)
    assert collectives(trace) == {"ALL_REDUCE": weights}


def test_sharded_weights_are_gathered_one_after_the_other_from_the_start():
    trace = ranks_of(replace(SMALL, dp=4, weight_sharded=True))[0]
    gathers = np.flatnonzero(trace.comm_type == CommType.ALL_GATHER)
    assert (np.diff(trace.data_ptr)[gathers] == 0).all()
    for before, row in pairwise(gathers):
        assert trace.ctrl[trace.ctrl_ptr[row] : trace.ctrl_ptr[row + 1]].tolist() == [before]
    assert collectives(trace)["REDUCE_SCATTER"] > 0
    assert collectives(trace)["ALL_REDUCE"] == 0


def test_sizes_that_do_not_divide_are_cut_off_when_written():
    """5 * 3 / (2 * 2) elements in a norm: operations, and elements read and written, each cut off on its own."""
    args = StageArgs(dp=2, tp=2, batch=3, seq=1, dmodel=5, head=5, num_stacks=1)
    trace = ranks_of(args)[0]
    row = trace.names.index("stack_0_mha_norm@0_COMP")
    assert (trace.num_ops[row], trace.tensor_size[row]) == (int(5 * 3.75), int(2 * 3.75))
    read = trace.input_tensor[trace.input_ptr[row]]
    assert trace.tensor_names[read] == "stack_0_mha_res@0Batch/dp,Seq/sp,Dmodel/tp"
    assert trace.tensor_bytes[read] == 3


@pytest.mark.parametrize(
    "change",
    [
        {"dp": 2, "tp": 2, "sp": 2, "pp": 3, "weight_sharded": True, "activation_recompute": True},
        {"tp": 3, "sp": 5, "num_stacks": 0, "pp": 2},
        {"dp": 3, "num_stacks": 1, "pp": 2},
    ],
)
def test_checks_of_traces_find_nothing(change, tmp_path):
    made = generate(replace(SMALL, **change))
    write_traces(made, tmp_path / "new" / "folder", "w", "groups.json")
    assert not validate(str(tmp_path / "new" / "folder"), made.groups)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"dp": 0}, "--dp 0"),
        ({"head": -8}, "--head -8"),
        ({"seq": 1 << 31}, "--seq"),
        ({"num_stacks": -1}, "--num_stacks -1"),
        ({"pp": 8, "num_stacks": 5}, "use --pp 7 at most"),
        ({"batch": 1 << 30, "seq": 1 << 30, "dmodel": 1 << 30}, "use smaller ones"),
    ],
)
def test_flags_that_make_no_trace_are_named(flags, part):
    with pytest.raises(ForerunError, match=part):
        generate(StageArgs(**flags))


def test_no_rank_beyond_the_last():
    made = generate(replace(SMALL, dp=2))
    for rank in (-1, 2):
        with pytest.raises(ForerunError, match="ranks 0 to 1"):
            made.rank(rank)
    with pytest.raises(IndexError):
        made[2]


def test_flags_from_a_file(tmp_path):
    path = tmp_path / "flags.json"
    path.write_text(json.dumps({"dp": 2, "weight_sharded": 1, "activation_recompute": False, "num_stacks": 4}))
    assert load_stage_args(path) == StageArgs(dp=2, weight_sharded=True, num_stacks=4)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object"),
        ('{"dpp": 2}', "unknown flag .*flags.json 'dpp'; did you mean"),
        ('{"dp": "2"}', "dp: expected a whole number"),
        ('{"dp": true}', "dp: expected a whole number"),
        ('{"weight_sharded": "perhaps"}', "neither true nor false"),
        ('{"dp": 0}', "flags.json: --dp 0"),
        ("\ud800", "not UTF-8"),
    ],
)
def test_a_bad_file_of_flags_is_named(text, part, tmp_path):
    path = tmp_path / "flags.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ForerunError, match=part):
        load_stage_args(path)
    with pytest.raises(ForerunError, match="can't be read"):
        load_stage_args(tmp_path / "none.json")
