"""Programs as traces, and back: the same work, the same end."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from random_programs import random_programs, rank_class
from trace_building import assert_equal

from forerun.astrasim.chakra.export import _node_kind, to_traces, write_run
from forerun.astrasim.chakra.groups import read_comm_groups
from forerun.astrasim.chakra.program import to_program
from forerun.astrasim.chakra.trace import NodeKind
from forerun.astrasim.chakra.traces import open_traces
from forerun.astrasim.chakra.validate import validate
from forerun.common.errors import ForerunError
from forerun.core.engine.simulate import simulate
from forerun.core.program.builder import BlockBuilder, OpTableBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import Direction, OpKind
from forerun.core.program.types import Channel, Collective, Program, Stream
from forerun.core.program.unfold import unfold
from forerun.core.program.validate import check
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build

US = 10**6
PLANS = {
    "fsdp and tp": {"dp_shard": 4, "tp": 2},
    "pipeline": {"pp": 2, "dp_shard": 2, "tp": 2, "n_microbatches": 8},
    "V pipeline": {"pp": 4, "dp_shard": 2, "n_microbatches": 8, "pp_schedule": "ZBV", "virtual_stages": 2},
    "ring attention": {"cp": 4, "tp": 2},
    "replicas": {"dp_replicate": 2, "dp_shard": 2, "pp": 2, "n_microbatches": 8},
}


def costs_ps(ops):
    """Whole microseconds for compute, so that traces hold them exactly; something for what communicates."""
    compute_us = np.round((ops.flops / 1e14 + (ops.bytes_read + ops.bytes_written) / 1e12) * 1e6)
    moves = np.isin(ops.kind, [OpKind.COLLECTIVE, OpKind.P2P, OpKind.HOST_COPY])
    time = compute_us * US
    time[ops.is_delay] = ops.delay(np.flatnonzero(ops.is_delay)).duration_ps
    return np.where(moves, ops.bytes_comm * 20 + 5 * US, time).astype(np.int64)


def end_ps(program):
    flat = unfold(program)
    nothing = np.zeros(flat.n_ops)
    time = costs_ps(program.ops)
    return simulate(flat, time, nothing.astype(np.int64), nothing, nothing, nothing.astype(bool)).end_of_step_ps


def symbolic(**fields):
    plan = Plan(**{"seq_len": 512, **fields})
    return build(load_model("qwen3-0.6b"), plan, load_cluster("h100-sxm"))


@pytest.mark.parametrize("fields", PLANS.values(), ids=PLANS)
def test_a_program_that_went_through_traces_ends_at_the_same_time(fields):
    program = symbolic(**fields)
    traces, groups = to_traces(program, costs_ps(program.ops))
    assert len(traces) == 8
    again = to_program(traces, groups)
    check(again)
    assert end_ps(again) == end_ps(program)


def test_a_program_that_went_through_traces_has_the_same_work():
    program = symbolic(pp=2, dp_shard=4, n_microbatches=4)
    again = to_program(*to_traces(program))
    flat, flat_again = unfold(program), unfold(again)
    for c, one in enumerate(program.rank_classes):
        nodes = slice(flat.class_ptr[c], flat.class_ptr[c + 1])
        ops, op = program.ops, flat.op[nodes]
        join = ops.is_delay & (ops.delay(np.arange(len(ops))).duration_ps == 0)
        for rank in range(4 * c, 4 * c + 4):
            mine = flat_again.op[flat_again.class_ptr[rank] : flat_again.class_ptr[rank + 1]]
            assert len(mine) == (~join[op]).sum(), one.name
            assert again.ops.bytes_comm[mine].sum() == pytest.approx(ops.bytes_comm[op].sum(), rel=1e-9)
            assert again.ops.flops[mine].sum() == pytest.approx(ops.flops[op].sum(), rel=1e-9)
            moved = (ops.bytes_read + ops.bytes_written)[op[~join[op]]].sum()
            assert (again.ops.bytes_read + again.ops.bytes_written)[mine].sum() == pytest.approx(moved, rel=1e-6)


def test_traces_of_a_program_are_valid_and_read_back_equal(tmp_path):
    program = symbolic(pp=2, dp_shard=2, tp=2, n_microbatches=4)
    assert write_run(tmp_path / "run", program) == 8
    groups = read_comm_groups(tmp_path / "run" / "comm_group.json")
    read = open_traces(tmp_path / "run", names=True)
    traces, expected = to_traces(program)
    assert groups == expected
    for rank, trace in enumerate(traces):
        assert_equal(read[rank], trace)
    assert validate(tmp_path / "run", groups) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ForerunError, match="file/run"):
        write_run(tmp_path / "file" / "run", symbolic())


def test_groups_are_as_far_apart_as_the_mesh_says():
    traces, groups = to_traces(symbolic(pp=2, dp_shard=2, tp=2, n_microbatches=4))
    assert {(0, 1), (2, 3), (4, 5), (6, 7), (0, 2), (1, 3), (4, 6), (5, 7)} <= set(groups.values())
    own = [{groups[name] for name in trace.group_names} for trace in traces]
    assert all(rank in group for rank, mine in enumerate(own) for group in mine)


def test_a_reduction_over_stages_takes_a_rank_of_each():
    traces, groups = to_traces(symbolic(pp=4, n_microbatches=4))
    # First and last stage also sum the gradients of the embedding that they share.
    assert groups == {"1": (0, 3)}
    called = [trace.group[trace.kind == NodeKind.COLLECTIVE].tolist() for trace in traces]
    assert len(traces) == 4
    assert all(-1 in groups_of_rank for groups_of_rank in called)


def test_stages_send_to_the_same_place_of_the_next_stage():
    traces, _ = to_traces(symbolic(pp=2, dp_shard=4, n_microbatches=4))
    for rank, trace in enumerate(traces):
        other = (rank + 4) % 8
        assert set(trace.peer[trace.peer >= 0].tolist()) == {other}
        sends, receives = (trace.kind == NodeKind.SEND).sum(), (traces[other].kind == NodeKind.RECV).sum()
        assert sends == receives > 0


def test_a_gather_is_written_as_its_shard_and_measured_times_keep_their_sum():
    ops = OpTableBuilder()
    gather = ops.collective("gather", Collective.ALL_GATHER, 0, 800)
    kernels = [ops.memory(f"kernel {k}", 10, 10, flops=5) for k in range(10)]
    block = BlockBuilder()
    block.node(gather, Stream.GATHER)
    for kernel in kernels:
        block.node(kernel)
    one = rank_class("all", [0])
    one = type(one)(one.name, 8, one.block, one.microbatch, one.layer, one.resident_bytes)
    program = Program(ops.build(), (block.build("b"),), (one,), (CommGroup("tp", 8, 1, 8),), (), ("m",))
    traces, groups = to_traces(program, np.full(11, 300_000, np.int64))
    assert groups == {}
    assert traces[0].comm_size.tolist() == [100, *[0] * 10]
    assert traces[0].group[0] == -1
    assert traces[0].num_ops.tolist() == [0, *[5] * 10]
    assert traces[0].tensor_size.tolist() == [0, *[20] * 10]
    assert traces[0].duration_us.sum() == 3
    assert traces[0].names[1] == "kernel 0"


def test_messages_and_copies_go_where_they_say_or_where_their_stream_says():
    ops, out, into = OpTableBuilder(), Direction.OUT, Direction.IN
    transfers = [ops.p2p(f"transfer {k}", 0, 8, direction=way) for k, way in enumerate((out, into, Direction.EITHER))]
    copies = [ops.host_copy(f"copy {k}", 8, direction=way) for k, way in enumerate((out, into))]
    table = ops.build()
    sends, receives = int(Stream.PP_SEND), int(Stream.PP_RECV)
    kinds = {stream: [_node_kind(table, op, stream) for op in transfers] for stream in (sends, receives)}
    assert kinds[sends] == [NodeKind.SEND, NodeKind.RECV, NodeKind.SEND]
    assert kinds[receives] == [NodeKind.SEND, NodeKind.RECV, NodeKind.RECV]
    assert [_node_kind(table, op, sends) for op in copies] == [NodeKind.MEM_STORE, NodeKind.MEM_LOAD]


def test_joins_are_left_out_and_the_host_waits():
    ops = OpTableBuilder()
    work, join = ops.memory("work", 1, 1), ops.delay("join", 0)
    block = BlockBuilder()
    a = block.node(work, Stream.TP)
    b = block.node(work, Stream.CP)
    j = block.node(join, after=(a, b))
    c = block.node(work, after=(j,), sync=True)
    block.node(work, Stream.EP)
    program = Program(ops.build(), (block.build("b"),), (rank_class("one", [0]),), (), (), ("m",))
    trace = to_traces(program)[0][0]
    assert len(trace) == 4
    waits = [
        set(trace.data[trace.data_ptr[i] : trace.data_ptr[i + 1]].tolist())
        | set(trace.ctrl[trace.ctrl_ptr[i] : trace.ctrl_ptr[i + 1]].tolist())
        for i in range(4)
    ]
    assert waits == [set(), set(), {0, 1}, {2}]
    assert c == 3


def test_a_group_that_does_not_fit_its_ranks_is_named():
    ops = OpTableBuilder()
    block = BlockBuilder()
    block.node(ops.collective("sum", Collective.ALL_REDUCE, 0, 8))
    program = Program(
        ops.build(), (block.build("b"),), (rank_class("one", [0]),), (CommGroup("tp", 4, 1, 4),), (), ("m",)
    )
    with pytest.raises(ForerunError, match="group 'tp' of 4 ranks, 1 apart, does not divide the 1 ranks"):
        to_traces(program)


def test_a_message_between_three_is_refused():
    ops = OpTableBuilder()
    block = BlockBuilder()
    block.node(ops.p2p("send", 0, 8), Stream.PP_SEND, channel=0)
    classes = tuple(rank_class(f"stage {k}", [0]) for k in range(3))
    channel = Channel("wire", (0, 1, 2))
    program = Program(ops.build(), (block.build("b"),), classes, (CommGroup("pp", 2, 1, 2),), (channel,), ("m",))
    with pytest.raises(ForerunError, match="channel 'wire': a message has two ends, not 3"):
        to_traces(program)


@settings(max_examples=60)
@given(random_programs())
def test_random_programs_without_meetings_end_at_the_same_time(program):
    assume(not program.channels)
    # Fifteen streams are one more than a trace may name.
    assume(len(np.unique(unfold(program).stream)) <= 14)
    traces, groups = to_traces(program, costs_ps(program.ops))
    assert groups == {}
    assert end_ps(to_program(traces, groups)) == end_ps(program)
