"""The device meshes of a plan, with torchtitan's axes: pp, dp_replicate, dp_shard, cp, tp; ep within dp_shard x cp."""

from __future__ import annotations

import math
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from forerun.common.errors import ImpossiblePlan
from forerun.describe.plan.plan import DEFAULT_ORDER, Plan

_NAMES = {"dp_shard_mod_ep": "dp_expert"}
"""The names of axes that differ from those of the symbolic path."""


class Meshes:
    """The ranks of a plan as device meshes. Axes of degree 1 are left out, as torchtitan does."""

    def __init__(self, plan: Plan, device: str = "cuda") -> None:
        """Creates the meshes.

        Raises:
            ImpossiblePlan: ep doesn't fit into the data-parallel ranks, or the order of the axes is not torchtitan's.
        """
        if plan.mesh_order != DEFAULT_ORDER:
            raise ImpossiblePlan(f"impossible plan: mesh_order {plan.mesh_order}: torchtitan's is {DEFAULT_ORDER}")
        self.plan = plan
        sizes = _sizes(plan)
        # The rest of dp_shard beside ep stays an axis even of one rank, because experts are FSDP2 units of their own.
        kept = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard_mod_ep"}
        self._made: dict[str, Any] = {}
        self.world: Any = None
        if kept:
            self.world = init_device_mesh(device, tuple(kept.values()), mesh_dim_names=tuple(kept))
            self._made = {name: self.world[name] for name in kept}
        if plan.ep > 1:
            self._join("dp_shard", ("dp_shard_mod_ep", "dp_shard_in_ep"))
            self._join("ep", ("dp_shard_in_ep", "cp"))
        self._join("dp_shard_cp", ("dp_shard_mod_ep", "dp_shard_in_ep", "cp") if plan.ep > 1 else ("dp_shard", "cp"))
        self._name_groups()

    def _join(self, name: str, parts: tuple[str, ...]) -> None:
        """Creates one axis from neighbouring axes."""
        present = tuple(part for part in parts if part in self._made)
        if present[1:]:
            joined = self._made.get("dp_shard") if name == "dp_shard_cp" and self.plan.cp == 1 else None
            self._made[name] = joined or self.world[present]._flatten(name)
        elif present:
            self._made[name] = self._made[present[0]]

    def _name_groups(self) -> None:
        """Names process groups after the plan's axes. A group of all ranks would have no name of its own."""
        named: set[int] = set()
        for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "dp_shard_mod_ep", "dp_shard_cp"):
            mesh = self._made.get(name)
            group = None if mesh is None else mesh.get_group()
            if group is not None and id(group) not in named:
                named.add(id(group))
                group.label = _NAMES.get(name, name)

    def axis(self, name: str) -> Any:
        """Returns the 1-D mesh of axis `name`; None if it has one rank."""
        return self._made.get(name)

    def sharded(self) -> Any:
        """Returns the mesh for FSDP2: 1-D, or 2-D (replicate, shard) for HSDP; None if there is nothing to shard
        over."""
        shard = self.axis("dp_shard_cp")
        if shard is None or "dp_replicate" not in self._made:
            return shard
        return self._pair("dp_replicate", shard)

    def experts(self) -> Any:
        """Returns the mesh that a layer's experts are spread over, with tp, whose ranks hold the same experts."""
        tp = self.axis("tp")
        return self.axis("ep") if tp is None else self.world._concatenate([self.axis("ep"), tp])

    def expert_sharded(self) -> Any:
        """Returns the mesh that experts are sharded over besides `ep`: one rank or more, 2-D with dp_replicate."""
        shard = self._made["dp_shard_mod_ep"]
        return self._pair("dp_replicate", shard) if "dp_replicate" in self._made else shard

    def _pair(self, name: str, shard: Any) -> Any:
        return self.world._concatenate([self._made[name], shard])

    def replicated(self) -> Any:
        """Returns all data-parallel ranks as one axis, for DDP."""
        plan = self.plan
        parts = tuple(n for n in ("dp_replicate", "dp_shard", "cp") if n in self._made)
        if not parts:
            return None
        if len(parts) == 1:
            return self._made[parts[0]]
        return self.world[parts]._flatten("dp_cp" if plan.cp > 1 else "dp")


def _sizes(plan: Plan) -> dict[str, int]:
    shard = {"dp_shard": plan.dp_shard}
    if plan.ep > 1:
        if plan.ep % plan.cp or plan.dp_shard % (plan.ep // plan.cp):
            raise ImpossiblePlan(
                f"impossible plan: ep {plan.ep} must be a multiple of cp {plan.cp} and divide dp_shard {plan.dp_shard}"
                f" x cp {plan.cp} for PyTorch's meshes"
            )
        inner = plan.ep // plan.cp
        shard = {"dp_shard_mod_ep": plan.dp_shard // inner, "dp_shard_in_ep": inner}
    sizes = {"pp": plan.pp, "dp_replicate": plan.dp_replicate, **shard, "cp": plan.cp, "tp": plan.tp}
    assert math.prod(sizes.values()) == plan.world_size
    return sizes
