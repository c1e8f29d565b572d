"""Recordings as Programs: the same order, the same memory."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from made_recordings import LAUNCH_PS, Recorder, ends_ps, memory_levels, peak_bytes, pipelines, recordings

from forerun.common.errors import ForerunError
from forerun.core.engine.simulate import simulate
from forerun.core.memory.profile import profile
from forerun.core.program.kinds import OpKind
from forerun.core.program.origin import Origin
from forerun.core.program.storage import load, save
from forerun.core.program.types import Category, Collective, Phase, Stream
from forerun.core.program.unfold import unfold
from forerun.core.program.validate import check
from forerun.sources.trace.to_program import to_program


def run(program, issue_ps=LAUNCH_PS):
    check(program)
    flat = unfold(program)
    none = np.zeros(flat.n_ops)
    time = program.ops.flops.astype(np.int64)
    return flat, simulate(flat, time, program.ops.launches.astype(np.int64) * issue_ps, none, none, none.astype(bool))


def ends_of(program):
    flat, timeline = run(program)
    return [timeline.end_ps[a:b].tolist() for a, b in zip(flat.class_ptr[:-1], flat.class_ptr[1:], strict=True)]


def lanes_by_name(program, role=0):
    flat = unfold(program)
    nodes = range(flat.class_ptr[role], flat.class_ptr[role + 1])
    return [(program.ops.name[flat.op[i]], Stream(flat.stream[i])) for i in nodes]


@settings(max_examples=100, deadline=None)
@given(recordings())
def test_every_node_ends_when_the_recording_says(recording):
    program = to_program([recording])
    assert ends_of(program) == ends_ps([recording])
    assert program.meta["notes"] == []


@settings(max_examples=100, deadline=None)
@given(pipelines())
def test_every_node_of_a_pipeline_ends_when_the_recordings_say(stages):
    assert ends_of(to_program(stages)) == ends_ps(stages)


@settings(max_examples=100, deadline=None)
@given(recordings())
def test_memory_is_that_of_the_recording(recording):
    program = to_program([recording])
    mine = profile(program)[0]
    assert mine.peak_bytes == peak_bytes(recording)
    levels = [tuple(level.values()) for level in memory_levels(recording)]
    at_peak = [mine.by_category.get(category.name.lower(), 0) for category in Category]
    assert tuple(at_peak) in [level for level in levels if sum(level) == mine.peak_bytes]


@settings(max_examples=100, deadline=None)
@given(recordings())
def test_the_nodes_are_those_of_the_recording(recording):
    program = to_program([recording])
    flat, ops = unfold(program), recording.ops
    assert len(flat) == len(recording)
    assert flat.phase.tolist() == recording.phase.tolist()
    assert flat.sync.tolist() == recording.sync.tolist()
    names = [program.ops.name[op].removesuffix(" (compiled)") for op in flat.op]
    assert names == [ops.name[op] for op in recording.op]
    for column in ("kind", "flops", "bytes_read", "bytes_comm", "collective", "launches"):
        assert np.array_equal(getattr(program.ops, column)[flat.op], getattr(ops, column)[recording.op])
    compiled = np.isin(flat.op, program.meta["compiled_ops"])
    assert compiled.tolist() == (recording.compiled == 1).tolist()


def fsdp_layer(made, layer, gathered):
    """Layer `layer` waits for its gather while the next one is copied and gathered."""
    copied = made.kernel("copy in", 4, 1, module=f"layers.{layer}")
    following = made.collective(
        Collective.ALL_GATHER, 0, 4096, 50, 2, "gather", waits=(copied,), module=f"layers.{layer}"
    )
    made.kernel("copy out", 6, waits=(gathered,), module=f"layers.{layer}.mlp")
    made.kernel("multiply", 60, module=f"layers.{layer}.mlp")
    return following


def test_gathers_have_their_lane_and_copies_still_overlap():
    made = Recorder(groups=[("mesh_dp_shard", tuple(range(8)))])
    gathered = made.collective(Collective.ALL_GATHER, 0, 4096, 50, 2, "gather", module="layers.0")
    for layer in range(4):
        gathered = fsdp_layer(made, layer, gathered)
    program = to_program([made.recording()])
    lanes = dict(lanes_by_name(program))
    assert lanes["gather"] == Stream.GATHER
    assert lanes["copy out"] == lanes["multiply"] == Stream.COMPUTE
    assert lanes["copy in"] not in (Stream.COMPUTE, Stream.GATHER)
    assert ends_of(program) == ends_ps([made.recording()])


def test_layers_that_do_the_same_share_a_block_and_say_which_they_are():
    made = Recorder(groups=[("mesh_dp_shard", tuple(range(8)))])
    gathered = made.collective(Collective.ALL_GATHER, 0, 4096, 50, 2, "gather", module="layers.0")
    for layer in range(40):
        gathered = fsdp_layer(made, layer, gathered)
    program = to_program([made.recording()])
    # Two gathers are on their way at a time, so that layers take turns with two event slots.
    assert len(program.blocks) == 6
    cls = program.rank_classes[0]
    assert cls.layer.tolist() == list(range(40))
    assert {block.name for block in program.blocks} == {"forward layers"}
    assert "layers.*.mlp" in program.modules


def test_a_collective_on_the_compute_stream_is_communication_that_compute_waits_for():
    made = Recorder(groups=[("mesh_tp", (0, 1)), ("mesh_dp_shard", (0, 2, 4, 6))])
    made.kernel("before", 10)
    made.collective(Collective.ALL_REDUCE, 0, 8, 30)
    made.kernel("after", 10)
    made.collective(Collective.ALL_REDUCE, 1, 8, 30, phase=Phase.OPTIMIZER)
    program = to_program([made.recording()])
    assert [lane for _, lane in lanes_by_name(program)] == [Stream.COMPUTE, Stream.TP, Stream.COMPUTE, Stream.REDUCE]
    assert run(program, 0)[1].end_of_step_ps == 80


@pytest.mark.parametrize(
    ("name", "kind", "phase", "lane"),
    [
        ("mesh_dp_shard_cp", Collective.ALL_GATHER, Phase.FORWARD, Stream.GATHER),
        ("dp_replicate", Collective.ALL_REDUCE, Phase.BACKWARD, Stream.REDUCE),
        ("tp", Collective.ALL_GATHER, Phase.FORWARD, Stream.TP),
        ("mesh_cp", Collective.ALL_TO_ALL, Phase.FORWARD, Stream.CP),
        ("ep", Collective.ALL_TO_ALL, Phase.FORWARD, Stream.EP),
        ("17", Collective.ALL_TO_ALL, Phase.FORWARD, Stream.EP),
        ("17", Collective.ALL_REDUCE, Phase.OPTIMIZER, Stream.REDUCE),
        ("17", Collective.ALL_REDUCE, Phase.FORWARD, Stream.TP),
        ("0", Collective.ALL_GATHER, Phase.FORWARD, Stream.GATHER),
    ],
)
def test_collectives_run_on_the_lane_of_what_their_group_is_for(name, kind, phase, lane):
    made = Recorder(groups=[(name, tuple(range(8)))], data_parallel=["0"])
    made.kernel("work", 1, phase=phase)
    made.collective(kind, 0, 8, 1, 5, phase=phase)
    assert lanes_by_name(to_program([made.recording()]))[1][1] == lane


def test_groups_are_laid_out_by_their_ranks_and_joined_over_roles():
    groups = [
        [("mesh_pp", (0, 8)), ("mesh_dp_shard", (s, s + 2, s + 4, s + 6)), ("mesh_tp", (s, s + 1)), ("3", (0, 5, 6))]
        for s in (0, 8)
    ]
    stages = [Recorder(s, groups[s // 8], world_size=16, tokens=100, data_parallel_size=4) for s in (0, 8)]
    for made in stages:
        made.meta |= {"data_parallel": ["mesh_dp_shard"], "sharded": ["mesh_dp_shard"]}
        for number in range(3):
            made.collective(Collective.ALL_REDUCE, number, 8, 1, number + 1)
    program = to_program([made.recording() for made in stages])
    found = [(g.axis, g.size, g.nodes, g.ranks_per_node, g.inner) for g in program.groups]
    assert found == [("pp", 2, 2, 1, 8), ("dp_shard", 4, 2, 2, 2), ("tp", 2, 1, 2, 1), ("group", 3, 3, 1, 1)]
    origin = Origin.of(program)
    assert origin.group_ranks == ((0, 8), (0, 2, 4, 6), (0, 1), (0, 5, 6))
    assert (origin.data_parallel, origin.sharded, origin.tokens_per_step) == ((1,), (1,), 400)
    assert [cls.n_ranks for cls in program.rank_classes] == [8, 8]
    assert [cls.name for cls in program.rank_classes] == ["ranks like 0", "ranks like 8"]
    # The pipeline's own collective is one of both stages.
    assert [channel.members for channel in program.channels] == [(0, 1)]


def one_f_one_b(n_stages=2, n_micro=4, other=2):
    """Stages that send and receive in one batch, as torch's 1F1B does in its steady state."""
    ranks = tuple(other * s for s in range(n_stages))
    stages = [Recorder(rank, [("mesh_pp", ranks)], world_size=other * n_stages) for rank in ranks]
    for s, made in enumerate(stages):
        warm_up = min(n_micro, n_stages - s)
        forward = backward = 0
        received = None
        while backward < n_micro:
            if forward < n_micro and forward - backward < warm_up:
                if s:
                    received = made.message(False, ranks[s - 1], 0, 64, 20, 9)
                done = made.kernel("forward", 100, waits=(received,) if s else ())
                forward += 1
                if s < n_stages - 1:
                    made.message(True, ranks[s + 1], 0, 64, 20, 9, waits=(done,))
            else:
                waits = ()
                if s < n_stages - 1:
                    waits = (made.message(False, ranks[s + 1], 0, 64, 20, 9),)
                done = made.kernel("backward", 200, phase=Phase.BACKWARD, waits=waits)
                backward += 1
                if s:
                    made.message(True, ranks[s - 1], 0, 64, 20, 9, waits=(done,), phase=Phase.BACKWARD)
    return [made.recording() for made in stages]


