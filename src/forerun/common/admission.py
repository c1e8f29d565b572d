"""Opens and reads every input file: regular files of bounded size, UTF-8 text, JSON and CSV.

Each reader checks its own format. This module refuses input that is wrong in every format: a device, a folder or a pipe
instead of a file, a file that is too large, text that is not UTF-8, too deep nesting, a key that is given twice, a
number that is not finite or exceeds 64 bits. `yaml_files` and `array_files` do the same for YAML and for saved arrays.
"""

from __future__ import annotations

import csv
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from io import TextIOWrapper
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

from forerun.common.errors import ForerunError

MOST_TEXT_BYTES = 1 << 26
"""largest text file; as JSON it can take 1.5 GB of memory"""
MOST_TABLE_BYTES = 1 << 28
"""largest CSV file"""
DEEPEST = 64
"""levels of lists and mappings in each other; Python's recursion ends at a thousand"""
LONGEST_KEY = 4096
_MOST_CELLS = 1 << 25
"""cells of a CSV file, in memory 2 GB"""
_NO_FILES = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


@contextmanager
def opened(path: str | Path, most_bytes: int | None = None) -> Iterator[BinaryIO]:
    """Opens a regular file of at most `most_bytes` for reading.

    Raises ForerunError, which names the file, if it can't be read, is something else than a regular file, or is larger.
    """
    try:
        # A pipe that nobody writes to would otherwise wait for ever.
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    try:
        about = os.fstat(number)
        refuse_special(about, path)
        if most_bytes is not None and about.st_size > most_bytes:
            raise ForerunError(f"{path}: has {about.st_size:,} bytes; at most {most_bytes:,} are read")
    except ForerunError:
        os.close(number)
        raise
    with os.fdopen(number, "rb") as file:
        yield file


def refuse_special(about: os.stat_result, path: str | Path) -> None:
    """Raises ForerunError unless `about`, a result of `stat`, is that of a regular file."""
    if not stat.S_ISREG(about.st_mode):
        what = next((name for is_kind, name in _NO_FILES if is_kind(about.st_mode)), "no file")
        raise ForerunError(f"{path}: can't be read: it is {what}; give a regular file")


def read_bytes(path: str | Path, most_bytes: int = MOST_TEXT_BYTES) -> bytes:
    """Returns the bytes of a file. Raises ForerunError as `opened` does."""
    with opened(path, most_bytes) as file:
        try:
            content = file.read(most_bytes + 1)
        except OSError as error:
            raise unreadable(path, error) from None
    if len(content) > most_bytes:  # files under /proc have a size of 0
        raise ForerunError(f"{path}: has more than {most_bytes:,} bytes; at most so many are read")
    return content


