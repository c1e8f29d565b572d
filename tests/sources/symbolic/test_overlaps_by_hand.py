"""What runs beside what in tensor and context parallelism: the streams of a layer's nodes and what each waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.core.program.types import Program
from forerun.sources.symbolic.build import build

from .by_hand import kernels_of, moves, nodes_of
from .cases import CLUSTER, DENSE, plan

T, H, F = 2048, 1024, 2816
X = 2 * T * H
"""bytes of the activations of all tokens"""
ATTENTION, FFN = 2, 4


def beside(program: Program, name: str, *prefixes: str) -> list[str]:
    """Nodes of these names, each as `name on stream after others`; the main stream and its own order go unsaid."""
    out = []
    for node in nodes_of(program, name):
        if node.name.startswith(prefixes):
            on = "" if node.stream == "compute" else f" on {node.stream}"
            out.append(node.name + on + (f" after {', '.join(node.after)}" if node.after else ""))
    return out


# -- tensor parallelism ------------------------------------------------------------------------------------------------


def test_a_ring_exposes_its_first_piece_and_runs_the_others_beside_the_product() -> None:
    """NeMo's userbuffers on two ranks: half of the exchange before the product and half beside it."""
    program = build(DENSE, plan(stack="nemo", tp=2, zero_stage=1), CLUSTER)
    assert beside(program, "layer.forward", "ffn", "swiglu", "residual'") == [
        "ffn.up.head on tp after rmsnorm'",
        "ffn.up.rest on tp",
        "ffn.up after ffn.up.head",
        "swiglu after ffn.up.rest",
        "ffn.down.reduce.head on tp after swiglu",
        "ffn.down.reduce.rest on tp",
        "ffn.down after ffn.down.reduce.head",
        "residual' after ffn.down.reduce.rest",
    ]
    assert beside(program, "layer.backward", "ffn", "swiglu", "rmsnorm.backward") == [
        "ffn.down.dgather.head on tp after residual.backward",
        "ffn.down.dgather.rest on tp",
        "ffn.down.dgrad after ffn.down.dgather.head",
        "ffn.down.wgrad after ffn.down.dgather.rest",
        "swiglu.backward",
        "ffn.up.gather on tp after swiglu.backward",
        "ffn.up.dgrad",
        "ffn.up.reduce on tp after ffn.up.dgrad",
        "ffn.up.wgrad after ffn.up.gather",
        "rmsnorm.backward after ffn.up.reduce",
        "rmsnorm.backward' after attention.qkv.reduce",
    ]
    four = build(DENSE, plan(stack="nemo", tp=4, zero_stage=1), CLUSTER)
    pieces = {k.name: k.moved for k in kernels_of(four, "layer.forward") if k.name.startswith("ffn.up.")}
    assert pieces == {"ffn.up.head": X / 4, "ffn.up.rest": X * 3 / 4}


def test_a_compiler_fuses_an_exchange_with_a_product_that_reads_it_alone() -> None:
    """Inductor's asynchronous tensor parallelism: the gradients of gate and up are summed before their reduction."""
    program = build(DENSE, plan(stack="torchtitan", tp=2, compile=True, async_tp=True), CLUSTER)
    assert beside(program, "layer.forward", "ffn") == [
        "ffn.gate.head on tp after rmsnorm'",
        "ffn.gate.rest on tp",
        "ffn.gate after ffn.gate.head",
        "ffn.up after ffn.gate.rest",
        "ffn.down.reduce.head on tp after swiglu",
        "ffn.down.reduce.rest on tp",
        "ffn.down after ffn.down.reduce.head",
    ]
    assert beside(program, "layer.backward", "ffn", "fan_out") == [
        "ffn.down.dgather.head on tp after residual.backward",
        "ffn.down.dgather.rest on tp",
        "ffn.down.dgrad after ffn.down.dgather.head",
        "ffn.down.wgrad after ffn.down.dgather.rest",
        *("ffn.up.dgrad", "ffn.up.wgrad", "ffn.gate.dgrad", "ffn.gate.reduce.copy"),
        "ffn.gate.reduce on tp after ffn.gate.reduce.copy",
        "ffn.gate.wgrad after ffn.gate.reduce",
        "fan_out.backward",
        "fan_out.backward'",
    ]
    copies = [kernel for kernel in kernels_of(program, "layer.backward") if kernel.name.endswith("reduce.copy")]
    assert copies == [
        moves("ffn.gate.reduce.copy", 2 * X, 1, FFN),
        moves("attention.q.reduce.copy", 2 * X, 1, ATTENTION),
    ]
    gated = replace(DENSE, mlp="gelu")
    alone = beside(
        build(gated, plan(stack="torchtitan", tp=2, compile=True, async_tp=True), CLUSTER), "layer.backward", "ffn.up"
    )
    assert alone == ["ffn.up.dgrad", "ffn.up.reduce on tp after ffn.up.dgrad", "ffn.up.wgrad"]


