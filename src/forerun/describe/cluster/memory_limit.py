"""Limits the GPU memory that a run may use on a cluster."""

from __future__ import annotations

from dataclasses import replace

from forerun.common.errors import ForerunError
from forerun.common.units import GIB
from forerun.describe.cluster.types import Cluster

_SOLD = 1.05
"""largest ratio of the memory that a GPU is sold with to the memory that programs can use"""


def is_whole(own_gib: float, stated_gib: float) -> bool:
    """Returns whether `stated_gib` is the nominal size of a GPU of which programs can use `own_gib`."""
    return own_gib <= stated_gib <= own_gib * _SOLD


def limited(cluster: Cluster, memory_limit_gib: float | None) -> Cluster:
    """Returns the cluster with only `memory_limit_gib` of each GPU; the size that a GPU is sold with means all of it.

    Raises ForerunError for more than a GPU has.
    """
    if memory_limit_gib is None:
        return cluster
    own = cluster.device.memory_bytes / GIB
    if is_whole(own, memory_limit_gib):
        return cluster
    if not 0 < memory_limit_gib <= own:
        raise ForerunError(
            f"memory limit of {memory_limit_gib} GiB: expected more than 0 and at most the {own:.1f} GiB of"
            f" {cluster.device.name}"
        )
    return replace(cluster, device=replace(cluster.device, memory_bytes=int(memory_limit_gib * GIB)))
