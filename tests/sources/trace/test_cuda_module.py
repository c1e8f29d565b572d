"""torch.cuda on the virtual device: what programs ask of it, and what the recorder hears."""

import pytest
from virtual_process import run_virtual

from forerun.common.errors import ForerunError
from forerun.describe.cluster.catalog import cuda_entries, load_device


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_virtual(
        """
        c = torch.cuda
        result["available"] = [c.is_available(), c.device_count(), c.is_initialized(), torch.backends.cuda.is_built()]
        properties = c.get_device_properties("cuda:3")
        result["device"] = [c.get_device_name(), list(c.get_device_capability()), properties.multi_processor_count]
        result["version"] = [torch.version.cuda, torch.backends.cudnn.is_available(), c.is_bf16_supported()]
        c.set_device(3)
        with c.device(1):
            inside = c.current_device()
        result["index"] = [inside, c.current_device(), torch.accelerator.current_device_index()]
        result["fresh"] = str(torch.empty(2, device="cuda").device)
        result["invalid"] = fails(lambda: c.set_device(8))

        side, other = c.Stream(), c.Stream()
        result["streams"] = [isinstance(side, torch.Stream), isinstance(side, c.Stream), side == other, side == side]
        with c.stream(side):
            result["entered"] = [c.current_stream() == side, torch.accelerator.current_stream().stream_id]
        with side:
            result["entered"].append(c.current_stream() == side)
        result["left"] = c.current_stream() == c.default_stream()
        result["context"] = isinstance(c.StreamContext, type)
        result["side"] = [side.stream_id, other.stream_id]

        x = torch.empty(8, device="cuda")
        recorder.start()
        x.mul_(2)
        side.wait_stream(c.current_stream())
        with c.stream(side):
            x.add_(1)
        event = side.record_event()
        event.wait()
        x.sub_(1)
        generic = torch.Event("cuda")
        generic.record(side)
        other.wait_event(generic)
        with c.stream(other):
            x.neg_()
        outer = torch.Stream("cuda")
        outer.wait_event(event)
        with outer:
            x.abs_()
        result["ordered"] = nodes("mul_", "add_", "sub_", "neg_", "abs_")
        before = recorder.n_nodes
        c.synchronize(); event.synchronize(); side.synchronize(); torch.accelerator.synchronize()
        result["waits"] = nodes("synchronize")
        timed = c.Event(enable_timing=True), c.Event(enable_timing=True)
        timed[0].record(); timed[1].record()
        result["elapsed"] = timed[0].elapsed_time(timed[1])

        before = c.memory_allocated()
        big = torch.empty(1 << 20, device="cuda")
        result["memory"] = [before, c.memory_allocated() - before, c.max_memory_allocated() - before]
        del big
        result["after"] = [c.memory_allocated() - before, c.max_memory_allocated() - before]
        c.reset_peak_memory_stats()
        free, total = c.mem_get_info()
        result["peak"] = c.max_memory_allocated() - c.memory_allocated()
        result["free"] = [total - free - c.memory_allocated(), total == properties.total_memory]
        result["reserved"] = [c.memory_reserved() % (2 << 20), c.memory_reserved() >= c.memory_allocated()]
        result["accelerator"] = torch.accelerator.memory_allocated() == c.memory_allocated()
        c.empty_cache(); c.memory_summary(); c.memory._record_memory_history(); c.ipc_collect()

        c.manual_seed_all(7)
        state = c.get_rng_state()
        c._set_rng_state_offset(64)
        moved = c._get_rng_state_offset()
        c.set_rng_state(state)
        result["random"] = [c.initial_seed(), state.numel(), moved, c._get_rng_state_offset()]
        seeded = torch.Generator(device="cuda").manual_seed(1)
        result["generator"] = torch.randn(4, device="cuda", generator=seeded).shape[0]

        host = torch.ones(4)
        result["pinned"] = [host.is_pinned(), host.pin_memory() is host, host.is_pinned(), host[:2].is_pinned()]
        result["pinned"].append(torch.empty(3, pin_memory=True).numel())
        x.record_stream(side)
        result["unpinnable"] = fails(x.pin_memory)
        with c.nvtx.range("range"):
            c.nvtx.mark("mark")
        c.cudart().cudaProfilerStart()
        result["unavailable"] = fails(lambda: c.caching_allocator_alloc(4), ForerunError)

        graph = c.CUDAGraph()
        captured = recorder.n_nodes
        with c.graph(graph):
            y = (x * 2).relu()
        replays = nodes("mul", "relu")
        graph.replay(); graph.replay()
        result["graph"] = [replays, [name for name, *_ in nodes("mul", "relu")]]
        result["graphed"] = c.make_graphed_callables(torch.relu, (x,)) is torch.relu

        scaler = torch.amp.GradScaler("cuda")
        layer = nn.Linear(4, 4).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        with torch.autocast("cuda", dtype=torch.float16):
            out = layer(torch.randn(2, 4, device="cuda"))
        result["autocast"] = str(out.dtype)
        scaler.scale(out.float().mean()).backward()
        scaler.step(optimizer); scaler.update()
        result["scale"] = scaler.get_scale()
        """,
        tmp_path_factory.mktemp("cuda"),
    )


