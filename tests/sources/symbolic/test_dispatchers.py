"""Dispatchers: what they send, counted by hand, and that all of them compute the same."""

from dataclasses import replace

import numpy as np
import pytest

from forerun.common.errors import UnknownName
from forerun.core.program.counts import op_counts
from forerun.core.program.types import Collective, OpKind
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.kernels.dispatchers import dispatcher, dispatchers
from forerun.describe.model.catalog import load_model
from forerun.describe.plan import rules
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack, stack_names
from forerun.sources.symbolic.build import build

MODEL, CLUSTER = load_model("qwen3-30b-a3b"), load_cluster("h100-sxm")
TOKENS, EP = 2048, 8
ROW = 2 * MODEL.hidden


def program(name: str, ep: int = EP):
    plan = Plan(seq_len=TOKENS, dp_shard=8, ep=ep, stack="megatron-core")
    return build(MODEL, plan, CLUSTER, replace(load_stack("megatron-core"), dispatcher=name))


def sent(name: str) -> dict[tuple[Collective, float], int]:
    """(collective, its bytes) -> how often a rank runs it on behalf of experts."""
    made = program(name)
    ops, counts = made.ops, op_counts(made)[0]
    rows = [row for row in range(len(ops)) if ops.name[row].startswith(("ffn.dispatch", "ffn.combine", "ffn.counts"))]
    found: dict[tuple[Collective, float], int] = {}
    for row in rows:
        if ops.kind[row] == OpKind.COLLECTIVE:
            key = Collective(int(ops.collective[row])), float(ops.bytes_comm[row])
            found[key] = found.get(key, 0) + int(counts[row])
    return found


def test_copies_go_there_and_back_in_both_directions():
    each = MODEL.n_layers * 4
    assert sent("alltoall") == {(Collective.ALL_TO_ALL, TOKENS * MODEL.moe.top_k * ROW): each}
    counts = {(Collective.ALL_TO_ALL, MODEL.moe.n_experts * 8.0): MODEL.n_layers}
    assert sent("alltoall_with_counts") == sent("alltoall") | counts


def test_gathered_tokens_are_all_of_the_group_and_results_are_reduced():
    size = float(TOKENS * EP * ROW)
    each = MODEL.n_layers * 2
    assert sent("allgather") == {(Collective.ALL_GATHER, size): each, (Collective.REDUCE_SCATTER, size): each}


def test_own_kernels_send_a_token_by_its_routing_and_move_its_bytes_once_for_each_expert():
    each = MODEL.n_layers * 4
    assert sent("deepep") == {(Collective.ALL_TO_ALL, TOKENS * MODEL.moe.top_k * ROW): each}
    made = program("deepep")
    rows = [row for row, kernel in enumerate(made.ops.kernel) if kernel == "deepep"]
    routings = {made.ops.token_exchange(row) for row in rows}
    assert {(one.n_experts, one.top_k, one.combine) for one in routings} == {(128, 8, 0), (128, 8, 1)}


def test_under_fp8_tokens_go_out_in_8_bits_and_scales_and_come_back_in_16():
    plan = Plan(seq_len=TOKENS, dp_shard=8, ep=EP, stack="megatron-core", precision="fp8", fp8_recipe="block")
    ops = build(MODEL, replace(plan, dispatcher="deepep_fp8"), CLUSTER).ops
    sizes = {name: size for name, size in zip(ops.name, ops.bytes_comm, strict=True) if size}
    copies = TOKENS * MODEL.moe.top_k
    there, back = copies * (MODEL.hidden + 4 * MODEL.hidden / 128), copies * ROW
    assert sizes["ffn.dispatch"] == sizes["ffn.combine_exchange.backward"] == there
    assert sizes["ffn.dispatch.backward"] == sizes["ffn.combine_exchange"] == back


@pytest.mark.parametrize("ep", [1, EP])
def test_experts_compute_the_same_however_tokens_come_to_them(ep):
    def flops(name: str) -> float:
        made = program(name, ep)
        return float(op_counts(made)[0] @ np.where(made.ops.kind == OpKind.GEMM, made.ops.flops, 0.0))

    assert len({flops(name) for name in dispatchers()}) == 1


def test_rows_of_each_expert_can_be_padded(monkeypatch):
    padded = replace(dispatcher("alltoall"), rounds_to=4096)
    monkeypatch.setattr(rules, "dispatcher", lambda name: padded)
    local = MODEL.moe.n_experts // EP
    bytes_in = [size for (kind, size) in sent("alltoall") if kind == Collective.ALL_TO_ALL]
    assert max(bytes_in) == 4096 * local * ROW


def test_every_stack_names_a_dispatcher():
    assert all(dispatcher(load_stack(name).dispatcher) for name in stack_names())
    with pytest.raises(UnknownName, match=r"unknown dispatcher 'flex'.*known: allgather, alltoall"):
        dispatcher("flex")


def test_the_host_waits_for_counts_that_it_reads():
    def waits(name: str) -> int:
        return sum(int(block.sync.sum()) for block in program(name).blocks if block.name != "read loss")

    assert waits("alltoall_with_counts") == 1  # one block of a layer's forward pass
    assert waits("alltoall") == waits("deepep") == 0
