"""Several kinds of GPUs in one run: checks that they fit the plan, and joins the costs of their ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from forerun.answers.analysis.setup import Setup
from forerun.common.errors import ForerunError
from forerun.core.cost.step_costs import StepCosts
from forerun.core.engine.sharing import joined_demand
from forerun.core.program.types import OpTable


def check_kinds(setup: Setup) -> None:
    """Raises ForerunError for kinds of GPUs that don't fit the plan, and for factors of time that are not above 0."""
    if not 0 < setup.slow_links < inf:
        raise ForerunError(f"slow_links must be above 0 and finite, got {setup.slow_links}")
    plan, names = setup.plan, [kind.name for kind in setup.kinds]
    total = sum(kind.n_gpus for kind in setup.kinds)
    if total > setup.n_gpus:
        listed = ", ".join(map(repr, names))
        raise ForerunError(f"GPUs {listed}: {total} together, but the plan has only {setup.n_gpus}")
    per_replica = setup.n_gpus // plan.dp
    for kind in setup.kinds:
        where = f"GPUs {kind.name!r}"
        if kind.n_gpus < 1 or kind.n_gpus % per_replica:
            raise ForerunError(
                f"{where}: n_gpus {kind.n_gpus} must be a multiple of the {per_replica} GPUs of a data-parallel replica"
                f" (tp {plan.tp} x cp {plan.cp} x pp {plan.pp})"
            )
        if not 0 < kind.slowdown < inf:
            raise ForerunError(f"{where}: slowdown must be above 0 and finite, got {kind.slowdown}")
        if kind.micro_batch is not None and kind.micro_batch < 1:
            raise ForerunError(f"{where}: micro_batch must be at least 1, got {kind.micro_batch}")


def with_network_of(costs: StepCosts, shared: StepCosts, ops: OpTable) -> StepCosts:
    """Returns `costs` with the collectives and transfers of `shared`; both are of `ops`."""
    network = ops.is_communication
    return replace(
        costs,
        duration_ps=np.where(network, shared.duration_ps, costs.duration_ps),
        calibrated=np.where(network, shared.calibrated, costs.calibrated),
        demand=shared.demand,
    )


def joined_costs(costs: Sequence[StepCosts]) -> StepCosts:
    """Joins the costs of op tables, one table after the other."""
    first = np.cumsum([0, *(len(one.duration_ps) for one in costs)]).tolist()
    return StepCosts(
        duration_ps=np.concatenate([one.duration_ps for one in costs]),
        issue_ps=np.concatenate([one.issue_ps for one in costs]),
        slow_compute=np.concatenate([one.slow_compute for one in costs]),
        slow_network=np.concatenate([one.slow_network for one in costs]),
        network_op=np.concatenate([one.network_op for one in costs]),
        calibrated=np.concatenate([one.calibrated for one in costs]),
        lacks={first[i] + op: what for i, one in enumerate(costs) for op, what in one.lacks.items()},
        demand=joined_demand([one.demand for one in costs], [len(one.duration_ps) for one in costs]),
    )
