"""Setup: all inputs of the simulation of one iteration. What-if, scaling and advice compare Setups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from forerun.core.cost.measured import Measured
from forerun.core.network.network_file import Network
from forerun.core.network.patterns import CommunicationPattern
from forerun.describe.cluster.types import Cluster, Device
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan import rules
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.describe.stacks.stack import Stack


@dataclass(frozen=True)
class RankKind:
    """GPUs of one kind that differ from the cluster's: whole data-parallel replicas of the plan."""

    name: str
    n_gpus: int
    device: Device | None = None
    """their device; None: the cluster's"""
    slowdown: float = 1.0
    """time of their kernels over the time on a sound GPU"""
    micro_batch: int | None = None
    """samples of a micro batch; None: the plan's"""


@dataclass(frozen=True)
class Setup:
    """One iteration of a model under a plan on a cluster."""

    model: ModelSpec | LayeredModel
    plan: Plan
    cluster: Cluster
    network: Network | None = None
    """the network in place of the cluster's links"""
    measured: Measured | None = None
    """the user's own times of kernels and collectives"""
    pattern: CommunicationPattern | None = None
    """how ranks exchange gradients; None: as NCCL does"""
    changed_stack: Stack | None = None
    """the stack in place of the plan's; None: the plan's, as its file says"""
    kinds: tuple[RankKind, ...] = ()
    """the GPUs that differ; the rest of the plan's GPUs are the cluster's"""
    replays: bool = False
    """whether the caching allocator is replayed to find reserved memory; else it is an estimate, which takes no time"""
    slow_links: float = 1.0
    """time of collectives and transfers over the time on sound links"""

    @cached_property
    def stack(self) -> Stack:
        """Returns the stack that runs the plan: the changed one, or the plan's own for the number of nodes."""
        return self.changed_stack or load_stack(self.plan.stack).across(ceil(self.n_gpus / self.cluster.node_size))

    @property
    def n_gpus(self) -> int:
        """Returns the number of GPUs of the run."""
        return self.plan.world_size

    @property
    def reduce_dtype(self) -> str:
        """Returns the dtype in which gradients are reduced."""
        return str(rules.reduce_dtype(self.plan, self.stack))

    @property
    def gradient_bytes(self) -> int:
        """Returns the bytes per element of the gradients that are reduced."""
        return int(rules.element_bytes(self.reduce_dtype))

    @property
    def parts(self) -> tuple[RankKind, ...]:
        """Returns all GPUs by kind, in the order of their data-parallel replicas: the cluster's own first, if any.

        The second part of one name is called `<name> (2)`.
        """
        own = self.n_gpus - sum(kind.n_gpus for kind in self.kinds)
        parts = ((RankKind(self.cluster.device.name, own),) if own else ()) + self.kinds
        names = [part.name for part in parts]
        numbers = [names[: i + 1].count(name) for i, name in enumerate(names)]
        return tuple(
            part if number == 1 else replace(part, name=f"{part.name} ({number})")
            for part, number in zip(parts, numbers, strict=True)
        )

    @property
    def samples_per_step(self) -> int:
        """Returns the samples (sequences, images) of one optimizer step over all GPUs."""
        default = self.plan.micro_batch
        per_replica = self.n_gpus // self.plan.dp
        missing = sum((kind.n_gpus // per_replica) * ((kind.micro_batch or default) - default) for kind in self.kinds)
        return self.plan.global_batch + missing * self.plan.n_microbatches
