"""Communication groups of a mesh on nodes of 8 ranks, and the bytes of exchanges, written out."""

from __future__ import annotations

import pytest

from forerun.core.program.groups import CommGroup
from forerun.core.program.types import Collective
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.exchanges import (
    Exchange,
    gathered_bytes,
    gathers,
    reductions,
    shard_elements,
    sharded,
    whole_tensors,
)
from forerun.sources.symbolic.mesh import groups_of
from forerun.sources.symbolic.weights import Weights

from .cases import plan


def test_groups_of_every_axis() -> None:
    """The usual order is tp 2, cp 2, dp_shard 4, dp_replicate 2, pp 4, so neighbours are 1, 2, 4, 16 and 32 apart."""
    groups = groups_of(plan(pp=4, dp_shard=4, tp=2, cp=2, dp_replicate=2, n_microbatches=8, ep=4), 8)
    assert {axis: (group.size, group.nodes, group.ranks_per_node, group.inner) for axis, group in groups.items()} == {
        "tp": (2, 1, 2, 1),
        "cp": (2, 1, 2, 2),
        "dp_shard": (8, 2, 4, 2),
        "dp_replicate": (2, 2, 1, 16),
        "etp": (1, 1, 1, 1),
        "ep": (4, 1, 4, 1),
        "dp_expert": (4, 2, 2, 4),
        "dp_all": (16, 4, 4, 2),
        "dp_expert_all": (8, 4, 2, 4),
        "pp": (4, 4, 1, 32),
        "pp_near": (2, 1, 2, 32),
        "pp_far": (2, 2, 1, 32),
    }
    assert all(group.axis == axis for axis, group in groups.items())


def test_ranks_that_hold_the_same_stage_sum_their_gradients() -> None:
    """DualPipe holds each stage twice: ranks 0 and 1 share it with ranks 4 and 5, at the other end of the pipeline."""
    groups = groups_of(plan(pp=4, dp_shard=2, n_microbatches=8, pp_schedule="DualPipe", virtual_stages=2), 8)
    for axis in ("dp_shard", "dp_all", "dp_expert", "dp_expert_all"):
        assert (groups[axis].size, groups[axis].runs) == (4, ((2, 1), (2, 4))), axis
    assert groups["pp"].size == 4


@pytest.mark.parametrize(
    ("fields", "borders"),
    [
        ({}, 3),
        ({"pp_schedule": "Interleaved1F1B", "virtual_stages": 2}, 4),  # the last rank sends to the first
        ({"pp_schedule": "ZBV", "virtual_stages": 2}, 3),
    ],
)
def test_borders_between_stages(fields: dict[str, object], borders: int) -> None:
    groups = groups_of(plan(pp=4, tp=2, n_microbatches=8, **fields), 8)
    assert groups["pp_near"] == CommGroup("pp_near", 2, 1, 2, 2, borders, ())
    assert groups["pp_far"] == CommGroup("pp_far", 2, 2, 1, 2, borders, ())
    inside = groups_of(
        plan(pp=4, dp_shard=2, n_microbatches=8, mesh_order="tp-cp-pp-dp_shard-dp_replicate", **fields), 8
    )
    assert inside["pp_near"] == CommGroup("pp_near", 2, 1, 2, 1, borders, ((4, 1),))


WEIGHTS = Weights(matrices=[1000, 3000], vectors=[10], experts=[800, 800], wide=1000)
"""4,010 dense elements, 1,000 of which no product reads in fp8, and 1,600 of experts"""


def test_an_exchange_moves_all_of_its_tensors() -> None:
    assert Exchange(Collective.ALL_GATHER, "dp_shard", [1000, 24], 2.5).size_bytes == 2560


def test_shards_are_padded_and_experts_have_ranks_of_their_own() -> None:
    assert [sharded(10, ranks) for ranks in (1, 3, 10, 11)] == [10, 4, 1, 1]
    assert shard_elements(plan(dp_shard=8), WEIGHTS) == 502 + 200  # 4,010 / 8 and 1,600 / 8
    assert shard_elements(plan(dp_shard=8, ep=4), WEIGHTS) == 502 + 800
    assert shard_elements(plan(dp_shard=8, ep=8), WEIGHTS) == 502 + 1600


def test_small_tensors_stay_whole() -> None:
    """Of fp32 weights, 0.01 MiB are 2,621 elements; experts are sharded whatever their size."""
    small = plan(dp_shard=8, shard_min_mib=0.01)
    assert whole_tensors(small, WEIGHTS) == [1000, 10]
    assert whole_tensors(plan(dp_shard=8), WEIGHTS) == []
    assert shard_elements(small, WEIGHTS) == 3000 // 8 + 1010 + 200
    stack = load_stack("torchtitan")
    dense, experts = gathers(small, stack, WEIGHTS)
    assert (list(dense.tensors), list(experts.tensors)) == ([3000], [800, 800])
    whole = [each for each in reductions(small, stack, WEIGHTS) if each.kind == Collective.ALL_REDUCE]
    assert [list(each.tensors) for each in whole if sum(each.tensors)] == [[1000, 10]]


def test_bytes_of_gathered_parameters() -> None:
    """Two bytes an element; a matrix that is gathered in fp8 takes one, but for those that no product reads in fp8."""
    assert gathered_bytes(plan(dp_shard=8), WEIGHTS) == 2 * (4010 + 1600)
    narrow = plan(dp_shard=8, precision="fp8", fp8_recipe="tensorwise", fp8_all_gather=True)
    assert gathered_bytes(narrow, WEIGHTS) == 1 * 3000 + 2 * 1010 + 2 * 1600
    dense, experts = gathers(narrow, load_stack("torchtitan"), WEIGHTS)
    assert dense.size_bytes == pytest.approx(3000 + 2 * 1010)
    assert experts.size_bytes == 2 * 1600


def test_where_gradients_are_reduced() -> None:
    stack = load_stack("torchtitan")
    for fields, expected in (
        ({"dp_shard": 8}, [("REDUCE_SCATTER", "dp_shard", 4010), ("REDUCE_SCATTER", "dp_shard", 1600)]),
        ({"dp_shard": 8, "ep": 4}, [("REDUCE_SCATTER", "dp_shard", 4010), ("REDUCE_SCATTER", "dp_expert", 1600)]),
        ({"dp_shard": 8, "zero_stage": 0}, [("ALL_REDUCE", "dp_all", 4010), ("ALL_REDUCE", "dp_all", 1600)]),
        (
            {"dp_shard": 8, "zero_stage": 0, "ep": 2},
            [("ALL_REDUCE", "dp_all", 4010), ("ALL_REDUCE", "dp_expert_all", 1600)],
        ),
    ):
        found = [each for each in reductions(plan(**fields), stack, WEIGHTS) if sum(each.tensors)]
        assert [(each.kind.name, each.axis, sum(each.tensors)) for each in found] == expected
        assert {each.element_bytes for each in found} == {4}
