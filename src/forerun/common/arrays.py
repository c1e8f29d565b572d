"""Small operations on numpy columns: CSR pointers, grouping by owner, the inverse of an order, unions of intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

Number = TypeVar("Number", np.int64, np.float64)


def pointers(counts: npt.ArrayLike) -> Numbers:
    """Returns the CSR pointer (n + 1,) of n rows that have `counts` entries each."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def grouped(owner: npt.NDArray[Any], values: npt.NDArray[Any], n: int) -> tuple[Numbers, Any]:
    """Returns the `values` of each of `n` owners as CSR; the values of an owner keep their order."""
    return pointers(np.bincount(owner, minlength=n)), values[np.argsort(owner, kind="stable")]


def csr(lists: Sequence[Sequence[int]]) -> tuple[Numbers, Numbers]:
    """Lists of numbers as CSR: pointer and entries."""
    entries = np.array([entry for entries in lists for entry in entries], np.int64)
    return pointers([len(entries) for entries in lists]), entries


def positions(order: npt.NDArray[Any]) -> Numbers:
    """Returns the place of each row in `order`, which names every row once."""
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return place


def union(start: npt.NDArray[Number], end: npt.NDArray[Number]) -> tuple[npt.NDArray[Number], npt.NDArray[Number]]:
    """Returns start and end of the intervals that together cover the given ones, in order; those that touch are one.

    An interval that ends before it starts stays negative where no other covers it.
    """
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    if len(start) == 0:
        return start, end
    first = np.flatnonzero(np.concatenate(([True], start[1:] > np.maximum.accumulate(end)[:-1])))
    return start[first], np.maximum.reduceat(end, first)
