"""What traces of real training say beyond a simulator's: streams, process groups, launchers, lost dependencies."""

import json
from dataclasses import replace

import numpy as np
import pytest
from trace_building import assert_equal, attribute, collective, comp, node, recv, send, write, write_run

from forerun.astrasim.chakra.groups import process_groups, resolve_groups
from forerun.astrasim.chakra.node_streams import HOST_STREAM
from forerun.astrasim.chakra.program import to_program, traced_program
from forerun.astrasim.chakra.reader import read_rank
from forerun.astrasim.chakra.trace import NodeKind
from forerun.astrasim.chakra.traces import open_traces
from forerun.astrasim.chakra.writer import write_rank
from forerun.common.errors import ForerunError
from forerun.core.program.kinds import Delay, Direction, OpKind, Transfer
from forerun.core.program.types import Stream
from forerun.core.program.unfold import unfold
from forerun.core.program.validate import check


def host(number, /, data=(), duration=0, **more):
    made = node(number, NodeKind.COMP, data=data, duration=duration, stream=0, **more)
    made.attr.append(attribute("is_cpu_op", "bool_val", True))
    return made


def kernel(number, stream, data=(), duration=0, **more):
    return node(number, NodeKind.COMP, data=data, duration=duration, stream=stream, is_cpu_op=0, **more)


def nccl(number, stream, data=(), group="0", duration=0, comm_type=0, size=1 << 20, **more):
    said = {"comm_type": comm_type, "comm_size": size, "pg_name": group, "stream": stream, "is_cpu_op": 0}
    return node(number, NodeKind.COLLECTIVE, data=data, duration=duration, **said, **more)


def init(number, *groups):
    """PyTorch's node about process groups: (name, ranks)."""
    made = node(number, NodeKind.METADATA, name="## process_group:init ##", stream=0)
    items = [{"pg_name": name, "pg_desc": "x", "ranks": ranks, "group_size": len(ranks)} for name, ranks in groups]
    made.inputs.values = str([json.dumps(items)])
    made.attr.append(attribute("is_cpu_op", "bool_val", True))
    return made


def real_rank():
    """What PyTorch's converter makes of a step of data parallelism: launches on the host, kernels on two streams."""
    return [
        init(1, ("0", []), ("1", [0, 1])),
        host(2, duration=10),
        kernel(3, 7, data=[2], duration=100),
        host(4, data=[2], duration=20),
        nccl(5, 20, data=[4, 3], duration=55),
        host(6, data=[4], duration=5),
        kernel(7, 7, data=[6], duration=60),
        host(8, data=[6], duration=5),
        kernel(9, 7, data=[8, 5], duration=40),
    ]


def real_traces(folder):
    traces = open_traces(write_run(folder, real_rank(), real_rank()), names=True, lenient=True)
    return [traces[rank] for rank in range(2)]


def test_streams_and_process_groups_are_read_and_written_back(tmp_path):
    trace = read_rank(write(tmp_path / "a.0.et", real_rank()), names=True)
    assert trace.stream.tolist() == [0, 0, 7, 0, 20, 0, 7, 0, 7]
    assert trace.process_groups == {"0": (), "1": (0, 1)}
    write_rank(tmp_path / "b.0.et", trace)
    assert_equal(read_rank(tmp_path / "b.0.et", names=True), trace)


def test_a_trace_without_streams_has_none_and_nodes_without_one_have_minus_1(tmp_path):
    assert read_rank(write(tmp_path / "a.0.et", [comp(1)])).stream is None
    trace = read_rank(write(tmp_path / "b.0.et", [comp(1), kernel(2, 3), comp(4)]))
    assert trace.stream.tolist() == [-1, 3, -1]


def test_a_stream_that_is_none_is_refused(tmp_path):
    with pytest.raises(ForerunError, match=r"node 2 .*stream is -3, not a stream"):
        read_rank(write(tmp_path / "a.0.et", [comp(1), comp(2, stream=-3)]))


NO_GROUPS = [
    *("", "nothing", "[{", "[{}]", "[{1}]", "['[{]}']"),
    """['[{"pg_name": 1}]']""",
    """['[{"ranks": [0]}]']""",
    """['[{"pg_name": "0", "ranks": ["a"]}]']""",
    """['[{"pg_name": "0", "ranks": [1, 1]}]']""",
]


@pytest.mark.parametrize("text", NO_GROUPS)
def test_other_metadata_says_nothing_about_groups(text):
    assert process_groups(text) == {}