def test_batched_messages_both_ways_do_not_wait_for_each_other():
    pair = [Recorder(rank, [("mesh_pp", (0, 1))], world_size=2) for rank in (0, 1)]
    for made in pair:
        done = made.kernel("work", 10)
        # Both send first: on one stream, one after the other, neither would ever receive.
        made.message(True, 1 - made.rank, 0, 64, 20, 9, waits=(done,))
        got = made.message(False, 1 - made.rank, 0, 64, 20, 9, waits=(done,))
        made.kernel("work", 10, waits=(got,))
    program = to_program([made.recording() for made in pair])
    assert run(program, 0)[1].end_of_step_ps == 40
    assert [lane for _, lane in lanes_by_name(program)][1:3] == [Stream.PP_SEND, Stream.PP_RECV_GRAD]


@pytest.mark.parametrize("n_stages", [2, 3, 4])
def test_a_pipeline_runs_to_its_end(n_stages):
    stages = one_f_one_b(n_stages)
    assert ends_of(to_program(stages)) == ends_ps(stages)


def test_a_peer_that_is_not_recorded_is_the_stage_at_its_place():
    stages = []
    for stage, rank in enumerate((1, 6)):  # not the same place of their stages
        group = (rank, rank + 4) if stage == 0 else (rank - 4, rank)
        made = Recorder(rank, [("mesh_pp", group)], world_size=8)
        made.message(stage == 0, group[1 - stage], 0, 64, 20, 9)
        stages.append(made.recording())
    program = to_program(stages)
    assert [channel.members for channel in program.channels] == [(0, 1)]


