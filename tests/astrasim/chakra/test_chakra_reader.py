"""Reading: columns, number types that drift, older spellings, damaged files."""

import gzip
import json
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_building import attribute, collective, comp, node, recv, send, write

from forerun.astrasim.chakra.groups import read_comm_groups
from forerun.astrasim.chakra.reader import metadata, nodes, read_rank
from forerun.astrasim.chakra.schema import Node
from forerun.astrasim.chakra.trace import CommType, NodeKind
from forerun.common.errors import ForerunError

NUMBERS = [
    "int32_val",
    "int64_val",
    "uint32_val",
    "uint64_val",
    "sint32_val",
    "sint64_val",
    "fixed32_val",
    "fixed64_val",
    "sfixed32_val",
    "sfixed64_val",
    "double_val",
    "float_val",
]


def varint(value):
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def test_columns(tmp_path):
    first = comp(7, duration=3)
    first.attr.insert(0, attribute("inputs", "string_list", ["x", "16.0", "w", "8"]))
    first.attr.append(attribute("outputs", "string_list", ["y", "4.9"]))
    second = collective(2, "3", data=[7], comm_type=2, comm_priority=4)
    second.attr.append(attribute("inputs", "string_list", ["y", "4.0"]))
    path = write(tmp_path / "a.et", [first, second, send(9, 3, ctrl=[2, 7]), recv(1, 2, data=[9]), collective(4)])
    trace = read_rank(path, names=True)
    assert trace.node_id.tolist() == [7, 2, 9, 1, 4]
    assert trace.kind.tolist() == [4, 7, 5, 6, 7]
    assert trace.duration_us.tolist() == [3, 0, 0, 0, 0]
    assert trace.num_ops.tolist() == [10, 0, 0, 0, 0]
    assert trace.tensor_size.tolist() == [20, 0, 0, 0, 0]
    assert trace.comm_type.tolist() == [-1, CommType.ALL_GATHER, -1, -1, CommType.ALL_REDUCE]
    assert trace.comm_size.tolist() == [0, 64, 8, 8, 64]
    assert trace.comm_tag.tolist() == [0, 0, 5, 5, 0]
    assert trace.peer.tolist() == [-1, -1, 3, 2, -1]
    assert trace.group.tolist() == [-1, 0, -1, -1, -1]
    assert trace.group_names == ("3",)
    assert trace.priority.tolist() == [0, 4, 0, 0, 0]
    assert (trace.data_ptr.tolist(), trace.data.tolist()) == ([0, 0, 1, 1, 2, 2], [0, 2])
    assert (trace.ctrl_ptr.tolist(), trace.ctrl.tolist()) == ([0, 0, 0, 2, 2, 2], [1, 0])
    assert trace.tensor_names == ("x", "w", "y")
    assert trace.tensor_bytes.tolist() == [16, 8, 4]
    assert trace.input_tensor.tolist() == [0, 1, 2]
    assert trace.output_tensor.tolist() == [2]
    assert not trace.has_tensors, "some nodes have no lists"
    assert trace.names == ("node7", "node2", "node9", "node1", "node4")
    assert metadata(path).version == "0.0.4"


def test_columns_have_the_types_they_say(tmp_path):
    trace = read_rank(write(tmp_path / "a.et", [comp(1), send(2, 0)]))
    assert trace.node_id.dtype == trace.comm_size.dtype == trace.data_ptr.dtype == np.int64
    assert trace.kind.dtype == trace.comm_type.dtype == np.int8
    assert trace.peer.dtype == trace.data.dtype == trace.group.dtype == np.int32
    assert trace.is_cpu.dtype == np.bool_


def test_without_tensors_their_lists_are_not_even_decoded(tmp_path):
    made = comp(1)
    made.attr.append(attribute("inputs", "string_list", ["x"]))
    path = write(tmp_path / "a.et", [made])
    assert len(read_rank(path, tensors=False).tensor_bytes) == 0
    with pytest.raises(ForerunError, match=r"node 1 \(node1\): inputs is \['x'\], not a list of names and sizes"):
        read_rank(path)


@pytest.mark.parametrize("field", NUMBERS)
def test_any_number_type_is_read(tmp_path, field):
    made = node(1, NodeKind.SEND)
    for name, value in {"comm_size": 4096, "comm_tag": 12, "comm_dst": 3, "is_cpu_op": 1}.items():
        made.attr.append(attribute(name, field, value))
    trace = read_rank(write(tmp_path / "a.et", [made]))
    row = (trace.comm_size, trace.comm_tag, trace.peer, trace.is_cpu)
    assert [int(column[0]) for column in row] == [4096, 12, 3, 1]


