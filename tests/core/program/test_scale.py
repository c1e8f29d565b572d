"""Programs at other numbers of ranks and on other nodes are those that would be built there."""

from dataclasses import replace

import numpy as np
import pytest
from saved_programs import H100, MODEL, plan_of, program_of, with_group_ranks

from forerun.answers.analysis.predict import simulate
from forerun.answers.analysis.predict_program import predict_program
from forerun.common.errors import ForerunError
from forerun.core.program.builder import BlockBuilder, OpTableBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.layout import laid_out
from forerun.core.program.scale import scaled
from forerun.core.program.types import N_CATEGORIES, Category, Collective, Phase, Program, RankClass, Stream
from forerun.core.program.validate import check
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model

MOE = replace(load_model("mixtral-8x7b"), n_layers=2)


def used(groups):
    """Groups of several ranks, without the borders of pipelines, whose places the two ends know."""
    return [group for group in groups if group.size > 1 and not group.axis.startswith("pp_")]


SIZES = {
    "FSDP": (dict(dp_shard=8), dict(dp_shard=64)),
    "DDP": (dict(dp_shard=8, zero_stage=0), dict(dp_shard=64, zero_stage=0)),
    "HSDP": (dict(dp_shard=8, dp_replicate=2), dict(dp_shard=8, dp_replicate=16)),
    "FSDP and TP": (dict(dp_shard=4, tp=4), dict(dp_shard=32, tp=4)),
    "FSDP and PP": (dict(dp_shard=4, pp=2, n_microbatches=4), dict(dp_shard=32, pp=2, n_microbatches=4)),
    "DDP and PP": (
        dict(dp_shard=8, pp=2, n_microbatches=4, zero_stage=0),
        dict(dp_shard=32, pp=2, n_microbatches=4, zero_stage=0),
    ),
    "FSDP and CP": (dict(dp_shard=4, cp=4), dict(dp_shard=16, cp=4)),
    "accumulation": (dict(dp_shard=8, n_microbatches=4), dict(dp_shard=48, n_microbatches=4)),
}


@pytest.mark.parametrize("ranked", [False, True], ids=["by spacing", "by ranks"])
@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("name", SIZES)
def test_a_scaled_program_is_the_one_built_at_that_size(name, way, ranked):
    small, large = (plan_of(**fields) for fields in SIZES[name])
    before, after = (small, large) if way == "up" else (large, small)
    program = program_of(before)
    if ranked and before.pp == 1:
        program = with_group_ranks(program)
    found = predict_program(program, H100, n_gpus=after.world_size).prediction
    expected = simulate(MODEL, after, H100).prediction
    assert found.n_gpus == after.world_size
    assert found.step_time_s == pytest.approx(expected.step_time_s, rel=1e-3)
    assert found.peak_allocated_gib == pytest.approx(expected.peak_allocated_gib, rel=1e-3)
    assert found.tokens_per_s_per_gpu == pytest.approx(expected.tokens_per_s_per_gpu, rel=5e-3)
    assert found.dollars_per_billion_tokens == pytest.approx(expected.dollars_per_billion_tokens, rel=5e-3)


def test_without_sharding_scaling_is_exact():
    small, large = (plan_of(**fields) for fields in SIZES["DDP"])
    found = predict_program(program_of(small), H100, n_gpus=64).prediction
    expected = simulate(MODEL, large, H100).prediction
    assert found.step_time_s == expected.step_time_s
    assert found.peak_allocated_gib == expected.peak_allocated_gib


def test_expert_parallelism_stays_when_data_parallelism_grows():
    small, large = plan_of(dp_shard=8, ep=4), plan_of(dp_shard=32, ep=4)
    program = program_of(small, model=MOE)
    grown = scaled(program, 32, H100.node_size)
    check(grown)
    sizes = {group.axis: group.size for group in grown.groups}
    assert (sizes["ep"], sizes["dp_expert"], sizes["dp_shard"]) == (4, 8, 32)
    found = predict_program(program, H100, n_gpus=32).prediction
    expected = simulate(MOE, large, H100).prediction
    assert found.step_time_s == pytest.approx(expected.step_time_s, rel=1.5e-2)  # kernels over both kinds of shards
    assert found.peak_allocated_gib == pytest.approx(expected.peak_allocated_gib, rel=5e-3)


def test_the_groups_are_those_of_the_larger_mesh():
    small, large = plan_of(dp_shard=4, tp=2, pp=2), plan_of(dp_shard=16, tp=2, pp=2)
    grown = scaled(program_of(small), large.world_size, H100.node_size)
    built = program_of(large)
    assert used(grown.groups) == used(built.groups)
    assert [cls.n_ranks for cls in grown.rank_classes] == [32, 32]
    assert grown.meta["tokens_per_step"] == large.tokens_per_step


