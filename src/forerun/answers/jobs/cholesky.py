"""Cholesky's factor of a dense matrix, on one thread and with the same digits on every processor.

numpy's linear algebra runs on as many threads as the machine has processors. They wait for each other without rest, so
that on a busy machine a small system takes many times as long.
"""

from __future__ import annotations

import numpy as np

from forerun.common.jit import kernel
from forerun.core.program.types import F64


@kernel
def factor(matrix: F64) -> bool:
    """Replaces the upper half of a symmetric positive definite matrix A by U with U^T U = A.

    Returns False, with the matrix half done, if it is not positive definite to the digits that numbers have.
    """
    size = len(matrix)
    for k in range(size):
        row = matrix[k]
        if not row[k] > 0.0:
            return False
        pivot = np.sqrt(row[k])
        for j in range(k, size):
            row[j] /= pivot
        for i in range(k + 1, size):
            times = row[i]
            if times != 0.0:
                below = matrix[i]
                for j in range(i, size):
                    below[j] -= times * row[j]
    return True


@kernel
def solve(upper: F64, right: F64) -> None:
    """Replaces b by the x with U^T U x = b."""
    size = len(right)
    for i in range(size):
        row = upper[i]
        right[i] /= row[i]
        for j in range(i + 1, size):
            right[j] -= right[i] * row[j]
    for i in range(size - 1, -1, -1):
        row, total = upper[i], right[i]
        for j in range(i + 1, size):
            total -= row[j] * right[j]
        right[i] = total / row[i]