@pytest.mark.parametrize(("recipe", "asynchronous"), [("tensorwise", True), ("rowwise", False)])
def test_fp8_is_fused_with_a_gather_where_casts_come_before_it(recipe: str, asynchronous: bool) -> None:
    fields = {"stack": "torchtitan", "tp": 2, "compile": True, "precision": "fp8", "fp8_recipe": recipe}
    program = build(DENSE, plan(**fields, async_tp=True), CLUSTER)
    names = {kernel.name: kernel.moved for kernel in kernels_of(program, "layer.forward")}
    assert ("ffn.gate.head" in names) == asynchronous
    if asynchronous:  # a byte an element
        assert names["ffn.gate.head"] == names["ffn.gate.rest"] == X / 2 / 2
    else:
        assert names["ffn.up.enter.gather"] == X
    plain = {k.name: k.moved for k in kernels_of(build(DENSE, plan(**fields), CLUSTER), "layer.forward")}
    assert plain["ffn.up.enter.gather"] == (X / 2 if asynchronous else X)
    assert plain["ffn.up.enter.copy"] == 2 * plain["ffn.up.enter.gather"]


def test_megatron_reduces_an_input_gradient_beside_the_gradient_of_the_weights() -> None:
    for stack, after in (("megatron-lm", []), ("megatron-core", ["ffn.up.reduce"])):
        program = build(DENSE, plan(stack=stack, tp=2, zero_stage=0, sequence_parallel=True), CLUSTER)
        wgrad = next(node for node in nodes_of(program, "layer.backward") if node.name == "ffn.up.wgrad")
        assert list(wgrad.after) == after


def test_gathers_and_copies_at_the_borders_of_a_tensor_parallel_region() -> None:
    """torchtitan: an exchange is followed by a copy of what it has moved, forward and backward."""
    program = build(DENSE, plan(stack="torchtitan", tp=2), CLUSTER)
    assert beside(program, "layer.forward", "ffn") == [
        "ffn.up.enter.gather on tp after rmsnorm'",
        "ffn.up.enter.copy after ffn.up.enter.gather",
        "ffn.gate",
        "ffn.up",
        "ffn.down",
        "ffn.down.copy",
        "ffn.down.reduce on tp after ffn.down.copy",
    ]
    assert beside(program, "layer.backward", "ffn") == [
        "ffn.down.gather on tp after residual.backward",
        "ffn.down.copy after ffn.down.gather",
        *("ffn.down.dgrad", "ffn.down.wgrad", "ffn.up.dgrad", "ffn.up.wgrad", "ffn.gate.dgrad", "ffn.gate.wgrad"),
        "ffn.up.enter.copy",
        "ffn.up.enter.scatter on tp after ffn.up.enter.copy",
    ]
    names = [kernel for kernel in kernels_of(program, "layer.forward") if kernel.name.startswith("ffn.up.enter")]
    assert names == [moves("ffn.up.enter.gather", X, 1, FFN), moves("ffn.up.enter.copy", 2 * X, 1, FFN)]
    whole = build(DENSE, plan(stack="torchtitan", tp=2, sequence_parallel=False), CLUSTER)
    assert beside(whole, "layer.forward", "ffn") == [
        *("ffn.gate", "ffn.up", "ffn.down", "ffn.down.copy"),
        "ffn.down.reduce on tp after ffn.down.copy",
    ]
    assert beside(whole, "layer.backward", "ffn.up.enter", "ffn.down.") == [
        *("ffn.down.dgrad", "ffn.down.wgrad", "ffn.up.enter.copy"),
        "ffn.up.enter.reduce on tp after ffn.up.enter.copy",
    ]


