"""The network of an experiment, and how gradients are exchanged over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.answers.experiment.description.own_code import is_own_code, load_own
from forerun.answers.experiment.description.sections import IDEAL, NetworkSection
from forerun.common.errors import ForerunError, at
from forerun.common.yaml_files import read_yaml
from forerun.core.network.for_experiment import CLUSTER, topology_of
from forerun.core.network.network_file import Network, network_from
from forerun.core.network.on_topology import check_size
from forerun.core.network.patterns import CommunicationPattern, NoNetwork
from forerun.core.network.patterns_catalog import pattern_of
from forerun.describe.cluster.types import Cluster
from forerun.describe.plan.plan import Plan


def network_of(section: NetworkSection, cluster: Cluster, num_nodes: int, n_gpus: int, place: str) -> Network | None:
    """The topology in place of the links of `cluster`; None for those.

    Raises ForerunError for keys that contradict each other, a wrong file, or more GPUs than the network joins.
    """
    if section.file is not None:
        other = next((key for key in ("topology_type", "base_latency_us") if getattr(section, key) is not None), None)
        if other is not None:
            raise ForerunError(f"{place}: file and {other} both describe the network; keep one of them")
    kind = section.topology_type or CLUSTER
    if section.oversubscription is not None and kind != "fat_tree":
        raise ForerunError(f"{place}: oversubscription is only for topology_type fat_tree; leave it out for {kind}")
    if section.file is not None or (section.topology_type is None and cluster.network is not None):
        network = _of_file(section.file or str(cluster.network), f"{place}: file")
    elif kind == IDEAL:
        network = None
    else:
        with at(place):
            network = topology_of(kind, cluster, num_nodes, oversubscription=section.oversubscription or 1)
    if network is not None:
        with at(f"{place}: {'file' if section.file is not None else 'topology_type'}"):
            check_size(network, n_gpus)
    return network


def _of_file(file: str | dict[str, Any], place: str) -> Network:
    with at(place):
        if isinstance(file, dict):
            return network_from({"bandwidth_unit": "GB/s", **file}, "keys")
        return network_from({"bandwidth_unit": "GB/s", **read_yaml(Path(file))}, file)


def read_pattern(given: Any, place: str) -> CommunicationPattern | None:
    """The pattern that communication_pattern means; None for NCCL's own choice.

    Raises ForerunError for an unknown name or option, or code of one's own that can't be run or is no pattern.
    """
    with at(place):
        if isinstance(given, dict):
            return pattern_of({**given, "name": _loaded(given.get("name"))} if "name" in given else given)
        return pattern_of(_loaded(given))


def _loaded(given: Any) -> Any:
    return load_own(given, "communication_pattern") if isinstance(given, str) and is_own_code(given) else given


def pattern_in_force(
    given: CommunicationPattern | None, section: NetworkSection, plan: Plan, place: str
) -> CommunicationPattern | None:
    """Check the pattern `given` against `plan`; on an ideal network communication takes no time.

    Raises ForerunError if the plan has no all-reduce that the pattern could run.
    """
    if given is not None:
        with at(place):
            given.check(plan)
    return NoNetwork() if section.topology_type == IDEAL else given
