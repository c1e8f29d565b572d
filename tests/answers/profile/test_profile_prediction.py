"""A profiled step predicted: as it was on its own GPUs, scaled by the models on others."""

import json

import pytest
from command_here import run_here
from profile_files import host, kernel, launch, write_profile

from forerun.answers.analysis.predict_program import predict_program
from forerun.answers.analysis.what_if import sensitivities_of_program
from forerun.answers.profile.imported import import_step
from forerun.common.errors import ForerunError
from forerun.core.program.origin import Origin
from forerun.core.program.storage import save
from forerun.describe.cluster.catalog import load_cluster
from forerun.sources.profile.read import read_profiles

A100 = [{"name": "NVIDIA A100-SXM4-40GB", "totalGlobalMem": 42_000_000_000}]
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"
TALK = {"Collective name": "allreduce", "In msg nelems": 50_000_000, "Out msg nelems": 50_000_000, "Group size": 8}
TALK |= {"dtype": "Float", "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]"}
PRODUCT = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}


@pytest.fixture
def program(tmp_path):
    events = [
        *(host("ProfilerStep#1", 0, 50, "user_annotation"), host("aten::mm", 5, 10, **PRODUCT), launch(6, 2, 1)),
        *(launch(20, 2, 2), launch(30, 2, 3)),
        *(launch(35, 1, 90, "cudaEventRecord"), launch(37, 1, 91, "cudaStreamWaitEvent"), launch(40, 2, 4)),
        *(kernel("gemm", 10, 600, 1), kernel(NCCL, 612, 1500, 2, 9, **TALK), kernel("relu", 611, 400, 3)),
        kernel("after", 2113, 100, 4),
    ]
    beside = {"deviceProperties": A100, "distributedInfo": {"rank": 0, "world_size": 8}}
    return import_step(read_profiles([write_profile(tmp_path / "a.json", events, **beside)])).program


def test_its_own_gpus_take_the_recorded_time(program):
    found = predict_program(program, load_cluster("a100-sxm-40gb"), whole_timeline=True)
    assert found.prediction.step_time_s == pytest.approx(2213e-6)
    assert found.prediction.n_gpus == 8
    assert any("recorded on NVIDIA A100-SXM4-40GB" in line for line in found.prediction.explain)


def test_waiting_for_a_second_stream_of_kernels_is_no_pipeline(tmp_path):
    events = [
        *(host("ProfilerStep#1", 0, 50, "user_annotation"), launch(6, 2, 1), launch(20, 2, 2)),
        *(launch(35, 1, 90, "cudaEventRecord"), launch(37, 1, 91, "cudaStreamWaitEvent"), launch(40, 2, 4)),
        *(kernel("a", 10, 100, 1), kernel("beside", 30, 300, 2, 9), kernel("after", 331, 300, 4)),
    ]
    path = write_profile(tmp_path / "a.json", events, deviceProperties=A100)
    found = predict_program(import_step(read_profiles([path])).program, load_cluster("a100-sxm-40gb"))
    assert found.prediction.breakdown["memory_bound"] == pytest.approx(620e-6, rel=0.01)


def _times(program, cluster, **options):
    found = predict_program(program, load_cluster(cluster), whole_timeline=True, **options)
    ops = found.program.ops
    return dict(zip(ops.name, found.costs.duration_ps.tolist(), strict=True))


def test_another_gpu_scales_each_kernel_by_its_models(program):
    here, there = _times(program, "a100-sxm-40gb"), _times(program, "h100-sxm")
    assert here["gemm"] == 600e6
    assert there["gemm"] < 0.6 * here["gemm"]  # 312 to 989 TFLOP/s, less what the power limit takes
    assert there["relu"] == pytest.approx(here["relu"] * 1555 / 3352, rel=0.1)  # by the bandwidth of memory
    assert there[NCCL] < here[NCCL]


def test_more_gpus_change_collectives_alone(program):
    here, there = _times(program, "a100-sxm-40gb"), _times(program, "a100-sxm-40gb", n_gpus=64)
    assert there[NCCL] > here[NCCL]
    assert {name for name in here if here[name] != there[name]} == {NCCL}


def test_what_if_the_network_were_faster(program):
    cluster = load_cluster("a100-sxm-40gb")
    base = predict_program(program, cluster)
    changes = {row.label: row.change for row in sensitivities_of_program(program, cluster, base)}
    assert changes["network twice as fast"] < -0.1
    assert changes["free network"] < changes["network twice as fast"]
    assert changes["HBM twice as fast"] < -0.02


def test_what_if_launches_took_no_time(tmp_path):
    events = [host("ProfilerStep#1", 0, 500, "user_annotation"), launch(400, 5, 1), kernel("a", 410, 50, 1)]
    path = write_profile(tmp_path / "a.json", events, deviceProperties=A100)
    program, cluster = import_step(read_profiles([path])).program, load_cluster("a100-sxm-40gb")
    base = predict_program(program, cluster)
    assert base.prediction.step_time_s == pytest.approx(500e-6)
    changes = {row.label: row.step_time_s for row in sensitivities_of_program(program, cluster, base)}
    assert changes["no launch overhead"] == pytest.approx(60e-6)  # the delay of 10 us, and the kernel


def test_a_gpu_that_is_not_known_keeps_all_times(program):
    program.meta["recorded"]["device"] = ""
    assert _times(program, "h100-sxm")["gemm"] == 600e6


@pytest.mark.parametrize(
    "recorded",
    [
        5,
        {"device": "a100-sxm-40gb", "gpu": "", "time_ps": [-2], "group_ranks": []},
        {"device": 3, "gpu": "", "time_ps": [], "group_ranks": [[0]]},
        {"device": "", "gpu": "", "time_ps": [], "group_ranks": 3},
        {"device": "", "gpu": "", "time_ps": [], "group_ranks": [[0]], "host_ops": [10**9]},
    ],
)
def test_wrong_recorded_times_are_refused(program, recorded):
    program.meta["recorded"] = recorded
    with pytest.raises(ForerunError, match="meta 'recorded'"):
        Origin.of(program)


def test_a_profile_without_memory_does_not_say_that_it_fits(tmp_path):
    events = [launch(10, 5, 1), kernel("a", 30, 100, 1)]
    path = write_profile(tmp_path / "a.json", events, deviceProperties=A100)
    save(import_step(read_profiles([path])).program, tmp_path / "step.program")
    arguments = ("predict", "--program", tmp_path / "step.program", "--cluster", "a100-sxm-40gb")
    shown = run_here(None, *arguments).stdout
    assert "not recorded, so whether it fits is not known" in shown
    assert "nvidia-smi" not in shown
    assert json.loads(run_here(None, *arguments, "--json").stdout)["memory_recorded"] is False
    refused = run_here(None, *arguments, "--must-fit")
    assert refused.returncode == 2
    assert "does not record memory" in refused.stderr
