"""The messages of a Chakra v0.0.4 trace, as protobuf classes made from `et_def.yaml`.

Code that the protobuf compiler generates runs only with the protobuf versions it was made for; a descriptor runs with
all of them.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from forerun.common.shipped import shipped_data

VERSION = "Chakra v0.0.4"


def _classes() -> dict[str, Any]:
    """Returns the class of each message by name, with a `RawNode` that leaves the attributes of a node undecoded.

    Most attributes of a trace repeat byte for byte, so decoding them through a cache reads a trace twice as fast.
    """
    file = ParseDict(shipped_data("forerun.astrasim.chakra", "et_def.yaml"), FileDescriptorProto())
    raw = file.message_type.add()
    raw.CopyFrom(next(message for message in file.message_type if message.name == "Node"))
    raw.name = "RawNode"
    attributes = next(field for field in raw.field if field.name == "attr")
    attributes.type = FieldDescriptorProto.TYPE_BYTES
    attributes.ClearField("type_name")
    # Another package of this process may have registered the same file in the default pool.
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    messages = pool.FindFileByName(file.name).message_types_by_name.items()
    return {name: GetMessageClass(message) for name, message in messages}


_CLASSES = _classes()
GlobalMetadata: Any = _CLASSES["GlobalMetadata"]
Node: Any = _CLASSES["Node"]
AttributeProto: Any = _CLASSES["AttributeProto"]
IOInfo: Any = _CLASSES["IOInfo"]
RawNode: Any = _CLASSES["RawNode"]
"""a Node in which each attribute is the bytes of an AttributeProto"""
UNDECODABLE = (DecodeError, UnicodeDecodeError)
"""exceptions of protobuf for bytes that are not a message; its pure Python version raises the second for names"""
