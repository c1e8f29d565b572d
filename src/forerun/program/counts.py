"""How often each rank class runs each op in a step."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from forerun.program.types import I64, Phase, Program


def op_counts(program: Program, phases: Collection[Phase] = tuple(Phase)) -> I64:
    """Executions of every op by rank class, (n_classes, n_ops), in nodes of these `phases`."""
    n_ops, wanted = len(program.ops), np.array([int(phase) for phase in phases])
    per_block = [
        np.bincount(block.op[np.isin(block.phase, wanted)], minlength=n_ops).astype(np.int64)
        for block in program.blocks
    ]
    counts = np.zeros((len(program.rank_classes), n_ops), np.int64)
    for row, cls in zip(counts, program.rank_classes, strict=True):
        steps = np.bincount(cls.block, minlength=len(program.blocks))
        for number in np.flatnonzero(steps).tolist():
            row += steps[number] * per_block[number]
    return counts
