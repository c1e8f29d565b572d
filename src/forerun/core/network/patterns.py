"""Communication patterns: how data-parallel ranks sum their gradients, instead of NCCL's choice.

A pattern computes how long it takes until every rank of a group has the sum of all ranks' gradients. It gives the times
of the gradients' all-reduces. Reduce-scatters and all-gathers of sharded state, tensor, context and pipeline
parallelism, and norms of gradients still run as in NCCL. The shipped patterns have names (`patterns_catalog`). A user's
own pattern is a subclass of `CommunicationPattern`, a list of messages (`patterns_messages.MessagePattern`) or a
function (`TimedBy`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from forerun.common.errors import ForerunError
from forerun.core.network.constants import NodeCollectives
from forerun.core.network.link_load import Busiest, Fabric, fabric_of
from forerun.core.network.network_file import Network, NetworkDim
from forerun.core.network.of_cluster import link_dimension
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import F64
from forerun.describe.cluster.types import Cluster
from forerun.describe.plan.plan import Plan
from forerun.describe.plan.rules import scatters_gradients
from forerun.describe.stacks.catalog import load_stack


@dataclass(frozen=True)
class Wires:
    """The hardware under a pattern: `n_gpus` GPUs of `cluster`, on its own links or on a topology."""

    cluster: Cluster
    n_gpus: int
    network: Network | None = None
    """topology in place of the cluster's links; rank r is its NPU r"""
    measured: NodeCollectives | None = None
    """constants of the device's own NVLink, None for those of the link's kind"""
    memory_bytes_per_s: float = float("inf")
    """bandwidth that memory-bound kernels of the device reach"""
    launch_s: float = 0.0
    """of a memory-bound kernel"""

    @property
    def node_size(self) -> int:
        """Returns the number of GPUs of a node."""
        return max(1, self.cluster.node_size)

    @property
    def fabric(self) -> Fabric:
        """Returns everything that a message goes over: the topology, or the cluster's links as switches."""
        return fabric_of(self.network or _links_as_network(self.cluster, self.n_gpus))

    def pass_s(self, size_bytes: F64) -> F64:
        """Returns the seconds of a kernel that reads and writes `size_bytes` of the device's memory."""
        return self.launch_s + size_bytes / self.memory_bytes_per_s


@lru_cache(maxsize=256)
def _links_as_network(cluster: Cluster, n_gpus: int) -> Network:
    """Returns the link levels of `cluster` as dimensions that join at least `n_gpus` GPUs, in whole domains."""
    dims, left = [], n_gpus
    for link in cluster.links:
        size = min(link.size or left, left)
        left = -(-left // size)
        if size > 1:
            name, n, bandwidth_gbps, latency_ns = link_dimension(link, size)
            dims.append(NetworkDim(name, (n,), bandwidth_gbps, latency_ns))
    if left > 1:
        raise ForerunError(f"cluster {cluster.name}: its links join fewer than {n_gpus:,} GPUs; use fewer GPUs")
    return Network(tuple(dims), gib=False)


class CommunicationPattern(ABC):
    """A way to sum gradients over a group of ranks."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Returns the name that reports show."""

    @property
    def zero_stage(self) -> int:
        """Returns the `Plan.zero_stage` that the pattern means: whoever makes a plan from its name raises the plan's to
        it."""
        return 0

    @property
    def everything(self) -> bool:
        """Returns whether it prices all collectives and transfers of a step, not the gradients' all-reduces alone, and
        the host that starts them."""
        return False

    @property
    def as_nccl(self) -> bool:
        """Returns whether its times are those of NCCL. A training framework may be slower than these
        (Stack.network_rate). Other times are taken as they are.
        """
        return False

    @abstractmethod
    def seconds(self, size_bytes: F64, group: CommGroup, wires: Wires) -> F64:
        """Returns the seconds until all ranks of `group` have the sum of gradients of `size_bytes` (n,) each.

        All equal groups of the mesh axis work at once. Asked for groups of two ranks or more.
        """

    def busiest(self, size_bytes: float, group: CommGroup, wires: Wires) -> Busiest | None:
        """Returns the link of a topology that gradients of `size_bytes` use most, None if the pattern doesn't know.

        Its seconds are those of a byte of the gradients, for all that the pattern sends over it.
        """
        return None

    def check(self, plan: Plan) -> None:
        """Raises ForerunError if `plan` has no all-reduce of gradients that the pattern could run."""
        if not (self.zero_stage or self.everything or has_all_reduce(plan)):
            raise ForerunError(
                f"communication_pattern {self.name}: with zero_stage {plan.zero_stage} gradients are reduce-scattered"
                " and nothing is all-reduced; use zero_stage 0, or the pattern nccl"
            )


def has_all_reduce(plan: Plan) -> bool:
    """Returns whether gradients of `plan` are all-reduced, if they are shared at all."""
    return plan.dp_replicate > 1 or not scatters_gradients(plan, load_stack(plan.stack))


@dataclass(frozen=True)
class NoNetwork(CommunicationPattern):
    """An ideal network: collectives and transfers take no time, neither to start nor to run."""

    name: str = "no_network"
    everything: bool = True

    def seconds(self, size_bytes: F64, group: CommGroup, wires: Wires) -> F64:
        """Returns zeros."""
        return np.zeros_like(size_bytes)


@dataclass(frozen=True)
class TimedBy(CommunicationPattern):
    """A user's own function: `(bytes of a rank's gradients, ranks) -> seconds`."""

    function: Callable[[float, int], float]
    name: str = "own"

    def seconds(self, size_bytes: F64, group: CommGroup, wires: Wires) -> F64:
        """Calls the function and returns its seconds. Raises ForerunError if it fails or does not return a time."""
        try:
            found = [self.function(float(size), group.size) for size in size_bytes]
        except Exception as error:
            told = " ".join(f"{type(error).__name__}: {error}".split())
            raise ForerunError(f"communication pattern {self.name}: its function failed: {told}") from error
        for size, time in zip(size_bytes, found, strict=True):
            if (
                isinstance(time, bool)
                or not isinstance(time, (int, float, np.floating))
                or not 0 <= time < float("inf")
            ):
                raise ForerunError(
                    f"communication pattern {self.name}: {time!r} for {size:,.0f} bytes over {group.size} ranks;"
                    " the function has to return seconds, 0 or more"
                )
        return np.array(found, np.float64)
