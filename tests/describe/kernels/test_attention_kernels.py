"""Attention kernels: one entry serves plans, costs, words, launch files and traces, and no other file names one."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import forerun
from forerun.common.errors import UnknownName
from forerun.core.cost.attention import attention_rates
from forerun.describe.cluster.catalog import load_cluster, load_device
from forerun.describe.kernels.attention import attention_kernel, attention_kernels, kernel_in_words, names_in
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.constraints import refuse
from forerun.describe.plan.fields import from_text
from forerun.describe.plan.plan import Plan
from forerun.interfaces.report.launch.tools import launch_files

SOURCE = Path(forerun.__file__).parent
ONE = Plan(seq_len=4096, dp_shard=8, compile=True)
SAY_MORE = {"naive", "triton"}
"""names that are words of other things too"""
OTHERS = {
    "sources/trace/inside/device/attention_choice.py": "the choices of scaled_dot_product_attention, by torch's names",
    "sources/trace/inside/device/virtual_device.py": "the version of cuDNN",
    "interfaces/report/launch/torchtitan_toml.py": "torchtitan's names of its modules",
    "interfaces/report/launch/torchtitan_registry.py": "torchtitan's names of its modules",
    "describe/recipe/torchtitan.py": "torchtitan's names of its modules",
    "describe/recipe/torchtitan_model.py": "torchtitan's names of its modules",
    "describe/recipe/megatron.py": "Megatron-LM's word for a dispatcher, and one kernel of a word that several share",
    "describe/stacks/stack.py": "the kernel of a stack that states none",
    "core/program/builder.py": "the kernel of a row that states none",
}


def test_no_other_file_names_a_kernel():
    names = "|".join(set(attention_kernels()) - SAY_MORE)
    found = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if re.search(rf"""["']({names})["']""", path.read_text(encoding="utf-8"))
    }
    assert found == set(OTHERS)


@pytest.mark.parametrize("name", attention_kernels())
def test_every_kernel_can_be_asked_for_and_predicted(name):
    kernel = attention_kernel(name)
    device = next(name for name in ("b200-sxm", "h100-sxm", "mi300x") if kernel.runs(load_device(name).architecture))
    plan = replace(ONE, attention=from_text("attention", name))
    assert forerun.predict("llama-3.2-1b", plan, device).step_time_s > 0
    if kernel.form == "fused":
        assert attention_rates(load_device(device), name, 128).flops_per_s > 0


def test_no_tool_calls_two_kernels_that_a_trace_tells_apart_by_the_same_name():
    operators = [
        operator
        for kernel in attention_kernels().values()
        for directions in kernel.operators.values()
        for names in directions.values()
        for operator in names
    ]
    for one in (operators, list(names_in("torch").values()), list(names_in("sdp_backend").values())):
        assert len(set(one)) == len(one)


@pytest.mark.parametrize(
    ("words", "kernel"),
    [
        *[("FlashAttention-4", "flash4"), ("FA3", "flash3"), ("flash attention 1", "flash1"), ("flash-attn", "flash2")],
        *[("flex (eager)", "flex_uncompiled"), ("flex(compiled)", "flex"), ("xformers", "efficient"), ("none", None)],
    ],
)
def test_words_of_tables_find_their_kernel(words, kernel):
    assert kernel_in_words(words) == kernel


def test_rates_that_stand_in_for_unknown_ones_are_said_and_leave_the_calibrated_range():
    own, lent = (attention_rates(load_device("h100"), name, 128) for name in ("flash3", "flash4"))
    assert (own.flops_per_s, own.backward_rate) == (lent.flops_per_s, lent.backward_rate)
    assert own.calibrated
    assert not lent.calibrated
    flash3, flash4 = (
        forerun.predict("llama-3.1-8b", replace(ONE, attention=name), "h100-sxm") for name in ("flash3", "flash4")
    )
    assert flash4.step_time_s == flash3.step_time_s
    assert flash4.coverage < flash3.coverage
    assert "attention flash4: its rates on hopper are not known, so Forerun uses those of flash3" in flash4.explain
    assert "stand in" not in "".join(flash3.explain)


def test_a_kernel_that_the_device_does_not_run_is_refused():
    refusal = refuse(load_model("llama-3.1-8b"), replace(ONE, attention="flash4"), load_cluster("a100-80gb"))
    assert refusal.reason == "attention flash4 needs hopper or blackwell; a100-sxm-80gb is ampere"


def test_launch_files_say_each_kernel_as_the_tool_does():
    model, cluster = load_model("llama-3.1-8b"), load_cluster("b200-sxm")
    for kernel in ("flash3", "flash4", "flex"):
        text = launch_files(replace(ONE, attention=kernel), model, cluster, "torchtitan")["forerun_torchtitan.py"]
        assert f'attn_backend="{names_in("torchtitan")[kernel]}"' in text
    plan = replace(ONE, attention="cudnn", compile=False)
    assert "--attention-backend fused" in launch_files(plan, model, cluster, "megatron-lm")["launch.sh"]


def test_an_unknown_kernel_is_an_error_that_lists_the_known_ones():
    with pytest.raises(UnknownName, match=r"unknown attention kernel 'flash9'.*flash4"):
        attention_kernel("flash9")
    with pytest.raises(UnknownName, match=r"unknown attention kernel 'flash9'; did you mean flash4"):
        forerun.predict("llama-3.2-1b", replace(ONE, attention="flash9"), "h100-sxm")
