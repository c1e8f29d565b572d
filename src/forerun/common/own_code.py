"""The user's own Python code, named as FILE.py:NAME. It runs with all rights of the user."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from forerun.common.errors import ForerunError, UnknownName

_asked: list[Callable[[str], None]] = []
"""receives the announcement of code that a file names, before the code runs"""


def is_own_code(text: str) -> bool:
    """Returns whether a name means FILE.py:NAME."""
    path, colon, name = text.rpartition(":")
    return bool(colon) and path.endswith(".py") and name.isidentifier()


@contextmanager
def before_own_code(ask: Callable[[str], None]) -> Iterator[None]:
    """Calls `ask` within the block before code runs that a file names, with a line that says where and which.

    An error that `ask` raises prevents that the code runs.
    """
    _asked.append(ask)
    try:
        yield
    finally:
        _asked.remove(ask)


def load_own(text: str, place: str) -> Any:
    """Returns the object NAME of a Python file; `text` is FILE.py:NAME. A file is executed again only after a change.

    Raises ForerunError if there is no such file, it can't be run, or it has no such name; the message starts with
    `place`.
    """
    for ask in _asked:
        ask(f"{place}: names Python code ({text})")
    file, _, name = text.rpartition(":")
    path = Path(file)
    try:
        module = load_module(path)
    except OSError as error:
        raise ForerunError(f"{place}: {path} cannot be read ({error.strerror or error})") from None
    except Exception as error:
        told = " ".join(str(error).split())
        raise ForerunError(f"{place}: {path} fails when Forerun executes it: {type(error).__name__}: {told}") from None
    if not hasattr(module, name):
        public = [each for each in vars(module) if not each.startswith("_")]
        raise ForerunError(f"{place}: {UnknownName(f'name in {path}', name, public)}")
    return getattr(module, name)


def load_module(path: Path) -> ModuleType:
    """Returns the module of a Python file. The file is executed again only after a change.

    Raises the errors of the file itself, and OSError if it can't be read.
    """
    try:
        state = path.stat()
    except ValueError as error:  # a name with a null character
        raise OSError(str(error)) from None
    return _module(path, state.st_mtime_ns, state.st_size)


@cache
def _module(path: Path, mtime_ns: int, size: int) -> ModuleType:
    name = f"forerun_own_{path.stem}_{sha256(f'{path}|{mtime_ns}|{size}'.encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class up by its module
    spec.loader.exec_module(module)
    return module
