"""Compiled functions: object code that came with the package, or numba's compiler with a cache on disk.

Importing numba takes a second, and compiling the functions of a command up to half a minute. So numba is imported only
if the library (`native`) has no code for a function and its arguments.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

from forerun.common.native.library import Mismatch, library
from forerun.common.native.signatures import RECORDING, record

F = TypeVar("F", bound=Callable[..., object])
_SHARED = tuple(
    Path(__file__).parents[1] / package for package in ("common", "core/engine", "core/program", "astrasim/messages")
)
"""packages whose compiled functions other packages call"""


def njit(function: F) -> F:
    """Compiles `function`."""
    return cast(F, Kernel(function, {}))


def kernel(function: F) -> F:
    """Compiles a function that allocates no arrays (numba refuses one that does).

    Without allocations numba need not count references. Otherwise it counts them for each array of a tuple at every
    call, which takes ten times as long as the work of a small function.
    """
    return cast(F, Kernel(function, {"_nrt": False}))


def inlined(function: F) -> F:
    """Compiles a `kernel` into its callers. Use it for a function that takes many arrays and has few callers.

    Numba passes an array as seven words, so passing a hundred arrays costs more than the work of a small function.
    """
    return cast(F, Kernel(function, {"_nrt": False, "forceinline": True}))


class Kernel:
    """A function of numbers, arrays and tuples of them that runs compiled."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self.py_func = function
        self._options = options
        self._native: list[Callable[..., Any]] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Calls the native function for such arguments, or the one that numba compiles for them."""
        if self._native is None:
            known = None if RECORDING else library()
            self._native = [] if known is None else list(known.variants(self.name))
        for native in self._native:
            try:
                return native(*arguments)
            except (Mismatch, TypeError, OverflowError):
                continue
        result = self.dispatcher(*arguments)
        if RECORDING:
            record(self.name, arguments, result)
        return result

    @property
    def name(self) -> str:
        """Returns `module:name`, by which the library knows the function."""
        return f"{self.py_func.__module__}:{self.py_func.__qualname__}"

    @cached_property
    def dispatcher(self) -> Any:
        """Returns numba's function, which compiles itself on its first call.

        It has no cache if numba finds no folder for it. numba raises RuntimeError if it can write neither the package's
        folder, nor NUMBA_CACHE_DIR, nor the home directory (a read-only install, a container without a home).
        """
        numba = _numba()
        try:
            compiled = numba.njit(cache=True, **self._options)(self.py_func)
        except RuntimeError:
            return numba.njit(**self._options)(self.py_func)
        _watch_callees(compiled, Path(inspect.getfile(self.py_func)).parent)
        return compiled


@cache
def _numba() -> Any:
    """Returns numba, which takes a Kernel that another one calls for the function that numba compiled of it."""
    import numba
    from numba.core import event, types
    from numba.extending import typeof_impl

    class Announced(event.Listener):
        """Says to somebody who waits at a terminal that numba compiles."""

        said = False

        def on_start(self, event: Any) -> None:
            if not self.said and sys.stderr.isatty():
                print("forerun: compiling kernels, which takes up to a minute the first time", file=sys.stderr)
            self.said = True

        def on_end(self, event: Any) -> None:
            """Does nothing, because the answer follows at once."""

    event.register("numba:compile", Announced())  # type: ignore[no-untyped-call]

    @typeof_impl.register(Kernel)
    def _typeof(kernel: Kernel, context: Any) -> Any:
        return types.Dispatcher(kernel.dispatcher)

    return numba


def _watch_callees(compiled: Any, folder: Path) -> None:
    """Makes a change of any module in `folder`, or in the shared packages, outdate the cache.

    Numba stamps a cache with the file of the compiled function alone, though functions that it calls from other
    modules are compiled into it.
    """
    cache_file = compiled._cache._cache_file
    cache_file._source_stamp = (*cache_file._source_stamp, _newest(folder), *map(_newest, _SHARED))


@cache
def _newest(folder: Path) -> int:
    """Returns when a module of `folder`, or a file of constants beside it, last changed."""
    paths = (*folder.glob("*.py"), *folder.glob("*.yaml"))
    return max((path.stat().st_mtime_ns for path in paths), default=0)
