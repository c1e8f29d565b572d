"""What each rule of a plan and its stack says, worked out by hand."""

from dataclasses import replace

import pytest

from forerun.describe.model.catalog import load_any, load_model
from forerun.describe.plan import rules
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.stack import Stack

STACK = Stack("hand", "by hand", "a test")
FSDP1 = replace(STACK, fsdp="fsdp1")
SIMPLE = replace(STACK, fsdp="simple", parametrized=True)
LLAMA = load_model("llama-3.2-1b")


def plan_of(**fields) -> Plan:
    return Plan(512, **fields)


@pytest.mark.parametrize(
    ("dtype", "n_bytes"),
    [("fp32", 4), ("tf32", 4), ("bf16", 2), ("fp16", 2), ("fp8", 1), ("mxfp8", 1), ("nvfp4", 1)],
)
def test_bytes_of_an_element(dtype, n_bytes):
    assert rules.element_bytes(dtype) == n_bytes


@pytest.mark.parametrize(
    ("fields", "wide", "weight", "gradient"),
    [
        ({"precision": "bf16"}, "bf16", 2, 2),
        ({"precision": "fp16"}, "fp16", 2, 2),
        ({"precision": "fp32"}, "fp32", 4, 4),
        ({"precision": "tf32"}, "tf32", 4, 4),
        ({"precision": "fp8"}, "bf16", 2, 2),  # only the operands of products are narrower
        ({"precision": "mxfp8"}, "bf16", 2, 2),
        ({"precision": "bf16", "autocast": True}, "bf16", 2, 4),
    ],
)
def test_dtypes_of_activations_and_gradients(fields, wide, weight, gradient):
    plan = plan_of(**fields)
    assert (rules.wide_dtype(plan), rules.weight_bytes(plan), rules.gradient_bytes(plan)) == (wide, weight, gradient)


SHARDED = {"dp_shard": 8, "zero_stage": 3}
REPLICATED = {"dp_replicate": 8, "zero_stage": 0}


@pytest.mark.parametrize(
    ("fields", "stack", "reduced", "accumulated"),
    [
        (REPLICATED, STACK, "fp32", "bf16"),
        (SHARDED, STACK, "fp32", "fp32"),  # FSDP2 casts also what it reduces later
        (SHARDED, FSDP1, "fp32", "bf16"),
        ({**REPLICATED, "autocast": True}, STACK, "fp32", "fp32"),
        ({**REPLICATED, "reduce_dtype": "bf16", "accumulate_dtype": "fp32"}, STACK, "bf16", "fp32"),
        (REPLICATED, replace(STACK, reduce_dtype="param", accumulate_dtype="fp32"), "bf16", "fp32"),
        (REPLICATED, replace(STACK, accumulate_dtype="reduce"), "fp32", "fp32"),
        ({**REPLICATED, "precision": "fp16"}, replace(STACK, reduce_dtype="fp32-unless-fp16"), "fp16", "fp16"),
        (REPLICATED, replace(STACK, accumulate_dtype="fp32-unless-fp16"), "fp32", "fp32"),
    ],
)
def test_dtypes_of_sums_of_gradients(fields, stack, reduced, accumulated):
    plan = plan_of(**fields)
    assert (rules.reduce_dtype(plan, stack), rules.accumulate_dtype(plan, stack)) == (reduced, accumulated)


@pytest.mark.parametrize(
    ("fields", "stack", "gathers", "copies"),
    [
        (SHARDED, STACK, True, False),
        ({"zero_stage": 3}, STACK, False, False),  # FSDP of one rank gathers and casts nothing
        ({"zero_stage": 3, "offload": "params"}, STACK, True, False),
        ({"zero_stage": 3}, SIMPLE, True, False),  # its parametrization casts
        ({"zero_stage": 3, "master_dtype": "bf16"}, SIMPLE, False, False),
        (REPLICATED, STACK, False, True),
        ({**REPLICATED, "master_dtype": "bf16"}, STACK, False, False),
        ({**REPLICATED, "precision": "fp32"}, STACK, False, False),
        ({**REPLICATED, "autocast": True}, STACK, False, False),
        (REPLICATED, replace(STACK, autocast=True), False, False),
        (REPLICATED, SIMPLE, False, False),
    ],
)
def test_gathered_parameters_and_working_copies(fields, stack, gathers, copies):
    plan = plan_of(**fields)
    assert (rules.gathers_parameters(plan, stack), rules.has_working_copy(plan, stack)) == (gathers, copies)


