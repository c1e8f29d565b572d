"""Traces of STAGE's second generation: known counts, and what must hold for any flags."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.astrasim.chakra.trace import CommType, NodeKind
from forerun.astrasim.chakra.validate import validate
from forerun.astrasim.chakra.writer import write_rank
from forerun.astrasim.stage.second_generation import SecondStageArgs, generate_second
from forerun.common.errors import ForerunError

SMALL = SecondStageArgs(num_stacks=2, batch=8, dvocal=512, dmodel=256, dff=512, seq=64, head=8, kvhead=4)
MOE = replace(SMALL, model_type="moe", experts=4, kexperts=2)


def traces(args, named=True):
    made = generate_second(args)
    return [made.rank(rank, names=named) for rank in range(len(made))]


def groups(args):
    return generate_second(args).groups


def ops_and_bytes(trace):
    moved = Counter()
    for comm, size in zip(trace.comm_type, trace.comm_size, strict=True):
        if comm != CommType.NONE:
            moved[CommType(comm).name] += int(size)
    sent = int(trace.comm_size[trace.kind == NodeKind.SEND].sum())
    return int(trace.num_ops.sum()), dict(moved) | ({"SEND": sent} if sent else {})


ALL_OF = {"dp": 2, "tp": 2, "sp": 2}


@pytest.mark.parametrize(
    ("flags", "computations", "collectives", "num_ops", "moved"),
    [
        ({}, 74, 0, 2031091712, {}),
        (
            {"dp": 4, "tp": 2, "sp": 2, "weight_sharded": True},
            74,
            42,
            127565824,
            {"ALL_GATHER": 393216, "REDUCE_SCATTER": 720896, "ALL_REDUCE": 1310720},
        ),
        (
            ALL_OF | {"tpsp": False},
            74,
            27,
            255819776,
            {"ALL_REDUCE": 1671168, "REDUCE_SCATTER": 131072, "ALL_GATHER": 81920},
        ),
        (
            ALL_OF | {"num_stacks": 3, "pp": 2, "weight_sharded": True},
            74,
            42,
            254607360,
            {"ALL_GATHER": 786432, "REDUCE_SCATTER": 917504, "ALL_REDUCE": 1310720, "SEND": 32768},
        ),
        (
            ALL_OF | {"micro_batch": 4, "pp": 2, "weight_sharded": True},
            68,
            39,
            127221760,
            {"ALL_GATHER": 655360, "REDUCE_SCATTER": 720896, "SEND": 16384, "ALL_REDUCE": 917504},
        ),
        (
            ALL_OF | {"micro_batch": 4, "pp": 2, "mixed_precision": True},
            86,
            35,
            140230656,
            {"ALL_GATHER": 114688, "REDUCE_SCATTER": 196608, "SEND": 16384, "ALL_REDUCE": 1572864},
        ),
        (
            ALL_OF | {"model_type": "moe", "experts": 8, "ep": 2},
            180,
            82,
            181749504,
            {"ALL_GATHER": 213504, "REDUCE_SCATTER": 327680, "ALL_TO_ALL": 131072, "ALL_REDUCE": 3277824},
        ),
        (
            {"model_type": "moe", "experts": 4, "ep": 2, "pp": 2, "micro_batch": 4},
            134,
            14,
            715460096,
            {"ALL_GATHER": 131584, "ALL_TO_ALL": 524288, "SEND": 131072},
        ),
    ],
)
def test_first_rank_as_stage_writes_it(flags, computations, collectives, num_ops, moved):
    trace = traces(replace(SMALL, **flags), named=False)[0]
    kinds = Counter(trace.kind.tolist())
    assert (kinds[NodeKind.COMP], kinds[NodeKind.COLLECTIVE]) == (computations, collectives)
    assert ops_and_bytes(trace) == (num_ops, moved)


def test_work_of_one_block_by_hand():
    trace = traces(replace(SMALL, num_stacks=1))[0]
    ops = dict(zip(trace.names, trace.num_ops.tolist(), strict=True))
    tokens, d, ff = 8 * 64, 256, 512
    assert ops["mb0.transformer.0.mha.qkv@0_COMP"] == tokens * d * 3 * d
    assert ops["mb0.transformer.0.mha.attn_kernel.qkv@0_COMP"] == 3 * tokens * d
    assert ops["mb0.transformer.0.mha.attn_kernel.dk@0_COMP"] == 6 * tokens * d
    assert ops["mb0.transformer.0.ffn.dwgate@0_COMP"] == tokens * d * ff
    assert ops["mb0.transformer.0.input_norm.dx@0_COMP"] == 5 * tokens * d
    assert ops["transformer.0._sharded_weight@1_COMP"] == 4 * d * d + 2 * d * ff
    assert ops["in_emb.w@1_COMP"] == 512 * d
    assert not any(name.endswith("mha_res.dx1@0_COMP") for name in ops)


def test_names_and_sizes_of_tensors():
    trace = traces(replace(SMALL, **ALL_OF, mixed_precision=True))[0]
    sizes = dict(zip(trace.tensor_names, trace.tensor_bytes.tolist(), strict=True))
    assert sizes["mb0.transformer.1.mha.q@0MicroBatch/dp,Seq/cp,Dmodel/Head,Head/tp"] == 2 * 4 * 32 * 32 * 4
    # two bytes an element for what is computed; six, and four of optimizer state, for a weight
    assert sizes["in_emb.w@0Dvocal,Dmodel"] == 512 * 256 * 10
    bucket = "3*Dff*Dmodel/tp + Dmodel**2/tp + Dmodel**2*(Head + 2*KVHead)/(Head*tp)"
    elements = (3 * 512 * 256 + 256**2 + 256**2 * 16 // 8) // 2
    assert sizes[f"transformer.0._sharded_weight@0{bucket}"] == elements * 10


def test_gradients_of_sharded_weights_count_as_nothing():
    trace = traces(replace(SMALL, dp=2, weight_sharded=True))[0]
    sizes = dict(zip(trace.tensor_names, trace.tensor_bytes.tolist(), strict=True))
    assert sizes["mb0.transformer.0.mha.dwo@0Dmodel/Head,Head/tp,Dmodel"] == 0
    assert sizes["mb0.transformer.0._assembled_weight@02*Dff*Dmodel/tp + 4*Dmodel**2/tp"] == 0
    assert sizes["transformer.0._sharded_weight@0(2*Dff*Dmodel/tp + 4*Dmodel**2/tp)/dp"] == 524288 // 2 * 5


flags = st.fixed_dictionaries(
    {
        "dp": st.sampled_from([1, 2, 3]),
        "tp": st.sampled_from([1, 2]),
        "sp": st.sampled_from([1, 2]),
        "ep": st.sampled_from([1, 2]),
        "pp": st.sampled_from([1, 2, 3]),
        "num_stacks": st.sampled_from([3, 4]),
        "micro_batch": st.sampled_from([-1, 2, 4]),
        "weight_sharded": st.booleans(),
        "tpsp": st.booleans(),
        "mixed_precision": st.booleans(),
        "model_type": st.sampled_from(["dense", "gpt", "moe"]),
    }
).map(lambda chosen: replace(MOE, **(chosen | ({"tpsp": True} if chosen["model_type"] == "moe" else {}))))


@settings(max_examples=40)
@given(flags)
def test_ranks_agree(args):
    every = traces(args, named=False)
    assert len(every) == args.dp * args.tp * args.sp * args.ep * args.pp
    sends, receives = (
        Counter(
            (int(tag), int(size), *((rank, int(peer)) if kind == NodeKind.SEND else (int(peer), rank)))
            for rank, trace in enumerate(every)
            for tag, size, peer, own in zip(trace.comm_tag, trace.comm_size, trace.peer, trace.kind, strict=True)
            if own == kind
        )
        for kind in (NodeKind.SEND, NodeKind.RECV)
    )
    assert sends == receives
    assert set(sends.values()) <= {1}
    assert (args.pp > 1) == bool(sends)
    members = groups(args)
    calls = {}
    for rank, trace in enumerate(every):
        assert len(set(trace.node_id.tolist())) == len(trace)
        rows = np.flatnonzero(trace.kind == NodeKind.COLLECTIVE)
        for name in set(trace.group[rows].tolist()):
            group = trace.group_names[name]
            assert rank in members[group]
            own = rows[trace.group[rows] == name]
            calls.setdefault(group, []).append((trace.comm_type[own].tolist(), trace.comm_size[own].tolist()))
    for group, lists in calls.items():
        assert len(lists) == len(members[group]) > 1
        assert lists.count(lists[0]) == len(lists)


@settings(max_examples=40)
@given(flags)
def test_dependencies_have_an_order(args):
    for trace in traces(args, named=False)[:: args.ranks_a_stage]:
        waiting = np.diff(trace.data_ptr)
        dependants = [[] for _ in range(len(trace))]
        for row in range(len(trace)):
            own = trace.data[trace.data_ptr[row] : trace.data_ptr[row + 1]].tolist()
            assert len(set(own)) == len(own)
            for other in own:
                dependants[other].append(row)
        ready = np.flatnonzero(waiting == 0).tolist()
        done = 0
        while ready:
            done += 1
            for row in dependants[ready.pop()]:
                waiting[row] -= 1
                if not waiting[row]:
                    ready.append(row)
        assert done == len(trace)


@pytest.mark.parametrize(
    "args",
    [
        replace(SMALL, **ALL_OF, pp=2, micro_batch=4, weight_sharded=True),
        replace(MOE, dp=2, tp=2, ep=2, pp=2),
        replace(SMALL, num_stacks=6, pp=4, mixed_precision=True),
    ],
)
def test_the_validator_finds_nothing(args, tmp_path):
    for rank, trace in enumerate(traces(args)):
        write_rank(tmp_path / f"w.{rank}.et", trace)
    assert validate(tmp_path / "w", groups(args)) == []


@pytest.mark.parametrize("base", [replace(SMALL, dp=2, tp=2), replace(SMALL, mixed_precision=True), MOE])
def test_sequence_parallel_ranks_share_the_work(base):
    def of_micro_batches(every):
        # a gated network adds two partial gradients on every tensor-parallel rank before it reduces their sum
        return sum(
            int(ops)
            for trace in every
            for name, ops in zip(trace.names, trace.num_ops, strict=True)
            if name.startswith("mb0.") and "dx000" not in name
        )

    total = of_micro_batches(traces(replace(base, dp=1, tp=1)))
    for degrees in ({"dp": 2}, {"tp": 4}, {"sp": 2}, {"dp": 2, "tp": 2, "sp": 2}, {"dp": 2, "tp": 2, "pp": 2}):
        assert of_micro_batches(traces(replace(base, **({"dp": 1, "tp": 1} | degrees)))) == total, degrees


def test_each_micro_batch_has_its_nodes_and_its_gathers():
    one, four = (traces(replace(SMALL, dp=2, weight_sharded=True, micro_batch=size))[0] for size in (8, 2))
    shared = sum(not name.startswith("mb") for name in one.names)
    assert len(four) - shared == 4 * (len(one) - shared)
    # a gather before the forward and one before the backward pass, of each block and micro-batch
    assert (four.comm_type == CommType.ALL_GATHER).sum() == 4 * 2 * 2
    merged = four.names.index("transformer.0._sharded_grad@0_COMP")
    assert four.data_ptr[merged + 1] - four.data_ptr[merged] == 4


def test_more_layers_batch_and_sequence_cost_more():
    cost = [
        traces(replace(SMALL, **more), named=False)[0].num_ops.sum()
        for more in ({}, {"num_stacks": 3}, {"num_stacks": 3, "batch": 16}, {"num_stacks": 3, "batch": 16, "seq": 128})
    ]
    assert cost == sorted(set(cost))


def test_dense_models_add_expert_parallelism_to_tensor_parallelism():
    both, folded = replace(SMALL, tp=2, ep=2), replace(SMALL, tp=4)
    assert groups(both) == groups(folded)
    assert [ops_and_bytes(t) for t in traces(both)] == [ops_and_bytes(t) for t in traces(folded)]


def test_recomputation_changes_nothing():
    plain, recomputed = (traces(replace(SMALL, tp=2, activation_recompute=on))[0] for on in (False, True))
    assert plain.names == recomputed.names
    assert (plain.num_ops == recomputed.num_ops).all()


@pytest.mark.parametrize(("mixed", "stage"), [(False, 1), (True, 3)])
def test_where_the_output_embedding_is(mixed, stage):
    every = traces(replace(SMALL, num_stacks=6, pp=4, mixed_precision=mixed))
    assert [any("out_emb.y" in name for name in trace.names) for trace in every] == [n == stage for n in range(4)]
    assert [sum("input_norm.y@0_COMP" in name for name in trace.names) for trace in every] == [2, 2, 1, 1]


def test_groups_by_hand():
    over_dp = [(0, 1), (2, 3), (4, 5), (6, 7)]
    over_tp = [(0, 2), (1, 3), (4, 6), (5, 7)]
    over_sp = [(rank,) for rank in (0, 2, 1, 3, 4, 6, 5, 7)]
    expected = {str(number): group for number, group in enumerate(over_dp + over_tp + over_sp, start=1)}
    assert groups(replace(SMALL, dp=2, tp=2, pp=2)) == expected


def test_footprint_by_hand():
    args = replace(SMALL, num_stacks=1, dvocal=1 << 20, dmodel=1024, dff=1024, batch=1, seq=1024, dp=2)
    block, embeddings = 6 << 20, 2 << 30
    # weights before and after their update, four bytes each and four of optimizer state
    weights = 2 * 4 * (block + embeddings) / 2**30
    lines = generate_second(args).footprint_lines()
    assert [line[: line.index("total")] for line in lines] == [
        f"[Dense] [GPU pp=0,cp=0,tp=0,dp={rank}] " for rank in range(2)
    ]
    assert f"| weights={weights:.3f} | opt={weights:.3f} |" in lines[0]
    assert lines[0].endswith(f"grads={block / 2**30:.3f}")


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"model_type": "lama"}, "did you mean llama"),
        ({"micro_batch": 3}, "--micro_batch 3 does not divide --batch 8"),
        ({"micro_batch": 0}, "--micro_batch 0"),
        ({"dp": 0}, "--dp 0: give a whole number of at least 1"),
        ({"pp": 4}, "--num_stacks 2 leaves pipeline stage 2"),
        ({"pp": 4, "mixed_precision": True}, "--num_stacks 2 leaves pipeline stage 2"),
        ({"model_type": "moe", "tpsp": False}, "leave --tpsp true"),
        ({"num_stacks": 1 << 30}, "use fewer layers, experts or micro-batches"),
        ({"batch": 1 << 30, "micro_batch": 1}, "use fewer layers, experts or micro-batches"),
        ({"model_type": "moe", "experts": 1 << 30}, "use fewer layers, experts or micro-batches"),
        ({"dp": 1 << 20, "pp": 2}, "make 2097152 ranks; use 1048576 at most"),
        ({"model_type": "moe", "ep": 3}, "--ep 3 does not divide --experts 8"),
    ],
)
def test_impossible_flags(wrong, complaint):
    with pytest.raises(ForerunError, match=complaint):
        generate_second(replace(SMALL, **wrong))


def test_ranks_and_classes():
    made = generate_second(replace(MOE, dp=2, tp=2, ep=2, pp=2, micro_batch=4))
    assert len(made) == made.n_ranks == 16
    assert made.class_of_rank.tolist() == [0] * 8 + [1] * 8
    for rank, trace in enumerate(made):
        own = made.classes[made.class_of_rank[rank]]
        assert not trace.names
        assert trace.num_ops is own.num_ops
        assert (trace.peer == np.where(own.peer < 0, -1, own.peer + rank % 8)).all()
        mine = {name for name, members in made.groups.items() if rank in members and len(members) > 1}
        assert set(trace.group_names) == mine
    assert made.classes[1].group_names == made[8].group_names


def test_no_such_rank():
    with pytest.raises(ForerunError, match="rank 1: there are ranks 0 to 0"):
        generate_second(SMALL).rank(1)


def test_sizes_that_no_trace_can_hold():
    made = generate_second(replace(SMALL, dvocal=1 << 30, dmodel=1 << 30, batch=1 << 10))
    with pytest.raises(ForerunError, match="does not fit in 63 bits"):
        made.rank(0)
