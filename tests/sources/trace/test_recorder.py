"""The Recorder: streams and events, the life of storages, what a step is made of."""

import gc

import pytest

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
