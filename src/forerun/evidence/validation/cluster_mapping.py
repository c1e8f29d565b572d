"""Finds the cluster of a measured row: its device by name and memory, its node by the links, its network as stated."""

from __future__ import annotations

import re
from dataclasses import replace

from forerun.common.errors import UnknownName
from forerun.common.units import GIB, GIGA
from forerun.describe.cluster.catalog import cluster_from_parts, load_device
from forerun.describe.cluster.types import Cluster, Device, LinkKind
from forerun.evidence.validation.hardware import Hardware, HostFacts
from forerun.evidence.validation.rows import Measurement
from forerun.evidence.validation.wording import says

FABRICS: tuple[tuple[str, LinkKind], ...] = (
    (r"infiniband|\b(HDR|NDR|EDR|XDR)\b", "infiniband"),
    (r"omni-?path", "omnipath"),
    (r"\bEFA\b", "efa"),
    (r"roce|rdma", "roce"),
    (r"ethernet", "ethernet"),
)
"""pattern of a fabric's words -> kind of link; the first match wins"""
MEMORY_TOLERANCE = 0.1
"""largest relative difference between a device's stated and catalogued memory; beyond it is another device"""


def cluster_of(row: Measurement, hardware: Hardware, notes: list[str]) -> Cluster:
    """Returns the Cluster of a row. Raises UnknownName for an unknown device; appends each assumption to `notes`."""
    facts = hardware.get(row.hw_key, HostFacts())
    device = _device(row, facts, notes)
    intra = row.intra_node or facts.intra
    gbit = row.inter_node_gbit_s_per_gpu or facts.inter_node_gbit_s_per_gpu
    cluster = cluster_from_parts(
        row.hw_key or device.name,
        device.name,
        _node_size(row, facts, intra),
        intra_kind="nvlink" if says(intra, r"no NVSwitch") else None,
        inter_bytes_per_s=None if gbit is None else gbit * GIGA / 8,
        inter_kind=next((kind for words, kind in FABRICS if says(facts.fabric, words)), None),
    )
    if gbit is None and (row.n_gpus or 1) > cluster.node_size:
        usual = cluster.links[-1].bytes_per_s * 8 / GIGA
        notes.append(f"network between nodes not stated: taken as {usual:g} Gbit/s per GPU, usual for {device.name}")
    return replace(cluster, device=device)


def _device(row: Measurement, facts: HostFacts, notes: list[str]) -> Device:
    gpu = row.gpu or facts.gpu
    memory_gb = row.gpu_mem_gb or facts.hbm_gb
    device = _catalogued(gpu, memory_gb)
    if memory_gb is None:
        notes.append(f"memory of {gpu} not stated: taken as {device.name}")
    elif abs(memory_gb * GIB / device.memory_bytes - 1) > MEMORY_TOLERANCE:
        notes.append(f"{gpu} with {memory_gb:g} GB is not in the catalogue: taken as {device.name} with that memory")
        device = replace(device, memory_bytes=round(memory_gb * GIB))
    if says(f"{row.notes} {facts.stated}", r"power[- ]limited"):
        notes.append(f"{gpu} with an unknown power limit: taken as the catalogue's power-limited part")
        try:
            device = replace(load_device(f"{gpu}-power-limited"), memory_bytes=device.memory_bytes)
        except UnknownName:
            notes[-1] = f"{gpu} with an unknown power limit: taken at full power"
    return device


def _catalogued(gpu: str, memory_gb: float | None) -> Device:
    """Returns the device of that name and memory, or else of that name."""
    if memory_gb is not None:
        try:
            return load_device(f"{gpu}-{memory_gb:g}GB")
        except UnknownName:
            pass
    return load_device(gpu)


def _node_size(row: Measurement, facts: HostFacts, intra: str) -> int | None:
    """Returns the number of GPUs in one NVLink domain: a rack where the links say so, else the server."""
    domain = re.search(r"NVL(\d+)", intra)
    return int(domain[1]) if domain else row.gpus_per_node or facts.gpus_per_node
