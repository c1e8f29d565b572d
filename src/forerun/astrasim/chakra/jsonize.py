"""Converts traces to JSON and back without loss, in protobuf's JSON mapping (64-bit numbers are texts, bytes base64).

In JSON lines, the first line is `{"metadata": {...}}` and every other line is a node. JSON is one object `{"metadata":
{...}, "nodes": [...]}` with one node on each line. Fields have the names of Chakra's schema. An attribute such as
`{"name": "num_ops", "int64_val": "7"}` keeps its type.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from forerun.astrasim.chakra.framing import MAX_MESSAGE_BYTES, chunks
from forerun.astrasim.chakra.json_trace import json_messages, message_of, parsed
from forerun.astrasim.chakra.reader import metadata, nodes
from forerun.astrasim.chakra.schema import GlobalMetadata, Node
from forerun.astrasim.chakra.writer import message_writer, packed_file
from forerun.common.admission import opened
from forerun.common.errors import ForerunError

_FORMATS = (".et", ".jsonl", ".json")
_PACKED = (".gz", ".zst")
Write = Callable[[Any], None]


def convert(source: str | Path, target: str | Path) -> int:
    """Writes the trace `source` in the format that the name of `target` ends in, and returns the number of nodes.

    Formats are .et, .jsonl and .json, each also with .gz or .zst appended. It converts node by node, but reads a .json
    source whole.

    Raises ForerunError, naming the file and the line or node, for another format, an unreadable or damaged file, JSON
    that is not a trace, and a target that can't be written.
    """
    messages, writer = _READERS[_format(source)](Path(source)), _WRITERS[_format(target)]
    count = -1
    with writer(Path(target)) as write:
        for count, message in enumerate(messages):  # noqa: B007
            write(message)
    return count


def json_lines(source: str | Path) -> Iterator[str]:
    """Yields the trace `source`, in any format, as JSON lines. Raises ForerunError as `convert` does."""
    messages = _READERS[_format(source)](Path(source))
    yield json.dumps({"metadata": _record(next(messages))})
    for node in messages:
        yield json.dumps(_record(node))


def _format(path: str | Path) -> str:
    name = Path(path).name
    packed = next((suffix for suffix in _PACKED if name.endswith(suffix)), "")
    for form in _FORMATS:
        if name.removesuffix(packed).endswith(form):
            return form
    raise ForerunError(
        f"{path}: unknown format; its name must end in .et, .jsonl or .json, which .gz or .zst may follow"
    )


def _record(message: Any) -> dict[str, Any]:
    record: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return record


def _read_trace(path: Path) -> Iterator[Any]:
    yield metadata(path)
    yield from nodes(path)


def _read_lines(path: Path) -> Iterator[Any]:
    lines = ((number, line) for number, line in enumerate(_lines(path), 1) if line.strip())
    number, line = next(lines, (1, b"null"))
    first = parsed(line, str(path), number)
    if not isinstance(first, dict) or list(first) != ["metadata"]:
        raise ForerunError(f'{path}, line {number}: expected the metadata, such as {{"metadata": {{}}}}')
    yield message_of(GlobalMetadata, first["metadata"], f"{path}, line {number}")
    for number, line in lines:
        yield message_of(Node, parsed(line, str(path), number), f"{path}, line {number}")


def _read_whole(path: Path) -> Iterator[Any]:
    with opened(path) as file:
        yield from json_messages(file, str(path))


_READERS: dict[str, Callable[[Path], Iterator[Any]]] = {".et": _read_trace, ".jsonl": _read_lines, ".json": _read_whole}


def _lines(path: Path) -> Iterator[bytes]:
    rest = b""
    with opened(path) as file:
        for piece in chunks(file, str(path)):
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines
            if len(rest) > MAX_MESSAGE_BYTES:
                raise ForerunError(f"{path}: a line has more than {MAX_MESSAGE_BYTES} bytes; it is not a trace")
    yield rest


@contextmanager
def _trace_writer(path: Path) -> Iterator[Write]:
    with message_writer(path) as write:
        yield lambda message: write(message.SerializeToString())


@contextmanager
def _lines_writer(path: Path) -> Iterator[Write]:
    first = True

    def write(message: Any) -> None:
        nonlocal first
        record = _record(message)
        file.write(json.dumps({"metadata": record} if first else record).encode() + b"\n")
        first = False

    with packed_file(path) as file:
        yield write


@contextmanager
def _whole_writer(path: Path) -> Iterator[Write]:
    count = 0

    def write(message: Any) -> None:
        nonlocal count
        text = json.dumps(_record(message)).encode()
        before = b",\n" if count > 1 else b'{"metadata": ' if count == 0 else b', "nodes": [\n'
        file.write(before + text)
        count += 1

    with packed_file(path) as file:
        yield write
        file.write(b"\n]}\n" if count > 1 else b', "nodes": []}\n')


_WRITERS: dict[str, Callable[[Path], AbstractContextManager[Write]]] = {
    ".et": _trace_writer,
    ".jsonl": _lines_writer,
    ".json": _whole_writer,
}
