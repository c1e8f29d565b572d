"""The scanner and the reader that goes node by node: the same traces, the same errors."""

import io
import struct
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_building import GOLDEN, assert_equal, attribute, collective, comp, node, recv, send, write

from forerun.astrasim.chakra import attributes
from forerun.astrasim.chakra.framing import chunks
from forerun.astrasim.chakra.groups import process_group_text
from forerun.astrasim.chakra.reader import read_node_by_node, read_rank, read_rank_from
from forerun.astrasim.chakra.scan_columns import KEYS
from forerun.astrasim.chakra.scan_nodes import size_of_tensor
from forerun.astrasim.chakra.scanned import scanned_rank
from forerun.astrasim.chakra.schema import AttributeProto, GlobalMetadata, Node
from forerun.astrasim.chakra.trace import NodeKind, RankTrace
from forerun.astrasim.chakra.wire import N_FOUND, is_text, read_attribute, tag, varint, whole_number
from forerun.common.errors import ForerunError

FIELDS = [field.name for field in AttributeProto.DESCRIPTOR.fields if field.number > 2]


def buffer(content):
    return np.frombuffer(content, np.uint8)


def outcome(read, content, options):
    """What a reader makes of a file: a trace, or the text of its error."""
    try:
        return read(io.BytesIO(content), "a.et", **options)
    except ForerunError as error:
        return str(error)


def compare(content, **options):
    """Both readers give the same trace or the same error, with all options unless some are given."""
    every = [
        {"names": names, "tensors": tensors, "lenient": lenient}
        for names, tensors, lenient in ((True, True, False), (False, False, True), (False, True, False))
    ]
    for one in [options] if options else every:
        mine, its = (outcome(read, content, one) for read in (read_rank_from, read_node_by_node))
        if isinstance(its, RankTrace):
            assert isinstance(mine, RankTrace), mine
            assert_equal(mine, its)
            assert all(
                getattr(mine, name).dtype == getattr(its, name).dtype
                for name in RankTrace.__slots__
                if isinstance(getattr(its, name), np.ndarray)
            )
        else:
            assert mine == its


def scanned(content, names=True, tensors=True):
    return scanned_rank(io.BytesIO(content), "a.et", names, tensors, False)


def content_of(nodes, metadata=None):
    """The bytes of a trace file."""
    found = []
    for message in [metadata or GlobalMetadata(version="0.0.4"), *nodes]:
        body, size = message.SerializeToString(), bytearray()
        left = len(body)
        while left >= 0x80:
            size.append(left & 0x7F | 0x80)
            left >>= 7
        found.append(bytes([*size, left]) + body)
    return b"".join(found)


def usual():
    """Nodes of every kind, as converters write them."""
    first = comp(7, duration=3, stream=7, rf_id=12)
    first.attr.insert(0, attribute("inputs", "string_list", ["x", "16.0", "w", "8"]))
    first.attr.append(attribute("outputs", "string_list", ["y", "4.9"]))
    first.attr.append(attribute("kernel_file", "string_val", "größe.py"))
    first.attr.append(attribute("losses", "double_list", [1.5, 2]))
    first.attr.append(attribute("nothing", "int64_val", 0))
    first.attr[-1].ClearField("int64_val")
    second = collective(2, "3", data=[7], comm_type=2, comm_priority=4)
    second.attr.append(attribute("inputs", "string_list", []))
    launcher = node(12, NodeKind.COLLECTIVE, comm_size=4)
    launcher.attr.append(attribute("is_cpu_op", "bool_val", True))
    described = node(3, NodeKind.METADATA)
    described.inputs.values = process_group_text({"0": (0, 1), "3": ()})
    described.inputs.shapes, described.outputs.values = "[]", "[{]}"
    dims = node(4, NodeKind.COLLECTIVE, comm_size=8, comm_type=0, involve_dims=[True, False])
    by_group = node(5, NodeKind.SEND, comm_size=8, pg_name="3")
    return [described, first, second, send(9, 3, ctrl=[2, 7]), recv(1, 2, data=[9]), dims, by_group, launcher]


@pytest.mark.parametrize("tensors", [False, True])
def test_usual_traces_are_scanned(tensors):
    trace = scanned(content_of(usual()), tensors=tensors)
    assert trace is not None
    assert trace.group_names == ("3",)
    assert trace.involved_dims == {5: (True, False)}
    assert trace.process_groups == {"0": (0, 1), "3": ()}
    assert trace.stream.tolist() == [-1, 7, *[-1] * 6]
    assert trace.tensor_names == (("x", "w", "y") if tensors else ())
    assert trace.tensor_bytes.tolist() == ([16, 8, 4] if tensors else [])
    compare(content_of(usual()))