def test_texts_and_lists_of_one_are_numbers_too(tmp_path):
    made = comp(1, num_ops="123.0", tensor_size="7")
    made.attr.append(attribute("is_cpu_op", "string_val", "true"))
    other = collective(2, 5)
    other.attr.append(attribute("comm_priority", "int32_list", [9]))
    trace = read_rank(write(tmp_path / "a.et", [made, other]))
    assert trace.num_ops.tolist() == [123, 0]
    assert trace.tensor_size.tolist() == [7, 0]
    assert trace.is_cpu.tolist() == [True, False]
    assert trace.priority.tolist() == [0, 9]
    assert trace.group_names == ("5",)


def test_who_takes_part_in_a_collective(tmp_path):
    plain = {"comm_size": 8, "comm_type": 0}
    made = [
        node(1, NodeKind.COLLECTIVE, **plain, pg_name="a", involve_dims=[True, False]),
        node(2, NodeKind.COLLECTIVE, **plain, pg_name="a", involved_dim=[True, False]),
        node(3, NodeKind.COLLECTIVE, **plain, comm_group=4),
        node(4, NodeKind.COLLECTIVE, **plain, involved_dim=[True, True]),
        node(5, NodeKind.COLLECTIVE, **plain),
    ]
    trace = read_rank(write(tmp_path / "a.et", made))
    assert trace.involved_dims == {0: (True, False), 3: (True, True)}
    assert [trace.group_names[group] if group >= 0 else None for group in trace.group] == [None, "a", "4", None, None]


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        ([node(1, 12)], r"node 1 \(node1\): unknown node type 12"),
        ([collective(1, comm_type=10)], "unknown comm_type 10"),
        ([node(1, NodeKind.COLLECTIVE, comm_type=0)], "comm_size is missing"),
        ([node(1, NodeKind.COLLECTIVE, comm_size=8)], "comm_type is missing"),
        ([node(1, NodeKind.COLLECTIVE, comm_size=8, is_cpu_op=0)], "comm_type is missing"),
        ([node(1, NodeKind.COLLECTIVE, comm_size=8, is_cpu_op="maybe")], "is_cpu_op is 'maybe', not a number"),
        ([node(1, NodeKind.SEND, comm_size=1)], "comm_dst is missing"),
        ([comp(1, num_ops=-3)], "num_ops is -3, which is negative"),
        ([comp(1, num_ops="many")], "num_ops is 'many', not a number"),
        ([comp(1, num_ops=1e300)], "does not fit in 64 bits"),
        ([comp(1, num_ops=float("nan"))], "not a number"),
        ([send(1, -1)], "comm_dst is -1, not a rank"),
        ([comp(1), comp(1)], "node 1: two nodes have this id"),
        ([comp(1, data=[2])], "node 1: data dependency on node 2, which is not in the trace"),
        ([comp(5), comp(1, ctrl=[1])], "node 1: control dependency on itself"),
        ([comp((1 << 64) - 1)], "does not fit in 64 bits"),
        ([comp(1, data=[(1 << 64) - 1])], "not in the trace"),
    ],
)
def test_bad_nodes_are_named(tmp_path, made, complaint):
    with pytest.raises(ForerunError, match=rf"a\.et: .*{complaint}"):
        read_rank(write(tmp_path / "a.et", made))


@pytest.mark.parametrize("pack", [gzip.compress, lambda data: zstandard.compress(data), lambda data: data])
def test_compression_is_seen_by_content(tmp_path, pack):
    plain = write(tmp_path / "a.et", [comp(1), comp(2, data=[1])]).read_bytes()
    path = tmp_path / "b.et"
    path.write_bytes(pack(plain[:30]) + pack(plain[30:]))
    assert [one.id for one in nodes(path)] == [1, 2]


def outcome(path):
    """The trace, or the error."""
    try:
        return read_rank(path, names=True)
    except ForerunError as error:
        return error


@pytest.mark.parametrize("suffix", ["et", "et.gz", "et.zst"])
def test_every_truncation_is_an_error_or_ends_between_nodes(tmp_path, suffix):
    whole = write(tmp_path / f"a.{suffix}", [comp(1), comp(2), send(3, 0)]).read_bytes()
    path, n_read = tmp_path / f"b.{suffix}", []
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        result = outcome(path)
        if isinstance(result, ForerunError):
            assert str(result).startswith(str(path))
        else:
            n_read.append(len(result))
    assert n_read == ([0, 1, 2] if suffix == "et" else []), "compressed data says where it ends"


@pytest.mark.parametrize("length", [varint(1 << 60), varint(1 << 31), b"\xff" * 12, varint((1 << 28) + 1)])
def test_absurd_lengths_are_refused_at_once(tmp_path, length):
    path = write(tmp_path / "a.et", [comp(1)])
    path.write_bytes(path.read_bytes() + length + b"abc")
    with pytest.raises(ForerunError, match=r"node number 2 claims a length"):
        list(nodes(path))


