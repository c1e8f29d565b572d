"""Flat copies through which gradients are reduced and updated parameters gathered at the end of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forerun.core.program.types import Block, Category
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.model.parameters import parameter_count
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.build import build

MODEL = replace(load_model("gpt2-small"), vocab=50304)  # nothing to pad
CLUSTER = load_cluster("a100-sxm")
STACK = load_stack("megatron-deepspeed")
PLAN = Plan(seq_len=512, dp_shard=8, n_microbatches=2, zero_stage=1, stack="megatron-deepspeed")


def copies(elements: int) -> tuple[list[int], list[int]]:
    """Bytes of the copies of the reduction and of the gather."""
    program = build(MODEL, PLAN, CLUSTER, replace(STACK, step_elements=elements))
    blocks = [program.blocks[number] for number in program.rank_classes[0].block]
    return tuple(_copies(blocks, name) for name in ("reduce at the end", "optimizer"))  # type: ignore[return-value]


def _copies(blocks: list[Block], name: str) -> list[int]:
    (block,) = [one for one in blocks if one.name == name]
    own = block.tensor_category == Category.COMMUNICATION
    assert (block.tensor_free[own] > block.tensor_alloc[own]).all()
    return np.sort(block.tensor_bytes[own]).tolist()


def test_in_place_nothing_is_copied() -> None:
    assert copies(0) == ([], [])


@pytest.mark.parametrize("elements", [1_000_000, 10**12])
def test_a_bucket_is_copied_in_the_dtypes_of_sum_and_reduction(elements: int) -> None:
    copied = min(elements, parameter_count(MODEL))
    assert copies(elements) == ([2 * copied, 4 * copied], [2 * copied])
