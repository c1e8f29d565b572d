"""The share of a step's kernel time in shapes that were measured on the device, and the kernels outside of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.core.cost.step_costs import StepCosts
from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import KINDS, OpKind, Work
from forerun.core.program.types import I64, OpTable, Program

_LABELS = {
    label: [kind for kind in OpKind if KINDS[kind].label == label]
    for label in dict.fromkeys(one.label for one in KINDS.values() if one.work in (Work.COMPUTE, Work.COMMUNICATION))
}
"""names of the kinds of op that count as kernel time; copies to the host and fixed delays do not"""
_LISTED = 3


@dataclass(frozen=True, slots=True)
class KindCoverage:
    """Kernels of one kind, as shares of the kernel time of all ranks."""

    share: float
    inside: float
    """the part of it in calibrated shapes"""


@dataclass(frozen=True, slots=True)
class Coverage:
    """The share of kernel time in calibrated shapes."""

    share: float
    """share of all kernel time, 0 to 1; 1 if no kernel takes time"""
    by_kind: dict[str, KindCoverage]
    """kind -> its coverage, for the kinds that take time"""
    outside: tuple[tuple[str, float], ...]
    """kernels outside calibrated shapes that take most time, each with its share of all kernel time"""


def coverage(program: Program, counts: I64, costs: StepCosts) -> Coverage:
    """Returns the coverage of the ops of `program` by the time that each takes alone, over all ranks.

    `counts` (n_classes, n_ops) says how often each rank class runs each op.
    """
    ops = program.ops
    ranks = np.array([cls.n_ranks for cls in program.rank_classes], np.float64)
    spent = (ranks @ counts) * costs.duration_ps
    inside = spent * costs.calibrated
    spent_by_number = np.bincount(ops.kind, weights=spent, minlength=len(OpKind))
    inside_by_number = np.bincount(ops.kind, weights=inside, minlength=len(OpKind))
    total = sum(float(spent_by_number[number]) for kinds in _LABELS.values() for number in kinds)
    if not total:
        return Coverage(1.0, {}, ())
    by_kind = {}
    for name, kinds in _LABELS.items():
        time = sum(float(spent_by_number[number]) for number in kinds)
        if time:
            by_kind[name] = KindCoverage(time / total, sum(float(inside_by_number[number]) for number in kinds) / time)
    is_kernel = (ops.is_compute | ops.is_communication) & (spent > inside)
    outside = np.where(is_kernel, spent - inside, 0.0)
    return Coverage(
        share=min(1.0, sum(kind.share * kind.inside for kind in by_kind.values())),
        by_kind=by_kind,
        outside=tuple(
            (_described(ops, row, program.groups), float(outside[row]) / total)
            for row in np.argsort(-outside, kind="stable")[:_LISTED].tolist()
            if outside[row]
        ),
    )


def _described(ops: OpTable, row: int, groups: Sequence[CommGroup]) -> str:
    """Describes an op by its name and by the shape and dtype that decide whether it was measured."""
    shape = ops.details_of(row).words(ops.kernel[row])
    if shape:
        return f"{ops.name[row]} {shape}"
    if ops.is_communication[row] and ops.group[row] >= 0:
        group = groups[int(ops.group[row])]
        return f"{ops.name[row]} over {group.nodes} x {group.ranks_per_node} ranks"
    return ops.name[row]
