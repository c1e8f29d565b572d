"""Makes a Request from checked sections: its network, and lines that say how Forerun understood its units."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.answers.analysis.compression import compressed, read_compression
from forerun.answers.analysis.kinds import check_kinds
from forerun.answers.analysis.setup import RankKind, Setup
from forerun.answers.experiment.description.config import (
    hardware_config,
    model_config,
    network_config,
    prices_config,
    training_config,
)
from forerun.answers.experiment.description.hardware import adapted, base_cluster, rank_kinds
from forerun.answers.experiment.description.model import is_convolutional, model_of
from forerun.answers.experiment.description.schema import Sections
from forerun.answers.experiment.description.sections import IDEAL, NetworkSection
from forerun.answers.experiment.description.training import (
    DEFAULTS_BY_KIND,
    agreed,
    disturbance_of,
    in_spelling,
    iterations_of,
    open_axes,
    peak_dtype,
    plan_of,
    precision_of,
    schedules_of,
)
from forerun.answers.experiment.prices import prices_of
from forerun.answers.experiment.request import Request, Thresholds
from forerun.common.errors import ForerunError, at
from forerun.common.own_code import is_own_code, load_own
from forerun.common.units import GIB, GIGA, TERA
from forerun.common.yaml_files import read_yaml
from forerun.core.network.for_experiment import CLUSTER, topology_of
from forerun.core.network.network_file import Network, network_from
from forerun.core.network.on_topology import check_size
from forerun.core.network.patterns import CommunicationPattern, NoNetwork
from forerun.core.network.patterns_catalog import pattern_of
from forerun.describe.cluster.schema import BITS_PER_BYTE, US_PER_S
from forerun.describe.cluster.types import Cluster, Device
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.constraints import check_plan
from forerun.describe.plan.plan import Plan

MOST_GPUS = 1_000_000


@dataclass(frozen=True)
class _Machine:
    """The GPUs and links of `hardware`, before the precision is known."""

    base: Cluster
    node_size: int
    num_nodes: int
    kinds: tuple[RankKind, ...] = ()

    @property
    def n_gpus(self) -> int:
        return self.num_nodes * self.node_size

    @property
    def devices(self) -> tuple[Device, ...]:
        """Returns the devices of the cluster and of the GPUs that differ."""
        return (self.base.device, *(kind.device for kind in self.kinds if kind.device))


def assembled(sections: Sections, place: str, name: str) -> Request:
    """Returns the Request of checked sections; `place` begins messages.

    Raises:
        ImpossiblePlan: the plan can't run.
        ForerunError: keys that contradict each other, an unknown name, a file that is wrong.
    """
    training, at_training = sections.training, f"{place}: training"
    machine = _machine(sections, f"{place}: hardware")
    model, own_length = model_of(sections.model, f"{place}: model")
    has_tokens = not isinstance(model, LayeredModel)
    setup, values = _setup(sections, machine, model, own_length, place)
    schedules = schedules_of(training, has_tokens, at_training)
    for start, each in schedules.segments(setup):
        with at(f"{at_training}: batch_schedule and sequence_length_schedule: from iteration {start} on"):
            check_plan(model, each.plan, setup.cluster)
    disturbance = disturbance_of(training, sections.hardware, at_training)
    own_names = {machine.base.name, *(device.name for device in machine.devices)}
    prices = prices_of(sections.prices, Path(), f"{place}: prices", own_names)
    sample = model.sample if isinstance(model, LayeredModel) else "sequence"
    return Request(
        name=name,
        setup=setup,
        num_iterations=iterations_of(training, setup, schedules, has_tokens, at_training),
        batch_schedule=schedules.batch,
        seq_len_schedule=schedules.seq_len,
        disturbance=disturbance,
        thresholds=Thresholds(**sections.thresholds.model_dump()),
        prices=prices,
        sample=sample,
        config={
            "hardware": hardware_config(sections.hardware, machine.node_size),
            "model": model_config(sections.model, model, setup.plan.seq_len),
            "training": training_config(
                training, sections.plan_keys, values, setup.plan, disturbance, machine.num_nodes
            ),
            "network": network_config(sections.network),
            "prices": prices_config(sections.prices, prices),
            "thresholds": sections.thresholds.model_dump(),
        },
        echo=echo_of(setup, machine.base.device.memory_bytes, sample),
    )


def _machine(sections: Sections, place: str) -> _Machine:
    hardware = sections.hardware
    base = base_cluster(hardware, place)
    machine = _Machine(base, hardware.num_gpus_per_node or base.node_size, sections.training.num_nodes or 1)
    if machine.num_nodes > 1 and len(base.links) == 1 and hardware.network_gbit_s is None:
        raise ForerunError(
            f"{place}: key 'network_bandwidth' (200 Gbit/s or 25 GB/s) or 'network_bandwidth_gbps' is missing;"
            f" give it, because {base.name} has no link between nodes"
        )
    if machine.n_gpus > MOST_GPUS:
        raise ForerunError(
            f"{place}: num_gpus_per_node {machine.node_size} x training.num_nodes {machine.num_nodes} are"
            f" {machine.n_gpus:,} GPUs; choose at most {MOST_GPUS:,}"
        )
    return replace(machine, kinds=rank_kinds(hardware, machine.n_gpus, machine.node_size, place))


def _setup(
    sections: Sections, machine: _Machine, model: ModelSpec | LayeredModel, own_length: int, place: str
) -> tuple[Setup, dict[str, Any]]:
    """Returns the Setup, and the keys of its plan as they stand in a configuration: -1 for the rest of the GPUs."""
    training, at_training = sections.training, f"{place}: training"
    convolutional = is_convolutional(model)
    fields = agreed(training, sections.plan_keys, sections.model.sequence_length, at_training)
    compression = read_compression(training.gradient_compression, at_training)
    if compression is not None and compression.reduce_dtype is not None:
        if fields.get("reduce_dtype", "auto") not in ("auto", compression.reduce_dtype):
            raise ForerunError(
                f"{at_training}: gradient_compression {compression.method} and reduce_dtype {fields['reduce_dtype']}"
                " contradict; keep one of them"
            )
        fields["reduce_dtype"] = compression.reduce_dtype
    given = fields.get("precision", training.mixed_precision)
    precision = precision_of(given, machine.devices, convolutional, at_training)
    cluster = adapted(machine.base, sections.hardware, sections.network, peak_dtype(precision), f"{place}: hardware")
    pattern = read_pattern(training.communication_pattern, at_training)
    defaults = {"seq_len": own_length, **DEFAULTS_BY_KIND["images" if convolutional else "tokens"]}
    values = open_axes({**defaults, **fields, "precision": precision}, pattern.zero_stage if pattern else 0)
    plan = plan_of(values, machine.n_gpus, at_training)
    with at(at_training), in_spelling():
        check_plan(model, plan, cluster)
    setup = Setup(
        model,
        plan,
        cluster,
        network=network_of(sections.network, cluster, machine.num_nodes, machine.n_gpus, f"{place}: network"),
        pattern=pattern_in_force(pattern, sections.network, plan, at_training),
        kinds=machine.kinds,
        replays=True,
        slow_links=sections.hardware.slow_links,
    )
    if compression is not None:
        setup = replace(setup, pattern=compressed(compression, setup, at_training))
    with at(f"{place}: hardware: mixed"):
        check_kinds(setup)
    return setup, values


def echo_of(setup: Setup, own_memory_bytes: int, sample: str) -> tuple[str, ...]:
    """Returns the lines; `own_memory_bytes` is the device's memory as the catalogue has it."""
    dtype = peak_dtype(setup.plan.precision)
    cluster, device = setup.cluster, setup.cluster.device
    intra, inter = cluster.links[0], cluster.links[1] if len(cluster.links) > 1 else None
    lines = [
        f"compute_tflops {device.peak(dtype) / TERA:.5g}: 10**12 FLOP/s, the dense {dtype} peak of a GPU",
        _memory_line(device.memory_bytes, own_memory_bytes),
        f"memory_bandwidth_gb_s {device.memory_bytes_per_s / GIGA:.6g}: 10**9 bytes a second of a GPU's memory",
        f"intra_node_bandwidth_gbps {_rates(intra.bytes_per_s)} for each GPU and direction in a node of {intra.size}",
    ]
    if inter is not None:
        lines.append(f"network_bandwidth_gbps {_rates(inter.bytes_per_s)} for each GPU and direction between nodes")
        lines.append(f"base_latency_us {inter.latency_s * US_PER_S:.4g}: microseconds of a hop between nodes")
    lines.append(f"mixed_precision {setup.plan.precision}: what matrix products run in")
    lines.append(f"bucket_size_mb {setup.plan.ddp_bucket_mib:g}: MiB (2**20 bytes), as DDP's bucket_cap_mb")
    lines.append(_batch_line(setup, sample))
    return tuple(lines)


