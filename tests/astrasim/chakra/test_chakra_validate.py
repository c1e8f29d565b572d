"""Every kind of fault is found, where it is, and nothing else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_building import GOLDEN, attribute, collective, comp, node, recv, send, write_run

from forerun.astrasim.chakra.groups import read_comm_groups
from forerun.astrasim.chakra.info import info, overall
from forerun.astrasim.chakra.schema import Node
from forerun.astrasim.chakra.trace import NodeKind
from forerun.astrasim.chakra.validate import validate
from forerun.common.errors import ForerunError

REFERENCE = [path.parent for path in sorted(GOLDEN.glob("stage/small/*/et"))]


def found(folder, *ranks, groups=None, **options):
    """Findings as (severity, kind, rank, node, message)."""
    findings = validate(write_run(folder, *ranks), groups, **options)
    return [(one.severity, one.kind, one.rank, one.node, one.message) for one in findings]


@pytest.mark.skipif(not REFERENCE, reason="no reference traces beside the repository")
@pytest.mark.parametrize("folder", REFERENCE[::4], ids=lambda folder: folder.name)
def test_traces_of_stage_have_no_faults(folder):
    assert validate(folder, read_comm_groups(folder / "comm_group.json")) == []


def test_a_clean_run(tmp_path):
    zero = [comp(1), send(2, 1, data=[1]), collective(3, "a", data=[9]), collective(4, ctrl=[3]), recv(9, 1, data=[2])]
    one = [recv(1, 0), send(2, 0, data=[1]), collective(30, "a"), collective(31)]
    assert found(tmp_path, zero, one, groups={"a": (0, 1)}) == []


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (node(1, 12), "unknown node type 12"),
        (node(1, NodeKind.COMP), "it has neither num_ops nor a duration"),
        (node(1, NodeKind.COMP, num_ops=3), "tensor_size is missing"),
        (node(1, NodeKind.MEM_LOAD), "tensor_size is missing"),
        (node(1, NodeKind.COLLECTIVE, comm_size=3), "comm_type is missing"),
        (node(1, NodeKind.COLLECTIVE, comm_type=3), "comm_size is missing"),
        (node(1, NodeKind.SEND, comm_tag=3, comm_size=3), "comm_dst is missing"),
        (node(1, NodeKind.RECV, comm_tag=3, comm_size=3), "comm_src is missing"),
        (comp(1, num_ops=-4), "num_ops is -4, which is negative"),
        (comp(1, tensor_size="few"), "tensor_size is 'few', not a number"),
        (comp(1, is_cpu_op="maybe"), "is_cpu_op is 'maybe', not a number"),
        (collective(1, comm_type=10), "unknown comm_type 10"),
        (collective(1, involve_dims="x"), "involve_dims is 'x', not a list"),
        (comp(1 << 63), "its id does not fit in 63 bits"),
    ],
)
def test_bad_nodes(tmp_path, made, message):
    assert found(tmp_path, [made]) == [("error", "node", 0, made.id, message)]


def test_what_launches_a_collective_needs_neither_size_nor_type(tmp_path):
    assert found(tmp_path, [node(1, NodeKind.COLLECTIVE, is_cpu_op=1)]) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["x"], "inputs is ['x'], not a list of names and sizes"),
        (["x", "much"], "size of tensor 'x' is 'much', not a number"),
        (["x", "-2"], "size of tensor 'x' is -2, which is negative"),
    ],
)
def test_bad_lists_of_tensors(tmp_path, values, message):
    made = comp(1)
    made.attr.append(attribute("inputs", "string_list", values))
    assert found(tmp_path, [made, comp(2)]) == [("error", "node", 0, 1, message)]


def test_what_is_odd_is_a_warning(tmp_path):
    made = [Node(id=1), collective(2, comm_size=0), node(3, NodeKind.SEND, comm_size=1, comm_dst=0)]
    findings = found(tmp_path, [*made, recv(4, 0, comm_size=1, comm_tag=0)])
    assert [(one[0], one[3]) for one in findings] == [("warning", 1), ("warning", 2), ("warning", 3)]


def test_ids_given_twice_and_missing_dependencies(tmp_path):
    findings = found(tmp_path, [comp(5, data=[1]), comp(1, ctrl=[7]), comp(5)])
    assert findings == [
        ("error", "node", 0, 5, "two nodes have this id"),
        ("error", "dependency", 0, 1, "depends on node 7, which is not in the trace"),
    ]


def test_a_cycle_names_its_nodes(tmp_path):
    made = [comp(1), comp(2, data=[1, 4]), comp(3, ctrl=[2]), comp(4, data=[3]), comp(5, data=[4])]
    ((severity, kind, rank, start, message),) = found(tmp_path, made)
    assert (severity, kind, rank) == ("error", "cycle", 0)
    assert message == f"depends on itself: {start} -> 4 -> 3 -> 2; 4 nodes can never start"
    assert start == 2


def test_a_node_that_depends_on_itself(tmp_path):
    assert found(tmp_path, [comp(1, data=[1])])[0][4] == "depends on itself: 1 -> 1; 1 nodes can never start"


def test_a_long_cycle_is_cut(tmp_path):
    made = [comp(number, data=[(number + 1) % 50]) for number in range(50)]
    ((*_, message),) = found(tmp_path, made)
    assert message.endswith("-> 11 -> ... 38 more ... -> 0; 50 nodes can never start")


def test_messages_without_their_other_end(tmp_path):
    zero = [send(1, 1), send(2, 1), send(3, 1, comm_tag=9), send(4, 7)]
    one = [recv(1, 0), recv(2, 0, comm_tag=9, comm_size=80)]
    assert sorted(found(tmp_path, zero, one), key=str) == [
        ("error", "message", 0, 2, "send of 8 bytes with tag 5 to rank 1 has no receive"),
        ("error", "message", 0, 3, "send of 8 bytes with tag 9 to rank 1 has no receive; its peer says 80 bytes"),
        ("error", "message", 0, 4, "its peer is rank 7, but there are 2 traces"),
        (
            "error",
            "message",
            1,
            2,
            "receive of 80 bytes with tag 9 from rank 0 has no send; its peer says 8 bytes",
        ),
    ]


def test_groups_that_are_unknown_or_of_others(tmp_path):
    made = [collective(1, "b"), collective(2, "c")]
    assert found(tmp_path, made, [], groups={"b": (1,), "d": (4, 1)}) == [
        ("error", "group", None, None, "group 'd' has rank 4, but there are 2 traces"),
        ("error", "group", 0, 1, "group 'b' does not contain rank 0"),
        ("error", "group", 0, 2, "unknown group 'c': the file of groups does not name it"),
    ]


@pytest.mark.parametrize(
    ("other", "severity", "words"),
    [
        (
            [collective(8, "a")],
            "error",
            "is no more collectives, but there it is all_gather of 64 bytes in node 2",
        ),
        ([collective(8, "a"), collective(9, "a", comm_type=7)], "error", "number 1 is reduce_scatter of 64 bytes"),
        ([collective(8, "a", comm_size=1), collective(9, "a", comm_type=2)], "error", "number 0 is all_reduce of 1"),
        (
            [collective(8, "a", comm_type=2), collective(9, "a")],
            "warning",
            "order than on rank 0: number 0 is all_gather",
        ),
        ([], "error", "runs none of its collectives, but rank 0 runs 2"),
    ],
)
def test_members_of_a_group_that_disagree(tmp_path, other, severity, words):
    mine = [collective(1, "a"), collective(2, "a", comm_type=2)]
    (finding,) = found(tmp_path, mine, other, groups={"a": (0, 1)})
    assert finding[:3] == (severity, "collective", 1)
    assert words in finding[4]


def test_without_a_file_of_groups_a_name_may_stand_for_several(tmp_path):
    (finding,) = found(tmp_path, [collective(1, "a")], [collective(1, "a", comm_size=9)])
    assert finding[:3] == ("warning", "collective", 1)


def test_some_ranks_are_compared_with_each_other_only(tmp_path):
    prefix = write_run(tmp_path, [send(1, 1), send(2, 2)], [recv(1, 0)], [])
    files = [prefix.with_name("w.0.et"), prefix.with_name("w.1.et")]
    assert validate(files, {"a": (0, 5)}) == []


def test_many_findings_are_counted(tmp_path):
    findings = found(tmp_path, [comp(number, num_ops=-1) for number in range(50)], limit=3)
    assert len(findings) == 4
    assert findings[3] == ("error", "node", None, None, "47 more of kind node")


def test_a_damaged_file_ends_the_check(tmp_path):
    prefix = write_run(tmp_path, [comp(1)])
    path = prefix.with_name("w.0.et")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ForerunError, match=r"w\.0\.et: truncated"):
        validate(prefix)


@given(st.data())
@settings(max_examples=100)
def test_mutated_traces_are_checked_or_refused(tmp_path_factory, data):
    prefix = write_run(tmp_path_factory.getbasetemp(), [comp(1), collective(2, "a", data=[1]), send(3, 0, ctrl=[1, 2])])
    path = prefix.with_name("w.0.et")
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    for check in (validate, info):
        try:
            result = check([path])
        except ForerunError as error:
            result = error
        assert isinstance(result, (list, ForerunError))


def test_figures_of_a_run(tmp_path):
    zero = [comp(1, num_ops=7), comp(2, data=[1]), collective(3, "a", data=[2]), collective(4, "a", comm_size=6)]
    one = [comp(9), send(1, 0, data=[9]), collective(5, involve_dims=[True]), collective(6, comm_type=2)]
    ranks = info(write_run(tmp_path, zero, one))
    assert [rank.rank for rank in ranks] == [0, 1]
    assert ranks[0].metadata == {"version": "0.0.4"}
    assert ranks[0].figures.record() == {
        "nodes": 4,
        "nodes_by_type": {"collective": 2, "comp": 2},
        "dependencies": 2,
        "num_ops": 17,
        "tensor_bytes": 40,
        "critical_path_nodes": 3,
        "communication": [{"operation": "all_reduce", "group": "a", "calls": 2, "bytes": 70}],
    }
    total = overall(ranks).record()
    assert (total["nodes"], total["num_ops"], total["critical_path_nodes"]) == (8, 27, 3)
    assert [(row["operation"], row["group"], row["bytes"]) for row in total["communication"]] == [
        ("all_gather", "", 64),
        ("all_reduce", "(by dimension)", 64),
        ("all_reduce", "a", 70),
        ("send", "", 8),
    ]
