"""JSON of other tools: Chakra's feeder and jsonizer, and PyTorch's execution traces."""

import json

import pytest
from command_here import run_here
from google.protobuf.json_format import MessageToJson
from random_traces import collective, comp, trace

from forerun.astrasim.chakra.jsonize import convert
from forerun.astrasim.chakra.reader import metadata, nodes
from forerun.astrasim.chakra.trace import CommType, NodeKind
from forerun.astrasim.chakra.traces import open_traces
from forerun.astrasim.chakra.writer import write_rank
from forerun.common.errors import ForerunError

GRAPH = {
    "workload_graph": [
        {"Id": 3, "Name": "aten::mm", "NodeType": 4, "runtime": 7, "data_deps": [], "is_cpu_op": True},
        {"Id": 5, "Name": "gemm", "NodeType": 4, "runtime": 40, "data_deps": [3], "ctrlDeps": [3], "is_cpu_op": False},
        {"Id": 8, "Name": "ncclKernel", "NodeType": 7, "runtime": 28, "data_deps": [5], "is_cpu_op": False},
        {"Id": 9, "NodeType": 7, "data_deps": [8], "is_cpu_op": False, "comm_type": 0, "comm_size": 64, "pg_name": "1"},
        {"Id": 10, "NodeType": 5, "data_deps": [9], "comm_dst": 1, "comm_size": 32, "comm_tag": 2},
    ]
}
TENSOR, OTHER = [14, 15, 0, 8, 4, "cuda:0"], [19, 20, 0, 8, 4, "cuda:0"]


def executed(node_id, name, caller, inputs=(), outputs=()):
    return {
        "id": node_id,
        "name": name,
        "ctrl_deps": caller,
        "inputs": {"values": inputs},
        "outputs": {"values": outputs},
    }


GROUPS = '[{"pg_name": "7", "backend_id": 821, "ranks": [0, 1], "group_size": 2, "group_count": 1}]'
EXECUTED = {
    "schema": "1.0.2-chakra.0.0.4",
    "nodes": [
        executed(2, "[pytorch|profiler|execution_trace|thread]", 1),
        executed(3, "## process_group:init ##", 2, [GROUPS]),
        executed(9, "record_param_comms", 5, [[TENSOR], 12, 821, 0, "all_gather", [], [], 2], [[[OTHER]]]),
        executed(5, "c10d::allgather_", 2, [[[OTHER]], [TENSOR]], [[[OTHER]]]),
        executed(4, "aten::ones", 2, [[8]], [TENSOR]),
        executed(11, "aten::add", 2, [OTHER, 1], [OTHER]),
    ],
}


@pytest.fixture
def read(tmp_path):
    """Reads what is written into a JSON file."""

    def of(text, lenient=False):
        (tmp_path / "run.0.json").write_text(text if isinstance(text, str) else json.dumps(text))
        return open_traces(tmp_path / "run", 1, names=True, lenient=lenient)[0]

    return of


def test_the_form_of_chakras_feeder(read):
    found = read(GRAPH)
    assert found.node_id.tolist() == [3, 5, 8, 9, 10]
    assert found.duration_us.tolist() == [7, 40, 28, 0, 0]
    assert found.is_cpu.tolist() == [True, False, False, False, False]
    assert found.data.tolist() == [0, 1, 2, 3]
    assert found.ctrl.tolist() == [0]
    assert found.kind.tolist() == [4, 4, NodeKind.COMP, 7, NodeKind.SEND], "a kernel without a kind keeps its time"
    assert (found.comm_type[3], found.comm_size[3], found.group_names) == (CommType.ALL_REDUCE, 64, ("1",))
    assert (found.peer[4], found.comm_tag[4]) == (1, 2)


