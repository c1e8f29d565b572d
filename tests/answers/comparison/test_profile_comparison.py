"""A profile of a step with known perturbations: the comparison names them, and its files make the prediction right."""

import json
from dataclasses import replace
from functools import cache

import pytest
from command_here import run_here
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kineto_writer import perturbed, write_kineto

from forerun.answers.analysis.predict_program import predict_program
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.comparison.compare import compare
from forerun.answers.comparison.matching import pairs_of
from forerun.answers.comparison.ran_step import HOST, Line
from forerun.answers.comparison.verdict import verdict
from forerun.answers.profile.imported import import_step
from forerun.core.program.types import Collective
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_any
from forerun.describe.plan.complete import complete_plan
from forerun.sources.profile.kernel_names import work_of
from forerun.sources.profile.read import read_profiles

CLUSTER = load_cluster("h100-sxm")
PLANS = {
    "one": {"seq_len": 128},
    "fsdp": {"dp_shard": 16, "seq_len": 1024},
    "tp": {"tp": 4, "dp_shard": 2, "seq_len": 1024, "compile": True},
}


@cache
def _steps():
    model = load_any("gpt2-large")
    plans = {name: complete_plan(fields, n_gpus=None, global_batch=None) for name, fields in PLANS.items()}
    return {name: simulate_setup(Setup(model, plan, CLUSTER)) for name, plan in plans.items()}


def _is_product(ops, row):
    return bool(ops.is_gemm[row])


def _is_attention_backward(ops, row):
    return bool(ops.is_attention[row]) and bool(ops.details_of(row).backward)


def _is_gather(ops, row):
    return int(ops.collective[row]) == Collective.ALL_GATHER


@pytest.fixture(scope="module")
def steps():
    return _steps()


KINDS = {
    "matrix products": _is_product,
    "attention's backward pass": _is_attention_backward,
    "all-gathers": _is_gather,
}


def _compared(path, simulation, kernels=lambda row: 1.0, host=1.0, **how):
    timeline, issue_ps = perturbed(simulation, kernels, host)
    file = write_kineto(path, simulation, timeline, issue_ps, **how)
    return compare(import_step(read_profiles([file])), simulation, CLUSTER.device.name), timeline


def _adds_up(found):
    lost = sum(part.lost_s for part in found.parts)
    assert lost == pytest.approx(found.measured_s - found.predicted_s, abs=1e-9)
    for step in (found.measured, found.predicted):
        assert sum(step.parts.values()) == pytest.approx(step.step_s, rel=1e-9)
        assert min(step.parts.values()) >= 0


@pytest.mark.parametrize("plan", PLANS)
def test_a_profile_of_the_prediction_itself_differs_in_nothing(steps, tmp_path, plan):
    found, _ = _compared(tmp_path / "a.json", steps[plan])
    _adds_up(found)
    assert abs(found.slowdown) < 1e-5
    # a launch that is late by less than the gap between two kernels counts as such a gap, not as the host's time; how
    # many are depends on the times of the kernels
    assert max(abs(part.lost_s) for part in found.parts) < 2e-3 * found.predicted_s
    assert all(pair.counts[0] == pair.counts[1] for pair in found.pairs)
    assert verdict(found).startswith("as fast as predicted")


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plan=st.sampled_from(sorted(PLANS)),
    kind=st.sampled_from(sorted(KINDS)),
    factor=st.floats(1.1, 3.0),
    shapes=st.booleans(),
)
def test_a_slower_kind_of_work_is_named_with_its_size(tmp_path, plan, kind, factor, shapes):
    simulation = _steps()[plan]
    ops = simulation.program.ops
    slow = lambda row: factor if KINDS[kind](ops, row) else 1.0  # noqa: E731
    found, timeline = _compared(tmp_path / "a.json", simulation, slow, shapes=shapes)
    _adds_up(found)
    assert found.measured_s == pytest.approx(timeline.end_of_step_ps / 1e12, rel=1e-4)
    for part in found.parts:
        if part.predicted_busy_s < 1e-4:
            continue
        expected = factor if part.label.startswith(kind) else 1.0
        # collectives that share links slow each other; a launch that is late by less than a gap counts as the kernel's
        loose = 0.1 if " over " in part.label else 0.03
        assert part.measured_busy_s / part.predicted_busy_s == pytest.approx(expected, rel=loose), part
    assert found.slowdown < 0.01 or kind in verdict(found)


