"""Microbenchmarks, everything but the GPU: cases on the CPU, the order of events on a clock of our own."""

import time
from dataclasses import dataclass, field

import pytest

from forerun.common.errors import ForerunError
from forerun.core.cost.measured_files import read_kernel_profile, read_network_profile
from forerun.core.program.types import Collective
from forerun.describe.cluster.catalog import load_cluster
from forerun.evidence.measure.bench_kernels import Sizes, kernel_cases
from forerun.evidence.measure.calibrate import calibrate
from forerun.evidence.measure.microbench import (
    gpu_timer,
    import_torch,
    measure_collectives,
    measure_kernels,
    write_kernels,
    write_network,
)
from forerun.evidence.measure.samples import read_samples
from forerun.evidence.measure.timers import CudaTimer, run_count

TINY = Sizes(
    gemm_m=(16, 32, 48, 64),
    gemm_nk=((32, 16), (48, 32), (64, 64)),
    backward_least_m=32,
    head_dims=(16,),
    heads=((4, 2), (2, 2)),
    sequences=(32, 64),
    attention_tokens=(64, 128),
    moved_bytes=(4096, 16384, 65536, 262144),
    copied_bytes=(1024, 4096, 16384, 65536),
)


class CpuTimer:
    """What runs on the CPU is done when the call returns."""

    device = "cpu"

    def kernel_s(self, run) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    together_s = issue_s = kernel_s


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("torch")
    return import_torch()


@pytest.fixture(scope="module")
def found(torch):
    return measure_kernels(CpuTimer(), torch, TINY)


def test_what_is_measured_is_a_kernel_profile(found, tmp_path):
    profile = read_kernel_profile(write_kernels(tmp_path / "new" / "folder", found, "a test"))
    assert {shape[0] for _, shape in profile.gemm_of_layout} >= {"bf16", "fp16", "fp32", "tf32"}
    linear = ("bf16", 32, 48, 32, 1)  # 32 tokens, 48 outputs, 32 inputs
    assert {(0, linear), (1, ("bf16", 32, 32, 48, 1)), (2, ("bf16", 48, 32, 32, 1))} <= set(profile.gemm_of_layout)
    assert not any(layout and shape[0] != "bf16" for layout, shape in profile.gemm_of_layout)
    assert {(kernel, shape[7]) for kernel, shape in profile.attention} == {("flash2", 0), ("flash2", 1)}
    assert set(profile.memory) == {"", "silu", "copy"}
    assert profile.host_copy.size_bytes == TINY.copied_bytes
    assert found.issue_us > 0


def test_what_does_not_run_here_is_named_once_with_its_reason(found):
    cudnn = [line for line in found.failed if line.startswith("attention cudnn: ")]
    assert len(cudnn) == 1
    assert "\n" not in cudnn[0]
    assert len(cudnn[0]) > len("attention cudnn: ")


def test_progress_hears_of_every_case(torch):
    sizes = Sizes(gemm_nk=(), head_dims=(), moved_bytes=(4096,), copied_bytes=(1024,))
    heard = []
    measure_kernels(CpuTimer(), torch, sizes, heard.append)
    assert heard == [1, 2, 3, 4]


def test_a_calibration_takes_the_files(found, tmp_path):
    path = write_kernels(tmp_path, found, "a test")
    calibration = calibrate(load_cluster("h100-sxm"), read_samples([path], [], 8))
    sections = {row.section for row in calibration.errors}
    assert sections >= {"gemm.bf16", "gemm.fp32", "attention.head_dim.16", "memory_bound", "host_copy"}
    assert any("attention backward of flash2" in note for note in calibration.notes)
    assert "wgrad: 9 rows, mean error" in calibration.profile.gemm_roles.source


def test_products_that_take_too_long_are_left_out(torch):
    sizes = Sizes(gemm_dtypes=("bf16", "fp32"), head_dims=(), moved_bytes=(), copied_bytes=())
    cells = [case.cells for case in kernel_cases(sizes, torch, "cpu")]
    flops = {
        dtype: max(2.0 * c["m"] * c["n"] * c["k"] for c in cells if c["dtype"] == dtype) for dtype in ("bf16", "fp32")
    }
    assert flops["fp32"] <= sizes.gemm_most_flops / 8 < flops["bf16"] <= sizes.gemm_most_flops


def test_collectives_of_every_group_size_are_a_network_profile(torch, tmp_path):
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=6)
    try:
        times = measure_collectives(CpuTimer(), torch, (1024, 4096))
    finally:
        torch.distributed.destroy_process_group()
    curves = read_network_profile(write_network(tmp_path, times, "a test")).curves
    kinds = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)
    assert set(curves) == {(kind, ranks, 1) for kind in kinds for ranks in (2, 4, 6)}
    assert curves[Collective.ALL_GATHER, 2, 1].size_bytes == (1024, 4096)
    assert curves[Collective.ALL_GATHER, 6, 1].size_bytes == (1020, 4092)  # whole elements for each rank


