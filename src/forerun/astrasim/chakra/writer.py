"""Writes Chakra traces with the attributes and types that STAGE gives them."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard

from forerun.astrasim.chakra.attributes import DIMENSION_SPELLINGS, GROUP_SPELLINGS
from forerun.astrasim.chakra.groups import process_group_text
from forerun.astrasim.chakra.schema import AttributeProto, GlobalMetadata, RawNode
from forerun.astrasim.chakra.trace import NodeKind, RankTrace
from forerun.common.files import WholeFiles, whole_file

SCHEMA = "symbolic_tensor_network"
"""the schema that STAGE names in the metadata of its traces"""
_INT32 = 1 << 31
_COMPRESSION_LEVEL = 6
_CACHED = 1 << 14


@contextmanager
def message_writer(path: str | Path, files: WholeFiles | None = None) -> Iterator[Callable[[bytes], None]]:
    """Gives a function that writes one message to the trace file `path`, as `packed_file` does.

    Raises ForerunError if the file can't be written.
    """
    with packed_file(path, files) as file:

        def write(message: bytes) -> None:
            size, head = len(message), bytearray()
            while size >= 0x80:
                head.append(size & 0x7F | 0x80)
                size >>= 7
            head.append(size)
            file.write(head + message)

        yield write


@contextmanager
def packed_file(path: str | Path, files: WholeFiles | None = None) -> Iterator[BinaryIO]:
    """Opens a file that appears whole or not at all, compressed if its name ends in .gz or .zst.

    With `files` it appears together with these.

    Raises ForerunError if it can't be written.
    """
    with whole_file(path) if files is None else files.open(path) as file:
        if Path(path).suffix == ".gz":
            # The file holds neither its name nor a time, so that equal traces make equal files.
            with gzip.GzipFile("", "wb", _COMPRESSION_LEVEL, file, mtime=0) as packed:
                yield cast(BinaryIO, packed)
        elif Path(path).suffix == ".zst":
            with zstandard.ZstdCompressor(_COMPRESSION_LEVEL).stream_writer(file, closefd=False) as stream:
                yield cast(BinaryIO, stream)
        else:
            yield file


def write_rank(path: str | Path, trace: RankTrace, files: WholeFiles | None = None) -> None:
    """Writes one rank's trace as a file that `read_rank` reads back equal, with names if the trace has them.

    With `files` it appears together with these.

    Raises ForerunError if the file can't be written.
    """
    metadata = GlobalMetadata(attr=[AttributeProto(name="schema", string_val=SCHEMA)])
    with message_writer(path, files) as write:
        write(metadata.SerializeToString())
        for message in _messages(trace):
            write(message)


def _messages(trace: RankTrace) -> Iterator[bytes]:
    columns = [getattr(trace, name).tolist() for name in _FIELDS]
    ids = trace.node_id.tolist()
    data, ctrl = trace.node_id[trace.data].tolist(), trace.node_id[trace.ctrl].tolist()
    data_ptr, ctrl_ptr = trace.data_ptr.tolist(), trace.ctrl_ptr.tolist()
    names = trace.names or ("",) * len(trace)
    streams = [-1] * len(trace) if trace.stream is None else trace.stream.tolist()
    lists = _TensorLists(trace)
    groups = process_group_text(trace.process_groups) if trace.process_groups else ""
    for row, values in enumerate(zip(*columns, strict=True)):
        node = dict(zip(_FIELDS, values, strict=True))
        message = RawNode(
            id=ids[row],
            name=names[row],
            type=node["kind"],
            ctrl_deps=ctrl[ctrl_ptr[row] : ctrl_ptr[row + 1]],
            data_deps=data[data_ptr[row] : data_ptr[row + 1]],
            duration_micros=node["duration_us"],
            attr=[*lists.of(row), *_attributes(trace, row, node)],
        )
        if streams[row] >= 0:
            message.attr.append(_attribute("stream", "int64_val", streams[row]))
        if groups and node["kind"] == NodeKind.METADATA:
            message.inputs.values, groups = groups, ""
        yield message.SerializeToString()


_FIELDS = (
    *("kind", "is_cpu", "duration_us", "num_ops", "tensor_size"),
    *("comm_type", "comm_size", "comm_tag", "peer", "group", "priority"),
)


class _TensorLists:
    def __init__(self, trace: RankTrace) -> None:
        self._always = trace.has_tensors
        self._pointers = trace.input_ptr.tolist(), trace.output_ptr.tolist()
        self._tensors = trace.input_tensor.tolist(), trace.output_tensor.tolist()
        names = trace.tensor_names or [f"tensor_{row}" for row in range(len(trace.tensor_bytes))]
        self._texts = [(name, f"{size}.0") for name, size in zip(names, trace.tensor_bytes.tolist(), strict=True)]

    def of(self, row: int) -> Iterator[bytes]:
        parts = [
            tensors[pointer[row] : pointer[row + 1]]
            for pointer, tensors in zip(self._pointers, self._tensors, strict=True)
        ]
        for name, part in zip(("inputs", "outputs"), parts, strict=True):
            if part or self._always:
                attribute = AttributeProto(name=name)
                if part:
                    attribute.string_list.values.extend([text for tensor in part for text in self._texts[tensor]])
                yield attribute.SerializeToString()


def _attributes(trace: RankTrace, row: int, node: dict[str, Any]) -> Iterator[bytes]:
    kind = node["kind"]
    if kind == NodeKind.COMP or node["num_ops"]:
        yield _attribute("num_ops", "int64_val", node["num_ops"])
    if kind in (NodeKind.COMP, NodeKind.MEM_LOAD, NodeKind.MEM_STORE) or node["tensor_size"]:
        yield _attribute("tensor_size", "uint64_val", node["tensor_size"])
    if kind in (NodeKind.SEND, NodeKind.RECV, NodeKind.COLLECTIVE):
        yield from _communication(trace, row, node)
    elif node["is_cpu"]:
        yield _attribute("is_cpu_op", "bool_val", True)


def _communication(trace: RankTrace, row: int, node: dict[str, Any]) -> Iterator[bytes]:
    tag = node["comm_tag"]
    tag_type = "int32_val" if -_INT32 <= tag < _INT32 else "int64_val"
    yield _attribute("comm_size", "int64_val", node["comm_size"])
    if node["kind"] == NodeKind.COLLECTIVE:
        yield _attribute("comm_type", "int64_val", node["comm_type"])
        if node["group"] >= 0:
            yield _attribute(GROUP_SPELLINGS[0], "string_val", trace.group_names[node["group"]])
        if tag:
            yield _attribute("comm_tag", tag_type, tag)
    else:
        yield _attribute("comm_tag", tag_type, tag)
        yield _attribute("comm_dst" if node["kind"] == NodeKind.SEND else "comm_src", "int32_val", node["peer"])
    yield _attribute("is_cpu_op", "int32_val", int(node["is_cpu"]))
    if node["priority"]:
        yield _attribute("comm_priority", "int32_val", node["priority"])
    if trace.involved_dims and row in trace.involved_dims:
        dimensions = AttributeProto(name=DIMENSION_SPELLINGS[0])
        dimensions.bool_list.SetInParent()
        dimensions.bool_list.values.extend(trace.involved_dims[row])
        yield dimensions.SerializeToString()


@lru_cache(_CACHED, typed=True)
def _attribute(name: str, field: str, value: int | str) -> bytes:
    message: bytes = AttributeProto(name=name, **{field: value}).SerializeToString()
    return message
