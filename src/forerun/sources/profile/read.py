"""Reading Kineto files: plain or packed by gzip, in pieces, whatever their size."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from forerun.common.admission import opened, parse_json, unreadable
from forerun.common.errors import ForerunError
from forerun.common.interned import Texts
from forerun.sources.profile.profile import Profile, stated_rank
from forerun.sources.profile.scan import Extras, Rows, State, Status, scan_events
from forerun.sources.profile.scan_values import U8, skip_space, text_end, value_end

_PIECE = 16 << 20
_LARGEST_VALUE = 512 << 20
"""bytes of one event, or of one value beside the events"""
_MOST_UNPACKED = 300
"""times the size of the packed file; public traces unpack to 8 to 60 times"""
_ALWAYS_UNPACKED = 64 << 20
_ROW_BYTES = 32
"""no event that is kept is shorter"""
_EXTRA_BYTES = 8
"""no argument that is kept is shorter"""
_FIRST_TEXTS = 1 << 14
_GZIP = b"\x1f\x8b"
_FAULTS = {
    Status.SYNTAX: "not JSON as a profile has it; is the file damaged?",
    Status.NOT_AN_OBJECT: "an entry of traceEvents is not an object",
    Status.BAD_TIME: "the event's ts is not a number of microseconds",
    Status.BAD_DURATION: "the event's dur is not a number of microseconds from 0 to three years",
    Status.NO_TIME: "the event has a duration and no ts",
    Status.NO_NAME: "the event has a duration and no name",
    Status.BAD_TYPE: "the event's name or cat is not a text",
}


def read_profiles(paths: Sequence[str | Path]) -> list[Profile]:
    """Reads one file for each rank, in order of ranks.

    A file that does not state its rank has the number in its name (`rank-3`, `rank3`), or else the first free one.
    Raises ForerunError if a file can't be read, is not a profile, or if two files state the same rank.
    """
    found = [read_profile(path) for path in paths]
    numbers = [_rank(one) for one in found]
    taken = [number for number in numbers if number is not None]
    for number in taken:
        if taken.count(number) > 1:
            both = [one.path for one, rank in zip(found, numbers, strict=True) if rank == number]
            raise ForerunError(f"{both[0]} and {both[1]} are both of rank {number}; give one file for each rank")
    free = iter(number for number in range(len(found) + len(taken)) if number not in taken)
    ranked = [
        _with_rank(one, next(free) if number is None else number) for one, number in zip(found, numbers, strict=True)
    ]
    return sorted(ranked, key=lambda one: one.rank)


def read_profile(path: str | Path) -> Profile:
    """Reads one file. Raises ForerunError if it can't be read or is not a profile."""
    try:
        with opened(path) as file:
            packed = file.read(len(_GZIP)) == _GZIP
            file.seek(0)
            size = os.fstat(file.fileno()).st_size
            stream = gzip.GzipFile(fileobj=file) if packed else file
            most = _MOST_UNPACKED * size + _ALWAYS_UNPACKED if packed else None
            return _Reader(str(path), stream, most).profile()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ForerunError(f"{path}: can't be unpacked: {error}; is it cut short?") from None
    except OSError as error:
        raise unreadable(path, error) from None


