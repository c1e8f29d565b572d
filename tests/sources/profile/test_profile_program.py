"""A profiled step becomes a Program that replays it, with the waits that the profile tells."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_files import PUBLIC, host, kernel, launch, write_profile

from forerun.answers.profile.imported import import_step, replayed_s
from forerun.common.errors import ForerunError
from forerun.core.program.kinds import OpKind
from forerun.core.program.origin import Origin
from forerun.core.program.storage import load, save
from forerun.core.program.types import Collective, Phase, Stream
from forerun.sources.profile.collectives import kind_of
from forerun.sources.profile.device import device_of
from forerun.sources.profile.labels import labels_of
from forerun.sources.profile.read import read_profile, read_profiles
from forerun.sources.profile.schedule import schedule_of, typical
from forerun.sources.profile.step import steps_of

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"
A100 = [{"name": "NVIDIA A100-SXM4-40GB", "totalGlobalMem": 42_000_000_000}]
WORLD = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "Group size": 2}
WORLD |= {"dtype": "Float", "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}


def _step(begin=0, dur=400, number=1):
    return host(f"ProfilerStep#{number}", begin, dur, "user_annotation")


def _steps(tmp_path, events, **beside):
    return steps_of(read_profile(write_profile(tmp_path / "a.json", events, deviceProperties=A100, **beside)))


def test_a_step_replays_and_loads_as_it_was_saved(tmp_path):
    events = [_step(), launch(10, 5, 1), launch(20, 5, 2), kernel("a", 30, 100, 1), kernel("b", 135, 20, 2)]
    path = write_profile(tmp_path / "a.json", events, deviceProperties=A100)
    found = import_step(read_profiles([path]))
    assert (found.name, found.measured_s, found.device) == ("ProfilerStep#1", 400e-6, "a100-sxm-40gb")
    assert found.error == 0
    save(found.program, tmp_path / "step.program")
    again = load(tmp_path / "step.program")
    assert replayed_s(again) == found.replayed_s
    assert Origin.of(again).recorded == Origin.of(found.program).recorded


def test_work_belongs_to_the_step_that_launches_it(tmp_path):
    events = [_step(0, 100, 1), _step(100, 100, 2), launch(90, 5, 1), launch(110, 5, 2)]
    events += [kernel("a", 120, 40, 1), kernel("b", 160, 70, 2)]
    first, second = _steps(tmp_path, events)
    assert [len(first), len(second)] == [1, 1]
    assert schedule_of(first).measured_ns == 160_000
    assert (second.before_ns, schedule_of(second).measured_ns) == (
        160_000,
        100_000,
    )  # the host's 100 us are longer than 70


def test_the_typical_step_is_the_median_without_the_last(tmp_path):
    events = []
    for number, dur in enumerate((100, 80, 90, 10)):
        begin = number * 200
        events += [_step(begin, dur, number), launch(begin + 1, 1, number + 1), kernel("a", begin + 3, 2, number + 1)]
    assert typical([schedule_of(one) for one in _steps(tmp_path, events)]).step.name == "ProfilerStep#2"


def test_a_stated_wait_orders_streams(tmp_path):
    wait = {"stream": 9, "wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 5, "correlation": 6}
    events = [
        *(_step(), launch(10, 5, 1), launch(20, 2, 5, "cudaEventRecord"), launch(24, 2, 6, "cudaStreamWaitEvent")),
        *(launch(30, 5, 2), kernel("long", 20, 150, 1), kernel("short", 172, 10, 2, 9)),
        {**kernel("Stream Wait Event", 28, 1, 6, 9), "cat": "cuda_sync", "args": wait},
    ]
    (step,) = _steps(tmp_path, events)
    schedule = schedule_of(step)
    assert schedule.after == ((), (0,))
    assert (schedule.n_stated, schedule.n_inferred) == (1, 0)
    assert schedule.ready_ns[1] == 170_000


def test_a_wait_is_inferred_from_the_order_of_calls_where_times_allow_it(tmp_path):
    events = [
        *(_step(), launch(10, 5, 1), launch(20, 2, 5, "cudaEventRecord"), launch(22, 1, 3)),
        *(launch(24, 2, 6, "cudaStreamWaitEvent"), launch(30, 5, 2)),
        *(kernel("long", 20, 150, 1), kernel("after the record", 171, 200, 3), kernel("short", 172, 10, 2, 9)),
    ]
    (step,) = _steps(tmp_path, events)
    schedule = schedule_of(step)
    assert schedule.after[2] == (0,)
    assert (schedule.n_stated, schedule.n_inferred) == (0, 1)
    early = [*events[:-1], kernel("short", 40, 10, 2, 9)]  # it ran beside what it should have waited for
    assert schedule_of(_steps(tmp_path, early)[0]).n_inferred == 0


def test_the_host_waits_for_a_copy_that_its_call_outlasts(tmp_path):
    events = [_step(), launch(10, 5, 1), launch(20, 90, 2, "cudaMemcpyAsync"), launch(120, 5, 3)]
    events += [kernel("a", 20, 60, 1), kernel("Memcpy DtoH (Device -> Pageable)", 80, 20, 2), kernel("b", 130, 9, 3)]
    path = write_profile(tmp_path / "a.json", events, deviceProperties=A100)
    found = import_step(read_profiles([path]))
    (wait,) = schedule_of(steps_of(read_profile(path))[0]).host_waits
    assert (wait.begin_ns, wait.end_ns, wait.until) == (20_000, 110_000, (1,))
    faster = found.program
    times = [time // 2 if time > 0 else time for time in faster.meta["recorded"]["time_ps"]]
    faster.meta["recorded"]["time_ps"] = times
    assert replayed_s(faster) == pytest.approx(found.replayed_s - 40e-6)  # the host waits 40 us less


def test_a_synchronisation_waits_for_the_last_kernel_of_every_stream(tmp_path):
    events = [_step(), launch(10, 5, 1), launch(16, 2, 2), launch(20, 90, 9, "cudaDeviceSynchronize")]
    events += [kernel("a", 20, 60, 1), kernel("b", 22, 83, 2, 9)]
    (step,) = _steps(tmp_path, events)
    (wait,) = schedule_of(step).host_waits
    assert wait.until == (0, 1)


def test_a_launch_into_a_full_queue_waits_for_the_device(tmp_path):
    """1,200 kernels of 50 us: the host is ahead by 1,020 of them, and then launches one whenever one ends."""
    events, count, ahead, dur = [_step(0, 0)], 1200, 1020, 50
    ends = [10 + dur * (number + 1) for number in range(count)]
    begins, time = [], 0
    for number in range(count):
        begins.append(time)
        time = time + 2 if number < ahead else max(time + 2, ends[number - ahead])
    for number, (begin, following) in enumerate(zip(begins, [*begins[1:], time], strict=True)):
        events += [launch(begin, following - begin, number + 1), kernel("k", ends[number] - dur, dur, number + 1)]
    events[0]["dur"] = time + 1
    path = write_profile(tmp_path / "a.json", events, deviceProperties=A100)
    found = import_step(read_profiles([path]))
    assert abs(found.error) < 0.01
    recorded = found.program.meta["recorded"]
    recorded["time_ps"] = [time // 10 if time > 0 else time for time in recorded["time_ps"]]
    assert replayed_s(found.program) < 0.2 * found.measured_s  # faster kernels make the waiting host faster


def test_backward_work_is_in_the_module_whose_operator_made_its_node(tmp_path):
    """Of two threads that count nodes of their own, a number that both have says nothing."""
    events = [
        _step(),
        host("nn.Module: Net_0", 5, 40, "python_function"),
        host("nn.Module: Norm_1", 6, 9, "python_function"),
        host("aten::rms_norm", 7, 7, **{"Sequence number": 4}),
        launch(10, 2, 1),
        host("aten::mul", 20, 9, **{"Sequence number": 5}),
        host("aten::add", 30, 9, **{"Sequence number": 6}),
        host("nn.Module: Other_0", 5, 9, "python_function", tid=2),
        host("aten::add", 7, 5, tid=2, **{"Sequence number": 6}),
        host("aten::sum", 50, 9, **{"Sequence number": 7}),
    ]
    for number, begin in ((4, 100), (5, 120), (6, 140), (7, 160), (8, 180)):
        name = f"autograd::engine::evaluate_function: B{number}"
        events.append(host(name, begin, 15, tid=3, **{"Sequence number": number}))
        events += [
            host("aten::mul", begin + 1, 9, tid=3, **{"Sequence number": 6}),
            launch(begin + 2, 5, number, tid=3),
        ]
        events.append(kernel(f"k{number}", begin + 10, 5, number))
    path = write_profile(tmp_path / "a.json", [*events, kernel("k1", 20, 5, 1)])
    (step,) = steps_of(read_profile(path))
    texts, names = step.profile.texts, step.profile.rows.name[step.row]
    labels = {texts[name]: label for name, label in zip(names.tolist(), labels_of(step), strict=True)}
    modules = {"k1": "Net_0.Norm_1", "k4": "Net_0.Norm_1", "k5": "Net_0", "k6": "", "k7": "", "k8": ""}
    assert {name: label.module for name, label in labels.items()} == modules
    assert labels["k4"].phase == labels["k7"].phase == Phase.BACKWARD


def test_phases_modules_and_products_come_from_what_is_around(tmp_path):
    sizes = {"Input Dims": [[64, 32], [32, 16]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    events = [
        _step(),
        host("nn.Module: Net_0", 5, 50, "python_function"),
        host("nn.Module: Linear_1", 6, 40, "python_function"),
        host("aten::mm", 8, 30, **sizes),
        launch(10, 5, 1),
        host("autograd::engine::evaluate_function: MmBackward0", 100, 50),
        launch(110, 5, 2),
        host("Optimizer.step#SGD.step", 200, 50, "user_annotation"),
        launch(210, 5, 3),
        *(kernel("gemm", 20, 10, 1), kernel("back", 120, 10, 2), kernel("update", 220, 10, 3)),
    ]
    path = write_profile(tmp_path / "a.json", events, deviceProperties=A100)
    program = import_step(read_profiles([path])).program
    (block,) = program.blocks
    named = {program.ops.name[op]: node for node, op in enumerate(block.op.tolist())}
    phases = {name: Phase(block.phase[named[name]]) for name in ("gemm", "back", "update")}
    assert phases == {"gemm": Phase.FORWARD, "back": Phase.BACKWARD, "update": Phase.OPTIMIZER}
    assert program.modules[block.module[named["gemm"]]] == "Net_0.Linear_1"
    product = program.ops.details_of(int(block.op[named["gemm"]]))
    assert (product.m, product.n, product.k) == (64, 16, 32)
    assert program.ops.kind[block.op[named["update"]]] == OpKind.MEMORY
    assert set(block.stream[list(named.values())][: len(named)].tolist()) >= {int(Stream.COMPUTE)}


def test_ranks_meet_and_waiting_is_no_transfer(tmp_path):
    paths = []
    for rank, arrives in enumerate((50, 90)):
        events = [_step(), launch(10, 5, 1), launch(20, 5, 2), kernel("a", 30, arrives - 32, 1)]
        events += [kernel(NCCL, arrives, 130 - arrives, 2, 9, **WORLD)]
        beside = {"distributedInfo": {"rank": rank, "world_size": 4}}
        paths.append(write_profile(tmp_path / f"{rank}.json", events, deviceProperties=A100, **beside))
    found = import_step(read_profiles(paths))
    program = found.program
    assert [one.n_ranks for one in program.rank_classes] == [2, 2]
    (channel,) = program.channels
    assert channel.members == (0, 1)
    recorded = np.array(Origin.of(program).recorded.time_ps)
    talks = program.ops.is_collective
    assert recorded[talks].tolist() == [40_000_000]
    assert program.ops.bytes_comm[talks].tolist() == [4000.0]
    assert found.error == pytest.approx(0, abs=1e-9)


@given(st.data())
@settings(max_examples=40)
def test_any_step_replays_within_a_hundredth(tmp_path_factory, data):
    """Kernels run after their launches, one after the other on each stream."""
    events = [_step(0, 0)]
    free = dict.fromkeys((7, 8, 9), 0)
    time = 0
    for number in range(1, data.draw(st.integers(1, 25))):
        time += data.draw(st.integers(1, 40))
        stream = data.draw(st.sampled_from(sorted(free)))
        start = max(time + data.draw(st.integers(2, 9)), free[stream] + data.draw(st.integers(0, 60)))
        dur = data.draw(st.integers(1, 200))
        free[stream] = start + dur
        if data.draw(st.booleans()):
            events.append(launch(time, 1, 1000 + number, "cudaStreamWaitEvent"))
        events += [launch(time, 1, number), kernel(f"k{number % 3}", start, dur, number, stream)]
    events[0]["dur"] = time + data.draw(st.integers(5, 500))
    if len(events) == 1:
        return
    path = write_profile(tmp_path_factory.mktemp("step") / "a.json", events, deviceProperties=A100)
    assert abs(import_step(read_profiles([path])).error) < 0.01


def test_a_file_without_work_or_step_is_an_error(tmp_path):
    alone = write_profile(tmp_path / "a.json", [_step(), host("aten::mm", 1, 2)])
    with pytest.raises(ForerunError, match="holds no work of a device"):
        import_step(read_profiles([alone]))
    some = write_profile(tmp_path / "b.json", [_step(), launch(1, 1, 1), kernel("a", 3, 1, 1)])
    ages = write_profile(tmp_path / "c.json", [_step(), launch(1, 1, 1), kernel("a", 3, 10**12, 1)])
    with pytest.raises(ForerunError, match="takes 12 days"):
        import_step(read_profiles([ages]))
    with pytest.raises(ForerunError, match="has no step ProfilerStep#7"):
        import_step(read_profiles([some]), 7)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_allgather_base", Collective.ALL_GATHER),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", Collective.REDUCE_SCATTER),
        ("all_to_allv", Collective.ALL_TO_ALL),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", Collective.SEND_RECV),
        ("ncclDevKernel_Generic", Collective.NONE),
    ],
)
def test_kinds_of_collectives(name, kind):
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("name", "memory_gb", "device"),
    [
        ("NVIDIA A100-SXM4-80GB", 85, "a100-sxm-80gb"),
        ("NVIDIA A100-PG509-200", 42, "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", 85, "a100-pcie-80gb"),
        ("NVIDIA H100 80GB HBM3", 85, "h100-sxm-80gb"),
        ("Tesla V100-SXM2-32GB", 34, "v100-sxm2-32gb"),
        ("AMD Instinct MI300X", 206, "mi300x"),
        ("NVIDIA GeForce RTX 4090", 25, "rtx-4090"),
        ("NVIDIA GeForce RTX 2080 Ti", 11, None),
        ("Some GPU", 16, None),
    ],
)
def test_the_gpus_name_and_memory_tell_the_device(tmp_path, name, memory_gb, device):
    gpu = [{"name": name, "totalGlobalMem": memory_gb * 10**9}]
    found = device_of(read_profile(write_profile(tmp_path / "a.json", [kernel("a", 0, 1, 1)], deviceProperties=gpu)))
    assert (found.name if found else None) == device


TRAINING = (
    "facebookresearch+HolisticTraceAnalysis/tests/data/nccl_parser_config/nccl_data.json.gz",
    "facebookresearch+HolisticTraceAnalysis/tests/data/df_index_resolver/df_index_resolver.json.gz",
    "facebookresearch+HolisticTraceAnalysis/tests/data/ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
    "facebookresearch+HolisticTraceAnalysis/tests/data/negative_queue_length_values_check/rank0.json.gz",
    "facebookresearch+HolisticTraceAnalysis/tests/data/trace_diff/control/control.json.gz",
    "facebookresearch+HolisticTraceAnalysis/tests/data/trace_diff/test/test.json.gz",
    "AMD-AGI+TraceLens/tests/traces/mi300/resnet_act_checkpoint.json.gz",
    "deepseek-ai+profile-data/train.json",
)


@pytest.mark.parametrize("name", TRAINING)
def test_every_step_of_public_training_profiles_replays_within_two_percent(name):
    if not (PUBLIC / name).exists():
        pytest.skip(f"{name} is not under {PUBLIC} (FORERUN_PUBLIC_PROFILES)")
    profile = read_profile(PUBLIC / name)
    for step in steps_of(profile):
        number = int(step.name.split("#")[1])
        assert abs(import_step([profile], number).error) < 0.02, step.name
