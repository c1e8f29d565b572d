"""Changes outside the plan: how gradients are exchanged, and which devices run it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from forerun.answers.analysis.setup import Setup
from forerun.answers.experiment.advice.change import PATTERN, Candidate, Kind
from forerun.answers.experiment.description.read import changed
from forerun.answers.experiment.description.sections import HardwareSection
from forerun.answers.experiment.request import Request
from forerun.common.errors import ForerunError
from forerun.core.network.gradient_compression import GradientCompression
from forerun.core.network.patterns import CommunicationPattern, has_all_reduce
from forerun.core.network.patterns_catalog import PATTERNS, pattern_of
from forerun.describe.cluster.catalog import cluster_table, load_cluster
from forerun.describe.cluster.types import Cluster, Device
from forerun.describe.plan.plan import Plan

DEVICE: Kind = "device"
_COMPRESSION = 4.0
"""bytes of gradients over those on the wire: fp32 in 8 bits"""
_OTHER_DEVICES = 5
"""devices that are tried for speed, and for speed per dollar"""
_NO_CUDA = ("tpu",)
"""architectures without the kernels of the stacks and without NCCL"""
_NOT_OF_GPUS = ("preset", "mixed", "slow_gpus", "slow_links")
"""keys of `hardware` that stay as they are with other devices"""


def patterns(request: Request) -> Iterator[Candidate]:
    """Returns other patterns of exchanging gradients, if a pattern decides it now."""
    own = request.setup.pattern
    if isinstance(own, GradientCompression):
        return  # the experiment already states how gradients are compressed
    if request.setup.plan.dp == 1 or not has_all_reduce(request.setup.plan) or (own is not None and own.everything):
        return
    for name in PATTERNS:
        pattern = pattern_of(name)
        if pattern is None or not (pattern.everything or pattern.zero_stage):
            title = f"exchange gradients by {name}" if pattern else "let NCCL choose how gradients are exchanged"
            yield from _with_pattern(request, "communication pattern", title, name, pattern)
    same = next((name for name in PATTERNS if pattern_of(name) == own), None)
    if same is not None:
        given = {"name": same, "compression": _COMPRESSION}
        title = f"compress gradients to {1 / _COMPRESSION:.0%} of their bytes"
        caveat = "compression loses bits: check that training still converges"
        yield from _with_pattern(request, "gradient compression", title, given, pattern_of(given), caveat)


def _with_pattern(
    request: Request, kind: Kind, title: str, given: object, pattern: CommunicationPattern | None, caveat: str = ""
) -> Iterator[Candidate]:
    if pattern != request.setup.pattern:
        yield Candidate(kind, title, replace(request.setup, pattern=pattern), {PATTERN: given}, {}, caveat)


def devices(request: Request) -> Iterator[Candidate]:
    """Yields the same number of GPUs of every other device with a price, with the links of its vendor."""
    setup = request.setup
    if setup.kinds:
        return
    for cluster in _other_clusters(request):
        change: dict[str, Any] = {
            f"hardware.{key}": None
            for key in (request.given.get("hardware") or {})
            if key in HardwareSection.model_fields and key not in _NOT_OF_GPUS
        }
        change |= {"hardware.gpu_model": cluster.name, "hardware.num_gpus_per_node": setup.cluster.node_size}
        plan = setup.plan
        if plan.precision not in cluster.device.peak_flops:
            change["training.mixed_precision"] = half(cluster.device)
            plan = replace(plan, precision=half(cluster.device))
        try:
            other = changed(request, change).setup if request.given else replace(setup, cluster=cluster, plan=plan)
        except ForerunError:
            continue
        title = f"{cluster.device.name} (as {cluster.name}) instead of {setup.cluster.device.name}"
        yield Candidate(DEVICE, title, other, change)


def devices_of(setup: Setup) -> list[Device]:
    """Returns the devices of all kinds of GPUs."""
    return [setup.cluster.device, *(kind.device for kind in setup.kinds if kind.device is not None)]


def half(*gpus: Device) -> Literal["bf16", "fp16"]:
    """Returns the 16-bit dtype to train in on `gpus`."""
    return "bf16" if all("bf16" in device.peak_flops for device in gpus) else "fp16"


def _other_clusters(request: Request) -> list[Cluster]:
    """Returns the clusters with the best rates and with the best rates per dollar, of each device the cheapest."""
    setup = request.setup
    size, own = setup.cluster.node_size, setup.cluster.device
    cheapest: dict[str, tuple[float, Cluster]] = {}
    for row in cluster_table():
        price = request.prices.by_name.get(row.name, request.prices.by_name.get(row.device, row.price_per_gpu_hour))
        if price is None or row.device == own.name or row.gpus_per_node < min(size, setup.n_gpus):
            continue
        cluster = load_cluster(row.name)
        if cluster.device.architecture in _NO_CUDA or _precision_on(cluster.device, setup.plan) is None:
            continue
        if row.device not in cheapest or price < cheapest[row.device][0]:
            links = (replace(cluster.links[0], size=size), *cluster.links[1:])
            cheapest[row.device] = price, replace(cluster, links=links)
    fastest = sorted(cheapest.values(), key=lambda each: -_speed(each[1].device, setup.plan))[:_OTHER_DEVICES]
    best_value = sorted(cheapest.values(), key=lambda each: -_speed(each[1].device, setup.plan) / each[0])
    chosen = [*fastest, *best_value[:_OTHER_DEVICES]]
    return list({cluster.name: cluster for _, cluster in chosen}.values())


def _precision_on(device: Device, plan: Plan) -> str | None:
    """Returns the plan's precision on `device`: itself, or the other 16-bit one."""
    if plan.precision in device.peak_flops:
        return plan.precision
    return half(device) if plan.precision in ("bf16", "fp16") and half(device) in device.peak_flops else None


def _speed(device: Device, plan: Plan) -> float:
    """Returns the geometric mean of arithmetic rate and memory bandwidth; the device with the largest is tried
    first."""
    peak = device.peak_flops[_precision_on(device, plan) or plan.precision]
    return float((peak * device.memory_bytes_per_s) ** 0.5)
