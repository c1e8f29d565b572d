"""memory_need: the memory that a Program needs on its devices, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.core.memory.allocator_settings import AllocatorSettings
from forerun.core.memory.outside import outside_bytes
from forerun.core.memory.profile import IN_GRAPHS, MemoryProfile, profile
from forerun.core.memory.replayed import replayed
from forerun.core.memory.reserved import Reserved, reserved
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import Category, Program
from forerun.describe.cluster.types import Cluster, Device
from forerun.describe.stacks.stack import Stack


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The memory that the fullest rank class of a Program needs."""

    profiles: list[MemoryProfile]
    worst: int
    """the fullest rank class"""
    groups: list[CommGroup]
    """groups that have a communicator"""
    outside_bytes: int
    held: Reserved
    limit_bytes: int
    """memory of the device of the fullest rank class"""
    replayed: bool
    """whether the allocator was replayed; else reserved memory is an estimate"""

    @property
    def fullest(self) -> MemoryProfile:
        """Returns the memory of the fullest rank class over the step."""
        return self.profiles[self.worst]


def memory_need(
    program: Program,
    cluster: Cluster,
    stack: Stack,
    devices: Sequence[Device] = (),
    settings: AllocatorSettings | None = None,
    graphs: bool = False,
) -> MemoryNeed:
    """Returns the memory that `program` needs under `stack` on a device of `cluster`, or on `devices`, one for each
    rank class.

    Among several devices the fullest rank class takes the largest share of its device, and the Program fits where every
    rank class does. With `settings` the caching allocator is replayed under them on the fullest rank class; without
    them, reserved memory is an estimate. With `graphs` compiled code runs from CUDA graphs: its tensors are in a pool
    that stays reserved and that PyTorch does not count as allocated (blocks of a private pool are allocated while a
    graph is recorded, and freed by the time it is replayed; torch/_inductor/cudagraph_trees.py).
    """
    profiles, groups = profile(program), _used_groups(program)
    pooled = IN_GRAPHS if graphs else _pool_of(program)
    outside = outside_bytes(groups, stack, cluster, program.groups)
    limits = [device.memory_bytes for device in devices] or [cluster.device.memory_bytes] * len(profiles)
    worst = max(range(len(profiles)), key=lambda i: profiles[i].peak_bytes / limits[i])

    def held(number: int) -> Reserved:
        resident = int(program.rank_classes[number].resident_bytes.sum())
        return reserved(profiles[number].peak_bytes, resident, limits[number] - outside)

    fullest = held(worst)
    if settings is not None:
        vendor = devices[worst].vendor if devices else cluster.device.vendor
        fullest = replayed(program, worst, settings.on(vendor), limits[worst] - outside, fullest, pooled)
    if devices and fullest.fits:
        every = [held(number) for number in range(len(profiles))]
        fullest = replace(fullest, fits=all(one.fits for one in every), tight=any(one.tight for one in every))
    shown = profile(program, without=pooled) if pooled else profiles
    return MemoryNeed(shown, worst, groups, outside, fullest, limits[worst], settings is not None)


def _pool_of(program: Program) -> tuple[Category, ...]:
    """Returns the category of the tensors of CUDA graphs, if a traced program has such tensors."""
    categories = [block.tensor_category for block in program.blocks]
    held = bool(categories) and bool((np.concatenate(categories) == Category.GRAPH_POOL).any())
    return (Category.GRAPH_POOL,) if held else ()


def _used_groups(program: Program) -> list[CommGroup]:
    """Returns the groups that some collective or transfer of the Program uses; each has a communicator."""
    used = np.unique(program.ops.group[program.ops.group >= 0]).tolist()
    return [program.groups[number] for number in used if program.groups[number].size > 1]
