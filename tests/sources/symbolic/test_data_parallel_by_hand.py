"""Blocks around the passes of a unit, node by node: gathers, reductions and the optimizer, written by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from forerun.core.program.types import Category, Program
from forerun.sources.symbolic.build import build

from .by_hand import Held, Node, held_by, kernels_of, moves, nodes_of, steps_of
from .cases import CLUSTER, DENSE, plan

MODEL = replace(DENSE, n_layers=2)
H, F, V = 1024, 2816, 32000
MATRICES = 2 * H * H + 2 * H * H // 2 + 3 * H * F
LAYER, TABLE, HEAD = MATRICES + 2 * H, V * H, V * H + H
"""parameters of a layer, of the embedding, and of the head with its norm"""
ALL = 2 * LAYER + TABLE + HEAD
SHARDS = 4
OPTIMIZER = 6
"""module of the optimizer"""


def made(**fields: object) -> Program:
    return build(MODEL, plan(**{"stack": "torchtitan", "dp_shard": SHARDS, **fields}), CLUSTER)


# -- fully sharded -----------------------------------------------------------------------------------------------------


def forward(micro: str = "", closes: bool = True) -> list[str]:
    units = [("embedding", ""), ("layer", " 0"), ("layer", " 1"), ("head", " 2")]
    out = []
    for name, layer in units:
        last = name == "head"
        actions = ["gather", "open_last" if last else "open", "forward", *(["close"] if closes and not last else [])]
        out += [f"{name}.{action}{layer}{micro}" for action in actions]
    return out


def test_each_gather_is_issued_one_unit_ahead() -> None:
    """The loss comes before the first gather of the backward pass; the head stays gathered until then."""
    assert steps_of(made()) == [
        *forward(),
        *("head.backward 2", "layer.gather 1", "head.close 2", "head.reduce 2"),
        *("layer.reopen 1", "layer.gather 0", "layer.backward 1", "layer.close 1", "layer.reduce 1"),
        *("layer.reopen 0", "embedding.gather", "layer.backward 0", "layer.close 0", "layer.reduce 0"),
        *("embedding.reopen", "embedding.backward", "embedding.close", "embedding.reduce"),
        *("reduced", "optimizer of 1"),
    ]


def test_gathers_run_as_far_ahead_as_the_plan_says() -> None:
    assert steps_of(made(prefetch=2))[15:] == [
        *("head.backward 2", "layer.gather 1", "layer.gather 0", "head.close 2", "head.reduce 2"),
        *("layer.reopen 1", "embedding.gather", "layer.backward 1", "layer.close 1", "layer.reduce 1"),
        *("layer.reopen 0", "layer.backward 0", "layer.close 0", "layer.reduce 0"),
        *("embedding.reopen", "embedding.backward", "embedding.close", "embedding.reduce"),
        *("reduced", "optimizer of 1"),
    ]
    assert steps_of(made(prefetch=0))[15:] == [
        *("head.backward 2", "head.close 2", "head.reduce 2"),
        *("layer.gather 1", "layer.reopen 1", "layer.backward 1", "layer.close 1", "layer.reduce 1"),
        *("layer.gather 0", "layer.reopen 0", "layer.backward 0", "layer.close 0", "layer.reduce 0"),
        *("embedding.gather", "embedding.reopen", "embedding.backward", "embedding.close", "embedding.reduce"),
        *("reduced", "optimizer of 1"),
    ]


@pytest.mark.parametrize(("prefetch", "slots"), [(1, [0] * 7), (2, [0, 1] * 3 + [0]), (3, [0, 1, 2] * 2 + [0])])
def test_gathers_take_turns_of_event_slots(prefetch: int, slots: list[int]) -> None:
    """Four gathers forward and three backward. Each waits until its slot was opened, and records that it is there."""
    program = made(prefetch=prefetch)
    blocks = [program.blocks[number] for number in program.rank_classes[0].block]
    gathers = [block for block in blocks if block.name.endswith(".gather")]
    opens = [block for block in blocks if ".open" in block.name or ".reopen" in block.name]
    assert [int(block.record[-1]) for block in gathers] == [8 + 2 * slot for slot in slots]
    assert [[-1 - int(n) for n in block.pred if n < 0] for block in gathers] == [[9 + 2 * slot] * 2 for slot in slots]
    assert [[-1 - int(n) for n in block.pred] for block in opens] == [[8 + 2 * slot] for slot in slots]
    assert [int(block.record[-1]) for block in opens] == [9 + 2 * slot for slot in slots]


def test_parameters_that_stay_are_gathered_in_every_micro_batch_and_freed_after_the_last() -> None:
    assert steps_of(made(reshard_after_forward="never", n_microbatches=2)) == [
        *forward(closes=False),
        *("head.backward 2", "head.reduce 2", "layer.backward 1", "layer.reduce 1"),
        *("layer.backward 0", "layer.reduce 0", "embedding.backward", "embedding.reduce", "reduced"),
        *forward(" of 1", closes=False),
        *("head.backward 2 of 1", "head.close 2 of 1", "head.reduce 2 of 1"),
        *("layer.backward 1 of 1", "layer.close 1 of 1", "layer.reduce 1 of 1"),
        *("layer.backward 0 of 1", "layer.close 0 of 1", "layer.reduce 0 of 1"),
        *("embedding.backward of 1", "embedding.close of 1", "embedding.reduce of 1", "reduced of 1"),
        "optimizer of 2",
    ]


def test_fsdp2_gathers_into_a_buffer_that_the_next_unit_frees() -> None:
    program = made()
    assert nodes_of(program, "layer.gather") == [
        Node("layer.copy_in", "gather", waits=(9,)),
        Node("layer.gather", "gather", ("layer.copy_in",), (9,), 8),
    ]
    assert kernels_of(program, "layer.gather") == [
        moves("layer.copy_in", (4 + 2) * LAYER / SHARDS, 1, 0),
        moves("layer.gather", 2 * LAYER, 1, 0),
    ]
    assert held_by(program, "layer.gather") == [Held(2 * LAYER, "communication", "layer.copy_in", "")]
    assert kernels_of(program, "layer.open") == [moves("layer.copy_out", 4 * LAYER, 1, 0)]
    assert held_by(program, "layer.open") == [
        Held(2 * LAYER, "unsharded", "layer.copy_out", ""),
        Held(2 * TABLE, "communication", "", "layer.copy_out"),
    ]
    assert held_by(program, "head.open_last") == [
        Held(2 * LAYER, "communication", "", "head.copy_out"),
        Held(2 * HEAD, "communication", "", "head.copy_out"),
        Held(2 * HEAD, "unsharded", "head.copy_out", ""),
    ]
    assert held_by(program, "layer.reopen") == [
        Held(2 * LAYER, "communication", "", "layer.copy_out"),
        Held(2 * LAYER, "unsharded", "layer.copy_out", ""),
    ]
    assert held_by(program, "layer.close") == [Held(2 * LAYER, "unsharded", "", "join")]


def test_fsdp2_reduces_in_a_buffer_that_the_next_unit_frees() -> None:
    """The shard of the gradients stays. Gradients of the norms' vectors are not held beside those of matrices."""
    program = made()
    assert nodes_of(program, "layer.reduce") == [
        Node("join", "compute"),
        Node("layer.grad_copy_in", "compute"),
        Node("layer.reduce", "gather", ("layer.grad_copy_in",), (), 2),
    ]
    assert kernels_of(program, "layer.reduce") == [
        moves("layer.grad_copy_in", (2 + 4) * LAYER, 1, 0),
        moves("layer.reduce", 4 * LAYER, 1, 0),
    ]
    assert held_by(program, "layer.reduce") == sorted(
        [
            Held(4 * LAYER // SHARDS, "gradient", "join", ""),
            Held(2 * MATRICES, "unsharded", "", "layer.grad_copy_in"),
            Held(4 * LAYER, "communication", "layer.grad_copy_in", ""),
            Held(4 * HEAD, "communication", "", "join"),
        ]
    )
    assert held_by(program, "reduced") == [Held(4 * TABLE, "communication", "", "join")]


def test_fsdp1_gathers_into_the_parameters_and_casts_gradients_apart() -> None:
    """Composer: the buffer of a reduction goes with its copy, and replicas sum the shards."""
    program = made(stack="composer", dp_replicate=2)
    assert nodes_of(program, "layer.open") == [Node("join", "compute", (), (8,), 9)]
    assert held_by(program, "layer.gather") == [Held(2 * LAYER, "unsharded", "layer.copy_in", "")]
    assert held_by(program, "layer.open") == []
    assert nodes_of(program, "layer.reduce") == [
        Node("layer.grad_copy_in", "compute"),
        Node("layer.reduce", "gather", ("layer.grad_copy_in",), (), 2),
        Node("layer.replicas", "reduce", ("layer.reduce",), (), 2),
    ]
    assert kernels_of(program, "layer.reduce") == [
        moves("layer.grad_copy_in", (2 + 2 + 2 + 4) * LAYER, 2, 0),
        moves("layer.reduce", 4 * LAYER, 1, 0),
        moves("layer.replicas", 4 * LAYER / SHARDS, 1, 0),
    ]
    assert held_by(program, "layer.reduce") == [
        Held(4 * LAYER // SHARDS, "gradient", "layer.grad_copy_in", ""),
        Held(2 * MATRICES, "unsharded", "", "layer.grad_copy_in"),
        Held(4 * LAYER, "communication", "layer.grad_copy_in", "layer.grad_copy_in"),
    ]


def test_simple_fsdp_moves_tensor_by_tensor_and_waits_for_each() -> None:
    """Eager modules hand their 9 parameters out one by one, each for 74 launches; nothing is gathered ahead."""
    program = made(stack="simple-fsdp", prefetch=1)
    sizes = [H * H, H * H // 2, H * H // 2, H * H, H * F, H * F, H * F, H, H]
    assert kernels_of(program, "layer.gather") == [
        moves("layer.hand_out", 0, 9 * 74, 0),
        moves("layer.copy_in", (4 + 2) * LAYER / SHARDS, 1, 0),
        *(moves("layer.gather", 2 * size, 1, 0) for size in sizes),
    ]
    gathers = nodes_of(program, "layer.gather")
    assert gathers[:3] == [
        Node("join", "compute"),
        Node("layer.hand_out", "compute", ("join",)),
        Node("layer.copy_in", "compute", ("layer.hand_out",)),
    ]
    for before, node in pairwise(gathers[2:]):
        assert (node.stream, node.after) == ("gather", (before.name,))
    assert [node.records for node in gathers] == [-1] * (len(gathers) - 1) + [8]
    assert held_by(program, "layer.gather") == []
    assert held_by(program, "layer.open") == [Held(2 * LAYER, "unsharded", "join", "")]
    reduces = nodes_of(program, "layer.reduce")
    assert reduces[:2] == [Node("layer.hand_out", "compute"), Node("layer.grad_copy_in", "compute")]
    assert [node.records for node in reduces] == [-1, -1, *[2] * 9, -1]
    assert reduces[-1] == Node("join", "compute", (reduces[-2].name,))
    assert kernels_of(program, "layer.reduce")[2:] == [moves("layer.reduce", 4 * size, 1, 0) for size in sizes]


def test_parameters_on_the_host_are_fetched_and_their_gradients_brought_back() -> None:
    program = made(offload="params")
    assert nodes_of(program, "layer.gather") == [
        Node("layer.fetch", "copy", (), (9,)),
        Node("layer.copy_in", "gather", ("layer.fetch",), (9,)),
        Node("layer.gather", "gather", ("layer.copy_in",), (9,), 8),
    ]
    assert kernels_of(program, "layer.gather")[0] == moves("layer.fetch", 4 * LAYER / SHARDS, 1, 0)
    assert nodes_of(program, "layer.reduce")[-1] == Node("layer.grads_out", "copy", ("layer.reduce",), (), 2)
    assert kernels_of(program, "layer.reduce")[-1] == moves("layer.grads_out", 4 * LAYER / SHARDS, 1, 0)
    assert "gradient" not in {held.category for held in held_by(program, "layer.reduce")}
    resident = program.rank_classes[0].resident_bytes
    assert np.flatnonzero(resident).tolist() == [Category.TEMPORARY], "workspaces of cuBLAS"
    # the host reads gradient, weight and two states, and writes weight and states
    assert kernels_of(program, "optimizer")[-2] == moves("optimizer.on_host", (16 + 12) * ALL / SHARDS, 1, OPTIMIZER)
    assert nodes_of(program, "optimizer")[-3:] == [
        Node("optimizer.on_host", "copy", ("grad_clip",)),
        Node("join'", "compute", ("optimizer.on_host",)),
        Node("step", "compute"),
    ]


# -- replicated --------------------------------------------------------------------------------------------------------


def test_ddp_adds_micro_batches_and_reduces_full_buckets_after_the_last() -> None:
    """Buckets of 30 MiB of fp32 gradients: the ends fill four each, a layer one and a half, which rounds to two."""
    program = made(dp_shard=1, dp_replicate=4, zero_stage=0, n_microbatches=2, ddp_bucket_mib=30)
    passes = ["embedding.forward", "layer.forward 0", "layer.forward 1", "head.forward 2"]
    assert steps_of(program) == [
        *passes,
        *("head.backward 2", "head.accumulate_first 2", "layer.backward 1", "layer.accumulate_first 1"),
        *("layer.backward 0", "layer.accumulate_first 0", "embedding.backward", "embedding.accumulate_first"),
        *(f"{name} of 1" for name in passes),
        *("head.backward 2 of 1", "head.accumulate 2 of 1", "reduce head of 1"),
        *("layer.backward 1 of 1", "layer.accumulate 1 of 1", "reduce layer of 1"),
        *("layer.backward 0 of 1", "layer.accumulate 0 of 1", "reduce layer of 1"),
        *("embedding.backward of 1", "embedding.accumulate of 1", "reduce embedding of 1"),
        "optimizer of 2",
    ]
    assert [kernel.moved for kernel in kernels_of(program, "reduce head")] == [4 * HEAD / 4] * 4
    assert [kernel.moved for kernel in kernels_of(program, "reduce layer")] == [4 * LAYER / 2] * 2
    assert nodes_of(program, "reduce layer") == [
        Node("join", "compute"),
        Node("reduce layer.grads", "gather", ("join",), (), 2),
        Node("reduce layer.grads'", "gather", ("join",), (), 2),
    ]
    assert held_by(program, "layer.accumulate_first") == [
        Held(2 * MATRICES, "unsharded", "", "join"),
        Held(2 * LAYER, "gradient", "join", ""),
    ]
    assert kernels_of(program, "layer.accumulate") == [moves("layer.accumulate", (2 + 2 + 2) * LAYER, 1, 0)]
    assert held_by(program, "layer.accumulate") == [Held(2 * MATRICES, "unsharded", "", "layer.accumulate")]


def test_a_bucket_is_reduced_when_it_is_full_and_not_before() -> None:
    """A bucket of exactly the gradients of the head is full with it; one byte more, and a layer joins it."""
    full = 4 * HEAD / 2**20
    fields = {"dp_shard": 1, "dp_replicate": 4, "zero_stage": 0}
    assert "reduce head" in steps_of(made(**fields, ddp_bucket_mib=full))
    assert "reduce head, layer" in steps_of(made(**fields, ddp_bucket_mib=full + 1 / 2**20))


def test_zero_1_scatters_gradients_and_gathers_updated_parameters() -> None:
    """Megatron adds gradients to an fp32 buffer of its own, and keeps an empty gradient of each weight shape."""
    program = made(stack="megatron-core", zero_stage=1, n_microbatches=2)
    assert steps_of(program)[-5:] == [
        "reduce head, layer of 1",
        "layer.backward 0 of 1",
        "embedding.backward of 1",
        "reduce layer, embedding of 1",
        "optimizer of 2",
    ]
    assert kernels_of(program, "reduce head, layer") == [moves("reduce head, layer.grads", 4 * (HEAD + LAYER), 1, 0)]
    assert kernels_of(program, "optimizer") == [
        moves("grad_norm", 4 * ALL / SHARDS, 1, OPTIMIZER),
        moves("grad_norm.reduce", 4, 1, OPTIMIZER),
        moves("grad_clip", 2 * 4 * ALL / SHARDS, 1, OPTIMIZER),
        moves("optimizer", (16 + 14) * ALL / SHARDS, 1, OPTIMIZER),  # writes a bf16 copy too
        moves("parameters.gather", 2 * ALL, 1, 0)._replace(module=OPTIMIZER),
        moves("zero_grad", 4 * ALL, 1, OPTIMIZER),
        moves("step", 0, 0, OPTIMIZER),
    ]
    assert nodes_of(program, "optimizer")[:7] == [
        Node("join", "compute", (), (2,)),
        Node("grad_norm", "compute"),
        Node("grad_norm.reduce", "reduce", ("grad_norm",)),
        Node("grad_clip", "compute", ("grad_norm.reduce",)),
        Node("optimizer", "compute"),
        Node("parameters.gather", "gather", ("optimizer",)),
        Node("join'", "compute", ("parameters.gather",)),
    ]
    shapes = [2 * H * H, H * H, 2 * H * F, H * F]
    resident = program.rank_classes[0].resident_bytes
    assert resident[Category.PARAMETER] == 2 * ALL
    assert resident[Category.GRADIENT] == 4 * ALL + 2 * sum(shapes)
    assert resident[Category.OPTIMIZER] == 12 * ALL // SHARDS


@pytest.mark.parametrize(
    ("implementation", "launches"), [("fused", 1), ("foreach", 8 * 1), ("loop", 8 * (2 * 9 + 1 + 2))]
)
def test_kernels_of_an_optimizer(implementation: str, launches: int) -> None:
    """21 tensors fit into one launch of 60; AdamW has eight operations."""
    step = next(k for k in kernels_of(made(optimizer_impl=implementation), "optimizer") if k.name == "optimizer")
    moved = 16 + 12 if implementation == "fused" else 52 + 32
    assert step == moves("optimizer", moved * ALL / SHARDS, launches, OPTIMIZER)


@pytest.mark.parametrize(("layers", "launches", "norms"), [(6, 1, 2), (7, 1, 3), (13, 2, 6)])
def test_many_tensors_take_several_launches(layers: int, launches: int, norms: int) -> None:
    """Nine tensors a layer and three more: a launch for each 60, and a kernel of norms for each 20."""
    program = build(replace(MODEL, n_layers=layers), plan(stack="torchtitan", dp_shard=SHARDS), CLUSTER)
    found = {kernel.name: kernel.launches for kernel in kernels_of(program, "optimizer")}
    assert found["optimizer"] == found["grad_clip"] == launches
    assert found["grad_norm"] == norms == (9 * layers + 3) // 20


def test_a_state_on_the_host_comes_and_goes() -> None:
    program = made(offload="optimizer")
    assert nodes_of(program, "optimizer")[4:8] == [
        Node("optimizer.offload", "copy", ("grad_clip",)),
        Node("optimizer", "compute", ("optimizer.offload",)),
        Node("optimizer.offload'", "copy", ("optimizer",)),
        Node("join'", "compute", ("optimizer.offload'",)),
    ]
    copies = [k for k in kernels_of(program, "optimizer") if k.name == "optimizer.offload"]
    assert copies == [moves("optimizer.offload", 12 * ALL / SHARDS, 1, OPTIMIZER)] * 2


def test_a_pipeline_adds_whole_gradients_and_reduces_them_once() -> None:
    """The second stage of two: gradients of the first micro batch become an fp32 buffer, the reduction frees it."""
    program = made(pp=2, dp_shard=2, n_microbatches=2)
    steps = steps_of(program, 1)
    assert steps[steps.index("layer.backward 1 of 1") :] == [
        *("layer.backward 1 of 1", "layer.close 1 of 1", "layer.accumulate 1 of 1", "layer.reduce 1 of 1"),
        *("reduced of 1", "send gradients of 1", "optimizer of 2"),
    ]
    assert held_by(program, "layer.accumulate_first") == [
        Held(2 * MATRICES, "unsharded", "", "join"),
        Held(4 * LAYER, "gradient", "join", ""),
    ]
    assert kernels_of(program, "layer.accumulate") == [moves("layer.accumulate", (2 + 4 + 4) * LAYER, 1, 0)]
    assert held_by(program, "layer.reduce") == sorted(
        [
            Held(4 * LAYER, "gradient", "", "layer.grad_copy_in"),
            Held(4 * LAYER // 2, "gradient", "layer.grad_copy_in", ""),
            Held(4 * LAYER, "communication", "layer.grad_copy_in", ""),
        ]
    )


def test_a_step_that_ends_in_flat_copies_holds_them_until_their_last_collective() -> None:
    """DeepSpeed with Megatron copies at most 500 million gradients, and as many parameters."""
    program = made(stack="megatron-deepspeed", zero_stage=1, precision="bf16", pp=1)
    ends = [block for block in program.blocks if block.name == "reduce at the end"]
    copies = {
        (int(size), int(since), int(until))
        for block in ends
        for size, category, since, until in zip(
            block.tensor_bytes, block.tensor_category, block.tensor_alloc, block.tensor_free, strict=True
        )
        if category == Category.COMMUNICATION
    }
    assert {until for _, _, until in copies} == {len(block.op) - 1 for block in ends}
    assert {since for _, since, _ in copies} == {0}
    assert {size // ALL for size, _, _ in copies} <= {2, 4}
