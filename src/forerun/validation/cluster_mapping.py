"""The cluster that a measured row ran on: device by name and memory, node by its links, network as stated."""

from __future__ import annotations

import re

from forerun.cluster.catalog import cluster_from_parts, load_device
from forerun.cluster.types import Cluster, Device
from forerun.validation.hardware import Hardware, HostFacts
from forerun.validation.plan_mapping import Inexpressible
from forerun.validation.rows import Measurement
from forerun.validation.wording import says

DEVICES: tuple[tuple[str, float, str], ...] = (
    (r"^V100", 0, "V100-SXM-32GB"),
    (r"^A100.*PCIe", 60, "A100-PCIe-80GB"),
    (r"^A100.*PCIe", 0, "A100-PCIe-40GB"),
    (r"^A100", 60, "A100-SXM-80GB"),
    (r"^A100", 0, "A100-SXM-40GB"),
    (r"^A800", 0, "A800-SXM-80GB"),
    (r"^H100.*(HBM2e|500W)", 0, "H100-SXM-96GB-500W"),
    (r"^H100.*PCIe", 0, "H100-PCIe-80GB"),
    (r"^H100", 0, "H100-SXM-80GB"),
    (r"^H800", 0, "H800-SXM-80GB"),
    (r"^H200", 0, "H200-SXM"),
    (r"^B200", 0, "B200-SXM"),
    (r"^B300", 0, "B300-SXM"),
    (r"^GB200", 0, "GB200"),
    (r"^GB300", 0, "GB300"),
    (r"^MI300X", 0, "MI300X"),
    (r"^L40S", 0, "L40S"),
    (r"^A6000|^RTX ?A6000", 0, "A6000"),
    (r"^(RTX ?)?4090", 0, "RTX4090"),
)
"""(pattern of the row's gpu, least memory in GB, device of the catalogue), first match wins"""

USUAL_GBIT_S_PER_GPU = {"volta": 100.0, "ampere": 200.0, "hopper": 400.0, "blackwell": 400.0, "cdna3": 400.0}
"""one NIC per GPU of the generation's reference server: DGX-1/2 EDR, DGX A100 HDR, DGX H100/B200 NDR"""
OTHER_GBIT_S_PER_GPU = 50.0
"""workstations: a 400 Gbit/s node of eight"""


def cluster_of(row: Measurement, hardware: Hardware, notes: list[str]) -> Cluster:
    """The Cluster of a row. Raises Inexpressible for an unknown device; appends each assumption to `notes`."""
    facts = hardware.get(row.hw_key, HostFacts())
    device = _device(row, facts, notes)
    node_size = _node_size(row, facts, notes)
    spans_nodes = (row.n_gpus or 1) > node_size
    gbit = row.inter_node_gbit_s_per_gpu or facts.inter_node_gbit_s_per_gpu
    if gbit is None:
        gbit = USUAL_GBIT_S_PER_GPU.get(device.architecture, OTHER_GBIT_S_PER_GPU)
        if spans_nodes:
            notes.append(f"network between nodes not stated: taken as {gbit:g} Gbit/s per GPU")
    return cluster_from_parts(device, node_size, gbit)


def _device(row: Measurement, facts: HostFacts, notes: list[str]) -> Device:
    gpu = row.gpu or facts.gpu
    memory_gb = row.gpu_mem_gb or facts.hbm_gb
    for pattern, least_gb, name in DEVICES:
        if says(gpu, pattern) and (memory_gb is None or memory_gb >= least_gb):
            if memory_gb is None and least_gb:
                notes.append(f"memory of {gpu} not stated: taken as {name}")
            if says(f"{row.notes} {facts.stated}", r"power[- ]limited"):
                notes.append(f"{gpu} with an unknown power limit: taken at full power")
            return load_device(name)
    raise Inexpressible(f"gpu {gpu!r} is not in the device catalogue")


def _node_size(row: Measurement, facts: HostFacts, notes: list[str]) -> int:
    """GPUs that share one NVLink domain: a rack of trays where the links say so, else the server."""
    domain = re.search(r"NVL(\d+)", row.intra_node or facts.intra)
    if domain:
        return int(domain[1])
    size = row.gpus_per_node or facts.gpus_per_node
    if not size:
        size = 8
        notes.append("gpus_per_node not stated: taken as 8")
    return size
