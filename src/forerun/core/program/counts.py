"""The number of times that each rank class runs each op in a step."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from forerun.core.program.types import I64, Phase, Program


def op_counts(program: Program, phases: Collection[Phase] = tuple(Phase)) -> I64:
    """Counts how often each rank class runs each op in nodes of these `phases`, (n_classes, n_ops)."""
    n_ops, n_blocks = len(program.ops), len(program.blocks)
    counts = np.zeros((len(program.rank_classes), n_ops), np.int64)
    if not n_blocks:
        return counts
    op = np.concatenate([block.op for block in program.blocks])
    block = np.repeat(np.arange(n_blocks), [len(each) for each in program.blocks])
    if len(phases) < len(Phase):
        phase = np.concatenate([each.phase for each in program.blocks])
        wanted = np.isin(phase, [int(each) for each in phases])
        op, block = op[wanted], block[wanted]
    for row, cls in zip(counts, program.rank_classes, strict=True):
        steps = np.bincount(cls.block, minlength=n_blocks)
        row[:] = np.bincount(op, weights=steps[block], minlength=n_ops)
    return counts
