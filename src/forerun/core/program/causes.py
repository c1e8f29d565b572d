"""The causes of the time of a step."""

from __future__ import annotations

from enum import IntEnum


class Cause(IntEnum):
    """The cause of a part of a step's time: a row of the breakdown."""

    MATMUL = 0
    ATTENTION = 1
    MEMORY_BOUND = 2
    RECOMPUTE = 3
    OPTIMIZER = 4
    EXPOSED_DATA_PARALLEL = 5
    EXPOSED_TENSOR_PARALLEL = 6
    EXPOSED_CONTEXT_PARALLEL = 7
    EXPOSED_EXPERT_PARALLEL = 8
    EXPOSED_PIPELINE_TRANSFER = 9
    EXPOSED_HOST_COPY = 10
    BUBBLE = 11
    HOST = 12
    WAITING = 13
    """waiting for slower GPUs of the same pipeline stage"""


N_CAUSES = len(Cause)
EXPOSED = (
    Cause.EXPOSED_DATA_PARALLEL,
    Cause.EXPOSED_TENSOR_PARALLEL,
    Cause.EXPOSED_CONTEXT_PARALLEL,
    Cause.EXPOSED_EXPERT_PARALLEL,
    Cause.EXPOSED_PIPELINE_TRANSFER,
    Cause.EXPOSED_HOST_COPY,
)
