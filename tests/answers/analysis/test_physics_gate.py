"""No Prediction breaks physics or arithmetic; what would is told with its numbers. Questionable input is said."""

import math
from dataclasses import replace

import numpy as np
import pytest

from forerun.answers.analysis.physics_gate import checked
from forerun.answers.analysis.predict import predict
from forerun.common.errors import ForerunError, ImpossibleResult
from forerun.core.cost.physics import least_compute_s, refuse_faster
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build

MODEL = load_model("llama-3.1-8b")
H100 = load_cluster("h100-sxm")


@pytest.fixture(scope="module")
def made():
    return predict(MODEL, Plan(seq_len=4096, dp_shard=8), H100)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step_time_s": math.nan}, "step_time_s is nan"),
        ({"peak_allocated_gib": -1.0}, "peak_allocated_gib is -1"),
        ({"mfu": math.inf}, "mfu is inf"),
        ({"step_time_low_s": 1e3}, "outside its band of 1000 to"),
        ({"utilization": 1.2}, "products and attention use 1.2000 of the peaks"),
        ({"breakdown": {"matmul": 1e-3}}, "the parts of the step sum to 0.001 s"),
        ({"bubble_s": 1e3}, "bubble_s is 1000 s of a step of"),
        ({"hfu": 0.01}, "HFU 0.0100 is below MFU"),
        ({"peak_reserved_gib": 1.0}, "1.0000 GiB are reserved for"),
        ({"peak_reserved_high_gib": 1.0}, "lie above their band to 1.0000"),
        ({"memory_by_category_gib": {"activation": 1.0}}, "memory by category sums to 1 GiB"),
    ],
)
def test_what_breaks_physics_or_arithmetic_is_a_bug_report(made, change, said):
    with pytest.raises(ImpossibleResult, match=said) as caught:
        checked(replace(made, **change))
    assert "llama-3.1-8b on 8 x h100-sxm under" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ForerunError, match="the measured times of kernels or collectives are faster than the GPU"):
        checked(replace(made, **change), is_measured=True)


def test_a_sound_prediction_passes_as_it_is(made):
    assert checked(made) is made
    assert 0 < made.utilization < 1
    assert made.mfu_peak == "bf16, 989 TFLOP/s"


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "fp8"])
@pytest.mark.parametrize("seq_len", [512, 131072])
def test_every_dtype_stays_under_its_own_peak(precision, seq_len):
    """fp32 attention at the peak of bf16 gave 144 % MFU."""
    prediction = predict(MODEL, Plan(seq_len=seq_len, dp_shard=8, precision=precision), H100)
    assert 0 < prediction.utilization < 1
    if precision in ("fp32", "tf32"):
        assert prediction.mfu_peak.startswith(precision)
        assert prediction.mfu < 1


def test_nvfp4_is_measured_by_the_peak_of_bf16_and_by_its_own():
    prediction = predict(MODEL, Plan(seq_len=8192, dp_shard=8, precision="nvfp4", compile=True), load_cluster("b200"))
    assert prediction.mfu_peak == "bf16, 2,250 TFLOP/s"
    assert prediction.utilization < prediction.mfu


def refusal(ops, program, duration_ps, cluster=H100):
    refuse_faster(ops, program.groups, cluster, duration_ps, np.zeros(len(ops), np.bool_), True)


@pytest.mark.parametrize("which", ["is_gemm", "is_attention", "is_memory_bound", "is_collective"])
def test_one_op_faster_than_physics_is_named(which):
    program = build(MODEL, Plan(seq_len=4096, dp_shard=16, tp=8), H100)
    slow = np.full(len(program.ops), 10**15)
    refusal(program.ops, program, slow)
    row = int(np.flatnonzero(getattr(program.ops, which))[0])
    fast = slow.copy()
    fast[row] = 1000
    with pytest.raises(ImpossibleResult, match=rf"{program.ops.name[row]} takes 1e-09 s on h100-sxm, but .* need"):
        refusal(program.ops, program, fast)


def test_the_least_time_is_flops_over_the_peak_of_the_dtype():
    for precision, peak in (("fp32", 66.9e12), ("bf16", 989.4e12), ("fp8", 1978.9e12)):
        ops = build(MODEL, Plan(seq_len=4096, dp_shard=8, precision=precision), H100).ops
        product = next(i for i in range(len(ops)) if ops.name[i] == "ffn.down")
        assert ops.dtype[product] == precision
        assert least_compute_s(ops, H100.device)[product] == pytest.approx(ops.flops[product] / peak)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (
            Plan(seq_len=512, pp=16),
            "of the step is pipeline bubble: one micro batch for 16 stages; try n_microbatches 32",
        ),
        (Plan(seq_len=512, dp_shard=8, expert_imbalance=2.0), "expert_imbalance 2 changes nothing"),
    ],
)
def test_questionable_input_is_said(plan, said):
    assert any(said in line for line in predict(MODEL, plan, H100).warnings)


def test_usual_input_raises_no_doubt(made):
    assert made.warnings == ()
    assert predict(MODEL, Plan(seq_len=512, pp=4, n_microbatches=16), H100).warnings == ()


@pytest.mark.parametrize("cluster", ["a100", "h100-sxm", "mi300x", "rtx3090"])
def test_recurrences_in_fp32_run_below_the_peak_of_fp32(cluster):
    plan = Plan(seq_len=512, dp_shard=64, ep=8, precision="fp32", stack="torchtitan")
    assert predict(load_model("qwen3-next-80b-a3b"), plan, load_cluster(cluster)).step_time_s > 0
