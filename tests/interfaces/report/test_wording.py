"""Plans, choices, lines of a log and commands in words, by known answers."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction
from types import SimpleNamespace

import pytest

from forerun.describe.plan.fields import from_text
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import stack_names
from forerun.interfaces.report.wording import choice_words, command_line, log_line, plan_words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ""),
        ({"dp_shard": 8}, "FSDP=8"),
        ({"dp_shard": 8, "reshard_after_forward": "never"}, "FSDP=8, no reshard"),
        ({"dp_shard": 8, "reshard_after_forward": "always"}, "FSDP=8, reshard"),
        ({"dp_shard": 8, "zero_stage": 1, "reshard_after_forward": "never"}, "ZeRO-1=8"),
        ({"tp": 2}, "tp=2"),
        ({"tp": 2, "sequence_parallel": False}, "tp=2, no SP"),
        ({"sequence_parallel": False}, ""),
        ({"pp": 2}, "pp=2, 1F1B"),
        ({"pp": 2, "pp_schedule": "Interleaved1F1B", "virtual_stages": 4}, "pp=2, Interleaved1F1Bx4"),
        ({"activation_checkpointing": "full"}, "AC=full"),
        ({"compile": True}, "compiled"),
        ({"offload": "optimizer", "dp_shard": 8, "zero_stage": 1}, "ZeRO-1=8, optimizer offloaded"),
    ],
)
def test_a_plan_in_words(fields, words):
    found = plan_words(Plan(2048, micro_batch=2, n_microbatches=8, **fields))
    assert "mb=2x8" in found.split(", ")
    assert [word for word in found.split(", ") if word not in ("mb=2x8", "one GPU")] == [
        *filter(None, words.split(", "))
    ]


def test_the_stack_stands_last_where_it_is_asked_for():
    plan = Plan(2048, compile=True)
    assert plan_words(plan, with_stack=True) == f"{plan_words(plan)}, {plan.stack}"


def test_a_mesh_of_another_order_is_named():
    plain = Plan(2048, tp=2, pp=2, dp_shard=2)
    assert "order" not in plan_words(plain)
    order = "-".join(reversed(plain.mesh_order.split("-")))
    other = Plan(2048, tp=2, pp=2, dp_shard=2, mesh_order=order)
    named = [axis for axis in other.mesh_axes if axis in ("tp", "pp", "dp_shard")]
    assert f"order {'-'.join(named)}" in plan_words(other).split(", ")


def of(step_s, mfu=0.4, **fields):
    plan = Plan(2048, **fields)
    return SimpleNamespace(own_plan=lambda: plan, step_time_s=step_s, mfu=mfu)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (
            {"field": "compile", "value": "on", "best": of(2.0, 0.5, compile=True), "instead": of(4.0), "caution": ""},
            "compile on instead of off: 4.00 s -> 2.00 s, MFU 40.0% -> 50.0% (torchtitan)",
        ),
        (
            {"field": "compile", "value": "on", "best": of(5.0, 0.3, compile=True), "instead": of(4.0), "caution": ""},
            "compile off instead of on: 5.00 s -> 4.00 s, MFU 30.0% -> 40.0% (torchtitan)",
        ),
        (
            {"field": "stack", "value": "megatron-core", "best": of(2.0, None, stack="megatron-core"),
             "instead": of(4.0), "caution": ""},
            "stack megatron-core instead of torchtitan: 4.00 s -> 2.00 s",
        ),
        (
            {"field": "stack", "value": "megatron-core", "best": of(2.0, None, stack="megatron-core"),
             "instead": of(4.0), "caution": "another framework"},
            "stack megatron-core instead of torchtitan: 4.00 s -> 2.00 s (another framework: --stack megatron-core "
            "searches it)",
        ),
        (
            {"field": "precision", "value": "fp8", "best": of(2.0, 0.4, precision="fp8", fp8_recipe="rowwise"),
             "instead": of(2.0, None), "caution": "less exact"},
            "precision fp8 instead of bf16: 2.00 s -> 2.00 s (less exact: --precision fp8 --fp8-recipe rowwise "
            "searches it)",
        ),
    ],
)  # fmt: skip
def test_what_a_choice_is_worth(choice, words):
    assert choice_words(SimpleNamespace(**choice)) == words


def test_the_line_of_a_log():
    usual = {"peak_reserved_gib": 6.25, "memory_limit_gib": 80.0, "tokens_per_s_per_gpu": 12345.6, "mfu": 0.4321}
    found = SimpleNamespace(**usual, samples_per_s_per_gpu=None, sample="image", memory_recorded=True)
    assert log_line(found, 2e9) == "memory:  6.25GiB(7.81%)  tps: 12,346  tflops: 24.69  mfu: 43.21%"
    assert log_line(found, None) == "memory:  6.25GiB(7.81%)  tps: 12,346  mfu: 43.21%"
    found.tokens_per_s_per_gpu, found.samples_per_s_per_gpu, found.mfu = None, 1999.6, None
    assert log_line(found, 2e9) == "memory:  6.25GiB(7.81%)  images/s: 2,000"
    found.memory_recorded = False
    assert log_line(found, 2e9) == "images/s: 2,000"


def test_a_plan_as_a_command():
    assert command_line(Plan(2048), "gpt", "h100") == (
        "forerun predict gpt --cluster h100 --seq-len 2048 --micro-batch 1 --n-microbatches 1"
    )
    plan = Plan(
        4096, tp=2, pp=2, micro_batch=3, n_microbatches=4, compile=True, layers_per_stage=(5, 7),
        overlap_grad_reduce=False,
    )  # fmt: skip
    words = command_line(plan, "gpt", "h100").split(" --")
    assert words[0] == "forerun predict gpt"
    assert set(words[1:]) >= {
        "cluster h100", "seq-len 4096", "micro-batch 3", "n-microbatches 4", "tp 2", "pp 2", "compile",
        "no-overlap-grad-reduce", "layers-per-stage 5,7",
    }  # fmt: skip
    assert len(words) == len(set(words)) == 10


@pytest.mark.parametrize("stack", stack_names())
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_command_of_a_plan_makes_this_plan(stack, sequence_parallel):
    """Also where the stack's defaults are other than those of Plan."""
    plan = Plan(4096, tp=2, dp_shard=4, stack=stack, sequence_parallel=sequence_parallel, cp_method="allgather")
    parser = ArgumentParser()
    for name in Plan.__dataclass_fields__:
        option, is_flag = f"--{name.replace('_', '-')}", isinstance(getattr(plan, name), bool)
        parser.add_argument(option, **({"action": BooleanOptionalAction} if is_flag else {"type": str}))
    words = command_line(plan, "gpt", "h100").replace("forerun predict gpt --cluster h100 ", "").split()
    given = {name: value for name, value in vars(parser.parse_args(words)).items() if value is not None}
    seq_len = int(given.pop("seq_len"))
    made = {name: value if isinstance(value, bool) else from_text(name, value) for name, value in given.items()}
    assert Plan(seq_len, **made) == plan