def test_the_form_of_chakras_jsonizer(read, tmp_path):
    one = trace([comp(), collective(CommType.ALL_GATHER, 64, after=[0])])
    write_rank(tmp_path / "et.0.et", one)
    found = read("".join(map(MessageToJson, [metadata(tmp_path / "et.0.et"), *nodes(tmp_path / "et.0.et")])))
    same = open_traces(tmp_path / "et", 1)[0]
    assert found.comm_size.tolist() == same.comm_size.tolist()
    assert found.num_ops.tolist() == same.num_ops.tolist()
    assert found.data.tolist() == same.data.tolist()


def test_an_execution_trace_of_pytorch(read):
    found = read(EXECUTED)
    assert found.names == (
        "## process_group:init ##",
        "aten::ones",
        "c10d::allgather_",
        "record_param_comms",
        "aten::add",
    )
    of = dict(zip(found.names, range(5), strict=True))
    gather = of["record_param_comms"]
    assert (found.comm_type[gather], found.comm_size[gather]) == (CommType.ALL_GATHER, 8 * 4)
    assert found.group_names == ("7",)
    assert found.process_groups == {"7": (0, 1)}
    assert found.is_cpu.sum() == 4

    def after(name):
        rows = slice(*found.data_ptr[of[name] : of[name] + 2])
        return {found.names[row] for row in found.data[rows]}

    assert after("record_param_comms") == {"aten::ones"}
    assert after("aten::add") == {"record_param_comms"}
    rows = slice(*found.ctrl_ptr[gather : gather + 2])
    assert [found.names[row] for row in found.ctrl[rows]] == ["c10d::allgather_"]


def test_a_caller_that_is_no_number_is_no_dependency(read):
    node = {"id": 2, "name": "aten::ones", "ctrl_deps": {"a": 1}, "inputs": [], "outputs": []}
    found = read({"schema": "1", "nodes": [node]})
    assert found.names == ("aten::ones",)
    assert len(found.ctrl) == 0


def test_json_becomes_a_trace_file(tmp_path):
    (tmp_path / "run.0.json").write_text(json.dumps(GRAPH))
    assert convert(tmp_path / "run.0.json", tmp_path / "out.0.et") == 5
    assert open_traces(tmp_path / "out", 1)[0].duration_us.tolist() == [7, 40, 28, 0, 0]
    assert run_here(tmp_path, "chakra", "info", "run.0.json").returncode == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ({"workload_graph": [{"Id": 1}]}, "node number 1: a node needs Id and NodeType"),
        ({"workload_graph": [{"Id": -1, "NodeType": 4}]}, "node number 1: "),
        ({"workload_graph": [{"Id": 1, "NodeType": 4, "data_deps": "x"}]}, "node number 1: "),
        ({"schema": "1", "nodes": [{"name": "x"}]}, "node number 1 by id: a node needs an id"),
        ({"traceEvents": []}, "Chakra's workload_graph, or an execution trace of PyTorch"),
        ('{"version": "0.0.4"} {"id": ', "object number 2 can't be read"),
        ('{"version": "0.0.4"}\n {"id": 1}\n{"id": 2} {', "object number 4 can't be read"),
    ],
)
def test_what_is_no_trace_is_one_line(read, text, problem):
    with pytest.raises(ForerunError) as caught:
        read(text)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_traces_of_pytorch_are_recognised_under_slots(tmp_path):
    (tmp_path / "run.0.json").write_text(json.dumps(EXECUTED))
    (tmp_path / "run.1.json").write_text(json.dumps(EXECUTED))
    (tmp_path / "system.json").write_text('{"all-gather-implementation": ["ring"]}')
    (tmp_path / "net.yml").write_text("topology: [Ring]\nnpus_count: [2]\nbandwidth: [50]\nlatency: [500]\n")
    files = ("--workload-configuration", "run", "--system-configuration", "system.json")
    done = run_here(tmp_path, "astra", *files, "--network-configuration", "net.yml")
    assert done.returncode == 0
    assert "the traces are PyTorch's, with streams or process groups" in done.stderr
    assert "--semantics streams" in done.stderr