# -- context parallelism -----------------------------------------------------------------------------------------------

CP = 4
PART = T // CP


def attention_of(program: Program, name: str) -> list[str]:
    return [
        node.replace("attention.kernel", "a").replace(".backward", "")
        for node in beside(program, name, "cp", "attention.kernel")
    ]


def test_a_ring_sends_keys_on_beside_each_part() -> None:
    """Hops beside three of four parts; every part but the first is merged. Gradients need a hop more to be home."""
    program = build(DENSE, plan(stack="torchtitan", cp=CP, cp_method="ring"), CLUSTER)
    assert attention_of(program, "layer.forward") == [
        *("cp.hop on cp after copy'", "a", "cp.hop' on cp after a", "a' after cp.hop", "cp_merge after cp.hop'"),
        *("cp.hop'' on cp after cp_merge", "a''", "cp_merge' after cp.hop''", "a'''", "cp_merge''"),
    ]
    assert attention_of(program, "layer.backward") == [
        "cp.hop on cp after attention.out.wgrad",
        "cp.hop.gradients on cp after attention.out.wgrad",
        "a",
        *("cp.hop' on cp after a", "cp.hop.gradients' on cp after a", "a' after cp.hop, cp.hop.gradients"),
        "cp_merge after cp.hop', cp.hop.gradients'",
        *("cp.hop'' on cp after cp_merge", "cp.hop.gradients'' on cp after cp_merge", "a''"),
        *("cp_merge' after cp.hop'', cp.hop.gradients''", "a'''", "cp_merge''"),
        "cp.hop.gradients''' on cp after cp_merge''",
    ]


def test_a_gather_runs_beside_the_first_part_unless_code_is_compiled() -> None:
    """Compiled code waits for each collective before it goes on."""
    eager, compiled = (
        build(DENSE, plan(stack="torchtitan", cp=CP, cp_method="allgather", compile=on), CLUSTER)
        for on in (False, True)
    )
    assert attention_of(eager, "layer.forward") == [
        *("cp.gather on cp after copy'", "a", "a' after cp.gather", "cp_merge"),
        *("a''", "cp_merge'", "a'''", "cp_merge''"),
    ]
    assert attention_of(compiled, "layer.forward") == [
        *("a", "cp.gather on cp after a", "a' after cp.gather", "cp_merge"),
        *("a''", "cp_merge'", "a'''", "cp_merge''"),
    ]
    assert attention_of(eager, "layer.backward") == [
        *("cp.gather on cp after attention.out.wgrad", "a", "cp.hop.gradients on cp after a", "a' after cp.gather"),
        *("cp_merge after cp.hop.gradients", "cp.hop.gradients' on cp after cp_merge", "a''"),
        *("cp_merge' after cp.hop.gradients'", "cp.hop.gradients'' on cp after cp_merge'", "a'''"),
        *("cp_merge'' after cp.hop.gradients''", "cp.hop.gradients''' on cp after cp_merge''"),
    ]
    assert attention_of(compiled, "layer.backward") == [
        *("a", "cp.gather on cp after a", "a' after cp.gather", "cp.hop.gradients on cp after a'"),
        *("cp_merge after cp.hop.gradients", "a''", "cp.hop.gradients' on cp after a''"),
        *("cp_merge' after cp.hop.gradients'", "a'''", "cp.hop.gradients'' on cp after a'''"),
        *("cp_merge'' after cp.hop.gradients''", "cp.hop.gradients''' on cp after cp_merge''"),
    ]