CLASSES = {"attn": "GPT.Block_7.Attention_7", "mlp": "GPT.Block_7.MLP_7", "ffn": "GPT.Block_7.MLP_7"}


def test_modules_that_a_profile_names_by_classes_are_those_of_the_prediction(steps, tmp_path):
    """Memory-bound kernels of one half of a layer take three times as long; its module has what they lost."""
    simulation = steps["one"]
    flat, ops, paths = simulation.flat, simulation.program.ops, simulation.program.modules
    inside = {int(row) for row, module in zip(flat.op, flat.module, strict=True) if "ffn" in paths[module]}
    elsewhere = {int(row) for row, module in zip(flat.op, flat.module, strict=True) if "ffn" not in paths[module]}
    slow = {row for row in inside - elsewhere if not (ops.is_gemm[row] or ops.is_communication[row])}
    named = lambda path: CLASSES.get(path.rpartition(".")[2], "GPT." + path.title().replace(".", ""))  # noqa: E731
    found, _ = _compared(tmp_path / "a.json", simulation, lambda row: 3.0 if row in slow else 1.0, module_name=named)
    assert slow
    lost = {row.module: row.lost_s for row in found.modules}
    (mlp,) = [module for module in lost if module.endswith("ffn")]
    assert lost[mlp] > 1e-4
    others = sum(abs(lost_s) for module, lost_s in lost.items() if module != mlp)
    assert others < 0.1 * lost[mlp]


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(factor=st.floats(3.0, 8.0))
def test_a_late_host_is_named_with_its_size(tmp_path, factor):
    found, _ = _compared(tmp_path / "a.json", _steps()["one"], host=factor)
    _adds_up(found)
    assert found.slowdown > 0.05
    worst = found.parts[0]
    assert worst.part == HOST
    assert worst.lost_s == pytest.approx(found.measured_s - found.predicted_s, rel=0.1)
    assert "host: the GPU runs nothing for" in verdict(found)


def test_collectives_that_a_late_host_exposes_say_so(steps, tmp_path):
    found, _ = _compared(tmp_path / "a.json", steps["fsdp"], host=4.0)
    assert "all-gathers over 16 ranks, of which" in verdict(found)
    assert "because the host launches them late" in verdict(found)


def test_collectives_say_the_bandwidths_of_both_sides(steps, tmp_path):
    ops = steps["fsdp"].program.ops
    found, _ = _compared(tmp_path / "a.json", steps["fsdp"], lambda row: 2.0 if _is_gather(ops, row) else 1.0)
    pairs = [pair for pair in found.pairs if pair.part == "all-gathers over 16 ranks"]
    assert pairs
    for pair in pairs:
        rates = [pair.rate(side, "moved_bytes") for side in (pair.predicted, pair.measured)]
        assert rates[0] / rates[1] == pytest.approx(2.0, rel=1e-3)
    assert "GB/s where" in verdict(found)
    assert "on 2 nodes" in verdict(found)