class _Reader:
    """Reads the members of the outermost object from a window that moves along the file."""

    def __init__(self, path: str, stream: BinaryIO | gzip.GzipFile, most: int | None) -> None:
        self._path = path
        self._stream = stream
        self._most = most
        self._buf: U8 = np.empty(_PIECE, np.uint8)
        self._pos = self._n = 0
        self._before = 0
        """bytes of the file before the window"""
        self._ended = False
        self._state = np.zeros(len(State), np.int64)
        self._texts = Texts.empty(_PIECE, _FIRST_TEXTS)
        self._rows: list[Rows] = []
        self._extras: list[Extras] = []
        self._found_events = False

    def profile(self) -> Profile:
        metadata = self._members()
        if not self._found_events:
            raise ForerunError(f"{self._path}: holds no traceEvents; is it a file of PyTorch's profiler?")
        state = self._state
        if state[State.EVENTS] == 0:
            raise ForerunError(f"{self._path}: traceEvents is empty; did the profiler record a step?")
        if state[State.ROWS] == 0 and not self._rows:
            raise ForerunError(f"{self._path}: no event has a duration; did the profiler record a step?")
        return Profile(
            path=self._path,
            rank=0,
            metadata=metadata,
            texts=tuple(map(_decoded, self._texts.stored())),
            rows=Rows(*map(np.concatenate, zip(*self._rows, strict=True))),
            extras=Extras(*map(np.concatenate, zip(*self._extras, strict=True))),
            n_events=int(state[State.EVENTS]),
            without_duration=int(state[State.WITHOUT_DURATION]),
            fractional=bool(state[State.FRACTIONAL]),
        )

    def _members(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        if self._next() != "{":
            raise ForerunError(f"{self._path}: is not one JSON object with traceEvents, as PyTorch's profiler writes")
        self._pos += 1
        if self._next() == "}":
            return metadata
        while True:
            if self._next() != '"':
                self._fail(Status.SYNTAX, self._pos)
            key = self._value()
            if self._next() != ":":
                self._fail(Status.SYNTAX, self._pos)
            self._pos += 1
            if self._next() == "[" and key == "traceEvents":
                if self._found_events:
                    raise ForerunError(f"{self._path}: holds traceEvents twice; keep one of them")
                self._found_events = True
                self._pos += 1
                self._events()
            elif key == "traceEvents":
                raise ForerunError(f"{self._path}: traceEvents is not a list of events")
            else:
                metadata[str(key)] = self._value()
            separator = self._next()
            self._pos += 1
            if separator == "}":
                return metadata
            if separator != ",":
                self._fail(Status.SYNTAX, self._pos - 1)

    def _next(self) -> str:
        """Moves to the next byte that is no white space and returns it."""
        while True:
            self._pos = skip_space(self._buf, self._pos, self._n)
            if self._pos < self._n:
                return chr(self._buf[self._pos])
            self._fill()

    def _value(self) -> Any:
        """Returns the value at the window's place, and moves behind it."""
        while True:
            if self._buf[self._pos] == ord('"'):
                end = text_end(self._buf, self._pos + 1, self._n)
                end = end + 1 if end >= 0 else -1
            else:
                end = value_end(self._buf, self._pos, self._n)
            if end == -2:
                self._fail(Status.SYNTAX, self._pos)
            if end >= 0:
                break
            self._fill()
        text = self._buf[self._pos : end].tobytes().decode("utf-8", "replace")
        at = f"{self._path}, byte {self._before + self._pos}"
        self._pos = end
        return parse_json(text, at)

    def _events(self) -> None:
        rows, extras = self._room()
        while True:
            self._state[State.ROWS] = self._state[State.EXTRAS] = 0
            self._pos, status = scan_events(self._buf, self._pos, self._n, rows, extras, self._texts, self._state)
            self._keep(rows, extras)
            if status == Status.END:
                return
            if status == Status.MORE:
                size = len(self._buf)
                self._fill()
                if len(self._buf) > size:
                    rows, extras = self._room()
            elif status == Status.GROW:
                self._texts = self._texts.grown(len(self._buf))
            else:
                self._fail(Status(status), int(self._state[State.FAULT]))

    def _room(self) -> tuple[Rows, Extras]:
        size = len(self._buf)
        return Rows.empty(size // _ROW_BYTES), Extras.empty(size // _EXTRA_BYTES)

    def _keep(self, rows: Rows, extras: Extras) -> None:
        n_rows, n_extras = int(self._state[State.ROWS]), int(self._state[State.EXTRAS])
        if n_rows == 0:
            return
        before = sum(len(one.ts_ns) for one in self._rows)
        self._rows.append(Rows(*(column[:n_rows].copy() for column in rows)))
        kept = Extras(*(column[:n_extras].copy() for column in extras))
        self._extras.append(kept._replace(row=kept.row + before))

    def _fill(self) -> None:
        """Moves the rest of the window to its front, and reads more bytes behind it. Raises ForerunError at the file's
        end.
        """
        left = self._n - self._pos
        if left > len(self._buf) // 2:
            if len(self._buf) >= _LARGEST_VALUE:
                raise ForerunError(
                    f"{self._path}: one value takes more than {_LARGEST_VALUE >> 21} MiB; is it damaged?"
                )
            larger = np.empty(2 * len(self._buf), np.uint8)
            larger[:left] = self._buf[self._pos : self._n]
            self._buf = larger
        else:
            self._buf[:left] = self._buf[self._pos : self._n].copy()
        self._before += self._pos
        self._pos, self._n = 0, left
        piece = self._stream.read(len(self._buf) - left)
        count = len(piece)
        self._buf[left : left + count] = np.frombuffer(piece, np.uint8)
        if not count:
            raise ForerunError(f"{self._path}: ends at byte {self._before + left:,} inside its JSON; is it cut short?")
        self._n += count
        if self._most is not None and self._before + self._n > self._most:
            raise ForerunError(f"{self._path}: unpacks to more than {_MOST_UNPACKED} times its size; is it a profile?")

    def _fail(self, status: Status, pos: int) -> NoReturn:
        event = f", event {self._state[State.EVENTS]}" if self._found_events else ""
        raise ForerunError(f"{self._path}{event}, byte {self._before + pos:,}: {_FAULTS[status]}")


def _decoded(raw: bytes) -> str:
    text = raw.decode("utf-8", "replace")
    if "\\" not in text:
        return text
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text


def _rank(profile: Profile) -> int | None:
    stated = stated_rank(profile.metadata)
    if stated is not None:
        return stated
    named = re.search(r"rank[-_]?(\d+)", Path(profile.path).name)
    return int(named[1]) if named else None


def _with_rank(profile: Profile, rank: int) -> Profile:
    fields = {name: getattr(profile, name) for name in profile.__dataclass_fields__}
    return Profile(**{**fields, "rank": rank})