def test_transformer_engine_merges_in_one_kernel_and_not_at_all_in_backward() -> None:
    ring = build(DENSE, plan(stack="megatron-core", cp=CP, cp_method="ring"), CLUSTER)
    output = PART * 16 * 64
    merges = [kernel for kernel in kernels_of(ring, "layer.forward") if kernel.name == "cp_merge"]
    assert merges == [moves("cp_merge", 10 * output, 1, ATTENTION)] * 3
    assert attention_of(ring, "layer.backward") == [
        "cp.hop on cp after attention.out.wgrad",
        "cp.hop.gradients on cp after attention.out.wgrad",
        *("a", "cp.hop' on cp after a", "cp.hop.gradients' on cp after a", "a' after cp.hop, cp.hop.gradients"),
        *("cp.hop'' on cp after a'", "cp.hop.gradients'' on cp after a'", "a'' after cp.hop', cp.hop.gradients'"),
        "a''' after cp.hop'', cp.hop.gradients''",
    ]
    gathered = build(DENSE, plan(stack="megatron-core", cp=CP, cp_method="allgather"), CLUSTER)
    assert attention_of(gathered, "layer.forward") == ["cp.gather on cp after rope", "a after cp.gather"]
    assert attention_of(gathered, "layer.backward") == [
        *("cp.gather on cp after attention.out.wgrad", "a after cp.gather", "cp.scatter on cp after a")
    ]
    ulysses = build(DENSE, plan(stack="megatron-core", cp=CP, cp_method="ulysses"), CLUSTER)
    assert attention_of(ulysses, "layer.forward") == [
        "cp.qkv on cp after rope",
        "a after cp.qkv",
        "cp.out on cp after a",
    ]
    assert attention_of(ulysses, "layer.backward") == [
        *("cp.out on cp after attention.out.wgrad", "a after cp.out", "cp.qkv on cp after a")
    ]


HALF = PART * PART / 2
"""pairs on the causal diagonal of a rank's own part, and of any other part under head and tail"""


@pytest.mark.parametrize(
    ("balance", "causal", "first", "others"),
    [
        ("head_tail", True, HALF, HALF),
        ("none", True, HALF, 2 * HALF * 0.5),  # the mean rank has half of the others' pairs
        ("none", False, 2 * HALF, 2 * HALF),
        ("head_tail", False, 2 * HALF, 2 * HALF),
    ],
)
def test_flops_of_the_parts_of_a_ring(balance: str, causal: bool, first: float, others: float) -> None:
    model = replace(DENSE, causal=causal)
    program = build(model, plan(stack="torchtitan", cp=CP, cp_method="ring", cp_load_balance=balance), CLUSTER)
    per_pair = 2 * 16 * 2 * 64
    for name, factor in (("layer.forward", 1), ("layer.backward", 2.5)):
        parts = [k.flops for k in kernels_of(program, name) if k.name.startswith("attention.kernel")]
        assert parts == [per_pair * factor * first, *[per_pair * factor * others] * 3]


@pytest.mark.parametrize(("balance", "pairs"), [("none", T * T / 2 / CP), ("head_tail", T * T / 2 / CP)])
def test_flops_of_attention_to_gathered_keys(balance: str, pairs: float) -> None:
    """All ranks together have half of the square; `none` counts the pairs of the last rank's diagonal as a square."""
    fields = {"stack": "megatron-core", "cp": CP, "cp_method": "allgather", "cp_load_balance": balance}
    program = build(DENSE, plan(**fields), CLUSTER)
    (kernel,) = [k for k in kernels_of(program, "layer.forward") if k.name == "attention.kernel"]
    assert kernel.flops == pytest.approx(2 * 16 * pairs * 2 * 64)
    free = build(replace(DENSE, causal=False), plan(**fields), CLUSTER)
    (kernel,) = [k for k in kernels_of(free, "layer.forward") if k.name == "attention.kernel"]
    assert kernel.flops == 2 * 16 * PART * T * 2 * 64
