"""Memory snapshots: plain data that PyTorch's own reader takes, and that adds up to the predicted peak."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from saved_programs import H100, plan_of, program_of

from forerun.answers.analysis.predict_program import predict_program
from forerun.common.errors import ForerunError
from forerun.core.program.builder import BlockBuilder, OpTableBuilder
from forerun.core.program.types import N_CATEGORIES, Category, Program, RankClass
from forerun.interfaces.report import memory_viz
from forerun.interfaces.report.memory_viz import snapshot, write_snapshot

PLANS = {
    "FSDP": dict(dp_shard=8),
    "DDP with accumulation": dict(dp_shard=4, zero_stage=0, n_microbatches=2),
    "PP": dict(dp_shard=2, pp=2, n_microbatches=4),
}


def simulated(plan):
    return predict_program(program_of(plan), H100, whole_timeline=True)


def written(simulation, rank_class=0):
    return snapshot(simulation.program, simulation.flat, simulation.timeline, rank_class)


def levels(events):
    """Allocated bytes after each event."""
    change = [e["size"] if e["action"] == "alloc" else -e["size"] * (e["action"] == "free_completed") for e in events]
    return np.cumsum(change)


@pytest.mark.parametrize("name", PLANS)
def test_the_events_add_up_to_the_peak_of_every_rank_class(name):
    simulation = simulated(plan_of(**PLANS[name]))
    for number, memory in enumerate(simulation.memory):
        found = levels(written(simulation, number)["device_traces"][0])
        assert found.max() == memory.peak_bytes
        assert found.min() >= 0
        kept = found[-1] - int(simulation.program.rank_classes[number].resident_bytes.sum())
        assert kept == 0, "a step leaves what it found"


@pytest.mark.parametrize("name", PLANS)
def test_what_is_alive_never_overlaps(name):
    simulation = simulated(plan_of(**PLANS[name]))
    alive, last_us = {}, 0
    for event in written(simulation)["device_traces"][0]:
        start, end = event["addr"], event["addr"] + event["size"]
        assert event["time_us"] >= last_us
        last_us = event["time_us"]
        if event["action"] == "alloc":
            assert all(end <= other or start >= stop for other, stop in alive.items())
            alive[start] = end
        elif event["action"] == "free_completed":
            assert alive.pop(start) == end


def test_the_segment_is_filled_without_gaps_or_overlaps():
    (segment,) = written(simulated(plan_of(dp_shard=8)))["segments"]
    address = segment["address"]
    for block in segment["blocks"]:
        assert block["address"] == address
        address += block["size"]
    assert address == segment["address"] + segment["total_size"]
    assert segment["allocated_size"] <= segment["total_size"]


def test_frames_say_what_made_a_tensor():
    simulation = simulated(plan_of(dp_shard=8))
    events = written(simulation)["device_traces"][0]
    names = {event["frames"][0]["name"] for event in events}
    assert "lives through the step" in names
    assert names & set(simulation.program.ops.name)
    assert {event["frames"][0]["filename"] for event in events} <= {one.name.lower() for one in Category}


def test_a_part_of_what_earlier_blocks_left_can_be_freed():
    ops, make, drop = OpTableBuilder(), BlockBuilder(), BlockBuilder()
    copy = ops.memory("copy", 1e3, 1e3)
    for _ in range(2):
        make.node(copy)
        make.alloc(1000, Category.GRADIENT, len(make) - 1)
    drop.node(copy)
    drop.tensor(1500, Category.GRADIENT, -1, 0)
    steps, nothing = np.arange(2, dtype=np.int32), np.zeros(2, np.int32)
    rank = RankClass("rank", 1, steps, nothing, nothing - 1, np.zeros(N_CATEGORIES, np.int64))
    program = Program(ops.build(), (make.build("make"), drop.build("drop")), (rank,), (), (), ("all",))
    simulation = predict_program(program, H100, whole_timeline=True)
    assert levels(written(simulation)["device_traces"][0])[-1] == 500


def test_what_earlier_blocks_left_is_not_what_this_block_makes():
    ops, block = OpTableBuilder(), BlockBuilder()
    block.node(ops.memory("copy", 1e3, 1e3))
    block.node(ops.memory("copy", 1e3, 1e3))
    block.tensor(1000, Category.ACTIVATION, 0, 1)
    block.tensor(1000, Category.ACTIVATION, -1, 0)  # as large as the one that the block makes
    steps = np.zeros(1, np.int32)
    resident = np.zeros(N_CATEGORIES, np.int64)
    resident[Category.ACTIVATION] = 1000
    program = Program(
        ops.build(), (block.build("only"),), (RankClass("rank", 1, steps, steps, steps, resident),), (), (), ("all",)
    )
    simulation = predict_program(program, H100, whole_timeline=True)
    found = levels(written(simulation)["device_traces"][0])
    assert (found.max(), found[-1]) == (2000, 0)


def test_pytorch_reads_the_file(tmp_path):
    viz = pytest.importorskip("torch.cuda._memory_viz")
    simulation = simulated(plan_of(dp_shard=8))
    path = tmp_path / "memory.pickle"
    write_snapshot(path, simulation.program, simulation.flat, simulation.timeline, 0)
    data = pickle.loads(path.read_bytes())
    assert "Device 0" in viz.trace(data)
    assert "total_reserved" in viz.segsum(data)
    assert "device_traces" in viz.trace_plot(data) or len(viz.trace_plot(data)) > 1000
    assert viz.segment_plot(data)


def test_the_pickle_holds_plain_data_only(tmp_path):
    simulation = simulated(plan_of(dp_shard=8))
    path = tmp_path / "memory.pickle"
    write_snapshot(path, simulation.program, simulation.flat, simulation.timeline, 0)

    class Plain(pickle.Unpickler):
        def find_class(self, module, name):
            raise AssertionError(f"{module}.{name} is no plain data")

    with path.open("rb") as file:
        assert set(Plain(file).load()) >= {"segments", "device_traces"}


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    simulation = simulated(plan_of(dp_shard=8))
    with pytest.raises(ForerunError, match="nowhere"):
        write_snapshot(tmp_path / "nowhere" / "m.pickle", simulation.program, simulation.flat, simulation.timeline, 0)


def test_an_event_has_the_time_at_which_the_host_issued_its_node():
    ops = OpTableBuilder()
    copy, other = ops.memory("copy", 1e3, 1e3), ops.memory("other", 1e3, 1e3)
    make, drop = BlockBuilder(), BlockBuilder()
    make.node(copy)
    make.node(other)
    make.alloc(1000, Category.GRADIENT, 1)
    drop.node(copy)
    drop.node(other)
    drop.tensor(1000, Category.GRADIENT, -1, 0)
    drop.tensor(500, Category.ACTIVATION, 1, 2)
    steps, nothing = np.array([0, 1], np.int32), np.zeros(2, np.int32)
    resident = np.zeros(N_CATEGORIES, np.int64)
    resident[Category.PARAMETER] = 10
    rank = RankClass("rank", 1, steps, nothing + 3, np.array([-1, 2], np.int32), resident)
    program = Program(ops.build(), (make.build("make"), drop.build("drop")), (rank, rank), (), (), ("all",))
    issued = np.array([1, 2, 3, 4, 11, 12, 13, 14]) * 10**6 + 1
    flat, timeline = SimpleNamespace(class_ptr=np.array([0, 4, 8])), SimpleNamespace(issue_end_ps=issued)
    for number, shift in ((0, 0), (1, 10)):
        (events,) = snapshot(program, flat, timeline, number)["device_traces"]
        found = [(e["time_us"], e["action"], e["size"], e["frames"][0]["name"]) for e in events]
        assert [one for one in found if one[1] != "free_requested"] == [
            (0, "alloc", 10, "lives through the step"),
            (2 + shift, "alloc", 1000, "other"),
            (3 + shift, "free_completed", 1000, "other"),
            (4 + shift, "alloc", 500, "other"),
            (4 + shift, "free_completed", 500, "other"),
        ]
    assert "drop of layer 2, micro batch 3, all" in str(events)
    assert "make, micro batch 3, all" in str(events)


@pytest.mark.parametrize(("size", "rounded"), [(0, 512), (1, 512), (512, 512), (513, 1024), (10_000, 10_240)])
def test_sizes_are_whole_blocks_of_512_bytes(size, rounded):
    assert memory_viz._rounded(size) == rounded
