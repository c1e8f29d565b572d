"""Reads Chakra traces, node by node or one rank into columns."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from forerun.astrasim.chakra.columns import AttributeCache, Columns
from forerun.astrasim.chakra.framing import chunks, messages
from forerun.astrasim.chakra.json_trace import json_messages
from forerun.astrasim.chakra.scanned import scanned_rank
from forerun.astrasim.chakra.schema import UNDECODABLE, GlobalMetadata, Node, RawNode
from forerun.astrasim.chakra.trace import RankTrace
from forerun.common.admission import opened
from forerun.common.errors import ForerunError


def nodes(path: str | Path) -> Iterator[Any]:
    """Yields the nodes of a trace file (plain, gzip or Zstandard) in file order, one message in memory at a time.

    Raises ForerunError, naming the file and the node, for an unreadable, truncated or damaged file.
    """
    with opened(Path(path)) as file:
        yield from node_messages(file, str(path), Node)


def metadata(path: str | Path) -> Any:
    """Returns the GlobalMetadata that a trace file begins with. Raises ForerunError as `nodes` does."""
    with opened(Path(path)) as file:
        if is_json(str(path)):
            return next(json_messages(file, str(path)))
        return _metadata(messages(chunks(file, str(path)), str(path)), str(path))


def read_rank(path: str | Path, names: bool = False, tensors: bool = True, lenient: bool = False) -> RankTrace:
    """Reads one rank's trace into columns; `names` keeps node and tensor names, `tensors` inputs and outputs of nodes.

    `lenient` drops control dependencies that can't be met (on missing nodes, in cycles), which converters of PyTorch's
    traces write. A number attribute may have any number type or be text. The first size of a tensor counts.

    Raises ForerunError, naming the file and the node, as `nodes` does, and for an unknown node type or collective, a
    missing, negative or wrong attribute, a repeated node id, and a dependency on a missing node or the node itself.
    """
    with opened(Path(path)) as file:
        return read_rank_from(file, str(path), names, tensors, lenient=lenient)


def read_rank_from(
    file: BinaryIO,
    place: str,
    names: bool = False,
    tensors: bool = True,
    cache: AttributeCache | None = None,
    lenient: bool = False,
) -> RankTrace:
    """Does the same as `read_rank` for an open file, which errors call `place`; `cache` comes from `new_cache`.

    The scanner reads usual traces. Other ones are read again from their beginning, node by node.
    """
    if file.seekable() and not is_json(place):
        start = file.tell()
        try:
            trace = scanned_rank(file, place, names, tensors, lenient)
        except ValueError as error:
            raise ForerunError(f"{place}: {error}") from None
        if trace is not None:
            return trace
        file.seek(start)
    return read_node_by_node(file, place, names, tensors, cache, lenient)


def read_node_by_node(
    file: BinaryIO,
    place: str,
    names: bool = False,
    tensors: bool = True,
    cache: AttributeCache | None = None,
    lenient: bool = False,
) -> RankTrace:
    """Does the same as `read_rank_from` without the scanner: it reads every form that protobuf reads, and JSON."""
    columns = Columns(names, tensors, cache)
    with collector_paused():
        for node in node_messages(file, place, RawNode):
            try:
                columns.add(node)
            except (ValueError, OverflowError) as error:
                reason = error if isinstance(error, ValueError) else "a number that does not fit in 64 bits"
                raise ForerunError(f"{place}: {describe(node)}: {reason}") from None
    try:
        return columns.finish(lenient)
    except ValueError as error:
        raise ForerunError(f"{place}: {error}") from None


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses Python's cyclic garbage collector, which finds nothing here and takes half of the time."""
    was_running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_running:
            gc.enable()


def node_messages(file: BinaryIO, place: str, kind: Any) -> Iterator[Any]:
    """Yields the nodes of an open trace file as messages of class `kind` (Node or RawNode). Raises as `nodes` does.

    A file whose name ends in .json is JSON.
    """
    if is_json(place):
        for node in islice(json_messages(file, place), 1, None):
            yield node if kind is Node else kind.FromString(node.SerializeToString())
        return
    stream = messages(chunks(file, place), place)
    _metadata(stream, place)
    decode = kind.FromString
    number = 1
    try:
        for number, message in enumerate(stream, 1):
            if not message:  # a compressed file of zeros has a billion of them
                raise ForerunError(f"{place}: node number {number} is empty; the file is damaged or not a Chakra trace")
            yield decode(message)
    except UNDECODABLE as error:
        raise ForerunError(f"{place}: node number {number} can't be decoded ({error}); write it again") from None


def is_json(name: str) -> bool:
    """Returns whether the file called `name` is JSON, packed or not."""
    return name.endswith((".json", ".json.gz", ".json.zst"))


def describe(node: Any) -> str:
    """Returns `node 7 (name)`, the name of a node in errors."""
    return f"node {node.id} ({node.name[:80]})" if node.name else f"node {node.id}"


def _metadata(stream: Iterator[bytes], place: str) -> Any:
    first = next(stream, None)
    if first is None:
        raise ForerunError(f"{place}: the file is empty; a Chakra trace begins with its metadata")
    # Field 1 is text in the metadata and a number in a node.
    if first.startswith(b"\x08"):
        raise ForerunError(f"{place}: begins with a node; a Chakra trace begins with its metadata")
    try:
        return GlobalMetadata.FromString(first)
    except UNDECODABLE:
        raise ForerunError(f"{place}: does not begin with metadata; is it a Chakra trace?") from None
