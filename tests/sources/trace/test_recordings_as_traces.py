"""Programs of recordings as Chakra traces of all ranks: valid, of the right ranks, and they replay."""

import numpy as np
import pytest
from made_pipelines import Mesh, pipeline_stages
from made_recordings import Recorder, ends_ps

from forerun.astrasim.astra.replay import Machine, replay
from forerun.astrasim.astra.streams import replay_streams
from forerun.astrasim.astra.system import system_from
from forerun.astrasim.chakra.export import to_traces, write_run
from forerun.astrasim.chakra.groups import read_comm_groups
from forerun.astrasim.chakra.trace import NodeKind
from forerun.astrasim.chakra.validate import validate
from forerun.core.engine.simulate import simulate
from forerun.core.network.network_file import network_from
from forerun.core.program.types import Phase, Stream
from forerun.core.program.unfold import unfold
from forerun.core.program.validate import check
from forerun.sources.trace.to_program import to_program

MESHES = {
    "stages outermost": Mesh(pp=4, dp_shard=8, tp=2),
    "stages inside": Mesh(dp_shard=8, pp=4, tp=2),
}
SYSTEM = {
    "local-mem-bw": 3350,
    "peak-perf": 989,
    **{f"{name}-implementation": ["ring"] for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")},
}


def timeline_of(program):
    flat = unfold(program)
    none = np.zeros(flat.n_ops)
    time = program.ops.flops.astype(np.int64)
    return simulate(flat, time, program.ops.launches.astype(np.int64) * 3, none, none, none.astype(bool))


@pytest.fixture(params=MESHES.values(), ids=MESHES)
def mesh(request):
    return request.param


def test_stages_end_when_their_recordings_say(mesh):
    stages = pipeline_stages(mesh)
    program = to_program(stages)
    check(program)
    assert timeline_of(program).class_end_ps.tolist() == [max(ends) for ends in ends_ps(stages)]
    assert [cls.name for cls in program.rank_classes] == [f"stage {k}" for k in range(4)]
    assert program.meta["tokens_per_step"] == 800
    assert program.meta["notes"] == []


def test_traces_of_all_ranks_are_valid(mesh, tmp_path):
    program = to_program(pipeline_stages(mesh))
    assert write_run(tmp_path, program) == 64
    assert validate(tmp_path, read_comm_groups(tmp_path / "comm_group.json")) == []


def test_ranks_talk_to_those_that_the_mesh_gives_them(mesh):
    traces, groups = to_traces(to_program(pipeline_stages(mesh)))
    for pp in range(4):
        for dp in range(8):
            for tp in range(2):
                place = {"pp": pp, "dp_shard": dp, "tp": tp}
                trace = traces[mesh.rank(**place)]
                mine = {groups[name] for name in trace.group_names}
                assert mine == {mesh.group("dp_shard", pp=pp, tp=tp), mesh.group("tp", pp=pp, dp_shard=dp)}
                assert (trace.group[trace.kind == NodeKind.COLLECTIVE] == -1).sum() == 1  # of the whole world
                stages = {s for s in (pp - 1, pp + 1) if 0 <= s < 4}
                peers = {mesh.rank(**{**place, "pp": s}) for s in stages}
                assert set(trace.peer[trace.peer >= 0].tolist()) == peers


def test_they_replay_in_both_ways(mesh):
    program = to_program(pipeline_stages(mesh, n_micro=4))
    traces, groups = to_traces(program, program.ops.flops.astype(np.int64))
    network = {"topology": ["Switch"], "npus_count": [64], "bandwidth": [450], "latency": [500]}
    machine = Machine(system_from(SYSTEM, "system"), network_from(network, "network"))
    slots = replay(traces, groups, machine).wall_ns
    streams = max(rank.wall_time for rank in replay_streams(traces, groups, machine))
    assert streams == pytest.approx(slots, rel=0.25)


def ring():
    """Ring attention: keys go round while the last ones are used."""
    made = Recorder(0, [("cp", (0, 1, 2, 3))], world_size=4)
    done = made.kernel("attention", 100_000)
    for _ in range(3):
        made.message(True, 1, 0, 1 << 20, 60_000, 4, waits=(done,))
        got = made.message(False, 3, 0, 1 << 20, 60_000, 4, waits=(done,))
        done = made.kernel("attention", 100_000, waits=(got,))
    return made.recording()


def test_a_ring_among_ranks_of_one_role_goes_round(tmp_path):
    program = to_program([ring()])
    assert timeline_of(program).end_of_step_ps == ends_ps([ring()])[0][-1]
    flat = unfold(program)
    assert Stream.CP in flat.stream
    assert (flat.phase == Phase.FORWARD).all()
    write_run(tmp_path, program)
    assert validate(tmp_path, read_comm_groups(tmp_path / "comm_group.json")) == []
    traces, _ = to_traces(program)
    for rank, trace in enumerate(traces):
        assert trace.peer[trace.kind == NodeKind.SEND].tolist() == [(rank + 1) % 4] * 3
        assert trace.peer[trace.kind == NodeKind.RECV].tolist() == [(rank - 1) % 4] * 3
