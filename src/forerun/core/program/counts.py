"""The number of times that each rank class runs each op in a step."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from forerun.core.program.types import I64, Phase, Program

_N_PHASES = len(Phase)


def op_counts(program: Program, phases: Collection[Phase] = tuple(Phase)) -> I64:
    """Counts how often each rank class runs each op in nodes of these `phases`, (n_classes, n_ops)."""
    out: I64 = counts_by_phase(program)[:, list(phases)].sum(axis=1)
    return out


def counts_by_phase(program: Program) -> I64:
    """Counts how often each rank class runs each op in nodes of each Phase, (n_classes, n_phases, n_ops)."""
    n_ops, blocks = len(program.ops), program.blocks
    counts = np.zeros((len(program.rank_classes), _N_PHASES, n_ops), np.int64)
    if not blocks:
        return counts
    phase = np.concatenate([block.phase for block in blocks]).astype(np.int64)
    place = phase * n_ops + np.concatenate([block.op for block in blocks])
    block = np.repeat(np.arange(len(blocks)), [len(block.op) for block in blocks])
    for rows, cls in zip(counts, program.rank_classes, strict=True):
        steps = np.bincount(cls.block, minlength=len(blocks))
        rows[:] = np.bincount(place, weights=steps[block], minlength=_N_PHASES * n_ops).reshape(rows.shape)
    return counts