def test_there_and_back_is_the_same_program():
    program = program_of(plan_of(dp_shard=8))
    back = scaled(scaled(program, 64, H100.node_size), 8, H100.node_size)
    assert used(back.groups) == used(program.groups)
    assert back.rank_classes[0].n_ranks == 8
    assert abs(back.rank_classes[0].resident_bytes - program.rank_classes[0].resident_bytes).max() <= 8
    assert back.meta["tokens_per_step"] == program.meta["tokens_per_step"]


def program_of_block(block, ops, **meta):
    """A program of one block on 8 ranks that shard their state."""
    one = np.zeros(1, np.int32)
    return Program(
        ops=ops.build(),
        blocks=(block.build("all"),),
        rank_classes=(RankClass("all", 8, one, one, one, np.zeros(N_CATEGORIES, np.int64)),),
        groups=(CommGroup("dp_shard", 8, 1, 8), CommGroup("ep", 2, 1, 2)),
        channels=(),
        modules=("m",),
        meta={"world_size": 8, "data_parallel": [0], "sharded": [0], "tokens_per_step": 8, **meta},
    )


def test_temporaries_of_the_update_are_those_allocated_in_it():
    """Node by node: an update, a forward, an update. What the first and the last allocate works on a share."""
    ops, block = OpTableBuilder(), BlockBuilder()
    op = ops.memory("update", 10, 10)
    for phase in (Phase.OPTIMIZER, Phase.FORWARD, Phase.OPTIMIZER):
        block.node(op, Stream.COMPUTE, phase=phase)
    for alloc, free in ((0, 0), (0, 1), (1, 2), (2, 2), (2, -1)):
        block.tensor(100, Category.TEMPORARY, alloc, free)
    grown = scaled(program_of_block(block, ops), 16, 8)
    assert grown.blocks[0].tensor_bytes.tolist() == [50, 50, 100, 50, 100]


def test_neighbours_along_the_axis_move_to_its_start():
    ops, block = OpTableBuilder(), BlockBuilder()
    block.node(ops.memory("copy", 10, 10), Stream.COMPUTE)
    program = program_of_block(block, ops, group_ranks=[list(range(8)), [2, 3]])
    grown = scaled(program, 16, 8)
    assert [list(ranks) for ranks in grown.meta["group_ranks"]] == [list(range(16)), [0, 1]]


def test_what_moves_a_share_shrinks_with_it_and_nothing_else_does():
    """A gather of 800 bytes over 8 ranks: a share has 100. On 16 ranks it has 50."""
    ops, block = OpTableBuilder(), BlockBuilder()
    moved = [
        (ops.collective("gather", Collective.ALL_GATHER, 0, 800.0), Stream.GATHER, 800.0),
        (ops.memory("copy in", 100, 900), Stream.GATHER, 50.0),
        (ops.memory("copy out", 900, 100.05), Stream.GATHER, 450.0),
        (ops.memory("other size", 101, 900), Stream.GATHER, 101.0),
        (ops.memory("beside", 100, 901), Stream.COMPUTE, 100.0),
        (ops.host_copy("of a share", 100), Stream.GATHER, 50.0),
        (ops.host_copy("of an aligned share", 100.05), Stream.GATHER, 50.025),
        (ops.host_copy("of two", 200), Stream.GATHER, 100.0),
        (ops.host_copy("of three", 300), Stream.GATHER, 300.0),
        (ops.gemm("product", 10, 10, 10), Stream.GATHER, 400.0),
    ]
    for op, stream, _ in moved:
        block.node(op, stream)
    block.tensor(100, Category.PARAMETER, 0, -1)
    block.tensor(100, Category.ACTIVATION, 0, -1)
    resident = np.zeros(N_CATEGORIES, np.int64)
    resident[[Category.PARAMETER, Category.ACTIVATION]] = 101
    one = np.zeros(1, np.int32)
    program = Program(
        ops=ops.build(),
        blocks=(block.build("all"),),
        rank_classes=(RankClass("all", 8, one, one, one, resident),),
        groups=(CommGroup("dp_shard", 8, 1, 8), CommGroup("tp", 1, 1, 1)),
        channels=(),
        modules=("m",),
        meta={"world_size": 8, "data_parallel": [0], "sharded": [0], "tokens_per_step": 3},
    )
    grown = scaled(program, 16, 8)
    at = grown.blocks[0].op
    found = np.maximum(grown.ops.bytes_read, grown.ops.bytes_comm)[at]
    assert found.tolist() == [size for _, _, size in moved]
    assert grown.blocks[0].tensor_bytes.tolist() == [50, 100]
    assert grown.rank_classes[0].resident_bytes[[Category.PARAMETER, Category.ACTIVATION]].tolist() == [51, 101]
    assert (grown.rank_classes[0].n_ranks, grown.meta["tokens_per_step"]) == (16, 6)
    alone = scaled(program, 1, 8)
    assert [(group.size, group.inner) for group in alone.groups] == [(1, 1), (1, 1)]
    assert (alone.rank_classes[0].n_ranks, alone.meta["tokens_per_step"]) == (1, 1)