def test_lenient_reading_leaves_out_control_dependencies_on_nodes_that_are_gone(tmp_path):
    path = write(tmp_path / "a.0.et", [comp(1), comp(2, ctrl=[77, 1]), comp(3, ctrl=[78, 3])])
    with pytest.raises(ForerunError, match="node 2: control dependency on node 77"):
        read_rank(path)
    trace = read_rank(path, lenient=True)
    assert trace.ctrl_ptr.tolist() == [0, 0, 1, 1]
    assert trace.ctrl.tolist() == [0]
    with pytest.raises(ForerunError, match="data dependency on node 9"):
        read_rank(write(tmp_path / "b.0.et", [comp(1, data=[9])]), lenient=True)


def test_lenient_reading_breaks_circles_at_control_dependencies_against_the_data(tmp_path):
    caller = [comp(1), comp(2, data=[1], ctrl=[3]), comp(3, data=[2]), comp(4, ctrl=[3])]
    trace = read_rank(write(tmp_path / "a.0.et", caller), lenient=True)
    assert trace.ctrl_ptr.tolist() == [0, 0, 0, 0, 1]
    assert trace.ctrl.tolist() == [2]


def test_what_launches_a_collective_on_the_host_is_host_work(tmp_path):
    launcher = node(1, NodeKind.COLLECTIVE, name="c10d::allreduce_", duration=7)
    launcher.attr.append(attribute("is_cpu_op", "bool_val", True))
    trace = read_rank(write(tmp_path / "a.0.et", [launcher, nccl(2, 5, data=[1], group="")]))
    program = to_program([trace, trace], {})
    block = program.blocks[0]
    assert block.stream.tolist() == [HOST_STREAM, Stream.COMPUTE]
    assert program.ops.kind[block.op].tolist() == [OpKind.DELAY, OpKind.COLLECTIVE]
    assert program.ops.details_of(block.op[0]) == Delay(7_000_000)


def test_groups_that_ranks_number_for_themselves_are_told_apart(tmp_path):
    ranks = [[init(1, ("1", [0, 1] if rank < 2 else [2, 3])), nccl(2, 5, group="1")] for rank in range(4)]
    traces = open_traces(write_run(tmp_path, *ranks))
    renamed, groups = resolve_groups([traces[rank] for rank in range(4)], {})
    assert [trace.group_names for trace in renamed] == [("1",), ("1",), ("1 (2, 3)",), ("1 (2, 3)",)]
    assert groups == {"1": (0, 1), "1 (2, 3)": (2, 3)}


def test_metadata_goes_over_the_file_of_groups(tmp_path):
    traces = open_traces(write_run(tmp_path, *[[init(1, ("0", [])), nccl(2, 5)]] * 2))
    _, groups = resolve_groups([traces[0], traces[1]], {"0": (1,), "other": (0, 1)})
    assert groups == {"0": (0, 1), "other": (0, 1)}


def test_streams_of_a_real_trace_become_lanes_in_launch_order(tmp_path):
    traced = traced_program(real_traces(tmp_path), {})
    program = traced.program
    check(program)
    assert [one.name for one in program.rank_classes] == ["rank 0 and 1 like it"]
    block = program.blocks[0]
    assert traced.classes[0].trace.node_id[traced.classes[0].row].tolist() == list(range(1, 10))
    host_lane, compute = HOST_STREAM, int(Stream.COMPUTE)
    assert block.stream.tolist() == [
        host_lane,
        host_lane,
        compute,
        host_lane,
        1,
        host_lane,
        compute,
        host_lane,
        compute,
    ]
    delays = block.op[program.ops.is_delay[block.op]]
    assert (program.ops.delay(delays).duration_ps / 1e6).tolist() == [0, 10, 100, 20, 5, 60, 5, 40]
    assert program.ops.name[block.op[4]] == "node5"
    assert program.groups[0].size == 2


def test_launch_order_goes_by_number_and_dependencies_whatever_the_file_order(tmp_path):
    ranks = [[kernel(9, 7, data=[3]), kernel(3, 7), kernel(2, 7, data=[9])]]
    traced = traced_program([read_rank(write(tmp_path / "a.0.et", ranks[0]))], {})
    one = traced.classes[0]
    assert one.trace.node_id[one.row].tolist() == [3, 9, 2]


def test_a_circle_of_nodes_is_named(tmp_path):
    trace = read_rank(write(tmp_path / "a.0.et", [comp(1, data=[3]), comp(2, data=[1]), comp(3, ctrl=[2])]))
    with pytest.raises(ForerunError, match="rank 0: nodes depend on themselves: 1 -> 3 -> 2 -> 1"):
        to_program([trace], {})


def test_more_streams_than_the_engine_has_are_refused(tmp_path):
    trace = read_rank(write(tmp_path / "a.0.et", [kernel(k + 1, k) for k in range(15)]))
    with pytest.raises(ForerunError, match=r"rank 0: .* run on 15 streams, but at most 14 can be simulated"):
        to_program([trace], {})