def read_text(path: str | Path, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """Returns the text of a file, without a byte order mark and with \\n as the end of each line.

    Raises ForerunError as `opened` does, and for text that is not UTF-8.
    """
    return decoded(read_bytes(path, most_bytes), str(path)).replace("\r\n", "\n").replace("\r", "\n")


def decoded(content: bytes, place: str) -> str:
    """Returns the UTF-8 text of `content`, without a byte order mark. Raises ForerunError, which names `place`."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ForerunError(f"{place}: not UTF-8 text (byte {error.start})") from None


def read_json(path: str | Path) -> Any:
    """Returns the value in a JSON file. Raises ForerunError, naming the file and the line."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, place: str, any_number: bool = False, line: int | None = None) -> Any:
    """Returns the value of a JSON text.

    Args:
        any_number: also reads numbers that `admit` refuses, for foreign files with keys that are never used.
        line: the line of the file that holds the text, if the text is not the whole file.

    Raises ForerunError, naming `place` and the line, if the text is not JSON or gives a key twice, and as `admit`.
    """
    whole = place if line is None else f"{place}, line {line}"
    try:
        data = json.loads(text, object_pairs_hook=_each_key_once)
    except json.JSONDecodeError as error:
        raise ForerunError(f"{place}, line {line or error.lineno}: not JSON: {error.msg}; is it cut short?") from None
    except ForerunError as error:
        raise ForerunError(f"{whole}: {error}") from None
    except (ValueError, RecursionError):
        raise ForerunError(f"{whole}: not JSON: a number is too long, or lists are nested too deeply") from None
    admit(data, whole, any_number)
    return data


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ForerunError(f"key {twice!r:.60} is given twice")
    return found


_Path = tuple[Any, ...]
"""the keys that lead to a value, as nested pairs: the way to its holder, and its own key"""


def admit(data: Any, place: str, any_number: bool = False) -> None:
    """Raises ForerunError, naming `place` and the key, for values that no file can mean.

    Such are nesting deeper than `DEEPEST`, a number that is not finite or not in 64 bits, a text or key that has a NUL
    or that UTF-8 can't write, a key longer than `LONGEST_KEY`, and a value of a type that JSON and plain YAML lack.
    """
    waiting: list[tuple[Any, _Path, int]] = [([data], (), -1)]
    while waiting:
        holder, way, depth = waiting.pop()
        if depth > DEEPEST:
            raise ForerunError(f"{place}: {_named(way)} lies more than {DEEPEST} levels deep")
        is_mapping = type(holder) is dict
        for key, value in holder.items() if is_mapping else enumerate(holder):
            if is_mapping and (problem := _problem_of_key(key)):
                raise ForerunError(f"{place}: {_named((way, key))}: {problem}")
            kind = type(value)
            if kind is dict or kind is list:
                waiting.append((value, (way, key), depth + 1))
            elif problem := _problem(kind, value, any_number):
                raise ForerunError(f"{place}: {_named((way, key))}: {problem}")


def _problem_of_key(key: Any) -> str:
    if type(key) is not str:
        return _problem(type(key), key, False)
    return f"the key has {len(key):,} characters" if len(key) > LONGEST_KEY else _problem_of_text(key)


def _problem(kind: type, value: Any, any_number: bool) -> str:
    """Describes the error in a value that is not a list or mapping. The text is empty if there is none."""
    if kind is str:
        return _problem_of_text(value)
    if kind is float:
        return "" if any_number or isfinite(value) else f"the number {value} is not finite"
    if kind is int:
        too_large = not -(2**63) <= value < 2**63 and not any_number
        return f"a whole number of {value.bit_length()} bits and a sign; 64 bits are the most" if too_large else ""
    if kind is bool or value is None or isinstance(value, date):
        return ""
    return f"a value of the type {kind.__name__} means nothing here"


def _problem_of_text(text: str) -> str:
    if "\0" in text:
        return "the text has a NUL character"
    if text.isascii():
        return ""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"the text has half a character (\\u{ord(text[error.start]):04x})"
    return ""


def _named(way: _Path) -> str:
    """Returns the keys of a way joined by dots, the first ones left out where they are many."""
    keys: list[str] = []
    while way:
        way, key = way
        keys.append(f"{key!s:.40}")
    inner = keys[:-1]  # the outermost list holds everything, so its index says nothing
    keys = [key.encode("ascii", "backslashreplace").decode() for key in inner]
    return ".".join(reversed(keys[:8])) or "the file"


def read_rows(path: str | Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the line (from 1) and the cells of each row of a CSV file that has any, the header first.

    Raises ForerunError, naming the file and the line, as `opened` does, for text that is not UTF-8, and for text that
    is no CSV, such as an open quotation mark at its end.
    """
    line = cells = 0
    try:
        with opened(path, MOST_TABLE_BYTES) as binary, TextIOWrapper(binary, "utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            for row in reader:
                line, cells = reader.line_num, cells + len(row)
                if cells > _MOST_CELLS:
                    raise ForerunError(f"{path}, line {line}: at most {_MOST_CELLS:,} cells of a table are read")
                if row:
                    yield line, row
    except UnicodeDecodeError as error:
        raise ForerunError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except csv.Error as error:
        raise ForerunError(f"{path}, line {line + 1}: not CSV: {error}; is the file cut short?") from None
    except OSError as error:
        raise unreadable(path, error) from None


def cells_of(row: str, place: str) -> list[str]:
    """Returns the cells of one row of a CSV text. Raises ForerunError, naming `place`, for text that is no CSV."""
    try:
        return next(csv.reader([row], strict=True))
    except csv.Error as error:
        raise ForerunError(f"{place}: not CSV: {error}") from None


def refuse_repeated(names: Sequence[str], place: str) -> None:
    """Raises ForerunError if a column's name is given twice."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ForerunError(f"{place}: column {twice!r:.60} is given twice")


def unreadable(path: str | Path, error: Exception) -> ForerunError:
    """Returns the error that says why `path` can't be read."""
    fix = "; check the path" if isinstance(error, FileNotFoundError) else ""
    return ForerunError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}{fix}")
