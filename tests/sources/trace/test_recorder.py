"""The Recorder: streams and events, the life of storages, what a step is made of."""

import gc

import pytest

from forerun.common.errors import ForerunError
from forerun.core.program.types import Category, Collective, Phase

torch = pytest.importorskip("torch", reason="tracing needs torch")
recorder_module = pytest.importorskip("forerun.sources.trace.inside.recorder")
MIB = 1 << 20


@pytest.fixture
def recorder():
    made = recorder_module.Recorder(0, 8, 8)
    made.start()
    return made


def kernel(recorder, stream=0, name="kernel"):
    return recorder.node(recorder.ops.memory(name, 1, 1), stream)


def waits_of(recording, node):
    return recording.wait[recording.wait_ptr[node] : recording.wait_ptr[node + 1]].tolist()


def test_an_event_makes_a_stream_wait_for_the_last_node_before_it(recorder):
    first = kernel(recorder)
    event = recorder.record_event(0)
    kernel(recorder)
    recorder.wait_event(event, stream=1)
    waiting, free = kernel(recorder, 1), kernel(recorder, 1)
    recording = recorder.finish([""], {})
    assert waits_of(recording, waiting) == [first]
    assert waits_of(recording, free) == []


def test_an_event_on_a_stream_that_only_waited_passes_the_wait_on(recorder):
    first = kernel(recorder, 0)
    recorder.wait_event(recorder.record_event(0), stream=1)
    recorder.wait_event(recorder.record_event(1), stream=2)
    assert waits_of(recorder_finish(recorder, 2), 1) == [first]


def recorder_finish(recorder, stream):
    kernel(recorder, stream)
    return recorder.finish([""], {})


def test_events_of_an_earlier_step_say_nothing(recorder):
    kernel(recorder)
    event = recorder.record_event(0)
    recorder.start()
    recorder.wait_event(event, stream=1)
    assert waits_of(recorder_finish(recorder, 1), 0) == []


def test_an_asynchronous_collective_runs_beside_what_follows(recorder):
    before = kernel(recorder)
    end = recorder.collective("sum", Collective.ALL_REDUCE, "dp", range(8), 1024, "bf16", True)
    beside = kernel(recorder)
    recorder.wait_event(end)
    after = kernel(recorder)
    recording = recorder.finish([""], {})
    assert waits_of(recording, before + 1) == [before]
    assert waits_of(recording, beside) == []
    assert waits_of(recording, after) == [before + 1]
    assert recording.stream[before + 1] >= recorder.COMM_STREAMS
    assert recording.groups == (("dp", tuple(range(8))),)


def test_another_collective_stands_in_the_stream_that_calls_it(recorder):
    recorder.collective("sum", Collective.ALL_REDUCE, "dp", range(8), 1024, "bf16", False)
    assert recorder.finish([""], {}).stream.tolist() == [0]


def test_storages_live_from_the_node_that_makes_them_to_the_one_before_they_end(recorder):
    tensor = torch.empty(MIB, dtype=torch.uint8)
    recorder.memory.allocated(tensor.untyped_storage(), MIB)
    kernel(recorder)
    kernel(recorder)
    del tensor
    gc.collect()
    kernel(recorder)
    recording = recorder.finish([""], {})
    assert recording.tensor_bytes.tolist() == [MIB]
    assert (recording.tensor_alloc.tolist(), recording.tensor_free.tolist()) == ([0], [1])
    assert recorder.memory.peak_bytes == MIB
    assert recorder.memory.allocated_bytes == 0


