"""The user's own code, named as FILE.py:NAME in an experiment file. It runs with all rights of the user."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from forerun.common.errors import ForerunError, UnknownName


def is_own_code(text: str) -> bool:
    """Returns whether a name means FILE.py:NAME."""
    path, colon, name = text.rpartition(":")
    return bool(colon) and path.endswith(".py") and name.isidentifier()


def load_own(text: str, place: str) -> Any:
    """Returns the object NAME of a Python file; `text` is FILE.py:NAME. A file is executed again only after a change.

    Raises ForerunError if there is no such file, it can't be run, or it has no such name; the message starts with
    `place`.
    """
    file, _, name = text.rpartition(":")
    path = Path(file)
    try:
        state = path.stat()
    except (OSError, ValueError) as error:
        raise ForerunError(f"{place}: {path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    try:
        module = _module(path, state.st_mtime_ns, state.st_size)
    except Exception as error:
        told = " ".join(str(error).split())
        raise ForerunError(f"{place}: {path} fails when Forerun executes it: {type(error).__name__}: {told}") from None
    if not hasattr(module, name):
        public = [each for each in vars(module) if not each.startswith("_")]
        raise ForerunError(f"{place}: {UnknownName(f'name in {path}', name, public)}")
    return getattr(module, name)


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
