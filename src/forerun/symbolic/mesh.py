"""Where the mesh axes of a plan lie on the nodes of a cluster."""

from __future__ import annotations

from forerun.plan.plan import Plan
from forerun.program.groups import CommGroup
from forerun.symbolic.schedule import V_SCHEDULES


def groups_of(plan: Plan, node_size: int) -> dict[str, CommGroup]:
    """Communication groups by axis. From the inside out: tp, cp, dp_shard, dp_replicate, pp (torchtitan, Megatron).

    dp_shard is the group that shares one model state: dp_shard x cp ranks. Expert parallelism takes the innermost of
    them; `dp_expert` is what is left to shard an expert over.
    """
    on = CommGroup.on_mesh
    tp, cp, fsdp = plan.tp, plan.cp, plan.fsdp
    stage = tp * fsdp * plan.dp_replicate
    goes_round = plan.virtual_stages > 1 and plan.pp_schedule not in V_SCHEDULES
    borders = plan.pp if goes_round else plan.pp - 1
    return {
        "tp": on("tp", tp, 1, node_size),
        "cp": on("cp", cp, tp, node_size),
        "dp_shard": on("dp_shard", fsdp, tp, node_size),
        "dp_replicate": on("dp_replicate", plan.dp_replicate, tp * fsdp, node_size),
        "ep": on("ep", plan.ep, tp, node_size),
        "dp_expert": on("dp_expert", max(1, fsdp // plan.ep), tp * plan.ep, node_size),
        "dp_all": on("dp_all", fsdp * plan.dp_replicate, tp, node_size),
        "dp_expert_all": on("dp_expert_all", max(1, fsdp * plan.dp_replicate // plan.ep), tp * plan.ep, node_size),
        "pp": on("pp", plan.pp, stage, node_size),
        "pp_near": CommGroup("pp_near", 2, 1, 2, stage, borders),
        "pp_far": CommGroup("pp_far", 2, 2, 1, stage, borders),
    }
