"""compare: simulates an experiment with other communication patterns, topologies, devices and precisions.

Everything else stays as in the experiment, except for consequences of the change: mixed_precision true is fp16 on a
device without bf16. Another device has the figures of its own reference system. Its nodes have the size that the
experiment states, or else their own size if it divides the number of GPUs, which stays the same. A network that the
experiment states stays the same, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from forerun.answers.experiment.description.hardware import base_cluster
from forerun.answers.experiment.description.read import changed
from forerun.answers.experiment.description.sections import HardwareSection
from forerun.answers.experiment.description.training import peak_dtype
from forerun.answers.experiment.digest import digest
from forerun.answers.experiment.request import Request
from forerun.answers.experiment.result import CAUSES, Comparison, Variant
from forerun.answers.experiment.run import run
from forerun.answers.experiment.store import Progress, Store, points_of, workers_of
from forerun.common.errors import ForerunError
from forerun.common.units import TERA
from forerun.common.workers import HERE, Workers

BASE = "as described"
"""label of the experiment itself"""
_OF_THE_DEVICE = (
    *("cluster", "compute_tflops", "memory_gb", "memory_bandwidth_gb_s"),
    *("intra_node_bandwidth", "intra_node_bandwidth_gbps"),
)
"""keys of `hardware` that another device replaces"""


def compare(
    request: Request,
    patterns: Sequence[str] = (),
    topologies: Sequence[str] = (),
    devices: Sequence[str] = (),
    precisions: Sequence[str] = (),
    grid: bool = False,
    folder: Path | None = None,
    progress: Progress | None = None,
    workers: Workers = HERE,
) -> Comparison:
    """Runs `request` as it is and with each of the changes; with `grid`, with every combination of one change per kind.

    A variant that can't run has the reason in place of figures.

    Args:
        folder: where finished variants are kept, so that a comparison that is broken off goes on from there.
        workers: who simulates; this process alone where the request has handlers.

    Raises ForerunError for a request that was not read from sections, or a folder that can't be written.
    """
    if not request.given:
        raise ForerunError(
            f"{request.name}: only an experiment that was read from sections can be compared; use Experiment.from_dict"
        )
    axes = {"pattern": patterns, "topology": topologies, "device": devices, "precision": precisions}
    asked = {axis: tuple(dict.fromkeys(values)) for axis, values in axes.items() if values}
    changes = _combinations(asked) if grid else [{axis: value} for axis, values in asked.items() for value in values]
    rows = [_Row(request, Variant(BASE, "base", None, 0.0, dict.fromkeys(CAUSES, 0.0), None))]
    rows += [_varied(request, change) for change in changes]
    ready = [row for row in rows if not row.variant.error]
    found = points_of(
        [digest("compare", row.request, row.variant.label, row.variant.axis) for row in ready],
        [f"{request.name}, {row.variant.label}" for row in ready],
        partial(_simulated, ready),
        Store(Variant, folder),
        progress,
        workers_of(request, workers),
    )
    done = iter(found)
    return Comparison(request, tuple(row.variant if row.variant.error else next(done) for row in rows))


@dataclass(frozen=True)
class _Row:
    request: Request
    """the variant, or the experiment as it is if the variant is impossible"""
    variant: Variant
    """the row before its simulation"""


def _combinations(asked: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Returns every combination of one value per axis; the last axis changes fastest."""
    return [dict(zip(asked, values, strict=True)) for values in product(*asked.values())] if asked else []


def _varied(request: Request, change: Mapping[str, str]) -> _Row:
    axis, label = ", ".join(change), ", ".join(change.values())
    variant = Variant(label, axis, None, 0.0, dict.fromkeys(CAUSES, 0.0), None)
    try:
        return _Row(varied(request, change), variant)
    except ForerunError as error:
        return _Row(request, replace(variant, error=str(error)))


def _simulated(rows: Sequence[_Row], number: int) -> Variant:
    row = rows[number]
    try:
        result = run(row.request)
    except ForerunError as error:
        return replace(row.variant, error=str(error))
    return replace(
        row.variant,
        prediction=result.prediction,
        samples_per_s=result.samples_per_s,
        breakdown_s=result.breakdown_s,
        bill=result.bill,
    )


def varied(request: Request, change: Mapping[str, str]) -> Request:
    """Returns `request` with other values on some axes: pattern, topology, device, precision.

    Raises ForerunError for an unknown name, or a plan that can't run there.
    """
    changes: dict[str, Any] = {}
    if "pattern" in change:
        changes["training.communication_pattern"] = change["pattern"]
    if "topology" in change:
        changes |= _topology(request, change["topology"])
    if "device" in change:
        changes |= _device(request, change["device"])
    if "precision" in change:
        changes |= _precision(request, change["precision"], "device" in change)
    return changed(request, changes)


def _topology(request: Request, name: str) -> dict[str, Any]:
    changes: dict[str, Any] = {"network.topology_type": name, "network.file": None}
    return changes if name == "fat_tree" else changes | {"network.oversubscription": None}


def _device(request: Request, name: str) -> dict[str, Any]:
    changes: dict[str, Any] = {f"hardware.{key}": None for key in _OF_THE_DEVICE}
    own_size = base_cluster(HardwareSection(gpu_model=name), request.name).node_size
    n_gpus, node_size = request.setup.n_gpus, request.setup.cluster.node_size
    hardware = request.given["hardware"]
    if "num_gpus_per_node" not in hardware and own_size and n_gpus % own_size == 0:
        node_size = own_size
    changes |= {"hardware.num_gpus_per_node": node_size, "training.num_nodes": n_gpus // node_size}
    return changes | {"hardware.gpu_model": name}


def _precision(request: Request, name: str, other_device: bool) -> dict[str, Any]:
    """Returns the keys of another precision. compute_tflops is the peak of the present one; that of another follows
    from the device's proportions."""
    changes: dict[str, Any] = {"training.mixed_precision": name, "training.precision": None}
    peak = request.setup.cluster.device.peak_flops.get(peak_dtype(name))
    if "compute_tflops" in request.given["hardware"] and not other_device and peak is not None:
        changes["hardware.compute_tflops"] = peak / TERA
    return changes
