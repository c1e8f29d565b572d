"""Maps the mesh axes of a plan to the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.common.errors import ImpossiblePlan
from forerun.core.program.groups import CommGroup
from forerun.describe.plan.plan import V_SCHEDULES, Plan

Run = tuple[int, int]
"""(number of ranks, distance between neighbours in ranks)"""


def groups_of(plan: Plan, node_size: int) -> dict[str, CommGroup]:
    """Returns the communication groups by axis, on nodes of `node_size` ranks, with the axes in the plan's order.

    The group `dp_shard` has the dp_shard x cp ranks that share one model state. Of the ranks of tp x cp x dp_shard the
    innermost, `etp`, split an expert, the next, `ep`, have different experts, and the rest, `dp_expert`, share the
    state of an expert. Where a pipeline holds each stage twice, the ranks of both copies belong to these groups.

    Raises ImpossiblePlan where the ranks can't be cut into equal groups of experts.
    """
    mesh = _Mesh(plan, node_size)
    near = mesh.first("cp", "dp_shard")
    stage = mesh.spacing["pp"]
    copies = [(plan.stage_copies, stage * plan.pp // plan.stage_copies)] * (plan.stage_copies > 1)
    fsdp = [*mesh.runs("cp", "dp_shard"), *copies]
    around = ("tp", "cp", "dp_shard") if plan.experts_apart else ("cp", "dp_shard")
    split, others = _cut(plan, mesh.runs(*around), plan.etp)
    experts, beside = _cut(plan, others, plan.ep)
    inner = mesh.first(*around)
    beside += copies
    replicas = mesh.runs("dp_replicate")
    goes_round = plan.virtual_stages > 1 and plan.pp_schedule not in V_SCHEDULES
    borders = plan.pp if goes_round else plan.pp - 1
    inside = ((plan.pp, stage),) if stage * plan.pp < plan.world_size else ()
    on = mesh.on
    return {
        "tp": on("tp", mesh.runs("tp"), mesh.spacing["tp"]),
        "cp": on("cp", mesh.runs("cp"), mesh.spacing["cp"]),
        "dp_shard": on("dp_shard", fsdp, near),
        "dp_replicate": on("dp_replicate", replicas, mesh.spacing["dp_replicate"]),
        "etp": on("etp", split, inner),
        "ep": on("ep", experts, inner * plan.etp),
        "dp_expert": on("dp_expert", beside, inner * plan.etp * plan.ep),
        "dp_all": on("dp_all", _joined([*mesh.runs(*_DATA), *copies]), mesh.first(*_DATA)),
        "dp_expert_all": on("dp_expert_all", _joined([*beside, *replicas]), inner * plan.etp * plan.ep),
        "pp": on("pp", mesh.runs("pp"), stage),
        "pp_near": CommGroup("pp_near", 2, 1, 2, stage, borders, inside),
        "pp_far": CommGroup("pp_far", 2, 2, 1, stage, borders, inside),
    }


_DATA = ("cp", "dp_shard", "dp_replicate")


class _Mesh:
    """The axes of a plan with their degrees and spacings in ranks."""

    def __init__(self, plan: Plan, node_size: int) -> None:
        self.node_size = node_size
        self.degree = {axis: int(getattr(plan, axis)) for axis in plan.mesh_axes}
        self.spacing: dict[str, int] = {}
        inner = 1
        for axis, degree in self.degree.items():
            self.spacing[axis] = inner
            inner *= degree

    def first(self, *axes: str) -> int:
        """Returns the spacing in ranks of the innermost of `axes`."""
        return min(self.spacing[axis] for axis in axes)

    def runs(self, *axes: str) -> list[Run]:
        """Returns the runs of evenly spaced ranks that `axes` form, innermost first; none where all have one rank."""
        return _joined([(self.degree[axis], self.spacing[axis]) for axis in axes if self.degree[axis] > 1])

    def on(self, axis: str, runs: list[Run], inner: int) -> CommGroup:
        """Returns the group of `runs`; without runs, a group of one rank with spacing `inner`."""
        return CommGroup.on_runs(axis, runs or [(1, inner)], self.node_size)


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Returns the runs, innermost first, with those that continue each other joined."""
    out: list[Run] = []
    for size, inner in sorted(runs, key=lambda run: run[1]):
        if out and out[-1][0] * out[-1][1] == inner:
            out[-1] = (out[-1][0] * size, out[-1][1])
        else:
            out.append((size, inner))
    return out


def _cut(plan: Plan, runs: list[Run], degree: int) -> tuple[list[Run], list[Run]]:
    """Returns the runs of the innermost `degree` ranks of `runs`, and those of the other ranks."""
    left, taken, beside = degree, [], []
    for size, spacing in runs:
        part = min(left, size)
        if size % part or left % part:
            break
        left //= part
        taken += [(part, spacing)] * (part > 1)
        beside += [(size // part, spacing * part)] * (size > part)
    if left > 1 or len(taken) + len(beside) < len(runs):
        raise ImpossiblePlan(
            f"impossible plan: etp {plan.etp} x ep {plan.ep} can't be cut out of tp {plan.tp} x cp {plan.cp} x dp_shard"
            f" {plan.dp_shard} in mesh_order {plan.mesh_order}"
        )
    return taken, beside
