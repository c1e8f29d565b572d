"""Programs of GPUs that differ become one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forerun.common.errors import ForerunError
from forerun.core.program.groups import CommGroup
from forerun.core.program.join import Part, _divided, joined
from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Program
from forerun.core.program.unfold import unfold
from forerun.core.program.validate import check
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build

MODEL = replace(load_model("llama-3.1-8b"), n_layers=3)
CLUSTER = load_cluster("h100-sxm")


def program(**fields: object) -> Program:
    return build(MODEL, Plan(seq_len=512, **fields), CLUSTER)  # type: ignore[arg-type]


def met_axes(joint: Program) -> set[str]:
    """Axes of the groups whose collectives are rendezvous between parts."""
    flat = unfold(joint)
    common = np.isin(flat.meeting_channel, joint.meta["joint_channels"])
    nodes = np.flatnonzero(flat.meeting >= 0)
    nodes = nodes[common[flat.meeting[nodes]]]
    assert (joint.ops.kind[flat.op[nodes]] == OpKind.COLLECTIVE).all()
    return {joint.groups[group].axis for group in joint.ops.group[flat.op[nodes]].tolist()}


def test_a_joined_program_has_the_classes_ops_and_steps_of_every_part() -> None:
    one = program(dp_replicate=4, pp=2, n_microbatches=3, zero_stage=0)
    joint = joined([Part("a", one, 6), Part("b", one, 2)])
    check(joint)
    assert [(c.name, c.n_ranks) for c in joint.rank_classes] == [
        ("a: stage 0", 3), ("a: stage 1", 3), ("b: stage 0", 1), ("b: stage 1", 1),
    ]  # fmt: skip
    assert len(joint.ops) == 2 * len(one.ops)
    assert joint.meta["part_ops"] == [0, len(one.ops)]
    flat, alone = unfold(joint), unfold(one)
    assert len(flat) == 2 * len(alone)
    ops = np.concatenate([alone.op, alone.op + len(one.ops)])
    assert (flat.op == ops).all()
    assert (flat.stream == np.tile(alone.stream, 2)).all()
    assert (flat.step == np.tile(alone.step, 2)).all()


def test_pipelines_stay_inside_a_part() -> None:
    one = program(dp_replicate=4, pp=2, n_microbatches=3, zero_stage=0)
    joint = joined([Part("a", one, 6), Part("b", one, 2)])
    own = [c for i, c in enumerate(joint.channels) if i not in joint.meta["joint_channels"]]  # type: ignore[operator]
    assert {c.members for c in own} == {(0, 1), (2, 3)}
    common = [joint.channels[i] for i in joint.meta["joint_channels"]]  # type: ignore[attr-defined]
    assert {c.members for c in common} == {(0, 2), (1, 3)}


@pytest.mark.parametrize(
    ("inner", "ranks", "is_divided"), [(1, (3, 1), True), (2, (3, 1), True), (4, (3, 1), False), (1, (2, 2), False)]
)
def test_a_group_is_divided_where_a_border_lies_inside_its_block_of_a_stage(
    inner: int, ranks: tuple[int, int], is_divided: bool
) -> None:
    """Two stages of four ranks each; a group of two ranks 4 apart joins the stages."""
    one = program(dp_replicate=4, pp=2, n_microbatches=2, zero_stage=0)
    parts = [Part(str(n), one, 2 * n) for n in ranks]
    assert _divided([CommGroup("pair", 2, 1, 2, inner), CommGroup("one", 1, 1, 1)], parts) == [0] * is_divided


@pytest.mark.parametrize(
    ("fields", "ranks", "axes"),
    [
        (dict(dp_shard=8), 1, {"dp_shard"}),
        (dict(dp_shard=4, dp_replicate=2), 4, {"dp_replicate"}),
        (dict(dp_shard=4, dp_replicate=2), 2, {"dp_shard", "dp_replicate"}),
        (dict(dp_replicate=4, zero_stage=0, tp=2), 2, {"dp_all"}),
        (dict(dp_shard=4, tp=2), 4, {"dp_shard"}),
    ],
)
def test_parts_meet_where_a_group_holds_ranks_of_both(fields: dict[str, int], ranks: int, axes: set[str]) -> None:
    one = program(**fields)
    world = Plan(seq_len=512, **fields).world_size  # type: ignore[arg-type]
    found = met_axes(joined([Part("a", one, world - ranks), Part("b", one, ranks)]))
    assert found == axes


def test_parts_with_different_numbers_of_micro_batches_are_refused() -> None:
    few, many = (program(dp_shard=4, n_microbatches=n) for n in (1, 2))
    with pytest.raises(ForerunError, match=r"'slow' share the collectives of dp_shard.*equal numbers of micro batches"):
        joined([Part("fast", many, 2), Part("slow", few, 2)])


def test_parts_that_move_different_bytes_are_refused() -> None:
    one = program(dp_replicate=4, zero_stage=0, ddp_bucket_mib=1e5)
    other = program(dp_replicate=4, zero_stage=0, ddp_bucket_mib=1e5, reduce_dtype="bf16")
    with pytest.raises(ForerunError, match=r"number 1 is all_reduce of [\d,]+ bytes and all_reduce of [\d,]+ bytes"):
        joined([Part("a", one, 2), Part("b", other, 2)])


def test_parts_of_different_meshes_are_refused() -> None:
    with pytest.raises(ForerunError, match="'a' and 'b' have different meshes"):
        joined([Part("a", program(dp_shard=4), 2), Part("b", program(dp_shard=8), 2)])
