"""Makes a Request from checked sections."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.answers.analysis.kinds import check_kinds
from forerun.answers.analysis.setup import RankKind, Setup
from forerun.answers.experiment.description.compression import compressed, read_compression
from forerun.answers.experiment.description.config import (
    hardware_config,
    model_config,
    network_config,
    prices_config,
    training_config,
)
from forerun.answers.experiment.description.echo import echo_of
from forerun.answers.experiment.description.hardware import adapted, base_cluster, rank_kinds
from forerun.answers.experiment.description.model import is_convolutional, model_of
from forerun.answers.experiment.description.network import network_of, pattern_in_force, read_pattern
from forerun.answers.experiment.description.schema import Sections
from forerun.answers.experiment.description.training import (
    DEFAULTS_BY_KIND,
    agreed,
    check_buckets,
    disturbance_of,
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
from forerun.describe.cluster.types import Cluster, Device
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.constraints import check_plan

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
        """The devices of the cluster and of the GPUs that differ."""
        return (self.base.device, *(kind.device for kind in self.kinds if kind.device))


def assembled(sections: Sections, place: str, name: str) -> Request:
    """The Request of checked sections; `place` begins messages.

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
    """The Setup, and the keys of its plan as they stand in a configuration: -1 for the rest of the GPUs."""
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
    with at(at_training):
        check_plan(model, plan, cluster)
    check_buckets(model, plan, at_training)
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