def test_a_length_beyond_the_file(tmp_path):
    path = write(tmp_path / "a.et", [comp(1)])
    path.write_bytes(path.read_bytes() + varint(1 << 27) + b"abc")
    with pytest.raises(ForerunError, match=r"truncated in node number 2"):
        read_rank(path)


def test_a_length_that_the_piece_ends_within(tmp_path):
    long = comp(2)
    long.inputs.values = "x" * (1 << 20)
    path = write(tmp_path / "a.et", [long, comp(3), long, long])
    assert [one.id for one in nodes(path)] == [2, 3, 2, 2]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "the file is empty"),
        (b"\x03\x08\x01\x10", "begins with a node"),
        (b"\x03\x0a\x7f\x00", "does not begin with metadata"),
        (b"\x00\x02\x0a\x7f", "node number 1 can't be decoded"),
    ],
)
def test_files_that_are_no_traces(tmp_path, content, complaint):
    path = tmp_path / "a.et"
    path.write_bytes(content)
    with pytest.raises(ForerunError, match=complaint):
        read_rank(path)


def test_unreadable_paths(tmp_path):
    for path in (tmp_path / "missing.et", tmp_path, "nul\0.et"):
        with pytest.raises(ForerunError, match="can't be read"):
            read_rank(path)


def survives(path):
    result = outcome(path)
    if isinstance(result, ForerunError):
        assert "\n" not in str(result)
    else:
        assert len(result.kind) == len(result.data_ptr) - 1


@given(st.binary(max_size=200), st.sampled_from([b"", b"\x00", b"\x1f\x8b\x08\x00", b"\x28\xb5\x2f\xfd"]))
@settings(max_examples=100)
def test_random_bytes_give_an_error_or_a_trace(tmp_path_factory, content, head):
    path = tmp_path_factory.getbasetemp() / "random.et"
    path.write_bytes(head + content)
    survives(path)


@given(st.data(), st.sampled_from(["et", "et.gz", "et.zst"]))
@settings(max_examples=100)
def test_mutated_traces_give_an_error_or_a_trace(tmp_path_factory, data, suffix):
    path = tmp_path_factory.getbasetemp() / f"mutated.{suffix}"
    made = comp(1)
    made.attr.append(attribute("inputs", "string_list", ["x", "16.0"]))
    content = bytearray(write(path, [made, collective(2, "1", data=[1]), send(3, 1, ctrl=[1, 2])]).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    survives(path)


def test_a_small_file_that_unpacks_to_a_large_one_is_refused_at_once(tmp_path):
    path = tmp_path / "a.et.zst"
    path.write_bytes(zstandard.compress(bytes(1 << 28)))
    assert path.stat().st_size < 1 << 16
    tracemalloc.start()
    with pytest.raises(ForerunError, match="node number 1 is empty"):
        read_rank(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 28


def test_an_attribute_that_is_none(tmp_path):
    broken = b"\x08\x01\x18\x04\x52\x02\x0a\x7f"
    path = tmp_path / "a.et"
    path.write_bytes(b"\x00" + bytes([len(broken)]) + broken)
    with pytest.raises(ForerunError, match="node 1: an attribute can't be decoded"):
        read_rank(path)


def test_node_messages_keep_everything(tmp_path):
    made = [comp(1, data=[2]), Node(id=2, start_time_micros=4)]
    made[0].inputs.shapes = "[[1]]"
    assert list(nodes(write(tmp_path / "a.et", made))) == made


def groups_of(tmp_path, text):
    path = tmp_path / "groups.json"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return read_comm_groups(path)


def test_groups_keep_their_order(tmp_path):
    groups = groups_of(tmp_path, {"2": [3, 1], "1": [0]})
    assert list(groups.items()) == [("2", (3, 1)), ("1", (0,))]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[1]", "not a mapping"),
        ("{", "line 1: not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("1" * 10_000, "a number is too long"),
        ({"1": []}, "group '1': expected a list of ranks"),
        ({"1": 3}, "group '1': expected a list of ranks, got 3"),
        ({"1": [0, True]}, "expected ranks, got true"),
        ({"1": [0, -1]}, "expected ranks, got -1"),
        ({"1": [0, 2.5]}, "expected ranks, got 2.5"),
        ({"1": [4, 3, 4]}, "rank 4 is in it twice"),
        ('{"1": [0], "1": [1]}', "key '1' is given twice"),
    ],
)
def test_bad_groups(tmp_path, text, complaint):
    with pytest.raises(ForerunError, match=complaint):
        groups_of(tmp_path, text)


def test_groups_that_can_not_be_read(tmp_path):
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    for name, complaint in {"missing.json": "can't be read", "binary.json": "not UTF-8"}.items():
        with pytest.raises(ForerunError, match=complaint):
            read_comm_groups(tmp_path / name)