def _rates(bytes_per_s: float) -> str:
    gbit_s = bytes_per_s * BITS_PER_BYTE / GIGA
    return f"{gbit_s:.6g}: {gbit_s:.6g} Gb/s = {bytes_per_s / GIGA:.6g} GB/s"


def _memory_line(memory_bytes: int, own_bytes: int) -> str:
    gib = f"{memory_bytes / GIB:.4g}"
    if memory_bytes == own_bytes:
        return f"memory_gb {gib}: GiB (2**30 bytes), all that programs can use of the GPU"
    return f"memory_gb {gib}: GiB (2**30 bytes), in place of the GPU's {own_bytes / GIB:.4g}"


def _batch_line(setup: Setup, sample: str) -> str:
    """Returns the micro batch of a GPU, and how the batch of a step follows from it."""
    plan = setup.plan
    own = [f", {kind.micro_batch} on {kind.name}" for kind in setup.kinds if kind.micro_batch is not None]
    accumulated = f" x {plan.n_microbatches} micro batches" if plan.n_microbatches > 1 else ""
    ranks = f" x {plan.dp} data-parallel rank{'s' if plan.dp > 1 else ''}"
    return (
        f"batch_size_per_gpu {plan.micro_batch}: {sample}s of a micro batch{''.join(own)};{accumulated}{ranks}"
        f" = {setup.samples_per_step:,} {sample}s an optimizer step"
    )


def network_of(section: NetworkSection, cluster: Cluster, num_nodes: int, n_gpus: int, place: str) -> Network | None:
    """Returns the topology in place of the links of `cluster`; None for those.

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
    """Returns the pattern that communication_pattern means; None for NCCL's own choice.

    Raises ForerunError for an unknown name or option, or code of one's own that can't be run or is not a pattern.
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
    """Checks the pattern `given` against `plan`; on an ideal network communication takes no time.

    Raises ForerunError if the plan has no all-reduce that the pattern could run.
    """
    if given is not None:
        with at(place):
            given.check(plan)
    return NoNetwork() if section.topology_type == IDEAL else given
