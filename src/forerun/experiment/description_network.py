"""The network of an experiment, and how gradients are exchanged over it."""

from __future__ import annotations

from forerun.cluster.types import Cluster
from forerun.errors import ForerunError
from forerun.experiment.description_sections import IDEAL, NetworkSection
from forerun.network.for_experiment import CLUSTER, topology_of
from forerun.network.network_file import Network, network_from
from forerun.network.on_topology import check_size, load_network
from forerun.network.patterns import CommunicationPattern, NoNetwork
from forerun.plan.plan import Plan


def network_of(section: NetworkSection, cluster: Cluster, num_nodes: int, n_gpus: int, place: str) -> Network | None:
    """The topology in place of the links of `cluster`; None for those.

    Raises:
        ForerunError: keys that contradict, a wrong file, more GPUs than the network joins.
    """
    if section.file is not None:
        other = next((key for key in ("topology_type", "base_latency_us") if getattr(section, key) is not None), None)
        if other is not None:
            raise ForerunError(f"{place}: file and {other} both say what the network is; keep one of them")
    kind = section.topology_type or CLUSTER
    if section.oversubscription is not None and kind != "fat_tree":
        raise ForerunError(f"{place}: oversubscription is a key of topology_type fat_tree")
    if isinstance(section.file, dict):
        network: Network | None = network_from({"bandwidth_unit": "GB/s", **section.file}, f"{place}: file")
    elif section.file is not None:
        network = load_network(section.file)
    elif kind == CLUSTER and section.topology_type is None and cluster.network is not None:
        network = load_network(cluster.network)
    elif kind == IDEAL:
        network = None
    else:
        try:
            network = topology_of(kind, cluster, num_nodes, oversubscription=section.oversubscription or 1)
        except ForerunError as error:
            raise ForerunError(f"{place}: {error}") from None
    if network is not None:
        try:
            check_size(network, n_gpus)
        except ForerunError as error:
            raise ForerunError(f"{place}: {error}") from None
    return network


def pattern_in_force(
    given: CommunicationPattern | None, section: NetworkSection, plan: Plan, place: str
) -> CommunicationPattern | None:
    """`given`, checked against `plan`; on an ideal network nothing takes time.

    Raises:
        ForerunError: the plan has no all-reduce that the pattern could run.
    """
    if given is not None:
        try:
            given.check(plan)
        except ForerunError as error:
            raise ForerunError(f"{place}: {error}") from None
    return NoNetwork() if section.topology_type == IDEAL else given
