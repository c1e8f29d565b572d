"""Layers whose experts join behind a second attention and feed-forward (LongCat-Flash), in Programs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forerun.answers.analysis.predict import predict
from forerun.common.errors import ImpossiblePlan
from forerun.core.program.counts import op_counts
from forerun.core.program.types import OpKind, Phase, Program, Stream
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.parameters import parameter_count
from forerun.describe.model.spec import ModelSpec, MoESpec
from forerun.describe.plan.constraints import check_plan
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build

MOE = MoESpec(64, 4, 1024)
SHORTCUT = ModelSpec("m", 4, 2048, 16, 16, 128, 8192, 1000, moe=MOE, shortcut=True)
IN_TURN = replace(
    SHORTCUT, n_layers=8, shortcut=False, moe=replace(MOE, shared_ffn=8192), layers=((), (("moe", None),))
)
"""the same products, whose experts end before the second half begins"""
CLUSTER = load_cluster("h100-sxm")


def plan_of(**fields: object) -> Plan:
    return Plan(**{"seq_len": 4096, "activation_checkpointing": "none", **fields})  # type: ignore[arg-type]


def products(program: Program) -> float:
    counts = op_counts(program)[0]
    return float((counts * program.ops.flops)[program.ops.kind == OpKind.GEMM].sum())


@pytest.mark.parametrize("ep", [1, 8])
@pytest.mark.parametrize("stack", ["torchtitan", "megatron-core"])
def test_products_are_those_of_two_layers(ep: int, stack: str) -> None:
    plan = plan_of(dp_shard=8, ep=ep, stack=stack)
    both = [build(model, plan, CLUSTER) for model in (SHORTCUT, IN_TURN)]
    assert products(both[0]) == products(both[1])
    assert parameter_count(SHORTCUT) == parameter_count(IN_TURN)


@pytest.mark.parametrize("dispatcher", ["auto", "allgather", "deepep"])
def test_exchanges_run_beside_attention_and_feed_forwards(dispatcher: str) -> None:
    plan = plan_of(dp_shard=32, ep=32, dispatcher=dispatcher, stack="megatron-core", zero_stage=1)
    hidden, shown = (predict(model, plan, CLUSTER).step_time_s for model in (SHORTCUT, IN_TURN))
    assert hidden < 0.95 * shown


def test_an_exchange_starts_before_the_second_half_and_ends_behind_it() -> None:
    program = build(SHORTCUT, plan_of(dp_shard=8, ep=8), CLUSTER)
    names = np.array(program.ops.name)
    for block in program.blocks:
        exchanges = np.flatnonzero(block.stream == Stream.EP)
        if not len(exchanges) or block.phase[exchanges[0]] != Phase.FORWARD:
            continue
        found = names[block.op]
        dispatch, combine = (
            int(np.flatnonzero(found == name)[-1]) for name in ("ffn.dispatch", "ffn.combine_exchange")
        )
        kernels = np.flatnonzero(found == "attention.kernel")
        assert len(kernels) == 2
        assert kernels[0] < dispatch < kernels[1] < combine


def test_what_runs_beside_its_own_exchanges_takes_no_other_passes() -> None:
    plan = plan_of(pp=2, ep=2, dp_shard=2, n_microbatches=4, zero_stage=1, expert_overlap=True)
    with pytest.raises(ImpossiblePlan, match="layers of m run beside their own exchanges already"):
        check_plan(SHORTCUT, plan, CLUSTER)
