"""Maps the mesh axes of a plan to the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from operator import mul

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

    Raises ImpossiblePlan if the ranks can't be cut into equal groups of experts.
    """
    degrees = tuple([(axis, int(getattr(plan, axis))) for axis in plan.mesh_axes])
    goes_round = plan.virtual_stages > 1 and plan.pp_schedule not in V_SCHEDULES
    borders = plan.pp if goes_round else plan.pp - 1
    apart = bool(plan.experts_apart)
    return dict(_groups(_Mesh(degrees, node_size), apart, plan.etp, plan.ep, plan.stage_copies, borders))


@lru_cache(maxsize=1024)
def _groups(mesh: _Mesh, apart: bool, etp: int, ep: int, n_copies: int, borders: int) -> dict[str, CommGroup]:
    """Returns `groups_of` for a mesh on which experts have axes of their own or not (`apart`).

    `n_copies` is the number of ranks of a pipeline that hold the same stage, `borders` the number of borders between
    stages. Plans of a search differ in other fields most of the time.
    """
    near = mesh.first("cp", "dp_shard")
    stage, pp = mesh.spacing["pp"], mesh.degree["pp"]
    copies = [(n_copies, stage * pp // n_copies)] * (n_copies > 1)
    fsdp = [*mesh.runs("cp", "dp_shard"), *copies]
    around = ("tp", "cp", "dp_shard") if apart else ("cp", "dp_shard")
    split, others = mesh.cut(mesh.runs(*around), etp, etp, ep)
    experts, beside = mesh.cut(others, ep, etp, ep)
    inner = mesh.first(*around)
    beside += copies
    replicas = mesh.runs("dp_replicate")
    inside = ((pp, stage),) if stage * pp < mesh.world_size else ()
    on = mesh.on
    return {
        "tp": on("tp", mesh.runs("tp"), mesh.spacing["tp"]),
        "cp": on("cp", mesh.runs("cp"), mesh.spacing["cp"]),
        "dp_shard": on("dp_shard", fsdp, near),
        "dp_replicate": on("dp_replicate", replicas, mesh.spacing["dp_replicate"]),
        "etp": on("etp", split, inner),
        "ep": on("ep", experts, inner * etp),
        "dp_expert": on("dp_expert", beside, inner * etp * ep),
        "dp_all": on("dp_all", _joined([*mesh.runs(*_DATA), *copies]), mesh.first(*_DATA)),
        "dp_expert_all": on("dp_expert_all", _joined([*beside, *replicas]), inner * etp * ep),
        "pp": on("pp", mesh.runs("pp"), stage),
        "pp_near": CommGroup("pp_near", 2, 1, 2, stage, borders, inside),
        "pp_far": CommGroup("pp_far", 2, 2, 1, stage, borders, inside),
    }


_DATA = ("cp", "dp_shard", "dp_replicate")


@dataclass(frozen=True)
class _Mesh:
    """The axes of a plan with their degrees and spacings in ranks."""

    degrees: tuple[tuple[str, int], ...]
    """(axis, its degree), innermost first"""
    node_size: int

    @cached_property
    def degree(self) -> dict[str, int]:
        """Returns the degree of each axis."""
        return dict(self.degrees)

    @cached_property
    def spacing(self) -> dict[str, int]:
        """Returns the distance in ranks between neighbours of each axis."""
        products = accumulate((degree for _, degree in self.degrees), mul, initial=1)
        return dict(zip(self.degree, products, strict=False))

    @property
    def world_size(self) -> int:
        """Returns the number of ranks."""
        return prod(self.degree.values())

    def first(self, *axes: str) -> int:
        """Returns the spacing in ranks of the innermost of `axes`."""
        return min(self.spacing[axis] for axis in axes)

    def runs(self, *axes: str) -> list[Run]:
        """Returns the runs of evenly spaced ranks that `axes` form, innermost first; none where all have one rank."""
        return _joined([(self.degree[axis], self.spacing[axis]) for axis in axes if self.degree[axis] > 1])

    def cut(self, runs: list[Run], degree: int, etp: int, ep: int) -> tuple[list[Run], list[Run]]:
        """Returns the runs of the innermost `degree` ranks of `runs`, and those of the other ranks.

        `etp` and `ep` are the degrees of experts, for the message where no such ranks can be cut out.
        """
        left, taken, beside = degree, [], []
        for size, spacing in runs:
            part = min(left, size)
            if size % part or left % part:
                break
            left //= part
            taken += [(part, spacing)] * (part > 1)
            beside += [(size // part, spacing * part)] * (size > part)
        if left > 1 or len(taken) + len(beside) < len(runs):
            tp, cp, dp_shard = (self.degree[axis] for axis in ("tp", "cp", "dp_shard"))
            raise ImpossiblePlan(
                f"impossible plan: etp {etp} x ep {ep} can't be cut out of tp {tp} x cp {cp} x dp_shard {dp_shard}"
                f" in mesh_order {'-'.join(self.degree)}"
            )
        return taken, beside

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
