"""The costs of a step whose GPUs, links or hosts are slower than sound ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from forerun.core.cost.step_costs import StepCosts
from forerun.core.program.kinds import Work
from forerun.core.program.types import F64, I64, OpTable


def slowed(
    costs: StepCosts, ops: OpTable, *, compute: float = 1.0, network: float = 1.0, host: float = 1.0
) -> StepCosts:
    """Returns the `costs` of `ops` with times multiplied by factors.

    `compute` is for kernels, with the gap before each; `network` for collectives and transfers; `host` for issuing and
    for delays, which are the host's work between kernels. Copies between device and host memory stay as they are.
    """
    factors = of_kinds(ops, compute, network, host)
    if (factors == 1.0).all() and host == 1.0:
        return costs
    return replace(costs, duration_ps=times(costs.duration_ps, factors), issue_ps=times(costs.issue_ps, host))


def of_kinds(ops: OpTable, compute: float, network: float, host: float) -> F64:
    """Returns the factor of every op, (n_ops,)."""
    factor = np.ones(len(Work))
    factor[[Work.COMPUTE, Work.COMMUNICATION, Work.DELAY]] = compute, network, host
    out: F64 = factor[ops.work]
    return out


def times(picoseconds: I64, factor: F64 | float) -> I64:
    """Returns `picoseconds` times `factor`, rounded to whole picoseconds."""
    out: I64 = np.rint(picoseconds * factor).astype(np.int64)
    return out
