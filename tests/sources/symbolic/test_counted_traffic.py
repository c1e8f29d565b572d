"""Bytes of memory-bound kernels that nothing else checks, counted by hand from the code that launches them."""

from __future__ import annotations

import pytest

from forerun.core.program.kinds import OpKind
from forerun.core.program.types import OpTable
from forerun.describe.model.parameters import parameter_count
from forerun.sources.symbolic.build import build

from .cases import CLUSTER, DENSE, MOE, plan


def moved(ops: OpTable, name: str) -> float:
    """Bytes that the op of this name reads and writes."""
    found = ops.name.index(name)
    return float(ops.bytes_read[found] + ops.bytes_written[found])


@pytest.mark.parametrize(("optimizer", "per_element"), [("adamw", 84), ("adam", 76), ("sgd", 44)])
@pytest.mark.parametrize("kernels", ["foreach", "loop"])
def test_an_unfused_optimizer_reads_its_temporaries_again(optimizer: str, per_element: int, kernels: str) -> None:
    p = plan(zero_stage=0, optimizer=optimizer, optimizer_impl=kernels)
    ops = build(DENSE, p, CLUSTER).ops
    assert moved(ops, "optimizer") == pytest.approx(per_element * parameter_count(DENSE))


def test_gradients_of_a_tensor_that_several_products_read_are_added() -> None:
    p = plan(stack="torchtitan", micro_batch=2)
    tokens = 2 * 2048
    ops = build(DENSE, p, CLUSTER).ops
    assert moved(ops, "fan_out.backward") == pytest.approx(6 * 2 * tokens * DENSE.hidden)  # queries, keys and values
    assert "fan_out.backward" not in build(DENSE, plan(stack="megatron-core"), CLUSTER).ops.name  # one product for all


def casts(ops: OpTable, *products: str) -> float:
    """Bytes of the casts to fp8 before the products of these names, forward and backward."""
    names = {f"{product}{kind}" for product in products for kind in (".cast", ".recast", ".grad.cast", ".grad.recast")}
    rows = [i for i, name in enumerate(ops.name) if name in names]
    return float((ops.bytes_read[rows] + ops.bytes_written[rows]).sum())


QKV = ("attention.q", "attention.k", "attention.v")
FP8 = {"precision": "fp8", "fp8_recipe": "tensorwise"}


@pytest.mark.parametrize(("compiled", "inputs", "per_element"), [(True, 1, 8), (False, 3, 35)])
def test_a_compiler_casts_an_operand_of_several_products_once(compiled: bool, inputs: int, per_element: int) -> None:
    ops = build(DENSE, plan(stack="torchtitan", compile=compiled, **FP8), CLUSTER).ops
    tokens, hidden, out = 2048, DENSE.hidden, DENSE.hidden + 2 * DENSE.n_kv_heads * DENSE.head_dim
    assert casts(ops, *QKV) == pytest.approx(per_element * (inputs * tokens * hidden + hidden * out + tokens * out))


def test_tensorwise_scaling_casts_before_a_gather_and_rowwise_after_it() -> None:
    wide = {"stack": "torchtitan", "compile": True, "tp": 4, "precision": "fp8"}
    own = build(DENSE, plan(**wide, fp8_recipe="tensorwise"), CLUSTER).ops
    whole = build(DENSE, plan(**wide, fp8_recipe="rowwise"), CLUSTER).ops
    tokens, hidden = 2048, DENSE.hidden
    local, out = hidden // 4, (hidden + 2 * DENSE.n_kv_heads * DENSE.head_dim) // 4
    weights, gradients = hidden * out, tokens * out
    assert casts(own, *QKV) == pytest.approx(5 * tokens * hidden / 4 + 3 * tokens * hidden + 8 * (weights + gradients))
    assert casts(whole, *QKV) == pytest.approx(10 * (tokens * hidden + weights + gradients))
    last = tokens * local + local * hidden
    assert casts(own, "attention.out") == pytest.approx(8 * (last + tokens * hidden / 4))
    assert casts(whole, "attention.out") == pytest.approx(10 * (last + tokens * hidden))


def test_weights_gathered_in_fp8_are_cast_in_their_shards() -> None:
    p = plan(stack="torchtitan", compile=True, dp_shard=8, fp8_all_gather=True, **FP8)
    gradients, inputs = 2048 * DENSE.hidden, 2048 * DENSE.hidden
    assert casts(build(DENSE, p, CLUSTER).ops, "attention.out") == pytest.approx(8 * (inputs + gradients))


def test_parts_of_a_sequence_are_copied_into_place_around_each_collective() -> None:
    wide = {"stack": "torchtitan", "tp": 4, "compile": True}
    size = 2048 * DENSE.hidden * 2
    ops = build(DENSE, plan(**wide), CLUSTER).ops
    assert moved(ops, "attention.qkv.enter.copy") == moved(ops, "ffn.down.copy") == 2 * size
    others = {
        other: {name for name in build(DENSE, plan(**wide, **{other: value}), CLUSTER).ops.name if ".copy" in name}
        for other, value in (("sequence_parallel", False), ("async_tp", True))
    }
    sums = {"attention.q.reduce.copy", "ffn.gate.reduce.copy"}  # of gradients, which no product makes
    assert others == {"sequence_parallel": set(), "async_tp": sums}


@pytest.mark.parametrize(("stack", "pieces", "per_element"), [("torchtitan", 4, 46 + 52), ("nemo", 1, 0)])
def test_pytorch_merges_attention_piece_by_piece(stack: str, pieces: int, per_element: int) -> None:
    program = build(DENSE, plan(stack=stack, cp=4, cp_method="allgather"), CLUSTER)
    forward = next(block for block in program.blocks if block.name == "layer.forward")
    assert [program.ops.kind[op] for op in forward.op].count(OpKind.ATTENTION) == pieces
    merges = [i for i, name in enumerate(program.ops.name) if name.startswith("cp_merge")]
    traffic = float((program.ops.bytes_read[merges] + program.ops.bytes_written[merges]).sum())
    assert traffic == pytest.approx(per_element * 2048 / 4 * DENSE.n_heads * DENSE.head_dim)


def test_tokens_of_other_ranks_are_sorted_by_local_expert() -> None:
    names = build(MOE, plan(stack="megatron-core", dp_shard=4, ep=4), CLUSTER).ops.name
    assert names.count("copy") > build(MOE, plan(stack="megatron-core", dp_shard=4), CLUSTER).ops.name.count("copy")


@pytest.mark.parametrize(
    ("stack", "reduce_dtype", "per_element"),
    [("torchtitan", "fp32", 6), ("composer", "fp32", 4 + 6), ("composer", "bf16", 4), ("simple-fsdp", "fp32", 6)],
)
def test_gradients_are_joined_and_cast_before_they_are_reduced(stack: str, reduce_dtype: str, per_element: int) -> None:
    ops = build(DENSE, plan(stack=stack, dp_shard=8, reduce_dtype=reduce_dtype), CLUSTER).ops
    assert moved(ops, "embedding.grad_copy_in") == per_element * DENSE.vocab * DENSE.hidden


def test_compiled_fsdp_moves_every_tensor_by_itself_and_reduces_it_where_it_is() -> None:
    program = build(DENSE, plan(stack="simple-fsdp", dp_shard=8, reduce_dtype="bf16"), CLUSTER)
    assert not [name for name in program.ops.name if name.endswith("grad_copy_in")]
    gather = next(block for block in program.blocks if block.name == "layer.gather")
    assert sum(program.ops.kind[op] == OpKind.COLLECTIVE for op in gather.op) == 9  # seven matrices and two norms
