"""Numba's compiler, with a cache on disk wherever a folder can be written."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])
_SHARED = tuple(Path(__file__).parents[1] / package for package in ("core/engine", "core/program", "astrasim/messages"))
"""packages whose compiled functions other packages call"""


def njit(function: F) -> F:
    """Compiles `function` on its first call."""
    return _compiled(function)


def kernel(function: F) -> F:
    """Compiles a function that allocates no arrays (numba refuses one that does) on its first call.

    Without allocations numba need not count references. Otherwise it counts them for each array of a tuple at every
    call, which takes ten times as long as the work of a small function.
    """
    return _compiled(function, _nrt=False)


def inlined(function: F) -> F:
    """Compiles a `kernel` into its callers. Use it for a function that takes many arrays and has few callers.

    Numba passes an array as seven words, so passing a hundred arrays costs more than the work of a small function.
    """
    return _compiled(function, _nrt=False, forceinline=True)


def _compiled(function: F, **options: Any) -> F:
    """Compiles with a cache, or without one where numba finds no folder to write it to.

    Numba raises RuntimeError when it can write neither the package's folder, nor NUMBA_CACHE_DIR, nor the home
    directory (a read-only install, a container without a home).
    """
    try:
        compiled = numba.njit(cache=True, **options)(function)
    except RuntimeError:
        return cast(F, numba.njit(**options)(function))
    _watch_callees(compiled, Path(inspect.getfile(function)).parent)
    return cast(F, compiled)


def _watch_callees(compiled: Any, folder: Path) -> None:
    """Makes a change of any module in `folder`, or in the shared packages, outdate the cache.

    Numba stamps a cache with the file of the compiled function alone, though functions that it calls from other
    modules are compiled into it.
    """
    cache_file = compiled._cache._cache_file
    cache_file._source_stamp = (*cache_file._source_stamp, _newest(folder), *map(_newest, _SHARED))


@cache
def _newest(folder: Path) -> int:
    """When a module of `folder`, or a file of constants beside it, last changed."""
    paths = (*folder.glob("*.py"), *folder.glob("*.yaml"))
    return max((path.stat().st_mtime_ns for path in paths), default=0)
