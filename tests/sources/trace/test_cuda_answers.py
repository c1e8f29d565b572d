"""What programs read back from torch.cuda and torch.accelerator on the virtual device."""

import pytest
from virtual_process import run_virtual

pytest.importorskip("torch", reason="tracing needs torch")


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_virtual(
        """
        c = torch.cuda
        c.set_device(2)
        with c.device(0):
            entered = c.current_device()
        with c.device(-1):
            kept = c.current_device()
        with torch.cuda.device_of(torch.empty(1, device="cuda:5")):
            of_tensor = c.current_device()
        result["guards"] = [entered, kept, of_tensor, c.current_device()]
        result["exchanged"] = [c._exchange_device(0), c._exchange_device(-1), c._maybe_exchange_device(2)]
        result["limits"] = [fails(lambda: c.set_device(8)).split(":")[0], fails(lambda: c.set_device(7))]
        c.set_device(0)
        result["peers"] = [c.can_device_access_peer(0, 1), c.can_device_access_peer(1, 0)]
        result["versions"] = [
            list(c.nccl.version()), torch._C._cuda_getCompiledVersion(), torch.backends.cudnn.version(),
        ]
        result["architectures"] = c.get_arch_list()
        result["built with"] = torch.__config__.show()
        result["generators"] = len(c.default_generators)

        result["streams"] = [
            c.default_stream().stream_id, c.current_stream().stream_id, c.default_stream(3).device_index,
            list(c.Stream.priority_range()), c.Stream(priority=-2).priority, c.Stream().priority,
        ]
        side = c.Stream()
        result["pointers"] = [side.cuda_stream == side.stream_id, c.ExternalStream(77).cuda_stream, side.query()]
        elsewhere = c.Stream(device=4)
        with c.stream(elsewhere):
            result["device of a stream"] = [c.current_device(), c.current_stream() == elsewhere]
        result["device of a stream"].append(c.current_device())

        recorder.start()
        never = c.Event()
        never.synchronize(); never.wait(); c.current_stream().wait_event(never)
        x = torch.ones(8, device="cuda")
        x.mul_(2)
        result["unrecorded"] = [nodes("synchronize"), nodes("mul_")[0][2], never.query()]
        timed = [c.Event(enable_timing=True) for _ in range(2)]
        for one in timed:
            one.record()
        result["elapsed"] = timed[0].elapsed_time(timed[1])

        graph = c.CUDAGraph()
        capturing = [c.is_current_stream_capturing()]
        with c.graph(graph):
            capturing.append(c.is_current_stream_capturing())
            x.add_(1)
        capturing.append(c.is_current_stream_capturing())
        result["capturing"] = capturing
        result["pools"] = [graph.pool() == graph.pool(), graph.pool() == c.graph_pool_handle(),
                           c.graph_pool_handle() == c.graph_pool_handle()]
        with c.graph(graph):
            x.sub_(1)
        graph.replay()
        result["captured again"] = [len(nodes("add_")), len(nodes("sub_"))]
        graph.reset(); graph.replay()
        result["reset"] = len(nodes("sub_"))
        with c.stream(side):
            with c.graph(graph):
                x.neg_()
            graph.replay()
        result["replayed on"] = [one[1] for one in nodes("neg_")] == [side.stream_id]
        graph.instantiate(); graph.enable_debug_mode(); graph.debug_dump("graph")
        recorder.recording = False
        with c.graph(c.CUDAGraph()):
            x.neg_()
        result["recording"] = recorder.recording

        before = c.memory_stats()
        big = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
        held = c.memory_stats()
        del big
        after = c.memory_stats()
        key = "allocated_bytes.all."
        result["held"] = [one[key + "current"] - before[key + "current"] for one in (held, after)]
        result["peak"] = [after[key + "peak"] == held[key + "current"],
                          after[key + "freed"] == after[key + "peak"] - after[key + "current"]]
        result["pools of memory"] = [held["allocated_bytes.large_pool.current"] == held[key + "current"],
                                     held["allocated_bytes.small_pool.current"]]
        result["alike"] = [held[f"{name}.all.current"] == held[key + "current"]
                           for name in ("active_bytes", "requested_bytes")]
        reserved = held["reserved_bytes.all.current"]
        result["reserved"] = [reserved % (2 << 20), 0 <= reserved - held[key + "current"] < 2 << 20]
        result["counts"] = {name: held[name] for name in (
            "num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free",
            "max_split_size", "inactive_split_bytes.all.current", "oversize_segments.peak")}
        result["accelerator"] = [
            torch.accelerator.memory_stats() == c.memory_stats(),
            torch.accelerator.max_memory_allocated() == c.max_memory_allocated(),
            list(torch.accelerator.get_memory_info()) == list(c.mem_get_info()),
        ]
        torch.accelerator.reset_peak_memory_stats()
        result["accelerator"].append(c.max_memory_allocated() == c.memory_allocated())
        total = c.get_device_properties().total_memory
        more = [torch.empty(total // 2 + 1, dtype=torch.uint8, device="cuda") for _ in range(2)]
        result["full"] = [c.mem_get_info()[0], c.device_memory_used() == c.memory_allocated()]
        del more
        result["allocator"] = [c.get_allocator_backend(), c.get_per_process_memory_fraction(), c.host_memory_stats(),
                               c.memory_snapshot(), c.memory._snapshot()["device_traces"]]

        def kept_settings():
            cudnn = torch.backends.cudnn
            return [cudnn.benchmark_limit, c.get_sync_debug_mode(), torch._C._cuda_get_conv_benchmark_empty_cache()]
        result["settings"] = [kept_settings()]
        with torch.backends.cudnn.flags(benchmark_limit=4):
            result["settings"].append(kept_settings())
        torch.backends.cudnn.benchmark_limit = 3
        c.set_sync_debug_mode("warn")
        torch._C._cuda_set_conv_benchmark_empty_cache(True)
        result["settings"].append(kept_settings())
        c.set_sync_debug_mode("default")
        tunable = c.tunable
        result["tunable"] = [tunable.is_enabled(), tunable.tuning_is_enabled(), tunable.record_untuned_is_enabled()]
        result["workspaces"] = [torch._C._cuda_getCublasWorkspaceSize(), torch._C._cuda_getCublasLtWorkspaceSize()]

        result["meters"] = [c.utilization(), c.memory_usage(), c.temperature(), c.power_draw(), c.clock_rate()]
        result["processes"] = c.list_gpu_processes()
        runtime = c.cudart()
        result["runtime"] = [int(runtime.cudaProfilerStart()), int(runtime.cudaHostRegister(0, 8, 0)),
                             runtime.cudaMemGetInfo(0)[1] == total, fails(lambda: c.check_error(0))]
        result["ranges"] = [c.nvtx.range_push("outer"), c.nvtx.range_pop(), c.nvtx.range_start("wide")]
        result["bad fork"] = [c._is_in_bad_fork(), torch._C._cuda_isInBadFork(), torch._C._cuda_hasPrimaryContext(0)]
        result["convolutions"] = [torch.backends.cudnn.is_acceptable(x), torch.backends.cudnn.is_available()]

        host = torch.ones(4)
        result["pinned"] = [x.is_pinned(), torch.ones(4).is_pinned()]
        host.pin_memory(); place = host.untyped_storage()._cdata
        del host
        result["pinned"].append(place in cuda_module._pinned)

        c.manual_seed(-1)
        result["wrapped seed"] = c.initial_seed() == (1 << 64) - 1
        c.manual_seed(0x0102)
        c._set_rng_state_offset(0x0304)
        state = c.get_rng_state()
        result["state"] = state.tolist()
        c.manual_seed(5)
        result["seeded anew"] = [c.initial_seed(), c._get_rng_state_offset()]
        c.set_rng_state(state)
        result["restored"] = [c.initial_seed(), c._get_rng_state_offset()]
        c.seed()
        drawn = c.initial_seed()
        result["by the clock"] = [drawn != 0x0102, 0 <= drawn < 1 << 63, c._get_rng_state_offset()]
        generator = c.default_generators[0]
        result["kept by graphs"] = [generator.graphsafe_get_state() is generator,
                                    generator.graphsafe_set_state(generator) is generator]
        """,
        tmp_path_factory.mktemp("answers"),
    )


