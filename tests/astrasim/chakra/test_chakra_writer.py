"""Writing: what is read is what was written, and STAGE's own files come out byte for byte."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_building import GOLDEN, assert_equal, attribute, collective, comp, node, recv, send, write

from forerun.astrasim.chakra.jsonize import convert
from forerun.astrasim.chakra.reader import nodes, read_rank
from forerun.astrasim.chakra.schema import AttributeProto, GlobalMetadata
from forerun.astrasim.chakra.trace import NodeKind
from forerun.astrasim.chakra.writer import write_rank
from forerun.common.errors import ForerunError

REFERENCE = sorted(GOLDEN.glob("stage/small/*/et/w.*.et"))
AMOUNT = st.integers(0, (1 << 63) - 1)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@st.composite
def nodes_of_a_trace(draw):
    made = []
    ids = draw(st.lists(st.integers(0, (1 << 63) - 1), unique=True, max_size=6))
    for number in ids:
        kind = draw(st.sampled_from(NodeKind))
        attributes = {
            "num_ops": draw(AMOUNT),
            "tensor_size": draw(AMOUNT),
            "comm_size": draw(AMOUNT),
            "comm_tag": draw(st.integers(-(1 << 63), (1 << 63) - 1)),
            "comm_type": draw(st.integers(0, 9)),
            "comm_dst": draw(st.integers(0, (1 << 31) - 1)),
            "comm_src": draw(st.integers(0, (1 << 31) - 1)),
            "comm_priority": draw(st.integers(-9, 9)),
            "is_cpu_op": draw(st.integers(0, 1)),
            "pg_name": draw(TEXT),
        }
        others = st.lists(st.sampled_from(ids), max_size=3).map(lambda some, me=number: [x for x in some if x != me])
        one = node(
            number, kind, name=draw(TEXT), data=draw(others), ctrl=draw(others), duration=draw(AMOUNT), **attributes
        )
        if draw(st.booleans()):
            one.attr.append(attribute("involve_dims", "bool_list", draw(st.lists(st.booleans(), max_size=3))))
        for name in ("inputs", "outputs"):
            tensors = draw(
                st.lists(st.sampled_from(["a", "1.0", "b", "2.0"]), max_size=0) | st.just(["a", "1", "b", "2"])
            )
            one.attr.append(attribute(name, "string_list", tensors))
        made.append(one)
    return made


@given(nodes_of_a_trace(), st.sampled_from(["et", "et.gz", "et.zst"]))
@settings(max_examples=100)
def test_what_is_written_is_read_back(tmp_path_factory, made, suffix):
    folder = tmp_path_factory.getbasetemp()
    first = read_rank(write(folder / "first.et", made), names=True)
    again = folder / f"again.{suffix}"
    write_rank(again, first)
    assert_equal(read_rank(again, names=True), first)


def test_traces_without_names_are_written_too(tmp_path):
    made = comp(1)
    made.attr.append(attribute("inputs", "string_list", ["x", "16.0"]))
    first = read_rank(write(tmp_path / "a.et", [made]))
    write_rank(tmp_path / "b.et", first)
    assert_equal(read_rank(tmp_path / "b.et"), first)


@pytest.mark.skipif(not REFERENCE, reason="no reference traces beside the repository")
def test_traces_of_stage_come_out_byte_for_byte(tmp_path):
    for path in REFERENCE[::6]:
        write_rank(tmp_path / "w.et", read_rank(path, names=True))
        assert (tmp_path / "w.et").read_bytes() == path.read_bytes(), path


def test_equal_traces_are_equal_files(tmp_path):
    trace = read_rank(write(tmp_path / "a.et", [comp(1), comp(2)]))
    for suffix in ("et.gz", "et.zst"):
        write_rank(tmp_path / f"b.{suffix}", trace)
        write_rank(tmp_path / f"c.{suffix}", trace)
        assert (tmp_path / f"b.{suffix}").read_bytes() == (tmp_path / f"c.{suffix}").read_bytes()


def test_a_folder_that_is_not_there(tmp_path):
    trace = read_rank(write(tmp_path / "a.et", [comp(1)]))
    with pytest.raises(ForerunError, match="can't be written"):
        write_rank(tmp_path / "nowhere" / "a.et", trace)


def everything():
    """A node with an attribute of every type, at values that are easily lost."""
    made = node(1, 4, data=[2, 3], ctrl=[4], duration=5)
    made.inputs.values, made.inputs.shapes = "[1]", "[]"
    made.outputs.SetInParent()
    made.start_time_micros = (1 << 64) - 1
    samples = {"string": "é\n", "bytes": b"\xff\x00", "bool": True, "double": 0.1, "float": 0.5}
    for field in AttributeProto.DESCRIPTOR.fields[2:]:
        kind, form = field.name.split("_")
        value = samples.get(kind, 7)
        made.attr.append(attribute(field.name, field.name, [value, value] if form == "list" else value))
    made.attr.append(attribute("zero", "int64_val", 0))
    made.attr.append(attribute("infinite", "double_val", float("-inf")))
    made.attr.append(attribute("none", "bool_list", []))
    made.attr.append(AttributeProto(name="outputs", doc_string="no value"))
    return made


@pytest.mark.parametrize("form", ["json", "jsonl", "jsonl.gz", "json.zst", "et.zst"])
def test_conversion_and_back_loses_nothing(tmp_path, form):
    metadata = GlobalMetadata(version="0.0.4", attr=[AttributeProto(name="schema", string_val="x")])
    source = write(tmp_path / "a.et", [everything(), node(2, 11), collective(3), recv(4, 0), send(5, 0)], metadata)
    assert convert(source, tmp_path / f"b.{form}") == 5
    assert convert(tmp_path / f"b.{form}", tmp_path / "c.et") == 5
    assert (tmp_path / "c.et").read_bytes() == source.read_bytes()


def test_json_has_the_schemas_own_names(tmp_path):
    write(tmp_path / "a.et", [comp(4), comp(6, data=[4], ctrl=[4])])
    convert(tmp_path / "a.et", tmp_path / "a.jsonl")
    last = json.loads((tmp_path / "a.jsonl").read_text().splitlines()[-1])
    assert (last["id"], last["data_deps"], last["ctrl_deps"]) == ("6", ["4"], ["4"])


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_an_empty_trace_converts(tmp_path, form):
    source = write(tmp_path / "a.et", [])
    assert convert(source, tmp_path / f"b.{form}") == 0
    assert convert(tmp_path / f"b.{form}", tmp_path / "c.et") == 0
    assert (tmp_path / "c.et").read_bytes() == source.read_bytes()


@given(nodes_of_a_trace())
@settings(max_examples=30)
def test_any_trace_converts_and_back(tmp_path_factory, made):
    folder = tmp_path_factory.getbasetemp()
    convert(write(folder / "a.et", made), folder / "a.jsonl")
    convert(folder / "a.jsonl", folder / "b.et")
    assert list(nodes(folder / "b.et")) == made


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.jsonl", "", "line 1: expected the metadata"),
        ("a.jsonl", '{"id": 1}\n', "line 1: expected the metadata"),
        ("a.jsonl", '{"metadata": {}}\n{"id": 1', "line 2: not JSON"),
        ("a.jsonl", '{"metadata": {}}\n\n{"idd": 1}', "line 3: .*idd"),
        ("a.jsonl", '{"metadata": {}}\n{"id": "x"}', "line 2: "),
        ("a.jsonl", '{"metadata": {}}\n{"id": -1}', "line 2: "),
        ("a.jsonl", '{"metadata": {}}\n{"name": "\\ud800"}', "line 2: "),
        ("a.jsonl", '{"metadata": {}}\n[]', "line 2: expected an object"),
        ("a.jsonl", '{"metadata": {}}\n{"type": "COMPUTE"}', "line 2: "),
        ("a.jsonl", '{"metadata": {}}\n' + "[" * 100_000, "line 2: not JSON"),
        ("a.jsonl", b"\xff", "line 1: not UTF-8"),
        ("a.json", "[]", "expected an object with metadata"),
        ("a.json", '{"metadata": {}, "nodes": [1]}', "node number 1: expected an object"),
        ("a.txt", "", "unknown form"),
    ],
)
def test_json_that_is_no_trace(tmp_path, name, text, complaint):
    source, target = tmp_path / name, tmp_path / "b.et"
    source.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ForerunError, match=complaint) as caught:
        convert(source, target)
    assert str(source) in str(caught.value)
    assert not target.exists()
