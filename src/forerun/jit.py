"""njit: numba's compiler with a disk cache where there is a folder to keep it in, without one elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def njit(function: F) -> F:
    """Compile `function` on its first call.

    Numba looks for a cache folder while it decorates and raises RuntimeError where neither the package's folder, nor
    NUMBA_CACHE_DIR, nor the home directory can be written (a read-only install, a container without a home).
    """
    try:
        return cast(F, numba.njit(cache=True)(function))
    except RuntimeError:
        return cast(F, numba.njit(function))
