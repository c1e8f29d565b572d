"""sealed: while the server reads a dropped file, it opens only the package, its libraries and the server's own folder.

A file that a user drops on the page may name other files: a trace, a network, Python code. On the command line Forerun
opens them. The server must not, because a dropped file may come from anywhere. Python tells an audit hook of every
file that it opens, whatever code opens it.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from forerun.common.errors import ForerunError

_state = threading.local()
_SYSTEM = ("/dev/null", "/dev/urandom", "/proc/", "/sys/")


@contextmanager
def sealed(folder: Path) -> Iterator[None]:
    """Lets this thread open files below `folder` and the installed code only.

    Every other file raises ForerunError. The rule holds for this thread alone.
    """
    _install()
    _state.folder = f"{os.path.realpath(folder)}{os.sep}"
    try:
        yield
    finally:
        _state.folder = None


@cache
def _install() -> None:
    sys.addaudithook(_hook)


@cache
def _installed() -> tuple[str, ...]:
    """Returns the folders of Python, its libraries and this package, and those where numba keeps compiled code."""
    places = {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, str(Path(__file__).parents[2])}
    caches = (os.environ.get("XDG_CACHE_HOME") or "~/.cache", "~/Library/Caches")
    places |= {os.path.expanduser(f"{cache}/numba") for cache in caches}
    places |= {folder for folder in (os.environ.get("NUMBA_CACHE_DIR"),) if folder}
    return tuple(f"{os.path.realpath(place)}{os.sep}" for place in places)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    folder = getattr(_state, "folder", None)
    if folder is None or event not in ("open", "sqlite3.connect"):
        return
    path = arguments[0]
    if not isinstance(path, str | bytes | os.PathLike):
        return  # a file that is open already
    real = os.path.realpath(os.fsdecode(path))
    if not real.startswith((folder, *_SYSTEM, *_installed())):
        raise ForerunError(
            f"the dropped file names another file, {os.fsdecode(path)}; the page opens none: use the command line"
        )