def test_messages_among_ranks_of_one_role_meet_nobody():
    made = Recorder(0, [("mesh_cp", (0, 1, 2, 3))])
    made.message(True, 1, 0, 64, 20, 4)
    made.message(False, 3, 0, 64, 20, 4)
    program = to_program([made.recording()])
    assert program.channels == ()
    assert run(program, 0)[1].end_of_step_ps == 20
    assert [g.axis for g in program.groups] == ["cp"]


def test_unequal_numbers_of_messages_are_refused_with_both_ranks():
    stages = one_f_one_b(2)
    made = Recorder(2, [("mesh_pp", (0, 2))], world_size=4)
    made.kernel("nothing else", 1)
    with pytest.raises(ForerunError, match=r"rank 0 sends 4 messages to rank 2 over process group 'mesh_pp'.* 0"):
        to_program([stages[0], made.recording()])


def test_collectives_of_several_roles_that_do_not_match_are_noted():
    stages = [Recorder(rank, [("world", (0, 1))], world_size=2) for rank in (0, 1)]
    for made in stages:
        for _ in range(1 + made.rank):
            made.collective(Collective.ALL_REDUCE, 0, 8, 1)
    program = to_program([made.recording() for made in stages])
    assert program.channels == ()
    assert "different numbers of collectives (1 to 2)" in program.meta["notes"][0]


