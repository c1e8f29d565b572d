"""The number of times that each rank class runs each op in a step."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from forerun.core.program.types import I64, Phase, Program

EVERY_PHASE = tuple(Phase)
_N_PHASES = len(Phase)


def op_counts(program: Program, phases: Collection[Phase] = EVERY_PHASE) -> I64:
    """Counts how often each rank class runs each op in nodes of these `phases`, (n_classes, n_ops)."""
    return counts_in(program, phases)[0]


def counts_in(program: Program, *several: Collection[Phase]) -> list[I64]:
    """Returns `op_counts` for each of `several` collections of phases, which takes hardly longer than for one."""
    n_ops, blocks = len(program.ops), program.blocks
    counts = [np.zeros((len(program.rank_classes), n_ops), np.int64) for _ in several]
    if not blocks:
        return counts
    phase = np.concatenate([block.phase for block in blocks]).astype(np.int64)
    place = phase * n_ops + np.concatenate([block.op for block in blocks])
    block = np.repeat(np.arange(len(blocks)), [len(block.op) for block in blocks])
    for row, cls in enumerate(program.rank_classes):
        steps = np.bincount(cls.block, minlength=len(blocks))
        by_phase = np.bincount(place, weights=steps[block], minlength=_N_PHASES * n_ops).reshape(_N_PHASES, n_ops)
        for found, phases in zip(counts, several, strict=True):
            found[row] = by_phase[list(phases)].sum(axis=0)
    return counts