def test_a_device_is_entered_and_left(answers):
    assert answers["guards"] == [0, 2, 5, 2]
    assert answers["exchanged"] == [2, -1, 0]
    assert answers["limits"] == ["AcceleratorError", ""]
    assert answers["device of a stream"] == [4, True, 0]


def test_the_node_and_its_libraries_are_described(answers):
    assert answers["versions"] == [[2, 29, 7], 13000, 92000]
    assert "PyTorch built with" in answers["built with"]
    assert "CUDA Runtime" in answers["built with"]
    assert answers["architectures"] == ["sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
    assert answers["peers"] == [True, True]
    assert answers["generators"] == 8
    assert answers["bad fork"] == [False, False, True]
    assert answers["convolutions"] == [False, True]


def test_streams_have_numbers_and_priorities(answers):
    assert answers["streams"] == [0, 0, 3, [0, -5], -2, 0]
    assert answers["pointers"] == [True, 77, True]


def test_an_event_that_was_never_recorded_holds_nothing_up(answers):
    assert answers["unrecorded"] == [[], [], True]


def test_a_millisecond_lies_between_any_two_events(answers):
    assert answers["elapsed"] == 1


def test_a_graph_holds_its_last_capture_until_it_is_reset(answers):
    assert answers["capturing"] == [False, True, False]
    assert answers["captured again"] == [0, 1]
    assert answers["reset"] == 1
    assert answers["replayed on"]
    assert not answers["recording"]


def test_each_graph_has_a_pool_of_its_own(answers):
    assert answers["pools"] == [True, False, False]


def test_memory_statistics_follow_what_is_allocated(answers):
    assert answers["held"] == [3 << 20, 0]
    assert answers["peak"] == [True, True]
    assert answers["pools of memory"] == [True, 0]
    assert answers["alike"] == [True, True]
    assert answers["reserved"] == [0, True], "in segments of 2 MiB"
    assert answers["accelerator"] == [True, True, True, True]


def test_the_allocator_counts_no_retries(answers):
    assert answers["counts"].pop("max_split_size") == -1
    assert set(answers["counts"].values()) == {0}
    assert answers["allocator"] == ["native", 1.0, {}, [], []]


def test_a_full_device_has_no_free_memory(answers):
    assert answers["full"] == [0, True]


def test_settings_are_read_back_as_they_are_set(answers):
    assert answers["settings"] == [[10, 0, False], [4, 0, False], [3, 1, True]]
    assert answers["tunable"] == [False, False, False]
    assert answers["workspaces"] == [32 << 20] * 2


def test_meters_show_an_idle_device(answers):
    assert answers["meters"] == [0, 0, 0, 0, 1980]
    assert answers["processes"] == ""


def test_calls_of_the_runtime_succeed(answers):
    assert answers["runtime"] == [0, 0, True, ""]
    assert answers["ranges"] == [0, 0, 0]


def test_only_pinned_tensors_of_the_host_are_pinned(answers):
    assert answers["pinned"] == [False, False, False], "nor is what was pinned once and is gone"


def test_the_random_state_is_seed_and_offset(answers):
    assert answers["wrapped seed"]
    assert answers["state"] == [2, 1, *[0] * 6, 4, 3, *[0] * 6]
    assert answers["seeded anew"] == [5, 0]
    assert answers["restored"] == [0x0102, 0x0304]
    assert answers["by the clock"] == [True, True, 0]
    assert answers["kept by graphs"] == [True, True]
