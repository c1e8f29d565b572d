"""The bytes of a trace file: compression by content, and messages with their length before them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from forerun.common.errors import ForerunError

MAX_MESSAGE_BYTES = 1 << 28
"""longest message that is read; real nodes have some hundred bytes"""
_CHUNK = 1 << 20
_COMPRESSED_CHUNK = 1 << 12
"""so little at once that even the densest compressed input stays within 128 MiB of output"""
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_GZIP_WINDOW = 31


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; raises ForerunError where it can't be."""
    try:
        file = path.open("rb")
    except (OSError, ValueError) as error:
        raise ForerunError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from None
    with file:
        yield file


def chunks(file: BinaryIO, place: str) -> Iterator[bytes]:
    """The content of `file` in pieces, decompressed where it begins like gzip or Zstandard.

    Raises ForerunError, naming `place`: unreadable, truncated or damaged file.
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
    # A compressed file is a sequence of frames, each of which says where it ends.
    stream: Any = None
    while head:
        for start in range(0, len(head), _COMPRESSED_CHUNK):
            data = head[start : start + _COMPRESSED_CHUNK]
            while data:
                stream = stream or new()
                yield stream.decompress(data)
                data = stream.unused_data
                stream = None if stream.eof else stream
        head = file.read(_CHUNK)
    if stream is not None:
        raise ForerunError(f"{place}: truncated: its compressed data ends too early; write it again")


def messages(pieces: Iterable[bytes], place: str) -> Iterator[bytes]:
    """The messages of a stream in which each has its length (a varint) before it.

    Raises ForerunError, naming `place` and the message: a length that is no varint, more than `MAX_MESSAGE_BYTES`, or
    beyond the end of the stream. Memory is that of the longest message and one piece.
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
    """The length at `start` and the position behind it, which is 0 where the data ends within the length."""
    size = shift = 0
    for position in range(start, len(data)):
        byte = data[position]
        size |= (byte & 0x7F) << shift
        shift += 7
        if size > MAX_MESSAGE_BYTES or shift > 35:
            raise ForerunError(
                f"{place}: {_message(count)} claims a length of at least {size} bytes, but at most "
                f"{MAX_MESSAGE_BYTES} are read; the file is damaged or no Chakra trace"
            )
        if byte < 0x80:
            return size, position + 1
    return 0, 0


def _message(count: int) -> str:
    return f"node number {count}" if count else "its first message"
