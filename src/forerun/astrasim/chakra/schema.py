"""The messages of a Chakra v0.0.4 trace, as protobuf classes made from `et_def.proto`."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from forerun.astrasim.chakra.proto_language import parse_proto

VERSION = "Chakra v0.0.4"


def _with_raw_nodes(file: FileDescriptorProto) -> FileDescriptorProto:
    # The same node read twice as fast: most attributes repeat byte for byte, so they are left undecoded for a cache.
    node = next(message for message in file.message_type if message.name == "Node")
    raw = file.message_type.add()
    raw.CopyFrom(node)
    raw.name = "RawNode"
    attributes = next(field for field in raw.field if field.name == "attr")
    attributes.type = FieldDescriptorProto.TYPE_BYTES
    attributes.ClearField("type_name")
    return file


def _classes() -> dict[str, Any]:
    text = files(__package__).joinpath("et_def.proto").read_text(encoding="utf-8")
    # A pool of its own: another package of this process may have registered the same file.
    pool = DescriptorPool()
    pool.AddSerializedFile(_with_raw_nodes(parse_proto(text, "et_def.proto")).SerializeToString())
    file = pool.FindFileByName("et_def.proto")
    return {name: GetMessageClass(message) for name, message in file.message_types_by_name.items()}


_CLASSES = _classes()
GlobalMetadata: Any = _CLASSES["GlobalMetadata"]
Node: Any = _CLASSES["Node"]
AttributeProto: Any = _CLASSES["AttributeProto"]
RawNode: Any = _CLASSES["RawNode"]
"""a Node whose attributes are the bytes of an AttributeProto each"""
UNDECODABLE = (DecodeError, UnicodeDecodeError)
"""what decoding raises for bytes that are no message; protobuf's own Python code has the second for names"""
