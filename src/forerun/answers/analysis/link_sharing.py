"""The time that collectives and transfers lose because others use the same links at the same time."""

from __future__ import annotations

import numpy as np

from forerun.core.cost.step_costs import StepCosts
from forerun.core.engine.simulate import Timeline
from forerun.core.program.types import I64, FlatProgram


def shared_ps(flat: FlatProgram, costs: StepCosts, timeline: Timeline, inside_ps: I64 | None = None) -> I64:
    """Returns how many picoseconds longer than alone the ops of each rank class take that use links, (n_classes,).

    `inside_ps` (n_ops,) is the same inside ops that stand for a run of blocks, 0 for other ops.
    """
    out = np.zeros(len(flat.class_ptr) - 1, np.int64)
    if costs.demand is not None:
        asking = np.flatnonzero(costs.demand.asks[flat.op])
        longer = timeline.end_ps[asking] - timeline.start_ps[asking] - costs.duration_ps[flat.op[asking]]
        out += _by_class(flat, asking, longer)
    if inside_ps is not None and inside_ps.any():
        standing = np.flatnonzero((inside_ps != 0)[flat.op])
        out += _by_class(flat, standing, inside_ps[flat.op[standing]])
    return out


def _by_class(flat: FlatProgram, nodes: I64, values: I64) -> I64:
    """Returns the sums of the `values` of `nodes`, which are in order, by rank class, (n_classes,)."""
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])[np.searchsorted(nodes, flat.class_ptr)]
    out: I64 = np.diff(ends)
    return out


def link_notes(shared_s: float) -> tuple[str, ...]:
    """Returns the lines of `explain` about links that are shared."""
    if shared_s <= 0:
        return ()
    return (
        f"shared_links_s: collectives and transfers of the slowest rank take {shared_s * 1e3:.3g} ms"
        " longer than alone, hidden or exposed, because several use one link at the same time; each one's"
        " demand is its bytes over the link's rate and its own time, and all slow down equally while the"
        " demands exceed the link",
    )
