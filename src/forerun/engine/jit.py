"""The engine's compiler, under the name that the rooms beside it use."""

from forerun.jit import njit

__all__ = ["njit"]