@pytest.mark.parametrize("cpu", [None, ("bool_val", False), ("string_val", "maybe"), ("bool_val", True)])
@pytest.mark.parametrize("size", [None, ("int64_val", 8), ("string_val", "x")])
def test_collectives_without_a_type_are_read_or_refused_alike(cpu, size):
    made = node(1, NodeKind.COLLECTIVE)
    for name, value in (("is_cpu_op", cpu), ("comm_size", size)):
        if value is not None:
            made.attr.append(attribute(name, *value))
    compare(content_of([made]))


def golden_files():
    """The reference traces: single files, and the first member of each archive."""
    for path in sorted(GOLDEN.rglob("*.et*")):
        if ".tar" not in path.name:
            yield path, b"".join(chunks(io.BytesIO(path.read_bytes()), str(path)))
            continue
        whole = io.BytesIO(b"".join(chunks(io.BytesIO(path.read_bytes()), str(path))))
        with tarfile.open(fileobj=whole) as archive:
            member = next(one for one in archive if one.isfile())
            yield path, archive.extractfile(member).read()


@pytest.mark.skipif(not GOLDEN.exists(), reason="the reference data are not there")
def test_reference_traces_are_scanned_and_equal():
    n_files = 0
    for path, content in golden_files():
        assert scanned(content) is not None, path
        compare(content, names=True, tensors=True)
        compare(content, names=False, tensors=False, lenient=True)
        n_files += 1
    assert n_files > 100


def test_a_trace_in_pieces_is_the_same(monkeypatch):
    """Messages that end in later pieces, and columns that grow."""
    many = [comp(k, name=f"n{k}" * (k % 50), data=range(max(1, k - 5), k), rf_id=k) for k in range(1, 9000)]
    for one in many[::3]:
        one.attr.append(
            attribute("inputs", "string_list", [text for k in range(5) for text in (f"t{one.id + k}", "7.0")])
        )
    content = content_of(many)
    whole = scanned(content)
    assert len(whole) == 8999
    compare(content, names=True, tensors=True)

    def small(file, place):
        while piece := file.read(977):
            yield piece

    monkeypatch.setattr("forerun.astrasim.chakra.scanned.chunks", small)
    assert_equal(scanned(content), whole)


def test_a_long_message_among_many_texts():
    one = comp(1)
    one.attr.append(attribute("inputs", "string_list", [text for k in range(40_000) for text in (f"t{k}", "1")]))
    one.data_deps.extend(range(2, 40_000))
    content = content_of([one, *(comp(k) for k in range(2, 40_000))])
    assert len(scanned(content).tensor_bytes) == 40_000
    compare(content, names=False, tensors=True)


def texts():
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


VALUES = {
    "double": st.floats(),
    "float": st.floats(width=32),
    "bool": st.booleans(),
    "string": texts() | st.sampled_from(["12", "7.0", "-3", "true", " 4"]),
    "bytes": st.binary(max_size=4) | st.just(b"3"),
    **{f"{sign}{bits}": st.integers(-(1 << bits - 1), (1 << bits - 1) - 1) | st.integers(0, 9)
       for sign in ("int", "sint", "sfixed") for bits in (32, 64)},
    **{f"{sign}{bits}": st.integers(0, (1 << bits) - 1) | st.integers(0, 9)
       for sign in ("uint", "fixed") for bits in (32, 64)},
}  # fmt: skip


@st.composite
def any_attribute(draw):
    """A known or an unknown attribute with a value of any type, or without one."""
    name = draw(st.sampled_from(KEYS) | texts())
    field = draw(st.sampled_from(FIELDS))
    if name in ("inputs", "outputs") and draw(st.integers(0, 3)):
        size = texts() | st.integers(0, 99).map(str) | st.floats(0, 1e18).map(str)
        pairs = draw(st.lists(st.tuples(st.sampled_from("xyzö"), size), max_size=3))
        return attribute(name, "string_list", [text for pair in pairs for text in pair])
    kind, _, how = field.rpartition("_")
    value = draw(st.lists(VALUES[kind], max_size=3) if how == "list" else VALUES[kind])
    made = attribute(name, field, value)
    if draw(st.integers(0, 9)) == 0:
        made.ClearField(field)
    if draw(st.integers(0, 9)) == 0:
        made.doc_string = draw(texts())
    return made