def test_more_streams_than_lanes_are_shared_and_noted():
    made = Recorder()
    for stream in range(20):
        made.kernel("work", 10, stream)
    program = to_program([made.recording()])
    assert "some that could overlap share" in program.meta["notes"][0]
    assert run(program, 0)[1].end_of_step_ps > 10


def test_a_host_wait_needs_no_lane_of_its_own_where_it_waits_for_compute():
    made = Recorder()
    work = made.kernel("work", 10)
    made.node(made.ops.delay("synchronize", 0), 1 << 17, sync=1, waits=(work,))
    made.kernel("work", 10)
    program = to_program([made.recording()])
    assert {lane for _, lane in lanes_by_name(program)} == {Stream.COMPUTE}
    assert ends_of(program) == ends_ps([made.recording()])


def test_a_kernel_that_is_compiled_in_one_place_only_is_two_ops():
    made = Recorder()
    made.kernel("mm", 5, compiled=1)
    made.kernel("mm", 5)
    program = to_program([made.recording()])
    assert [program.ops.name[op] for op in unfold(program).op] == ["mm (compiled)", "mm"]
    assert [program.ops.name[op] for op in program.meta["compiled_ops"]] == ["mm (compiled)"]


def test_tensors_from_before_the_step_and_beyond_it():
    made = Recorder()
    made.kernel("a", 1)
    made.kernel("b", 1, phase=Phase.BACKWARD)
    made.tensor(512, Category.PARAMETER, -1, -1)
    made.tensor(1024, Category.GRADIENT, -1, 0)
    made.tensor(2048, Category.ACTIVATION, 0, 1)
    made.tensor(4096, Category.OPTIMIZER, 1, -1)
    program = to_program([made.recording()])
    assert program.rank_classes[0].resident_bytes.tolist()[:3] == [512, 1024, 0]
    mine = profile(program)[0]
    assert mine.by_category == {"parameter": 512, "activation": 2048, "optimizer": 4096}
    assert mine.owner(program, 0).startswith("b in backward")


def test_a_program_of_recordings_is_saved_and_loaded(tmp_path):
    program = to_program(one_f_one_b(3))
    save(program, tmp_path / "p")
    again = load(tmp_path / "p")
    assert again.meta == program.meta
    assert ends_of(again) == ends_of(program)


def test_transfers_between_stages_belong_to_their_two_ranks():
    stages = one_f_one_b(4)
    program = to_program(stages)
    rows = program.ops.kind == OpKind.P2P
    used = [program.groups[g] for g in np.unique(program.ops.group[rows])]
    assert {(g.size, g.borders, g.nodes) for g in used} == {(2, 3, 1), (2, 3, 2)}


def test_nothing_recorded_is_refused():
    with pytest.raises(ForerunError, match="no recording"):
        to_program([])
    with pytest.raises(ForerunError, match="rank 3 ran no kernel"):
        to_program([Recorder(3).recording()])
    made = Recorder()
    made.kernel("a", 1)
    with pytest.raises(ForerunError, match="rank 0 is recorded twice"):
        to_program([made.recording(), made.recording()])
    other = Recorder(1, world_size=16)
    other.kernel("a", 1)
    with pytest.raises(ForerunError, match=r"world sizes \[8, 16\]"):
        to_program([made.recording(), other.recording()])


def test_source_lines_are_told_by_op_most_frequent_first():
    made = Recorder()
    for _ in range(3):
        made.kernel("mm", 5)
    recording = made.recording()
    lines = replace(recording, lines=("a.py:1", "b.py:2"), line=np.array([1, 0, 1], np.int32))
    assert to_program([lines]).meta["source_lines"] == {"mm": ["b.py:2", "a.py:1"]}
    assert to_program([recording]).meta["source_lines"] == {}
