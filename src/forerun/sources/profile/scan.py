"""The scanner of a Kineto file: bytes of `traceEvents` become columns, without an object for any event.

A call takes as many whole events as a buffer holds. Texts are stored once each and are numbers from then on, times are
whole nanoseconds. Other fields of events are kept as (row, key, value).

The scanner checks what it reads (types of the fields that it keeps, brackets, separators) and answers with the kind of
a fault and its place. It does not check the form of values that nobody reads.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.common.interned import Texts, intern
from forerun.common.jit import kernel
from forerun.sources.profile.event_keys import (
    ARGUMENT_SPELLINGS,
    REAL_KEYS,
    SPELLINGS,
    TEXT_KEYS,
    Key,
    key_hash,
    key_table,
)
from forerun.sources.profile.scan_values import (
    U8,
    nanoseconds,
    real_number,
    skip_space,
    text_end,
    value_end,
    whole_number,
)

I8 = npt.NDArray[np.int8]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


class Status(IntEnum):
    """The reason for which a scan ended."""

    MORE = 0
    """the buffer ends inside an event"""
    END = 1
    """the list of events is over"""
    GROW = 2
    """the table of texts is full"""
    SYNTAX = 3
    NOT_AN_OBJECT = 4
    BAD_TIME = 5
    BAD_DURATION = 6
    NO_TIME = 7
    NO_NAME = 8
    BAD_TYPE = 9


class State(IntEnum):
    """Counters that go from one scan to the next."""

    ROWS = 0
    EXTRAS = 1
    EVENTS = 2
    FRACTIONAL = 3
    """1 if a time has a fraction of a microsecond, or an event has none"""
    WITHOUT_DURATION = 4
    AFTER_EVENT = 5
    """1 between an event and the comma behind it"""
    FAULT = 6
    """the place of a fault in the buffer"""


MISSING = -1
NO_DURATION = -1
TEXT_THREAD = -(1 << 41)
"""processes and threads that are texts are numbered from here down"""


class Rows(NamedTuple):
    """Columns of the events that have a duration and a category, and of the memory events."""

    place: I64
    """place in `traceEvents`"""
    ts_ns: I64
    dur_ns: I64
    """NO_DURATION for a memory event"""
    name: I32
    cat: I32
    pid: I64
    tid: I64
    stream: I64
    correlation: I64
    external_id: I64

    @classmethod
    def empty(cls, n_rows: int) -> Rows:
        """Returns columns for `n_rows` rows that hold nothing yet."""
        wide, narrow = np.int64, np.int32
        types = (wide, wide, wide, narrow, narrow, wide, wide, wide, wide, wide)
        return cls(*(np.empty(n_rows, one) for one in types))  # type: ignore[arg-type]


class Extras(NamedTuple):
    """Values of arguments that few events have."""

    row: I64
    key: I8
    value: npt.NDArray[np.float64]
    """a number, or the number of a text"""

    @classmethod
    def empty(cls, n_rows: int) -> Extras:
        """Returns columns for `n_rows` values that hold nothing yet."""
        return cls(np.empty(n_rows, np.int64), np.empty(n_rows, np.int8), np.empty(n_rows, np.float64))


_EVENT_HASHES, _EVENT_KEYS = key_table(SPELLINGS)
_ARG_HASHES, _ARG_KEYS = key_table(ARGUMENT_SPELLINGS)
_IS_TEXT = np.array([key in TEXT_KEYS for key in Key])
_IS_REAL = np.array([key in REAL_KEYS for key in Key])
_PH, _CAT, _NAME, _PID, _TID, _TS, _DUR = map(int, (Key.PH, Key.CAT, Key.NAME, Key.PID, Key.TID, Key.TS, Key.DUR))
_ARGS, _STREAM, _CORRELATION, _EXTERNAL = map(int, (Key.ARGS, Key.STREAM, Key.CORRELATION, Key.EXTERNAL_ID))
_MORE, _END, _GROW, _SYNTAX, _NOT_AN_OBJECT = map(
    int, (Status.MORE, Status.END, Status.GROW, Status.SYNTAX, Status.NOT_AN_OBJECT)
)
_BAD_TIME, _BAD_DURATION, _NO_TIME, _NO_NAME, _BAD_TYPE = map(
    int, (Status.BAD_TIME, Status.BAD_DURATION, Status.NO_TIME, Status.NO_NAME, Status.BAD_TYPE)
)
_ROWS, _EXTRAS, _EVENTS, _FRACTIONAL, _WITHOUT, _AFTER, _FAULT = map(int, State)
_MEMORY = np.uint64(key_hash(b"[memory]"))
_QUOTE, _COMMA, _COLON, _OPEN, _CLOSE, _CLOSE_LIST = (ord(c) for c in '",:{}]')
_X, _I, _N = ord("X"), ord("i"), ord("n")
_LONGEST_NS = 10**17
"""durations beyond three years could bring the end of an event beyond 64 bits"""


@kernel
def _hash(buf: U8, first: int, end: int) -> Any:
    value = np.uint64(0xCBF29CE484222325)
    for i in range(first, end):
        value = (value ^ np.uint64(buf[i])) * np.uint64(0x100000001B3)
    return value


@kernel
def _find_key(buf: U8, first: int, end: int, hashes: U64, fields: I8) -> int:
    value = _hash(buf, first, end)
    slot = np.int64(value & np.uint64(255))
    while fields[slot] >= 0:
        if hashes[slot] == value:
            return int(fields[slot])
        slot = (slot + 1) & 255
    return -1


@kernel
def scan_events(buf: U8, pos: int, n: int, rows: Rows, extras: Extras, texts: Texts, state: I64) -> tuple[int, int]:
    """Reads the events of `buf[pos:n]` into the columns. Returns the place behind the last whole one, and a Status.

    `pos` is behind the bracket that opens the list, behind an event or behind a comma. The columns have room for as
    many rows as fit the buffer.
    """
    place_of, ts_of, dur_of, name_of, cat_of, pid_of, tid_of, stream_of, correlation_of, external_of = rows
    extra_row, extra_key, extra_value = extras
    while True:
        begin = pos
        pos = skip_space(buf, pos, n)
        if pos == n:
            return begin, _MORE
        if buf[pos] == _CLOSE_LIST:
            if state[_EVENTS] > 0 and state[_AFTER] == 0:
                state[_FAULT] = pos
                return begin, _SYNTAX
            return pos + 1, _END
        if state[_AFTER] == 1:
            if buf[pos] != _COMMA:
                state[_FAULT] = pos
                return begin, _SYNTAX
            state[_AFTER] = 0
            pos += 1
            continue
        state[_FAULT] = pos
        if buf[pos] != _OPEN:
            return begin, _NOT_AN_OBJECT
        pos += 1
        row = state[_ROWS]
        n_extras = state[_EXTRAS]
        phase, name, cat = 0, -1, -1
        pid, tid, stream, correlation, external = 0, 0, -1, -1, -1
        ts, dur, timed, lasting, fractional = 0, 0, 0, 0, 0
        memory = False
        inside, first_pair = False, True
        while True:
            pos = skip_space(buf, pos, n)
            if pos == n:
                return begin, _MORE
            state[_FAULT] = pos
            if buf[pos] == _CLOSE:
                pos += 1
                first_pair = False
                if inside:
                    inside = False
                    continue
                break
            if not first_pair:
                if buf[pos] != _COMMA:
                    return begin, _SYNTAX
                pos = skip_space(buf, pos + 1, n)
                if pos == n:
                    return begin, _MORE
            first_pair = False
            state[_FAULT] = pos
            if buf[pos] != _QUOTE:
                return begin, _SYNTAX
            key_first = pos + 1
            key_end = text_end(buf, key_first, n)
            if key_end < 0:
                return begin, _MORE
            pos = skip_space(buf, key_end + 1, n)
            if pos == n:
                return begin, _MORE
            if buf[pos] != _COLON:
                state[_FAULT] = pos
                return begin, _SYNTAX
            pos = skip_space(buf, pos + 1, n)
            if pos == n:
                return begin, _MORE
            if inside:
                key = _find_key(buf, key_first, key_end, _ARG_HASHES, _ARG_KEYS)
            else:
                key = _find_key(buf, key_first, key_end, _EVENT_HASHES, _EVENT_KEYS)
            if key == _ARGS and buf[pos] == _OPEN:
                inside, first_pair = True, True
                pos += 1
                continue
            first = pos
            state[_FAULT] = pos
            pos = value_end(buf, first, n)
            if pos == -1:
                return begin, _MORE
            if pos < 0:
                return begin, _SYNTAX
            if key < 0 or key == _ARGS:
                continue
            quoted = buf[first] == _QUOTE
            end = pos
            if quoted:
                first += 1
                end -= 1
            if key == _PH:
                phase = np.int64(buf[first]) if quoted and end == first + 1 else 0
            elif key == _TS:
                if buf[first] == _N and not quoted:
                    continue
                timed, ts, fraction = nanoseconds(buf, first, end)
                if timed == 0 or quoted:
                    return begin, _BAD_TIME
                fractional |= fraction
            elif key == _DUR:
                if buf[first] == _N and not quoted:
                    continue
                lasting, dur, fraction = nanoseconds(buf, first, end)
                if lasting == 0 or quoted or not 0 <= dur <= _LONGEST_NS:
                    return begin, _BAD_DURATION
            elif key in (_NAME, _CAT):
                if not quoted:
                    return begin, _BAD_TYPE
                number = intern(buf, first, end, texts)
                if number < 0:
                    return begin, _GROW
                if key == _NAME:
                    name = number
                    memory = _hash(buf, first, end) == _MEMORY
                else:
                    cat = number
            elif key in (_PID, _TID):
                ok, number = (0, 0) if quoted else whole_number(buf, first, end)
                if ok == 0:
                    number = intern(buf, first, end, texts)
                    if number < 0:
                        return begin, _GROW
                    number = TEXT_THREAD - number
                if key == _PID:
                    pid = number
                else:
                    tid = number
            elif key == _STREAM:
                ok, number = whole_number(buf, first, end)
                stream = number if ok == 1 else -1
            elif key == _CORRELATION:
                ok, number = whole_number(buf, first, end)
                correlation = number if ok == 1 else -1
            elif key == _EXTERNAL:
                ok, number = whole_number(buf, first, end)
                external = number if ok == 1 else -1
            else:
                if _IS_TEXT[key]:
                    ok, real = 1, float(intern(buf, first, end, texts))
                    if real < 0:
                        return begin, _GROW
                elif _IS_REAL[key]:
                    ok, real = real_number(buf, first, end)
                else:
                    ok, number = whole_number(buf, first, end)
                    real = float(number)
                if ok == 1:
                    extra_row[n_extras] = row
                    extra_key[n_extras] = key
                    extra_value[n_extras] = real
                    n_extras += 1
        state[_FAULT] = begin
        kept = lasting == 1 and cat >= 0
        if kept or (phase == _I and memory):
            if timed == 0:
                return begin, _NO_TIME
            if name < 0:
                return begin, _NO_NAME
            place_of[row] = state[_EVENTS]
            ts_of[row] = ts
            dur_of[row] = dur if lasting == 1 else NO_DURATION
            name_of[row] = name
            cat_of[row] = cat
            pid_of[row] = pid
            tid_of[row] = tid
            stream_of[row] = stream
            correlation_of[row] = correlation
            external_of[row] = external
            state[_ROWS] = row + 1
            state[_EXTRAS] = n_extras
        elif phase == _X:
            state[_WITHOUT] += 1
        if fractional == 1 or timed == 0:
            state[_FRACTIONAL] = 1
        state[_EVENTS] += 1
        state[_AFTER] = 1
