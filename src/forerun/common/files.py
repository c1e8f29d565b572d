"""Reading text and JSON with errors that name the file; writing files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from forerun.common.errors import ForerunError


def read_text(path: str | Path) -> str:
    """Returns what a text file holds. Raises ForerunError if it can't be read or is not UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ForerunError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None


def read_json(path: str | Path) -> Any:
    """Returns what a JSON file holds. Raises ForerunError, naming the file and the line."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, place: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Returns what a JSON text holds; `pairs` makes a value of the keys and values of an object.

    Raises ForerunError, naming `place` and the line, if the text is not JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise ForerunError(f"{place}, line {error.lineno}: not JSON: {error.msg}; is it cut short?") from None
    except ForerunError:
        raise
    except (ValueError, RecursionError):
        raise ForerunError(f"{place}: not JSON: a number is too long, or lists are nested too deeply") from None


def unreadable(path: str | Path, error: Exception) -> ForerunError:
    """The error that says why `path` can't be read."""
    return ForerunError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}")


def make_folder(path: str | Path) -> Path:
    """Makes a folder, and those around it, unless it is there. Raises ForerunError if that fails."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ForerunError(f"{path}: can't be made a folder: {error.strerror or error}") from None
    return Path(path)


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a temporary file that replaces `path` when the block ends, or is removed if the block fails.

    Raises ForerunError if the file can't be written.
    """
    target = Path(path)
    temporary = Path(f"{target.parent / ('.' + target.name)}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(target)
    except OSError as error:
        raise ForerunError(f"{target}: can't be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
