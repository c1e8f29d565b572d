"""How often a step of each rank class runs each op."""

from __future__ import annotations

import dataclasses

from random_programs import N_OPS, program

from forerun.core.program.builder import BlockBuilder
from forerun.core.program.counts import op_counts
from forerun.core.program.types import Phase


def test_ops_are_counted_by_class_and_phase() -> None:
    """The first class runs a forward twice and a backward once, the second class the backward alone."""
    forward, backward = BlockBuilder(), BlockBuilder()
    for op in (0, 0, 1):
        forward.node(op, phase=Phase.FORWARD)
    backward.node(1, phase=Phase.BACKWARD)
    backward.node(2, phase=Phase.RECOMPUTE)
    what = program([forward.build("forward"), backward.build("backward")], [[0, 0, 1], [1]])
    rest = [0] * (N_OPS - 3)
    assert op_counts(what).tolist() == [[4, 3, 1, *rest], [0, 1, 1, *rest]]
    assert op_counts(what, (Phase.FORWARD,)).tolist() == [[4, 2, 0, *rest], [0] * N_OPS]
    assert op_counts(what, (Phase.BACKWARD, Phase.RECOMPUTE)).tolist() == [[0, 1, 1, *rest], [0, 1, 1, *rest]]


def test_a_program_without_blocks_runs_nothing() -> None:
    block = BlockBuilder()
    block.node(0)
    empty = dataclasses.replace(program([block.build("b")], [[0]]), blocks=(), rank_classes=())
    assert op_counts(empty).shape == (0, N_OPS)