@st.composite
def any_nodes(draw):
    """Usual nodes with attributes that are not."""
    nodes = usual()[: draw(st.integers(1, 8))]
    for _ in range(draw(st.integers(0, 3))):
        one = nodes[draw(st.integers(0, len(nodes) - 1))]
        place = draw(st.integers(0, len(one.attr)))
        one.attr.insert(place, draw(any_attribute()))
        if draw(st.integers(0, 3)) == 0:
            del one.attr[draw(st.integers(0, len(one.attr) - 1))]
    one = nodes[draw(st.integers(0, len(nodes) - 1))]
    change = draw(st.integers(0, 12))
    if change == 1:
        one.type = draw(st.integers(0, 8))
    elif change == 2:
        one.id = draw(st.integers(0, (1 << 64) - 1))
    elif change == 3:
        one.duration_micros = draw(st.integers(0, (1 << 64) - 1))
    elif change == 4:
        one.data_deps.append(draw(st.integers(0, 12)))
    elif change == 5:
        one.inputs.values = draw(texts())
    elif change == 6:
        one.start_time_micros, one.name = draw(st.integers(0, (1 << 64) - 1)), draw(texts())
    return nodes


@given(any_nodes())
@settings(max_examples=400, deadline=None)
def test_any_attributes_mean_the_same(nodes):
    compare(content_of(nodes))


@given(any_nodes(), st.data())
@settings(max_examples=400, deadline=None)
def test_damaged_traces_end_the_same(nodes, data):
    content = bytearray(content_of(nodes))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        how = data.draw(st.integers(0, 3))
        if how == 0:
            content[place] = data.draw(st.integers(0, 255))
        elif how == 1:
            del content[place]
        elif how == 2:
            content.insert(place, data.draw(st.sampled_from([0x80, 0xFF, 0x0A, 0x52, 0x08, 0x7F])))
        else:
            content[place] ^= 1 << data.draw(st.integers(0, 7))
    compare(bytes(content))


@given(any_nodes(), st.data())
@settings(max_examples=100, deadline=None)
def test_truncated_traces_end_the_same(nodes, data):
    content = content_of(nodes)
    compare(content[: data.draw(st.integers(0, len(content)))])


def raw_node(body):
    """A trace of one node whose bytes are `body`."""
    return content_of([]) + bytes([len(body)]) + body


@pytest.mark.parametrize(
    "body",
    [
        b"\x08\x01\x18\x04\x08\x02",  # an id twice: the last one counts
        b"\x08\x81\x80\x00\x18\x04",  # a number longer than it need be
        b"\x08" + b"\xff" * 9 + b"\x01\x18\x04",  # 64 bits
        b"\x08" + b"\xff" * 9 + b"\x7f\x18\x04",  # more than 64 bits
        b"\x08" + b"\xff" * 11,
        b"\x88\x00\x01\x18\x04",  # a tag longer than it need be
        b"\x08\x01\x18\x84\x80\x80\x80\x80\x00",  # a kind whose 32 bits are 4
        b"\x08\x01\x18\x04\x28\x01\x2a\x01\x01",  # dependencies one by one and packed, on itself
        b"\x08\x01\x18\x04\x2a\x02\x01\x80",  # packed numbers that end within one
        b"\x08\x01\x18\x04\x12\x02\xc0\x80",  # a name in another form than the shortest
        b"\x08\x01\x18\x04\x12\x03\xed\xa0\x80",  # half a pair
        b"\x08\x01\x18\x04\x12\x04\xf0\x9f\x92\xa9",
        b"\x08\x01\x18\x04\x12\x7f",  # a name beyond the end
        b"\x08\x01\x18\x04\x7a\x00\x10\x01",  # unknown fields
        b"\x08\x01\x18\x04\x0b\x0c",  # groups
        b"\x08\x01\x18\x04\x42\x03\x0a\x01x\x42\x03\x12\x01y",  # inputs twice
        b"\x08\x01\x18\x04\x52\x00",  # an attribute without anything
        b"\x08\x01\x18\x04\x52\x05\x0a\x01x\x0a\x00",  # two names
        b"\x08\x01\x18\x04\x52\x09\x0a\x07num_ops\x52\x0b\x48\x05\x0a\x07num_ops",  # the value first
        b"\x08\x01\x18\x04\x52\x0d\x0a\x07num_ops\x48\x05\x38\x06",  # two values
        b"\x08\x01\x18\x04\x52\x0b\x0a\x06inputs\xff\xff\xff",  # what isn't looked at without tensors
        b"\x08\x01\x18\x04\x52\x0b\x0a\x01x\x52\x06\x0a\x04\x08\x01\x08\x02",  # numbers one by one
        b"",
    ],
)  # fmt: skip
def test_spellings_of_the_wire_format(body):
    compare(raw_node(body))


def test_a_first_message_that_is_no_metadata():
    for first in (b"\x02\x08\x01", b"\x02\x0a\x7f", b"\x03\x0a\x01\xff", b"\x00", b"", b"\x80"):
        compare(first + content_of(usual())[:0])
        compare(first + raw_node(b"\x08\x01\x18\x04")[9:])


