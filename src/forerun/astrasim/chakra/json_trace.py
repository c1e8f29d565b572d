"""Reads a JSON file as the messages of a trace: Forerun's own form, or one of other tools (`other_json`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from google.protobuf import json_format
from google.protobuf.message import EncodeError

from forerun.astrasim.chakra.framing import MAX_MESSAGE_BYTES, chunks
from forerun.astrasim.chakra.other_json import (
    concatenated,
    execution_trace,
    is_execution_trace,
    is_workload_graph,
    workload_graph,
)
from forerun.astrasim.chakra.schema import GlobalMetadata, Node
from forerun.common.admission import decoded, parse_json
from forerun.common.errors import ForerunError


def json_messages(file: BinaryIO, place: str) -> Iterator[Any]:
    """Yields the metadata and the nodes of an open JSON file.

    Raises ForerunError, naming the file and the node, for JSON that is not a trace.
    """
    text = b"".join(_bounded(chunks(file, place), place))
    several = concatenated(decoded(text, place), place) if text.lstrip().startswith(b"{") else None
    data = {"metadata": several[0], "nodes": several[1:]} if several else parsed(text, place)
    if is_workload_graph(data):
        yield from workload_graph(data, place)
    elif is_execution_trace(data):
        yield from execution_trace(data, place)
    elif isinstance(data, dict) and set(data) == {"metadata", "nodes"} and isinstance(data["nodes"], list):
        yield message_of(GlobalMetadata, data["metadata"], f"{place}, metadata")
        for number, record in enumerate(data["nodes"], 1):
            yield message_of(Node, record, f"{place}, node number {number}")
    else:
        raise ForerunError(
            f"{place}: expected an object with metadata and a list of nodes, Chakra's workload_graph, or an execution"
            " trace of PyTorch"
        )


def _bounded(pieces: Iterable[bytes], place: str) -> Iterator[bytes]:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_MESSAGE_BYTES:
            raise ForerunError(f"{place}: has more than {MAX_MESSAGE_BYTES:,} bytes; write it as JSON lines (.jsonl)")
        yield piece


def parsed(text: bytes, place: str, line: int | None = None) -> Any:
    """Parses the JSON `text` of a file or of one of its lines. Raises ForerunError."""
    return parse_json(decoded(text, place if line is None else f"{place}, line {line}"), place, line=line)


def message_of(kind: Any, record: Any, place: str) -> Any:
    """Makes a message of class `kind` of its JSON record. Raises ForerunError."""
    if not isinstance(record, dict):
        raise ForerunError(f"{place}: expected an object, got {json.dumps(record)[:60]}")
    try:
        return json_format.ParseDict(record, kind())
    except (json_format.ParseError, EncodeError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ForerunError(f"{place}: {error}") from None