LINE = Line("attention", "attention", "", (), "", "backward", (), 1, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_attention_is_paired_by_its_size_and_helpers_join_the_largest():
    wide, narrow = (2, 8, 512, 512, 128), (2, 8, 512, 512, 64)
    measured = [
        replace(LINE, name="flash_fwd a", shape=wide, time_s=3.0),
        replace(LINE, name="flash_fwd b", shape=narrow, time_s=1.0),
        replace(LINE, name="dot_do_o", time_s=0.25),
    ]
    predicted = [replace(LINE, name="attention", shape=shape) for shape in (narrow, wide)]
    pairs = pairs_of(measured, predicted)
    assert [(pair.shape, pair.measured_s, pair.counts) for pair in pairs] == [
        (wide, 3.25, (1, 1)),
        (narrow, 1.0, (1, 1)),
    ]


def test_attention_without_sizes_is_paired_by_pass():
    measured = [replace(LINE, name="flash_fwd", time_s=2.0)]
    (pair,) = pairs_of(measured, [replace(LINE, name="attention", shape=(2, 8, 512, 512, 64))])
    assert pair.lost_s == 1.0


def test_a_profile_of_the_prediction_pairs_attention_by_size(steps, tmp_path):
    found, _ = _compared(tmp_path / "a.json", steps["tp"])
    pairs = [pair for pair in found.pairs if pair.part.startswith("attention")]
    assert len(pairs) == 2
    assert {pair.shape for pair in pairs} == {(1, 5, 1024, 1024, 64)}


def test_graph_breaks_stand_in_the_verdict_and_the_tables(tmp_path):
    file = write_kineto(tmp_path / "a.json", _steps()["one"], *perturbed(_steps()["one"], host=6.0))
    events = json.loads(file.read_text())
    calls = [event["ts"] for event in events["traceEvents"] if event["name"] == "cudaLaunchKernel"]
    name = "model.py(12): torch_dynamo_resume_in_forward_at_12"
    for ts in calls[40:-40:20]:
        more = {"ph": "X", "cat": "python_function", "name": name, "pid": 10, "tid": 1, "ts": ts - 0.001, "dur": 0.0005}
        events["traceEvents"].append(more | {"args": {}})
    file.write_text(json.dumps(events))
    imported = import_step(read_profiles([file]))
    found = compare(imported, _steps()["one"], CLUSTER.device.name)
    ((place, calls_, idle_s),) = [(one.place, one.calls, one.idle_s) for one in found.graph_breaks]
    assert (place, calls_) == ("model.py:12", len(calls[40:-40:20]))
    assert idle_s > 0
    broken = replace(imported, graph_breaks=((found.graph_breaks[0]._replace(idle_s=found.parts[0].lost_s / 2),),))
    said = verdict(compare(broken, _steps()["one"], CLUSTER.device.name))
    assert "of it after graph breaks in forward (model.py:12)" in said
    out = run_here(None, "profile", "compare", file, "--model", "gpt2-large", "--seq-len", "128").stdout
    assert "Graph breaks" in out
    assert "at 1 places, GPU idle for" in out


def test_a_profile_beside_its_own_program_differs_in_nothing(steps, tmp_path):
    timeline, issue_ps = perturbed(steps["tp"])
    imported = import_step(read_profiles([write_kineto(tmp_path / "a.json", steps["tp"], timeline, issue_ps)]))
    again = predict_program(imported.program, load_cluster(imported.device), whole_timeline=True)
    found = compare(imported, again, imported.device)
    assert all(abs(part.lost_s) < 1e-9 for part in found.parts)
    assert found.slowdown == pytest.approx(0, abs=1e-6)


PERTURBED = [("product", 1.0), ("collective", 1.0), ("memory", 1.0), ("all", 1.0), ("none", 3.0), ("product", 2.0)]


@pytest.mark.parametrize("of_program", [False, True])
@pytest.mark.parametrize(("kind", "host"), PERTURBED)
def test_with_the_files_the_prediction_is_right(steps, tmp_path, kind, host, of_program):
    ops = steps["fsdp"].program.ops
    mask = {
        "product": ops.is_gemm,
        "collective": ops.is_collective,
        "memory": ops.is_memory_bound,
        "all": ops.kind >= 0,
        "none": ops.kind < 0,
    }[kind]
    timeline, issue_ps = perturbed(steps["fsdp"], lambda row: 1.4 if mask[row] else 1.0, host)
    file = write_kineto(tmp_path / "a.json", steps["fsdp"], timeline, issue_ps)
    plan = ["gpt2-large", "--dp-shard", "16", "--seq-len", "1024"]
    if of_program:
        other = write_kineto(tmp_path / "b.json", steps["fsdp"], *perturbed(steps["fsdp"]))
        assert run_here(None, "profile", "import", str(other), "-o", str(tmp_path / "b.program")).returncode == 0
        plan = ["--program", str(tmp_path / "b.program")]
    names = ("anchor", "kernel_profile", "network_profile")
    files = {f"--{name}".replace("_", "-"): str(tmp_path / name) for name in names}
    written = [text for option, path in files.items() for text in (f"{option}-out", path)]
    compared = plan if of_program else ["--model", *plan]
    assert run_here(None, "profile", "compare", str(file), *compared, *written, "--json").returncode == 0
    read = [text for pair in files.items() for text in pair]
    done = run_here(None, "predict", *plan, "--cluster", "h100-sxm", *read, "--json")
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)["step_time_s"]
    assert again == pytest.approx(timeline.end_of_step_ps / 1e12, rel=0.02)


