"""GPU memory outside of the caching allocator: the CUDA context with its kernels, and the buffers of NCCL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from forerun.common.shipped import shipped
from forerun.common.units import GIB, MIB
from forerun.core.program.groups import CommGroup
from forerun.describe.cluster.types import Cluster
from forerun.describe.stacks.stack import Stack

WORLD = "world"
"""in Stack.communicators: all ranks"""


@dataclass(frozen=True, slots=True)
class OutsideModel:
    """Everything in outside.yaml."""

    context_gib: float
    """context, kernels that were used, handles of libraries"""
    eager_context_gib: float
    """the same with every kernel of every library"""
    context_source: str
    protocols_mib: dict[str, float]
    """buffers of each protocol of a connection"""
    node_channels: dict[str, int]
    """channels of a communicator inside a node, by kind of link"""
    other_node_channels: int
    channels_per_nic: int
    most_channels: int
    most_tree_peers: int
    transfer_mib: float
    """buffers of all sends and receives of a communicator between nodes"""
    nccl_source: str

    @property
    def receive_bytes(self) -> int:
        """Returns the bytes of the receiving side of a connection: the buffers of all protocols."""
        return int(sum(self.protocols_mib.values()) * MIB)

    @property
    def send_bytes(self) -> int:
        """Returns the bytes of the sending side of a connection to another node, where the LL buffer is in host
        memory."""
        return int((self.protocols_mib["ll128"] + self.protocols_mib["simple"]) * MIB)

    @property
    def transfer_bytes(self) -> int:
        return int(self.transfer_mib * MIB)


def outside_model() -> OutsideModel:
    """Returns the shipped constants."""
    return shipped(OutsideModel, "forerun.core.memory", "outside.yaml")


def context_bytes(stack: Stack) -> int:
    """Returns the bytes of the context of a process that runs `stack`."""
    model = outside_model()
    return int((model.context_gib if stack.lazy_kernels else model.eager_context_gib) * GIB)


def communicator_bytes(group: CommGroup, cluster: Cluster) -> int:
    """Returns the bytes that NCCL's communicator of `group` has on each GPU, mean over its ranks; 0 for a single rank.

    Inside a node every channel is a chain of ranks: each has a connection from either side, which rings and trees
    share. Between nodes the ranks of a node share their NICs, and each channel has connections for a ring and for a
    tree where there are more than two nodes.
    """
    if group.size < 2:
        return 0
    model, ranks = outside_model(), group.ranks_per_node
    if group.nodes == 1:
        channels = model.node_channels.get(cluster.links[0].kind, model.other_node_channels)
        return channels * min(2, ranks - 1) * model.receive_bytes
    channels = min(model.channels_per_nic * ranks, model.most_channels)
    peers = min(group.nodes - 1, model.most_tree_peers)
    network = peers * (model.receive_bytes + model.send_bytes)
    chain = 2 * (ranks - 1) * model.receive_bytes
    return channels * (network + chain) // ranks


def outside_bytes(groups: Sequence[CommGroup], stack: Stack, cluster: Cluster, every: Sequence[CommGroup] = ()) -> int:
    """Returns the bytes of the context and of the communicators of `groups`.

    Neighbours in a pipeline have a communicator of two, and a rank has two neighbours. `every` are all groups of the
    ranks, used or not. The stack makes further communicators for some of them.
    """
    total = context_bytes(stack)
    for group in groups:
        pairs = 2 if group.borders else 1
        total += pairs * communicator_bytes(group, cluster)
        if group.borders and group.nodes > 1:
            total += pairs * outside_model().transfer_bytes
    return total + sum(communicator_bytes(group, cluster) for group in _further(stack, cluster, every))


def least_communicator_bytes(cluster: Cluster) -> int:
    """Returns the bytes of the smallest communicator of several ranks: of two, in one node or in two."""
    return min(communicator_bytes(CommGroup("", 2, nodes, 2 // nodes), cluster) for nodes in (1, 2))


def _further(stack: Stack, cluster: Cluster, every: Iterable[CommGroup]) -> list[CommGroup]:
    """Returns the groups of `stack.communicators`, as far as `every` says where their ranks are."""
    known = {group.axis: group for group in every}
    world = [known[axis] for axis in ("tp", "pp", "dp_all") if axis in known]
    out = []
    for name in stack.communicators:
        if name == WORLD:
            size = prod(group.size for group in world)
            out.append(CommGroup.on_mesh(name, size, 1, cluster.node_size))
        elif all(axis in known for axis in name.split("+")):
            groups = [known[axis] for axis in name.split("+")]
            runs = [run for one in groups for run in (one.runs or ((one.size, one.inner),)) if run[0] > 1]
            if runs:
                out.append(CommGroup.on_runs(name, sorted(runs, key=lambda run: run[1]), cluster.node_size))
    return out
