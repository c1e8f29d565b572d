"""Other plans with the same GPUs and global batch, those with the smallest time bound first."""

from __future__ import annotations

import numpy as np

from forerun.answers.analysis.setup import Setup
from forerun.answers.search.screening import Screening
from forerun.answers.search.space import Limits, Tally, make_space
from forerun.answers.search.time_bound import TimeBound
from forerun.answers.search.unit_runs import UnitRuns
from forerun.common.errors import ForerunError
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.fields import FIELD_TYPES
from forerun.describe.plan.plan import Plan

_SEARCHED = frozenset(
    {
        *("seq_len", "micro_batch", "n_microbatches", "dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "zero_stage"),
        *("activation_checkpointing", "pp_schedule", "virtual_stages", "layers_per_stage", "balance_ends"),
    }
)
"""fields of a Plan that the search may change; all others stay as they are"""
_MICRO_BATCHES = 8
"""the search tries micro batches up to this many times the plan's own"""


def plans_by_bound(setup: Setup) -> list[tuple[float, Plan]]:
    """Returns the bound of the step time and the plan, for plans that may fit, the least first; empty without a search.

    The space is that of `search` for the stack of the plan, with the schedule of the plan (1F1B without pipeline).
    Bounds are those of the cluster's own GPUs and of NCCL's collectives.
    """
    plan, model = setup.plan, setup.model
    if not isinstance(model, ModelSpec) or setup.kinds:
        return []
    fixed: dict[str, object] = {name: getattr(plan, name) for name in FIELD_TYPES if name not in _SEARCHED}
    fixed["pp_schedule"] = plan.pp_schedule
    if plan.pp > 1:
        fixed["virtual_stages"] = plan.virtual_stages
    limits = Limits(max_micro_batch=_MICRO_BATCHES * plan.micro_batch)
    try:
        space = make_space(model, setup.cluster, setup.n_gpus, plan.seq_len, plan.global_batch, fixed, limits)
    except ForerunError:
        return []
    table = space.table(Tally())
    screening = Screening(UnitRuns(model, setup.cluster, setup.network, setup.measured, setup.n_gpus), plan.stack)
    screened, close = screening.run(table), TimeBound(screening)
    found = []
    for row in np.flatnonzero(~screened.too_large).tolist():
        other, groups = table.plan(row), table.groups[int(table.mesh[row])]
        if groups is not None:
            found.append((close.least_step_s(other, groups), row, other))
    return [(bound, other) for bound, _, other in sorted(found, key=lambda each: each[:2])]
