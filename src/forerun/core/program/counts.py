"""The number of times that each rank class runs each op in a step."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from forerun.core.program.types import I64, Phase, Program


def op_counts(program: Program, phases: Collection[Phase] = tuple(Phase)) -> I64:
    """Counts how often each rank class runs each op in nodes of these `phases`, (n_classes, n_ops)."""
    n_ops, n_blocks = len(program.ops), len(program.blocks)
    counts = np.zeros((len(program.rank_classes), n_ops), np.int64)
    wanted = {int(phase) for phase in phases}
    used = [i for i, each in enumerate(program.blocks) if not wanted.isdisjoint(each.phase.tobytes())]
    if not used:
        return counts
    op = np.concatenate([program.blocks[i].op for i in used])
    block = np.repeat(used, [len(program.blocks[i]) for i in used])
    if len(phases) < len(Phase):
        phase = np.concatenate([program.blocks[i].phase for i in used])
        inside = np.isin(phase, list(wanted))
        op, block = op[inside], block[inside]
    for row, cls in zip(counts, program.rank_classes, strict=True):
        steps = np.bincount(cls.block, minlength=n_blocks)
        row[:] = np.bincount(op, weights=steps[block], minlength=n_ops)
    return counts