def test_collectives_between_nodes_are_refused(torch, monkeypatch):
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=8)
    try:
        with pytest.raises(ForerunError, match="inside one node: start torchrun with --nnodes 1"):
            measure_collectives(CpuTimer(), torch, (1024,))
    finally:
        torch.distributed.destroy_process_group()


def test_without_a_gpu_nothing_is_timed(torch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ForerunError, match="no GPU"):
        gpu_timer(torch)


# -- the timer of GPUs on a clock of our own ---------------------------------------------------------------------------


@dataclass
class FakeCuda:
    """A GPU whose clock goes forward by what is run on it."""

    now_ms: float = 0.0
    flushes: int = 0
    dirty: bool = True
    log: list[str] = field(default_factory=list)

    class _Event:
        def __init__(self, gpu):
            self.gpu, self.at_ms = gpu, None

        def record(self):
            self.at_ms = self.gpu.now_ms
            self.gpu.log.append("record")

        def elapsed_time(self, end):
            assert self.gpu.log[-1] == "synchronize", "CUDA: both events must be completed"
            return end.at_ms - self.at_ms

    def Event(self, enable_timing):
        assert enable_timing
        return self._Event(self)

    def synchronize(self):
        self.log.append("synchronize")

    def current_device(self):
        return 0

    def get_device_properties(self, device):
        return type("Properties", (), {"L2_cache_size": 200 * 2**20})

    def kernel(self, ms):
        """Takes `ms`, or half where it finds its operands in the cache."""
        self.now_ms += ms / 2 if not self.dirty else ms
        self.dirty = False


class FakeTorch:
    int8 = "int8"

    def __init__(self):
        self.cuda = FakeCuda()

    def empty(self, size, dtype, device):
        assert size == 400 * 2**20
        gpu = self.cuda

        class Buffer:
            def zero_(self):
                gpu.now_ms += 5.0
                gpu.flushes += 1
                gpu.dirty = True

        return Buffer()


def test_kernels_are_timed_alone_and_with_cold_caches():
    fake = FakeTorch()
    assert CudaTimer(fake).kernel_s(lambda: fake.cuda.kernel(2.0)) == pytest.approx(2e-3)
    assert fake.cuda.flushes == 1 + run_count(2e-3)


def test_runs_back_to_back_begin_on_an_idle_device():
    fake = FakeTorch()
    CudaTimer(fake).together_s(lambda: fake.cuda.log.append("run"))
    log = fake.cuda.log
    first = log.index("record")
    assert log[first - 1] == "synchronize"
    assert log[first : first + 23] == ["record", *["run"] * 20, "record", "synchronize"]


def test_back_to_back_runs_are_divided_by_their_number_which_no_clock_decides():
    counts = []
    for ms in (0.01, 300.0):
        fake, calls = FakeTorch(), []

        def run(fake=fake, calls=calls, ms=ms):
            calls.append(ms)
            fake.cuda.kernel(ms)

        assert CudaTimer(fake).together_s(run) == pytest.approx(ms / 2 * 1e-3)
        counts.append(len(calls))
    assert counts[0] == counts[1]


def test_the_host_is_timed_without_waiting_for_the_device():
    fake = FakeTorch()
    assert 0 < CudaTimer(fake).issue_s(lambda: fake.cuda.log.append("run")) < 1e-3
    first = fake.cuda.log.index("run")
    assert fake.cuda.log[first : first + 200] == ["run"] * 200


def test_short_kernels_run_more_often_within_limits():
    assert [run_count(seconds) for seconds in (0.0, 1e-6, 5e-3, 1.0)] == [101, 101, 20, 7]


@pytest.mark.parametrize("size", TINY.moved_bytes)
def test_memory_bound_cases_move_the_bytes_that_they_say(torch, size):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Moved(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            tensors = {one.data_ptr(): one for one in (*args, *(kwargs or {}).values(), made) if torch.is_tensor(one)}
            self.total += sum(one.nbytes for one in tensors.values())
            return made

    cases = [case for case in kernel_cases(TINY, torch, "cpu") if case.cells["kind"] == "memory"]
    runs = [case.prepare() for case in cases if case.cells["bytes"] == size]
    assert len(runs) == 3
    for run in runs:
        with Moved() as moved:
            run()
        assert moved.total == pytest.approx(size, abs=6)
