"""numba's compiler with a disk cache where there is a folder to keep it in, without one elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])
_SHARED = tuple(Path(__file__).parents[1] / room for room in ("core/engine", "core/program", "astrasim/messages"))
"""rooms whose compiled functions are called from others"""


def njit(function: F) -> F:
    """Compile `function` on its first call."""
    return _compiled(function)


def kernel(function: F) -> F:
    """Compile a function that makes no arrays (numba refuses one that does) on its first call.

    Without allocations nothing has to count references. Numba does count them for each array in a tuple whenever the
    tuple is handed on, which takes ten times as long as what small functions do with it.
    """
    return _compiled(function, _nrt=False)


def inlined(function: F) -> F:
    """A `kernel` that becomes part of its callers: for one that gets many arrays and has few callers.

    An array is handed on as seven words, so a tuple of a hundred of them costs more than what a small function does.
    """
    return _compiled(function, _nrt=False, forceinline=True)


def _compiled(function: F, **options: Any) -> F:
    """Numba looks for a cache folder while it decorates and raises RuntimeError where neither the package's folder, nor
    NUMBA_CACHE_DIR, nor the home directory can be written (a read-only install, a container without a home).
    """
    try:
        compiled = numba.njit(cache=True, **options)(function)
    except RuntimeError:
        return cast(F, numba.njit(**options)(function))
    _watch_callees(compiled, Path(inspect.getfile(function)).parent)
    return cast(F, compiled)


def _watch_callees(compiled: Any, folder: Path) -> None:
    """Make a change of any module of `folder`, or of the rooms that others call, outdate the cache.

    Numba stamps a cache with the file of the compiled function alone; functions that it calls from other modules are
    compiled into it and would stay as they were.
    """
    cache_file = compiled._cache._cache_file
    cache_file._source_stamp = (*cache_file._source_stamp, _newest(folder), *map(_newest, _SHARED))


@cache
def _newest(folder: Path) -> int:
    return max((path.stat().st_mtime_ns for path in folder.glob("*.py")), default=0)
