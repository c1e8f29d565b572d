"""A stack that captures graphs and has no compiler for them runs the operations of the graph one by one."""

from __future__ import annotations

from forerun.answers.analysis.predict import predict
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build

LLAMA, CLUSTER = load_model("llama-3.2-1b"), load_cluster("h100-sxm")


def totals(stack: str, compiled: bool) -> tuple[float, int]:
    """The bytes that all distinct operations of a step read, and their launches."""
    ops = build(LLAMA, Plan(seq_len=4096, dp_shard=8, stack=stack, compile=compiled), CLUSTER).ops
    return float(ops.bytes_read.sum()), int(ops.launches.sum())


def test_operations_of_a_captured_graph_are_those_of_an_eager_step_without_its_modules() -> None:
    fused, captured, eager = (
        totals(stack, compiled)
        for stack, compiled in (
            ("torchtitan-simple-fsdp", True),
            ("torchtitan-graph", True),
            ("torchtitan-graph", False),
        )
    )
    assert captured[0] == eager[0] > fused[0]
    assert fused[1] < captured[1] < eager[1], "eager modules pass each parameter on, which launches more"


def test_the_min_cut_partitioner_keeps_what_compiled_code_keeps() -> None:
    compiled, min_cut, default = (
        predict(LLAMA, Plan(seq_len=4096, dp_shard=8, stack=stack, compile=True), CLUSTER).peak_allocated_gib
        for stack in ("torchtitan-simple-fsdp", "torchtitan-aot-eager", "torchtitan-graph")
    )
    assert compiled <= min_cut < default
