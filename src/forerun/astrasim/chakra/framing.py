"""The bytes of a trace file: decompression, and messages that each follow their length."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import zstandard

from forerun.common.errors import ForerunError

MAX_MESSAGE_BYTES = 1 << 28
"""longest message that is read; real nodes have a few hundred bytes"""
_CHUNK = 1 << 20
_COMPRESSED_CHUNK = 1 << 12
"""bytes decompressed at once; even the densest input then gives at most 128 MiB"""
_LEAST_SUSPECT_BYTES = 1 << 28
_MOST_DENSE = 300
"""times that a trace may grow when it is decompressed; nodes with their attributes compress ten- to fiftyfold"""
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_GZIP_WINDOW = 31


def chunks(file: BinaryIO, place: str) -> Iterator[bytes]:
    """Yields the content of `file` in pieces; if it begins like gzip or Zstandard, decompressed.

    Raises ForerunError, naming `place`, for an unreadable, truncated or damaged file.
    """
    try:
        head = file.read(_CHUNK)
        if head.startswith(_ZSTD):
            yield from _decompressed(head, file, place, lambda: zstandard.ZstdDecompressor().decompressobj())
        elif head.startswith(_GZIP):
            yield from _decompressed(head, file, place, lambda: zlib.decompressobj(_GZIP_WINDOW))
        else:
            while head:
                yield head
                head = file.read(_CHUNK)
    except (zstandard.ZstdError, zlib.error, OSError) as error:
        raise ForerunError(f"{place}: damaged file ({error}); write it again") from None


def _decompressed(head: bytes, file: BinaryIO, place: str, new: Any) -> Iterator[bytes]:
    # A compressed file may consist of several frames, each of which knows its end.
    stream: Any = None
    n_packed = n_unpacked = 0
    while head:
        n_packed += len(head)
        for start in range(0, len(head), _COMPRESSED_CHUNK):
            data = head[start : start + _COMPRESSED_CHUNK]
            while data:
                stream = stream or new()
                piece = stream.decompress(data)
                n_unpacked += len(piece)
                if n_unpacked > max(_LEAST_SUSPECT_BYTES, _MOST_DENSE * n_packed):
                    raise ForerunError(f"{place}: unpacks to more than {_MOST_DENSE} times its size; it is not a trace")
                yield piece
                data = stream.unused_data
                stream = None if stream.eof else stream
        head = file.read(_CHUNK)
    if stream is not None:
        raise ForerunError(f"{place}: truncated: its compressed data ends too early; write it again")


def messages(pieces: Iterable[bytes], place: str) -> Iterator[bytes]:
    """Yields the messages of a stream in which each message follows its length, a varint.

    Raises ForerunError, naming `place` and the message, for a length that is not a varint, exceeds `MAX_MESSAGE_BYTES`
    or goes beyond the end of the stream. Memory holds the longest message and one piece.
    """
    count = 0
    waiting: list[bytes] = []
    n_waiting, n_needed = 0, 1
    for piece in pieces:
        waiting.append(piece)
        n_waiting += len(piece)
        if n_waiting < n_needed:
            continue
        data = b"".join(waiting)
        position, end = 0, len(data)
        n_needed = 1
        while position < end:
            start = position
            size = data[position]
            position += 1
            if size >= 0x80:
                size, position = _varint(data, start, place, count)
                if position == 0:
                    position, n_needed = start, end - start + 1
                    break
            stop = position + size
            if stop > end:
                position, n_needed = start, stop - start
                break
            yield data[position:stop]
            count += 1
            position = stop
        waiting = [data[position:]]
        n_waiting = end - position
    if n_waiting:
        raise ForerunError(f"{place}: truncated in {_message(count)}; write it again")


def _varint(data: bytes, start: int, place: str, count: int) -> tuple[int, int]:
    """Returns the length at `start` and the position after it, or position 0 if the data ends within the length."""
    size = shift = 0
    for position in range(start, len(data)):
        byte = data[position]
        size |= (byte & 0x7F) << shift
        shift += 7
        if size > MAX_MESSAGE_BYTES or shift > 35:
            raise ForerunError(
                f"{place}: {_message(count)} claims a length of at least {size} bytes, but at most "
                f"{MAX_MESSAGE_BYTES} are read; the file is damaged or not a Chakra trace"
            )
        if byte < 0x80:
            return size, position + 1
    return 0, 0


def _message(count: int) -> str:
    return f"node number {count}" if count else "its first message"