def test_sends_of_pytorch_name_a_group_of_two(tmp_path):
    def message(number, kind):
        return node(number, kind, comm_size=8, pg_name="3", stream=9, is_cpu_op=0)

    ranks = [[init(1, ("3", [0, 1])), message(2, kind)] for kind in (NodeKind.SEND, NodeKind.RECV)]
    traces = open_traces(write_run(tmp_path, *ranks))
    program = to_program([traces[0], traces[1]], {})
    assert [channel.members for channel in program.channels] == [(0, 1)]
    assert program.ops.kind[program.blocks[1].op[1]] == OpKind.P2P
    lost = [replace(traces[rank], process_groups=None) for rank in range(2)]
    with pytest.raises(ForerunError, match=r"rank 0 node 2: .*its peer must be another rank, 0 to 1"):
        to_program(lost, {})


def test_messages_that_leave_in_another_order_than_they_are_awaited_are_named(tmp_path):
    ranks = [
        [send(1, 1, stream=4), send(2, 1, comm_size=16, stream=4)],
        [recv(1, 0, comm_size=16, stream=4), recv(2, 0, stream=4)],
    ]
    traces = open_traces(write_run(tmp_path, *ranks))
    with pytest.raises(ForerunError, match=r"deadlock: rank 1 node 1: receive from rank 0, 16 bytes.*another order"):
        to_program([traces[0], traces[1]], {})


def test_unmatched_operations_are_named(tmp_path):
    traces = open_traces(write_run(tmp_path, [send(1, 1)], [recv(7, 0, comm_size=9)]), names=True)
    with pytest.raises(ForerunError) as caught:
        to_program([traces[0], traces[1]], {})
    assert "rank 0 node 1 (node1): send to rank 1, 8 bytes, tag 5" in str(caught.value)
    assert "rank 1 node 7 (node7): receive from rank 0, 9 bytes, tag 5" in str(caught.value)


def test_a_collective_that_a_rank_does_not_join_is_named(tmp_path):
    traces = open_traces(write_run(tmp_path, [collective(1, "g"), collective(2, "g")], [collective(1, "g")]))
    with pytest.raises(ForerunError, match=r"rank 0 node 2: all_reduce of 64 bytes in group g is not joined .* rank 1"):
        to_program([traces[0], traces[1]], {"g": (0, 1)})


def test_different_collectives_that_would_meet_are_named(tmp_path):
    ranks = [collective(1, "g")], [collective(4, "g", comm_type=2)]
    traces = open_traces(write_run(tmp_path, *ranks))
    with pytest.raises(ForerunError, match=r"rank 1 node 4: all_gather .* meets a different collective, rank 0 node 1"):
        to_program([traces[0], traces[1]], {"g": (0, 1)})


def test_the_collective_of_the_first_rank_is_the_one_of_the_same_turn(tmp_path):
    first = [collective(1, "g"), collective(2, "g", data=[1]), collective(3, "g", data=[2])]
    other = [collective(4, "g"), collective(5, "g", data=[4], comm_type=2), collective(6, "g", data=[5])]
    traces = open_traces(write_run(tmp_path, first, first, other))
    with pytest.raises(ForerunError, match=r"rank 2 node 5: all_gather .* different collective, rank 0 node 2"):
        to_program([traces[0], traces[1], traces[2]], {"g": (0, 1, 2)})


def test_a_collective_of_one_rank_meets_nobody(tmp_path):
    ranks = [send(1, 1), collective(2, "a", data=[1])], [recv(1, 0), collective(2, "b", data=[1])]
    traces = open_traces(write_run(tmp_path, *ranks))
    program = to_program([traces[0], traces[1]], {"a": (0,), "b": (1,)})
    assert len(program.channels) == 1
    flat = unfold(program)
    assert (flat.meeting >= 0).tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ({}, "is not among the communicator groups"),
        ({"g": (1,)}, "lacks rank 0"),
        ({"g": (0, 5)}, "has rank 5, there are 2 ranks"),
    ],
)
def test_wrong_groups_are_named(tmp_path, groups, problem):
    traces = open_traces(write_run(tmp_path, [collective(1, "g")], [comp(1)]))
    with pytest.raises(ForerunError, match=f"rank 0 node 1: .*group 'g' {problem}"):
        to_program([traces[0], traces[1]], groups)


def test_a_collective_that_a_program_has_not_is_refused(tmp_path):
    trace = read_rank(write(tmp_path / "a.0.et", [collective(1, comm_type=9)]))
    with pytest.raises(ForerunError, match=r"rank 0 node 1: barrier .*no such collective"):
        to_program([trace], {})


