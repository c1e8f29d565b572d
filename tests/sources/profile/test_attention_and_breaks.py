"""Attention with its sizes, and graph breaks, as profiles name them."""

import pytest
from profile_files import host, kernel, launch, write_profile

from forerun.answers.profile.imported import import_step
from forerun.core.program.kinds import ATTENTION_BACKWARD_FLOPS, Attention
from forerun.sources.profile.kernel_ops import attention_shape
from forerun.sources.profile.labels import Operator
from forerun.sources.profile.read import read_profiles

FIRST, LAST = ((2, 32, 512, 128), (2, 8, 512, 128)), ((2, 512, 32, 128), (2, 512, 8, 128))
SHAPE = (2, 32, 8, 512, 512, 128, 1)
OPERATORS = {
    "aten::_scaled_dot_product_flash_attention": ("sdpa", FIRST, False),
    "aten::_flash_attention_forward": ("sdpa", LAST, False),
    "aten::_flash_attention_backward": ("sdpa", LAST, True),
    "aten::_cudnn_attention_forward": ("cudnn", FIRST, False),
    "aten::_scaled_dot_product_cudnn_attention_backward": ("cudnn", FIRST, True),
    "aten::_efficient_attention_backward": ("efficient", LAST, True),
    "flash_attn::_flash_attn_forward": ("flash2", LAST, False),
    "flash_attn_3::_flash_attn_backward": ("flash3", LAST, True),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_tells_the_shape_of_attention(name):
    kernel_name, (query, key), backward = OPERATORS[name]
    operands = (query, query, key, key) if backward else (query, key, key)
    found = attention_shape(Operator(name, (*operands, ()), "bf16"))
    assert found == (kernel_name, Attention(*SHAPE, int(backward), 128))


@pytest.mark.parametrize(
    "operator",
    [
        Operator("aten::_flash_attention_forward", None, "bf16"),
        Operator("aten::_flash_attention_forward", (LAST[0],), "bf16"),
        Operator("aten::_flash_attention_forward", ((1024, 32, 128), (1024, 8, 128), (1024, 8, 128)), "bf16"),
        Operator("aten::_flash_attention_forward", (LAST[0], LAST[1], LAST[1]), ""),
        Operator("aten::mm", (FIRST[0], FIRST[1], FIRST[1]), "bf16"),
    ],
)
def test_what_tells_no_shape_has_none(operator):
    assert attention_shape(operator) is None


def _sizes(*operands):
    return {"Input Dims": [list(one) for one in operands], "Input type": ["c10::BFloat16"] * len(operands)}


def test_the_longest_kernel_of_a_backward_pass_is_the_attention(tmp_path):
    query, key = LAST
    events = [
        host("ProfilerStep#0", 0, 200, "user_annotation"),
        host("aten::_flash_attention_backward", 10, 60, **_sizes(query, query, key, key)),
        launch(20, 5, 1),
        kernel("void flash_bwd_dot_do_o_kernel<true>", 30, 5, 1),
        launch(30, 5, 2),
        kernel("void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<>", 40, 80, 2),
    ]
    imported = import_step(read_profiles([write_profile(tmp_path / "a.json", events)]))
    ops = imported.program.ops
    (row,) = [row for row in range(len(ops)) if ops.is_attention[row]]
    assert ops.name[row].startswith("void flash_bwd_dq_dk_dv")
    assert ops.flops[row] == ATTENTION_BACKWARD_FLOPS * 2.0 * 2 * 32 * 512 * 512 / 2 * 256
    assert any("counts as causal" in note for note in imported.notes)


def _broken_step(tmp_path):
    """Graphs break twice in a module, one break within the rest of the function that the other one broke."""
    stack = "python_function"
    events = [
        host("ProfilerStep#0", 0, 400, "user_annotation"),
        host("nn.Module: Mlp_0", 5, 300, stack),
        launch(10, 5, 1),
        kernel("gemm", 20, 10, 1),
        host("model.py(12): torch_dynamo_resume_in_forward_at_12", 50, 200, stack),
        launch(60, 5, 2),
        kernel("gemm", 100, 10, 2),
        host("model.py(20): torch_dynamo_resume_in_forward_at_20", 120, 60, stack),
        launch(130, 5, 3),
        kernel("gemm", 140, 10, 3),
        host("model.py(7): forward", 320, 10, stack),
    ]
    return write_profile(tmp_path / "a.json", events, distributedInfo={"rank": 0, "world_size": 1})


def test_graph_breaks_have_a_place_a_module_and_the_idle_time_after_them(tmp_path):
    (found,) = import_step(read_profiles([_broken_step(tmp_path)])).graph_breaks
    assert [(one.function, one.place, one.module, one.calls) for one in found] == [
        ("forward", "model.py:12", "Mlp_0", 1),
        ("forward", "model.py:20", "Mlp_0", 1),
    ]
    assert [one.idle_s for one in found] == pytest.approx([70e-6, 30e-6])


def test_a_step_counts_its_own_breaks_and_their_first_kernels(tmp_path):
    """One break just before the step, one as it begins, one inside twice, and one as it ends."""
    stack, name = "python_function", "model.py({0}): torch_dynamo_resume_in_f_at_{0}"
    events = [host(f"ProfilerStep#{number}", 100 * number, 100, "user_annotation") for number in (1, 2, 3)]
    events += [host("nn.Module: Outer_0", 90, 200, stack), host("nn.Module: Inner_0", 200, 20, stack)]
    for number, (at, line) in enumerate([(199, 1), (200, 2), (230, 3), (250, 3), (300, 4)], 1):
        events += [host(name.format(line), at, 0.5, stack), launch(at + 0.1, 0.2, number)]
        events += [kernel("gemm", at + 6, 10, number)]
    found = import_step(read_profiles([write_profile(tmp_path / "a.json", events)]), 2).graph_breaks[0]
    assert [(one.place, one.module, one.calls) for one in found] == [
        ("model.py:3", "", 2),
        ("model.py:2", "Inner_0", 1),
    ]
    assert [one.idle_s for one in found] == pytest.approx(
        [30e-6, 0]
    )  # 216 to 236, 246 to 256; the step before ends at 215
    two = import_step(read_profiles([_broken_step(tmp_path)])).graph_breaks[0]
    assert sum(one.calls for one in two) == 2