def test_files_made_to_fill_one_place_of_a_table_are_read_node_by_node():
    """Names of tensors whose hashes end alike."""
    size, prime, wanted = 8, 0x9FB21C651E98DF25, 64

    def word(end):
        # Undoes the hash of a text of eight bytes: value ^= value >> 32, then value ^ value >> 29.
        value = end
        for _ in range(3):
            value = end ^ (value >> 29)
        value ^= value >> 32
        value = value * pow(prime, -1, 1 << 64) % (1 << 64)
        return struct.pack("<Q", value ^ (size * 0x9E3779B97F4A7C15) % (1 << 64))

    found, k = [], 0
    while len(found) < 300:
        name = word(k << 32)
        k += 1
        if name.isascii() and b"\0" not in name:
            found.append(name.decode())
    assert len(set(found)) == 300, wanted
    one = comp(1)
    one.attr.append(attribute("inputs", "string_list", [text for name in found for text in (name, "1")]))
    content = content_of([one])
    assert scanned(content) is None
    compare(content)


@given(st.binary(max_size=12) | texts().map(str.encode), st.binary(max_size=3))
@settings(max_examples=300)
def test_texts_are_those_that_python_decodes(text, tail):
    whole = text + tail
    try:
        whole.decode()
    except UnicodeDecodeError:
        assert not is_text(buffer(whole), 0, len(whole))
    else:
        assert is_text(buffer(whole), 0, len(whole))


def test_every_text_of_two_and_three_bytes():
    for first in range(0x80, 0x100):
        for second in range(0x80, 0x100):
            for tail in (b"", b"\x80", b"\x80\x80", b"a"):
                whole = bytes([first, second]) + tail
                assert is_text(buffer(whole), 0, len(whole)) == (whole.decode(errors="replace").encode() == whole)


@given(st.integers(0, (1 << 64) - 1), st.integers(0, 2))
def test_varints(value, padding):
    left, made = value, bytearray()
    while left >= 0x80 or padding:
        padding -= left < 0x80
        made.append(left & 0x7F | 0x80)
        left >>= 7
    content = bytes([*made, left])
    bits, end = varint(buffer(content + b"\x01"), 0, len(content) + 1)
    if len(content) <= 10:
        assert (int(bits) % (1 << 64), end) == (value, len(content))
    assert varint(buffer(content), 0, len(content) - 1)[1] < 0


def test_tags_take_two_bytes_at_most():
    assert [tag(buffer(content), 0, 2) for content in (b"\x0a\xff", b"\x82\x01")] == [(10, 1), (130, 2)]
    assert tag(buffer(b"\x82\x81\x00"), 0, 3)[1] < 0
    assert tag(buffer(b"\x82"), 0, 1)[1] < 0


@given(st.sampled_from([name for name in FIELDS if name.endswith("_val")]), st.data())
@settings(max_examples=400)
def test_numbers_of_any_type_are_cut_as_python_cuts_them(field, data):
    value = data.draw(VALUES[field.removesuffix("_val")])
    content = attribute("x", field, value).SerializeToString()
    found = np.zeros(N_FOUND, np.int64)
    assert read_attribute(buffer(content), 0, len(content), found)
    told, number = whole_number(int(found[2]), int(found[3]))
    if field in ("string_val", "bytes_val"):
        assert not told
        return
    name, read = attributes.decoded(content)
    try:
        expected = attributes.whole_number(read, name)
    except ValueError:
        assert not told
    else:
        assert (told, number) == (True, expected)


@given(
    st.floats(0, 1e19).map(str) | st.decimals(0, 10**17, places=3).map(str) | st.integers(0, 10**20).map(str) | texts()
)
@settings(max_examples=400)
def test_sizes_of_tensors_are_cut_as_python_cuts_them(text):
    raw = text.encode()
    told, size = size_of_tensor(buffer(raw), 0, len(raw))
    assert not told or size == attributes.whole_number(text, "size")


def test_plain_sizes_are_told():
    for text, size in {"0": 0, "16.0": 16, "4.99": 4, "123456789012345678": 123456789012345678, "7.": 7}.items():
        assert size_of_tensor(buffer(text.encode()), 0, len(text)) == (True, size)
    for text in ("", ".5", "1e3", "-1", "4.9999999999999999", "1234567890123456789", "1 "):
        assert not size_of_tensor(buffer(text.encode()), 0, len(text))[0]


def test_a_stream_that_can_not_be_read_twice_goes_node_by_node(tmp_path):
    path = write(tmp_path / "a.et", usual())

    class Once(io.RawIOBase):
        def __init__(self):
            self._file = io.BytesIO(path.read_bytes())

        def read(self, size=-1):
            return self._file.read(size)

    assert_equal(read_rank_from(Once(), "a.et", names=True), read_rank(path, names=True))


def test_a_trace_without_nodes():
    compare(content_of([]))
    assert len(scanned(content_of([]))) == 0
    assert Node().SerializeToString() == b""