def test_no_traces_are_refused():
    with pytest.raises(ForerunError, match="no traces"):
        to_program([], {})


def test_figures_of_nodes_go_to_the_op_table(tmp_path):
    nodes = [
        comp(1, num_ops=10, tensor_size=20),
        comp(2, num_ops=30, tensor_size=40, duration=5),
        collective(3, comm_type=2, comm_size=100),
        node(4, NodeKind.MEM_STORE, tensor_size=64),
    ]
    trace = read_rank(write(tmp_path / "a.0.et", nodes))
    measured, roofline = to_program([trace] * 2, {}), to_program([trace] * 2, {}, measured=False)
    ops = measured.ops
    assert ops.kind.tolist() == [OpKind.HOST_COPY, OpKind.MEMORY, OpKind.DELAY, OpKind.COLLECTIVE]
    assert ops.flops.tolist() == [0, 10, 30, 0]
    assert (ops.bytes_read + ops.bytes_written).tolist() == [0, 20, 40, 0]
    assert ops.details_of(2) == Delay(5_000_000)
    assert ops.bytes_comm.tolist() == [64, 0, 0, 200]
    assert roofline.ops.kind.tolist() == [OpKind.HOST_COPY, OpKind.MEMORY, OpKind.MEMORY, OpKind.COLLECTIVE]
    assert roofline.ops.bytes_read.tolist() == [0, 20, 40, 0]


def test_ranks_that_send_are_classes_of_their_own_and_meet_on_channels(tmp_path):
    ranks = [comp(1), send(2, 1, data=[1])], [recv(1, 0), comp(2, data=[1])]
    traces = open_traces(write_run(tmp_path, *ranks))
    program = to_program([traces[0], traces[1]], {})
    flat = unfold(program)
    assert [one.name for one in program.rank_classes] == ["rank 0", "rank 1"]
    assert flat.meeting[flat.meeting >= 0].tolist() == [0, 0]
    assert program.blocks[0].stream.tolist() == [Stream.COMPUTE, Stream.PP_SEND]
    assert program.blocks[1].stream.tolist() == [Stream.PP_RECV, Stream.COMPUTE]
    assert program.ops.details_of(program.blocks[0].op[1]) == Transfer(Direction.OUT)
    assert program.ops.details_of(program.blocks[1].op[0]) == Transfer(Direction.IN)


def test_equal_ranks_share_a_class_only_where_their_groups_are_inside_it(tmp_path):
    ranks = [[collective(1, "a")], [collective(1, "a")], [collective(1, "b")], [collective(1, "b")]]
    traces = [open_traces(write_run(tmp_path, *ranks))[rank] for rank in range(4)]
    pairs = {"a": (0, 1), "b": (2, 3)}
    assert [one.n_ranks for one in to_program(traces, pairs).rank_classes] == [4]
    unequal = {"a": (0, 1), "b": (2, 3, 0)}
    with pytest.raises(ForerunError, match="not joined by all its ranks: rank 0 runs 0"):
        to_program(traces, unequal)
    far = traced_program(traces, pairs, alike=lambda members: members)
    assert len(far.classes) == 4
    assert [channel.name for channel in far.program.channels] == ["a", "b"]


def test_tensors_live_from_their_writer_to_their_last_reader(tmp_path):
    def works(number, inputs, outputs, **more):
        made = comp(number, **more)
        for name, tensors in (("inputs", inputs), ("outputs", outputs)):
            flat = [text for tensor in tensors for text in (tensor, "100.0")]
            made.attr.append(attribute(name, "string_list", flat))
        return made

    nodes = [works(1, ["w"], ["x"]), works(2, ["x", "w"], ["y"], data=[1]), works(3, ["x"], [], data=[2])]
    program = to_program([read_rank(write(tmp_path / "a.0.et", nodes))], {})
    check(program)
    block = program.blocks[0]
    assert list(zip(block.tensor_alloc.tolist(), block.tensor_free.tolist(), strict=True)) == [
        (-1, -1),
        (0, 2),
        (1, -1),
    ]
    assert program.rank_classes[0].resident_bytes.sum() == 100


def test_nodes_without_a_stream_beside_named_ones_have_lanes_of_their_own(tmp_path):
    nodes = [kernel(1, 7), kernel(2, 7), comp(3), collective(4, ""), kernel(5, 9)]
    block = to_program([read_rank(write(tmp_path / "a.0.et", nodes))], {}).blocks[0]
    assert len(np.unique(block.stream)) == 4
    assert block.stream[0] == block.stream[1] == Stream.COMPUTE
