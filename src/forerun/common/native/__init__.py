"""Compiled functions that load without numba: object code that is written when the package is built."""
