"""Bytes of memory-bound kernels that nothing else checks, counted by hand from the code that launches them."""

from __future__ import annotations

import pytest

from forerun.model.parameters import parameter_count
from forerun.program.types import OpTable
from forerun.symbolic.build import build

from .cases import CLUSTER, DENSE, plan


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
