"""Functions that test_native compiles ahead of time."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.common.jit import kernel, njit

RECORD = np.dtype([("when", np.int64), ("weight", np.float64), ("kind", np.int8)], align=True)


class Pair(NamedTuple):
    numbers: npt.NDArray[np.int64]
    table: npt.NDArray[np.float64]
    factor: int


class Found(NamedTuple):
    doubled: npt.NDArray[np.float64]
    total: float
    is_large: bool
    count: int


@njit
def weigh(pair: Pair, scale: float, above: bool) -> Found:
    doubled = np.empty((len(pair.numbers), pair.table.shape[1]), np.float64)
    for i in range(len(pair.numbers)):
        for j in range(pair.table.shape[1]):
            doubled[i, j] = pair.numbers[i] * pair.factor + scale * pair.table[i, j]
    total = doubled.sum()
    return Found(doubled, total, total > 10.0 if above else total < 10.0, len(pair.numbers))


@kernel
def fill(records: npt.NDArray[np.void], start: int) -> None:
    for i in range(len(records)):
        records[i]["when"] = start + i
        records[i]["weight"] = i / 2
        records[i]["kind"] = i % 3


@njit
def same(numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    fresh = numbers + 1
    return numbers, fresh


@njit
def twice(numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    fresh = numbers + 1
    return fresh, fresh


@njit
def divided(a: int, b: int) -> int:
    return a // b
