"""What FSDP's gathers and reductions hold beside parameters, by FSDP version."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forerun.core.memory.caching_allocator import ALLOC
from forerun.core.memory.program_events import step_events
from forerun.core.program.counts import op_counts
from forerun.core.program.types import Category, Program, Stream
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build

LLAMA = replace(load_model("llama-3.1-8b"), n_layers=4)
LAYER = LLAMA.hidden * (2 * LLAMA.hidden + 2 * LLAMA.n_kv_heads * LLAMA.head_dim + 3 * LLAMA.ffn_hidden + 2)


def program(**fields) -> Program:
    values = {"seq_len": 2048, "dp_shard": 8, "stack": "torchtitan"} | fields
    return build(LLAMA, Plan(**values), load_cluster("h100-sxm"))


def most_at_once(built: Program, stream: Stream, size: int) -> int:
    """Tensors of `size` bytes that are alive together on `stream`."""
    step = step_events(built, 0).step
    mine = (step.stream[step.tensor] == stream) & (step.size_bytes[step.tensor] == size)
    return int(np.cumsum(np.where(step.kind == ALLOC, 1, -1) * mine).max())


@pytest.mark.parametrize("fields", [{}, {"n_microbatches": 3}, {"pp": 2, "n_microbatches": 4}, {"dp_replicate": 2}])
@pytest.mark.parametrize("stack", ["torchtitan", "torchtitan-0.1", "composer", "simple-fsdp"])
def test_a_step_leaves_nothing_behind(fields: dict[str, int], stack: str) -> None:
    built = program(stack=stack, **fields)
    for cls in built.rank_classes:
        for category in Category:
            net = 0
            for number in cls.block.tolist():
                block = built.blocks[number]
                mine = block.tensor_category == category
                net += int(block.tensor_bytes[mine & (block.tensor_free < 0)].sum())
                net -= int(block.tensor_bytes[mine & (block.tensor_alloc < 0)].sum())
            assert net == 0, category


def test_fsdp2_gathers_a_layer_while_it_keeps_the_buffer_of_the_one_before() -> None:
    assert most_at_once(program(), Stream.GATHER, LAYER * 2) == 2


def test_fsdp1_gathers_into_the_parameters() -> None:
    assert most_at_once(program(stack="composer"), Stream.GATHER, LAYER * 2) == 2
    assert most_at_once(program(stack="composer"), Stream.COMPUTE, LAYER * 2) <= 1


def test_fsdp2_reduces_one_layer_while_the_next_has_its_backward_pass() -> None:
    built = program()
    names = [block.name for block in built.blocks]
    order = [names[number] for number in built.rank_classes[0].block.tolist()]
    assert order[-2] == "reduced"
    assert most_at_once(built, Stream.COMPUTE, LAYER * 4) == 1


def test_compiled_checkpoints_keep_only_what_backward_uses() -> None:
    def kept(compiled: bool) -> int:
        built = program(compile=compiled, activation_checkpointing="selective", selective_policy="op")
        block = next(block for block in built.blocks if block.name == "layer.forward")
        return int(block.tensor_bytes[(block.tensor_alloc >= 0) & (block.tensor_free < 0)].sum())

    assert kept(compiled=False) - kept(compiled=True) == 2048 * LLAMA.hidden * 2


def test_a_root_that_holds_both_ends_keeps_them_gathered() -> None:
    ends = 2 * LLAMA.hidden * LLAMA.vocab + LLAMA.hidden
    apart, joint = (program(stack=stack, compile=True) for stack in ("torchtitan", "torchtitan-0.1"))
    assert most_at_once(apart, Stream.COMPUTE, ends * 2) == 0
    assert most_at_once(joint, Stream.COMPUTE, ends * 2) == 1
    moved = [int((op_counts(built) @ built.ops.bytes_comm)[0]) for built in (apart, joint)]
    assert moved[0] - moved[1] == LLAMA.hidden * LLAMA.vocab * 2  # the embedding is not gathered again


def test_gathers_in_fp8_hold_a_byte_for_what_fp8_products_read() -> None:
    fp8 = program(precision="fp8", fp8_recipe="tensorwise", fp8_all_gather=True)
    assert most_at_once(fp8, Stream.GATHER, LAYER + 2 * LLAMA.hidden) == 2  # norms keep two bytes
    assert most_at_once(fp8, Stream.GATHER, LLAMA.hidden * LLAMA.vocab * 2) == 1  # as does the embedding
    wires = {name: size for name, size in zip(fp8.ops.name, fp8.ops.bytes_comm, strict=True) if name.endswith("gather")}
    assert wires["layer.gather"] == LAYER + 2 * LLAMA.hidden
    assert wires["embedding.gather"] == LLAMA.hidden * LLAMA.vocab * 2