ONE = {"dp_shard": 8, "zero_stage": 1}
ALL_REDUCE = replace(STACK, grad_reduce="all-reduce")


@pytest.mark.parametrize(
    ("fields", "stack", "scatters"),
    [
        (SHARDED, STACK, True),
        (SHARDED, ALL_REDUCE, True),
        (ONE, STACK, True),
        (ONE, ALL_REDUCE, False),
        (ONE, replace(STACK, grad_reduce="owner-reduce"), False),
        (REPLICATED, STACK, False),
    ],
)
def test_scattered_gradients(fields, stack, scatters):
    assert rules.scatters_gradients(plan_of(**fields), stack) == scatters


LATER = replace(STACK, fsdp_reduce_every_microbatch=False)
FUSED = replace(STACK, fused_accumulation=True)


@pytest.mark.parametrize(
    ("fields", "stack", "at_once", "accumulates"),
    [
        ({**SHARDED, "n_microbatches": 4}, STACK, True, False),
        ({**SHARDED, "n_microbatches": 4}, LATER, False, True),
        ({**SHARDED, "pp": 2, "n_microbatches": 4}, STACK, False, True),
        ({**REPLICATED, "n_microbatches": 2}, STACK, False, True),
        (REPLICATED, STACK, False, False),
        ({**REPLICATED, "n_microbatches": 4}, FUSED, False, False),
    ],
)
def test_sums_over_micro_batches(fields, stack, at_once, accumulates):
    plan = plan_of(**fields)
    assert (rules.reduces_every_microbatch(plan, stack), rules.accumulates(plan, stack)) == (at_once, accumulates)


@pytest.mark.parametrize(
    ("stack", "keeps"),
    [
        (STACK, False),
        (FUSED, True),
        (replace(STACK, accumulate_dtype="reduce"), False),
        (replace(STACK, accumulate_dtype="fp32"), True),
    ],
)
def test_a_buffer_of_gradients_through_the_step(stack, keeps):
    assert rules.keeps_gradient_buffer(stack) == keeps


COPIES = replace(STACK, bucket_copies=True)


@pytest.mark.parametrize(
    ("fields", "stack", "keeps"),
    [
        ({"dp_replicate": 2, "zero_stage": 0}, COPIES, True),
        ({"cp": 2, "zero_stage": 0}, COPIES, True),
        ({"zero_stage": 0}, COPIES, False),
        ({"dp_replicate": 2, "zero_stage": 0}, STACK, False),
        ({"dp_shard": 2, "zero_stage": 1}, COPIES, False),
    ],
)
def test_copies_of_buckets(fields, stack, keeps):
    assert rules.keeps_bucket_copies(plan_of(**fields), stack) == keeps


WHOLE = replace(STACK, whole_graph=True)


@pytest.mark.parametrize(
    ("model", "fields", "stack", "breaks"),
    [
        (LLAMA, {"compile": True, "attention": "flex"}, WHOLE, True),
        (LLAMA, {"compile": True, "attention": "sdpa"}, WHOLE, False),
        (LLAMA, {"compile": True}, replace(WHOLE, attention="flex"), True),
        (LLAMA, {"compile": True}, WHOLE, False),
        (LLAMA, {"compile": True, "attention": "flex"}, STACK, False),
        (LLAMA, {"compile": False, "attention": "flex"}, WHOLE, False),
        (LLAMA, {"compile": True, "attention": "sdpa", "graph_breaks": True}, STACK, True),
        (load_any("resnet50"), {"compile": True, "attention": "flex"}, WHOLE, False),
    ],
)
def test_graphs_end_where_the_plan_says_or_attention_is_compiled_apart(model, fields, stack, breaks):
    assert rules.breaks_graphs(model, plan_of(**fields), stack) == breaks