def test_the_page_and_the_tables_are_written(steps, tmp_path):
    timeline, issue_ps = perturbed(steps["tp"])
    file = write_kineto(tmp_path / "a.json", steps["tp"], timeline, issue_ps)
    plan = ["--model", "gpt2-large", "--tp", "4", "--dp-shard", "2", "--seq-len", "1024", "--compile"]
    out = run_here(None, "profile", "compare", file, *plan, "--report", tmp_path / "page.html").stdout
    assert out.startswith("as fast as predicted")
    assert "Where the step lost and won time" in out
    assert "measured: compute" in (tmp_path / "page.html").read_text()


BAD = [
    ([], "give one of --model with a plan"),
    (["--model", "gpt2-large", "--program", "b.program"], "give one of --model with a plan"),
    (["--program", "missing.program"], "missing.program"),
    (["--program", "b.program", "--tp", "2"], "a saved program has its own plan"),
    (["--model", "gpt2-large", "--seq-len", "1024", "--dp-shard", "8", "--anchor-out", "no/a.yaml"], "no folder"),
]


@pytest.mark.parametrize(("options", "words"), BAD)
def test_bad_options_end_in_one_line(steps, tmp_path, options, words):
    file = write_kineto(tmp_path / "a.json", steps["tp"], *perturbed(steps["tp"]))
    (tmp_path / "b.program").write_text("")
    done = run_here(tmp_path, "profile", "compare", file, *options)
    assert done.returncode == 2
    error = done.stderr
    assert words in error
    assert error.count("\n") == 1


NAMES = {
    "nvjet_hsh_128x256_64x4_2x1_v_bz_TNT": ("product", "product"),
    "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x32": ("product", "product"),
    "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32": ("product", "product"),
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16": ("product", "product"),
    "std::enable_if<!T7, void>::type internal::gemvx::kernel<int": ("product", "product"),
    "cudnn_infer_ampere_scudnn_winograd_128x128_ldg1_ldg4_relu": ("product", "convolution"),
    "volta_scudnn_128x128_stridedB_splitK_medium_nn_v1": ("product", "convolution"),
    "volta_fp16_scudnn_fp16_128x64_relu_small_nn_v1": ("product", "convolution"),
    "void fft2d_r2c_32x32<float, false, 0u, false>(float2*, float const*)": ("product", "convolution"),
    "cask_cudnn::computeBOffsetsKernel(cask_cudnn::ComputeBOffsetsParams)": ("product", "convolution"),
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<128,": ("attention", "attention"),
    "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<": ("attention_backward", "attention"),
    "void flash::flash_bwd_dot_do_o_kernel<true": ("attention_backward", "attention"),
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": ("attention", "attention"),
    "fmha_cutlassB_bf16_aligned_64x64_k64_sm80": ("attention_backward", "attention"),
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": ("attention", "attention"),
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16": ("attention_backward", "attention"),
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": ("memory", "norm"),
    "triton_poi_fused_add_mul_3": ("memory", "element-wise"),
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<": ("optimizer", "optimizer"),
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<": ("memory", "loss"),
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy": ("memory", "moving"),
    "ncclDevKernel_AllGather_RING_LL(ncclDevComm*)": ("communication", "exchange"),
    "a name that nobody knows": ("memory", "other"),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_kernels_tell_what_they_do(name):
    assert tuple(work_of(name)) == NAMES[name]


ANCHORS = {
    "rates: {gem: 1}": "unknown rate 'gem'",
    "rates: {gemm: 0}": "rates: gemm: expected a number above 0",
    "rates: 3": "expected factors by name",
    "{cluster: a100-sxm-80gb, rates: {gemm: 1}}": "its rates are of a100-sxm-80gb",
}


@pytest.mark.parametrize("text", ANCHORS)
def test_wrong_rates_end_in_one_line(tmp_path, text):
    file = tmp_path / "anchor.yaml"
    file.write_text(text)
    arguments = ["predict", "gpt2-large", "--cluster", "h100-sxm", "--seq-len", "1024", "--anchor", str(file)]
    done = run_here(None, *arguments)
    assert done.returncode == 2
    error = done.stderr
    assert ANCHORS[text] in error
    assert str(file) in error