def test_the_device_is_there(answers):
    assert answers["available"] == [True, 8, True, True]
    assert answers["device"] == ["NVIDIA H100 80GB HBM3", [9, 0], 132]
    assert answers["version"] == ["13.0", True, True]


def test_the_current_device_is_the_one_that_was_set(answers):
    assert answers["index"] == [1, 3, 3]
    assert answers["fresh"] == "cuda:3"
    assert "invalid device ordinal 8" in answers["invalid"]


def test_streams_are_torchs_and_of_their_own(answers):
    assert answers["streams"] == [True, True, False, True]
    assert answers["entered"] == [True, answers["side"][0], True]
    assert answers["left"]
    assert answers["context"]
    assert answers["side"][0] != answers["side"][1]


def test_events_order_kernels_of_different_streams(answers):
    mul, add, sub, neg, absolute = answers["ordered"]
    assert [node[1] for node in (mul, add, sub, neg)] == [0, answers["side"][0], 0, answers["side"][1]]
    assert (mul[2], add[2], sub[2]) == ([], [mul[7]], [add[7]])
    assert neg[2] == [add[7]], "a generic event"
    assert absolute[2] == [add[7]], "a generic stream"


def test_the_host_waits_for_what_it_names(answers):
    device, event, stream, accelerator = answers["waits"]
    kernels = {node[7] for node in answers["ordered"]}
    assert len(device[2]) == 4
    assert set(device[2]) < kernels
    add = answers["ordered"][1][7]
    assert event[2] == [add]
    assert stream[2] == [add]
    assert device[7] not in accelerator[2]
    assert answers["elapsed"] > 0


def test_memory_is_what_the_recorder_counts(answers):
    _, now, peak = answers["memory"]
    assert now == 4 << 20
    assert peak >= now
    assert answers["after"][0] == 0
    assert answers["after"][1] >= 4 << 20
    assert answers["peak"] == 0
    assert answers["free"] == [0, True]
    assert answers["reserved"] == [0, True]
    assert answers["accelerator"]


def test_random_state_can_be_saved_and_restored(answers):
    assert answers["random"] == [7, 16, 64, 0]
    assert answers["generator"] == 4


def test_pinned_memory_is_host_memory(answers):
    assert answers["pinned"] == [False, True, True, True, 3]
    assert "cannot pin" in answers["unpinnable"]


def test_what_needs_a_gpu_says_so(answers):
    assert answers["unavailable"].startswith("ForerunError: torch._C._cuda_cudaCachingAllocator_raw_alloc")


def test_a_graph_issues_its_kernels_when_it_is_replayed(answers):
    captured, replayed = answers["graph"]
    assert captured == []
    assert replayed == ["mul", "relu"] * 2
    assert answers["graphed"]


def test_mixed_precision_runs(answers):
    assert answers["autocast"] == "torch.float16"
    assert answers["scale"] == 65536.0


@pytest.mark.parametrize("name", ["abacus", "tpu-v4"])
def test_a_device_that_cuda_says_nothing_of_is_refused_by_name(name):
    virtual_device = pytest.importorskip("forerun.sources.trace.inside.device.virtual_device")
    with pytest.raises(ForerunError, match=rf"--device {name}: .* known: a100-pcie-40gb, a100-pcie-80gb, "):
        virtual_device.device(name)


@pytest.mark.parametrize("name", sorted(cuda_entries()))
def test_a_program_sees_the_device_that_predictions_are_for(name):
    virtual_device = pytest.importorskip("forerun.sources.trace.inside.device.virtual_device")
    seen, device = virtual_device.device(name.upper()), load_device(name)
    assert (seen.total_memory, seen.multi_processor_count) == (device.memory_bytes, device.multiprocessors)
    bytes_per_s = 2 * seen.memory_clock_rate * 1000 * seen.memory_bus_width / 8
    assert bytes_per_s == pytest.approx(device.memory_bytes_per_s, rel=1e-6)
    assert seen.shared_memory_per_block < seen.shared_memory_per_block_optin < seen.shared_memory_per_multiprocessor


def test_the_h100_is_as_torch_reports_it():
    virtual_device = pytest.importorskip("forerun.sources.trace.inside.device.virtual_device")
    seen = virtual_device.device("h100")
    assert (seen.name, seen.capability) == ("NVIDIA H100 80GB HBM3", (9, 0))
    assert (seen.shared_memory_per_multiprocessor, seen.shared_memory_per_block_optin) == (233472, 232448)
    assert (seen.clock_rate, seen.memory_bus_width, seen.L2_cache_size) == (1980000, 5120, 50 * 2**20)
    assert seen.memory_clock_rate == pytest.approx(2619000, rel=0.001)
    assert virtual_device.device("A100").capability == (8, 0)
