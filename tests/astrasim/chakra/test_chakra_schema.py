"""The messages are those of the published format, with any protobuf."""

from forerun.astrasim.chakra.schema import AttributeProto, GlobalMetadata, Node, RawNode

TYPES = "double float int32 int64 uint32 uint64 sint32 sint64 fixed32 fixed64 sfixed32 sfixed64 bool string bytes"


def numbers(message):
    return {field.name: field.number for field in message.DESCRIPTOR.fields}


def test_field_numbers_are_the_published_ones():
    assert numbers(Node) == {
        "id": 1,
        "name": 2,
        "type": 3,
        "ctrl_deps": 4,
        "data_deps": 5,
        "start_time_micros": 6,
        "duration_micros": 7,
        "inputs": 8,
        "outputs": 9,
        "attr": 10,
    }
    assert numbers(GlobalMetadata) == {"version": 1, "attr": 2}
    values = [f"{kind}_{form}" for kind in TYPES.split() for form in ("val", "list")]
    assert numbers(AttributeProto) == {"name": 1, "doc_string": 2, **{name: 3 + i for i, name in enumerate(values)}}


def test_wire_bytes_of_a_node():
    made = Node(id=3, name="x", type=4, data_deps=[1, 300])
    made.attr.append(AttributeProto(name="a", int64_val=7))
    assert made.SerializeToString() == b"\x08\x03\x12\x01x\x18\x04*\x03\x01\xac\x02R\x05\n\x01aH\x07"
    assert RawNode.FromString(made.SerializeToString()).attr[0] == b"\n\x01aH\x07"


def test_a_value_of_one_type_replaces_another():
    made = AttributeProto(name="a", int64_val=7)
    made.string_val = "seven"
    assert made.WhichOneof("value") == "string_val"