def test_a_storage_that_is_resized_is_freed_and_allocated_again(recorder):
    tensor = torch.empty(1000, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    recorder.memory.allocated(storage, 1000)
    kernel(recorder)
    recorder.memory.allocated(storage, 0)
    kernel(recorder)
    recorder.memory.allocated(storage, 1000)
    kernel(recorder)
    recorder.memory.mark(storage, Category.PARAMETER)
    recording = recorder.finish([""], {})
    assert recording.tensor_bytes.tolist() == [1024, 1024]
    assert recording.tensor_alloc.tolist() == [0, 2]
    assert recording.tensor_free.tolist() == [0, -1]
    assert recording.tensor_category.tolist()[1] == Category.PARAMETER


def test_what_is_there_at_the_start_was_there_before_the_step(recorder):
    tensor = torch.empty(8)
    recorder.memory.allocated(tensor.untyped_storage(), 32)
    recorder.start()
    kernel(recorder)
    recording = recorder.finish([""], {})
    assert (recording.tensor_alloc.tolist(), recording.tensor_free.tolist()) == ([-1], [-1])


def test_phases_follow_autograd_and_the_optimizer(recorder):
    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            kernel(recorder)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            kernel(recorder)
            with torch.enable_grad():
                kernel(recorder)
            return grad

    Watch.apply(torch.ones(1, requires_grad=True)).backward()
    kernel(recorder)
    recorder.in_optimizer += 1
    kernel(recorder)
    phases = [Phase(p) for p in recorder.finish([""], {}).phase.tolist()]
    # what comes between the last backward and the optimizer's step belongs to it
    assert phases == [Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE, Phase.OPTIMIZER, Phase.OPTIMIZER]


def test_nothing_is_recorded_after_the_step(recorder):
    kernel(recorder)
    recorder.finish([""], {})
    assert (kernel(recorder), recorder.n_nodes) == (-1, 1)
    recorder.start()
    assert kernel(recorder) == 0


def test_nothing_is_recorded_while_paused(recorder):
    recorder.paused += 1
    assert kernel(recorder) == -1
    recorder.paused -= 1
    assert kernel(recorder) == 0


def test_tokens_are_those_of_the_busiest_embedding(recorder):
    one, other = torch.empty(8, 2), torch.empty(8, 2)
    recorder.memory.allocated(one.untyped_storage(), 64)
    recorder.memory.allocated(other.untyped_storage(), 64)
    recorder.start()
    recorder.module_of_node = lambda: 1
    for weight in (one, other, one):
        recorder.looked_up(weight, 128)
    recorder.module_of_node = lambda: 2
    recorder.looked_up(torch.empty(9, 2), 128)
    assert recorder.workload.tokens == 256


def test_a_gathered_embedding_is_known_by_its_module_and_shape(recorder):
    recorder.module_of_node = lambda: 1
    for _ in range(3):
        recorder.looked_up(torch.empty(8, 2), 128)
    assert recorder.workload.tokens == 3 * 128


def stored(recorder, n_bytes):
    tensor = torch.empty(n_bytes, dtype=torch.uint8)
    recorder.memory.allocated(tensor.untyped_storage(), n_bytes)
    return tensor


def lives(recorder):
    """(bytes, category, made before, freed after) of each allocation."""
    recording = recorder.finish([""], {})
    columns = (recording.tensor_bytes, recording.tensor_category, recording.tensor_alloc, recording.tensor_free)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_workspace_lives_while_its_kernel_runs_and_counts_for_the_peak(recorder):
    kept = stored(recorder, MIB)
    node = kernel(recorder)
    recorder.memory.workspace(1000, node)
    recorder.memory.workspace(1 << 30, -1)  # of a kernel that is not recorded
    kernel(recorder)
    assert recorder.memory.peak_bytes == MIB + 1024
    assert recorder.memory.allocated_bytes == MIB
    assert lives(recorder) == [(MIB, Category.TEMPORARY, 0, -1), (1024, Category.TEMPORARY, 0, 0)]
    del kept


def test_the_first_mark_and_else_the_phases_say_what_memory_is_for(recorder):
    marked, plain, kept = (stored(recorder, size) for size in (MIB, MIB, 4096))
    kernel(recorder)
    recorder.memory.mark(marked.untyped_storage(), Category.PARAMETER)
    recorder.memory.mark(marked.untyped_storage(), Category.GRADIENT)
    recorder.memory.category = int(Category.GRAPH_POOL)
    pooled = stored(recorder, 512)
    recorder.memory.category = -1
    recorder.recomputing = True
    del plain
    gc.collect()
    kernel(recorder)
    late = stored(recorder, 2048)
    del late
    gc.collect()
    kernel(recorder)
    expected = [
        (MIB, Category.PARAMETER, 0, -1),
        (MIB, Category.ACTIVATION, 0, 0),  # made in the forward pass, freed later
        (4096, Category.TEMPORARY, 0, -1),
        (512, Category.GRAPH_POOL, 1, -1),
    ]
    assert lives(recorder) == expected  # what no kernel saw was never there
    del marked, kept, pooled


def test_what_is_done_once_in_a_run_was_there_before_the_step(recorder):
    kernel(recorder)
    with recorder.beforehand(Category.OPTIMIZER):
        state = stored(recorder, MIB)
        assert kernel(recorder) == -1
    assert kernel(recorder) == 1
    assert recorder.memory.is_older(state.untyped_storage())
    own = stored(recorder, 512)
    assert not recorder.memory.is_older(own.untyped_storage())
    kernel(recorder)
    assert lives(recorder) == [(MIB, Category.OPTIMIZER, -1, -1), (512, Category.TEMPORARY, 2, -1)]
    unknown = torch.empty(8).untyped_storage()
    assert not recorder.memory.is_older(unknown)
    assert [recorder.memory.follows(one) for one in (unknown, own.untyped_storage())] == [False, True]


def test_the_peak_is_the_most_that_was_there_at_once(recorder):
    one, two = stored(recorder, 3 * MIB), stored(recorder, 2 * MIB)
    del one
    gc.collect()
    three = stored(recorder, MIB)
    assert (recorder.memory.peak_bytes, recorder.memory.allocated_bytes) == (5 * MIB, 3 * MIB)
    recorder.memory.allocated(two.untyped_storage(), 2 * MIB)  # as large as before
    assert recorder.memory.allocated_bytes == 3 * MIB
    del three


@pytest.mark.parametrize("size", [-1, 1 << 51, 1.5])
def test_impossible_sizes_end_the_trace(recorder, size):
    with pytest.raises(ForerunError, match=f"a tensor has {size} bytes: at most 1048576 GiB are traced"):
        recorder.memory.allocated(torch.empty(1).untyped_storage(), size)


def test_memory_that_is_lost_count_of_ends_the_trace(recorder):
    tensor = stored(recorder, MIB)
    kernel(recorder, name="maker")
    recorder.memory.allocated_bytes += 512
    with pytest.raises(ForerunError, match=rf"lost count of memory: {MIB + 512} bytes recorded, {MIB} in tensors"):
        recorder.finish([""], {})
    recorder.memory.allocated(tensor.untyped_storage(), 2 * MIB, node=0)
    with pytest.raises(ForerunError, match=rf"{2 * MIB} bytes recorded of a tensor of maker, {MIB} there"):
        recorder.finish([""], {})
    recorder.start()
    with pytest.raises(ForerunError, match=rf"{2 * MIB} bytes recorded of a tensor of an earlier step, {MIB} there"):
        recorder.finish([""], {})


def test_impossible_operations_are_named(recorder):
    recorder.node(recorder.ops.memory("odd", 1, float("inf")))
    with pytest.raises(ForerunError, match="recorded inf bytes_written of odd"):
        recorder.finish([""], {})


def test_the_host_waits_for_an_event_or_for_every_stream(recorder):
    kernel(recorder, 0)
    event = recorder.record_event(0)
    kernel(recorder, 1)
    recorder.host_waits(event)
    kernel(recorder, 0)
    recorder.host_waits()
    recording = recorder.finish([""], {})
    host = [node for node in range(len(recording.op)) if recording.stream[node] == recorder.HOST_STREAM]
    assert host == [2, 4]
    assert [waits_of(recording, node) for node in host] == [[0], [1, 3]]
    assert recording.sync.tolist() == [0, 0, 1, 0, 1]


def test_a_stream_waits_for_the_last_of_several_events_of_another(recorder):
    kernel(recorder, 0)
    early = recorder.record_event(0)
    kernel(recorder, 0)
    late = recorder.record_event(0)
    for event in (late, early):
        recorder.wait_event(event, 1)
    recorder.wait_event(late, 0)  # its own work is in order
    recorder.wait_event(None, 1)
    both, own = kernel(recorder, 1), kernel(recorder, 0)
    recorder.wait_stream(2, 1)
    third = kernel(recorder, 2)
    recording = recorder.finish([""], {})
    assert [waits_of(recording, node) for node in (both, own, third)] == [[1], [], [both]]


def test_transfers_and_collectives_of_a_group_share_its_stream(recorder):
    recorder.collective("sum", Collective.ALL_REDUCE, "dp", range(8), 1024, "bf16", True)
    end = recorder.transfer(True, "pp", (0, 4), 4, 512, "bf16", True)
    recorder.transfer(False, "pp", (0, 4), 4, 256, "bf16", True)
    recorder.collective("sum", Collective.ALL_REDUCE, "dp", range(8), 1024, "bf16", True)
    recorder.wait_event(end)
    kernel(recorder)
    recording = recorder.finish([""], {})
    first = recorder.COMM_STREAMS
    assert recording.stream.tolist() == [first, first + 1, first + 1, first, 0]
    assert recording.peer.tolist() == [-1, 4, 4, -1, -1]
    assert waits_of(recording, 4) == [1]
    assert recording.groups == (("dp", tuple(range(8))), ("pp", (0, 4)))
    names = [recording.ops.name[op] for op in recording.op]
    assert names == ["sum", "send", "recv", "sum", "kernel"]
    assert recording.ops.bytes_comm[recording.op].tolist() == [1024, 512, 256, 1024, 0]


def test_work_between_the_last_backward_and_the_step_is_the_optimizers(recorder):
    phases = iter([Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD, Phase.OPTIMIZER,
                   Phase.FORWARD])  # fmt: skip
    recorder.phase = lambda: int(next(phases))
    for _ in range(7):
        kernel(recorder)
    found = recorder.finish([""], {}).phase.tolist()
    assert found == [
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OPTIMIZER,
        Phase.OPTIMIZER,
        Phase.FORWARD,
    ]


def test_a_step_without_an_optimizer_ends_with_what_clips(recorder):
    phases = iter([Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD])
    recorder.phase = lambda: int(next(phases))
    for _ in range(3):
        kernel(recorder)
    assert recorder.finish([""], {}).phase.tolist() == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]


def test_the_recording_says_what_the_step_was(recorder):
    recorder.note("once")
    recorder.note("once")
    recorder.fallbacks.setdefault("f")
    recorder.host_time("redistribute", 3)
    recorder.compiled = 1
    kernel(recorder)
    recording = recorder.finish(["", "model"], {"tokens": 7})
    meta = recording.meta
    assert (meta["notes"], meta["fallbacks"], meta["tokens"]) == (["once"], ["f"], 7)
    assert (meta["world_size"], meta["gpus_per_node"], recording.rank) == (8, 8, 0)
    assert recording.compiled.tolist() == [0, 1]
    assert recording.modules == ("", "model")
    assert recording.ops.launches[recording.op].tolist() == [3, 1]
    assert not recorder.recording
    assert kernel(recorder) == -1


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("module.layers.0._checkpoint_wrapped_module.wq", "layers.0.wq"),
        ("_orig_mod.module.norm", "module.norm"),
        ("module._fsdp_wrapped_module.head", "head"),
        ("layers.module", "layers.module"),
    ],
)
def test_paths_leave_out_what_wraps_a_module(path, expected):
    modules = pytest.importorskip("forerun.sources.trace.inside.modules")
    assert modules.plain(path) == expected
