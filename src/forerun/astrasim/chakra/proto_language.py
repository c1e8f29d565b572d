"""A `.proto` text into a protobuf file descriptor, without the protobuf compiler.

Code that the compiler generates runs only with the protobuf versions it was made for; a descriptor runs with all.
The part of the language that the trace format uses is understood: proto3, a package, top-level messages and enums,
`repeated` fields and `oneof`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto
from google.protobuf.descriptor_pb2 import FileDescriptorProto as FileDescriptor

_TOKEN = re.compile(r'\s*(?://[^\n]*|"([^"]*)"|([\w.]+)|(\S))')
_SCALARS = "double float int32 int64 uint32 uint64 sint32 sint64 fixed32 fixed64 sfixed32 sfixed64 bool string bytes"


def parse_proto(text: str, name: str) -> FileDescriptor:
    """The descriptor of the proto file `text`, which is called `name` in a pool of descriptors.

    Raises ValueError where the text is not of the part of the language described above.
    """
    file = FileDescriptor(name=name, syntax="proto3")
    tokens = _Tokens(text)
    for word in tokens:
        if word == "syntax":
            tokens.expect("=", "proto3", ";")
        elif word == "package":
            file.package = tokens.next()
            tokens.expect(";")
        elif word == "message":
            _message(tokens, file.message_type.add(name=tokens.next()))
        elif word == "enum":
            _enum(tokens, file.enum_type.add(name=tokens.next()))
        else:
            raise ValueError(f"{name}: unexpected {word!r}")
    _resolve(file)
    return file


class _Tokens:
    def __init__(self, text: str) -> None:
        found = ("".join(match.groups("")) for match in _TOKEN.finditer(text))
        self._left = iter([token for token in found if token])

    def __iter__(self) -> Iterator[str]:
        return self._left

    def next(self) -> str:
        return next(self._left, "the end of the text")

    def expect(self, *expected: str) -> None:
        for token in expected:
            if (found := self.next()) != token:
                raise ValueError(f"expected {token!r}, got {found!r}")


def _message(tokens: _Tokens, message: DescriptorProto) -> None:
    tokens.expect("{")
    while (word := tokens.next()) != "}":
        if word == "oneof":
            message.oneof_decl.add(name=tokens.next())
            tokens.expect("{")
            while (kind := tokens.next()) != "}":
                _field(tokens, message, kind).oneof_index = len(message.oneof_decl) - 1
        elif word == "repeated":
            _field(tokens, message, tokens.next()).label = FieldDescriptorProto.LABEL_REPEATED
        else:
            _field(tokens, message, word)


def _field(tokens: _Tokens, message: DescriptorProto, kind: str) -> FieldDescriptorProto:
    field = message.field.add(name=tokens.next(), label=FieldDescriptorProto.LABEL_OPTIONAL)
    if kind in _SCALARS.split():
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    else:
        field.type_name = kind
    tokens.expect("=")
    field.number = int(tokens.next())
    tokens.expect(";")
    return field


def _enum(tokens: _Tokens, enum: EnumDescriptorProto) -> None:
    tokens.expect("{")
    while (word := tokens.next()) != "}":
        tokens.expect("=")
        enum.value.add(name=word, number=int(tokens.next()))
        tokens.expect(";")


def _resolve(file: FileDescriptor) -> None:
    enums = {enum.name for enum in file.enum_type}
    messages = {message.name for message in file.message_type}
    for message in file.message_type:
        for field in message.field:
            if not field.type_name:
                continue
            if field.type_name not in enums | messages:
                raise ValueError(f"{file.name}: {message.name}.{field.name}: no type {field.type_name!r}")
            is_enum = field.type_name in enums
            field.type = FieldDescriptorProto.TYPE_ENUM if is_enum else FieldDescriptorProto.TYPE_MESSAGE
            field.type_name = f".{file.package}.{field.type_name}"