def test_its_own_size_changes_nothing():
    program = program_of(plan_of(dp_shard=8))
    same = scaled(program, 8, H100.node_size)
    assert used(same.groups) == used(program.groups)
    assert same.blocks is program.blocks
    assert same.ops is program.ops


def test_compiled_ops_stay_compiled_where_they_are_told_apart():
    program = program_of(plan_of(dp_shard=8))
    update = program.ops.name.index("optimizer")
    grown = scaled(replace(program, meta={**program.meta, "compiled_ops": [update]}), 16, H100.node_size)
    compiled = grown.meta["compiled_ops"]
    assert {grown.ops.name[i] for i in compiled} == {"optimizer"}
    used = {int(op) for block in grown.blocks for op in block.op}
    assert used & set(compiled)


def test_the_ranks_of_roles_move_with_the_mesh():
    plan = plan_of(dp_shard=4, pp=2, n_microbatches=2)
    program = program_of(plan, roles={"ranks": [0, 4], "world_size": 8})
    grown = scaled(program, 32, H100.node_size)
    assert grown.meta["roles"] == {"ranks": [0, 16], "world_size": 32}


@pytest.mark.parametrize(
    ("program", "n_gpus", "message"),
    [
        (program_of(plan_of(dp_shard=4, tp=2)), 9, "9 GPUs are not a multiple of 2"),
        (program_of(plan_of(dp_shard=4, tp=2)), 0, "at least 1"),
        (program_of(plan_of(tp=8)), 16, "one rank, or uneven ranks"),
        (program_of(plan_of(dp_shard=8), data_parallel=[]), 16, "has no data parallelism"),
        (program_of(plan_of(dp_shard=8), data_parallel=None), 16, "does not name its data-parallel groups"),
        (program_of(plan_of(dp_shard=8, ep=4), model=MOE), 6, "does not divide 6"),
        (program_of(plan_of(dp_shard=8), data_parallel=["dp"]), 16, "meta 'data_parallel'"),
        (program_of(plan_of(dp_shard=8), world_size="8"), 16, "meta 'world_size'"),
        (program_of(plan_of(dp_shard=8), group_ranks=[[0]]), 16, "meta 'group_ranks'"),
        (program_of(plan_of(dp_shard=8), notes="guess"), 16, "meta 'notes'"),
        (program_of(plan_of(dp_shard=8), name=3), 16, "meta 'name'"),
        (program_of(plan_of(dp_shard=8), roles={"ranks": [0, 1]}), 16, "meta 'roles'"),
    ],
)
def test_what_can_not_be_scaled_says_why(program, n_gpus, message):
    with pytest.raises(ForerunError, match=message):
        scaled(program, n_gpus, 8)


# -- nodes of another size ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", ["gb200-nvl72", "a100-80gb-sxm", "v100-dgx2"])
@pytest.mark.parametrize("fields", [dict(dp_shard=16), dict(dp_shard=4, tp=4), dict(dp_shard=2, dp_replicate=8)])
@pytest.mark.parametrize("ranked", [False, True])
def test_groups_lie_on_the_nodes_of_the_cluster(cluster, fields, ranked):
    plan = plan_of(**fields)
    node_size = load_cluster(cluster).node_size
    program = program_of(plan)
    placed = laid_out(with_group_ranks(program) if ranked else program, node_size)
    assert used(placed.groups) == used(program_of(plan, load_cluster(cluster)).groups)


def test_ranks_that_are_spaced_evenly_are_a_mesh_axis():
    assert CommGroup.of_ranks("dp", range(0, 64, 4), 8) == CommGroup.on_mesh("dp", 16, 4, 8)
    assert CommGroup.of_ranks("tp", [8, 9, 10, 11], 8) == CommGroup.on_mesh("tp", 4, 1, 8)
    assert CommGroup.of_ranks("one", [5], 8) == CommGroup("one", 1, 1, 1, 1)
    assert CommGroup.of_ranks("threes", range(0, 18, 3), 8) == CommGroup("threes", 6, 3, 2, 3)


def test_a_group_across_a_border_of_nodes_is_counted():
    assert CommGroup.of_ranks("pair", [7, 8], 8) == CommGroup("pair", 2, 2, 1, 1)
    assert CommGroup.of_ranks("four", [6, 7, 8, 9], 8) == CommGroup("four", 4, 2, 2, 1)


def test_uneven_ranks_are_counted_by_node():
    assert CommGroup.of_ranks("odd", [0, 1, 2, 3, 8, 9], 8) == CommGroup("odd", 6, 3, 2, 1)
    assert CommGroup.of_ranks("odd", [0, 2, 8, 10], 8) == CommGroup("odd", 4, 2, 2, 2)
    assert CommGroup.of_ranks("odd", [0, 1, 4, 5], 1) == CommGroup("odd", 4, 4, 1, 1)
