"""The cluster of an experiment: a known one with the figures that the experiment replaces."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from forerun.answers.analysis.setup import RankKind
from forerun.answers.experiment.description.sections import HardwareSection, MixedEntry, NetworkSection
from forerun.common.errors import ForerunError, at
from forerun.common.shipped import shipped_data
from forerun.common.units import GIB, GIGA, TERA
from forerun.describe.cluster.catalog import (
    INTER_NODE,
    cluster_from_keys,
    cluster_table,
    link_latency_s,
    load_cluster,
    load_device,
)
from forerun.describe.cluster.memory_limit import is_whole
from forerun.describe.cluster.schema import BITS_PER_BYTE, US_PER_S
from forerun.describe.cluster.types import Cluster, Device, Link


@cache
def hardware_presets() -> dict[str, dict[str, Any]]:
    """Returns the presets of hardware.preset: size or GPU -> keys of `hardware`, and num_nodes of a size."""
    document = shipped_data("forerun.answers.experiment.description", "hardware_presets.yaml")
    presets: dict[str, dict[str, Any]] = {**document["sizes"]["presets"], **document["profiles"]["presets"]}
    return presets


def base_cluster(section: HardwareSection, place: str) -> Cluster:
    """Returns the cluster that gpu_model or cluster names.

    Raises ForerunError: neither is given, both are and contradict, or the name or file is wrong.
    """
    named = None if section.gpu_model is None else _of_gpu_model(section.gpu_model, place)
    if section.cluster is None:
        if named is None:
            raise ForerunError(
                f"{place}: key 'gpu_model' is missing; give it (A100, H100, ...), or give cluster or preset"
            )
        return named
    given = _of_cluster(section.cluster, f"{place}: cluster")
    if named is not None and named.device.name != given.device.name:
        raise ForerunError(
            f"{place}: gpu_model {section.gpu_model} means {named.device.name}, but cluster {given.name} has"
            f" {given.device.name}; give only one of gpu_model and cluster"
        )
    return given


def adapted(cluster: Cluster, section: HardwareSection, network: NetworkSection, dtype: str, place: str) -> Cluster:
    """Returns `cluster` with the experiment's figures in place of its own.

    compute_tflops is the dense peak of `dtype`; peaks of other precisions scale with it.
    """
    device = _device(cluster.device, section, dtype, place)
    links = list(cluster.links)
    intra = links[0]
    if section.num_gpus_per_node is not None:
        intra = replace(intra, size=section.num_gpus_per_node)
    if section.intra_node_gbit_s is not None:
        intra = replace(intra, bytes_per_s=_bytes_per_s(section.intra_node_gbit_s), source="as given")
    inter = links[1] if len(links) > 1 else None
    if section.network_gbit_s is not None:
        rate = _bytes_per_s(section.network_gbit_s)
        inter = inter or Link(INTER_NODE, "infiniband", 0, rate, link_latency_s("infiniband"))
        inter = replace(inter, bytes_per_s=rate, source="as given")
    if network.base_latency_us is not None and inter is not None:
        inter = replace(inter, latency_s=network.base_latency_us / US_PER_S)
    return replace(cluster, device=device, links=(intra, *([] if inter is None else [inter]), *links[2:]))


def rank_kinds(section: HardwareSection, n_gpus: int, node_size: int, place: str) -> tuple[RankKind, ...]:
    """Returns the GPUs that differ.

    Raises ForerunError: an unknown device, or more GPUs than there are.
    """
    kinds = tuple(_kind(entry, node_size, f"{place}: mixed.{number}") for number, entry in enumerate(section.mixed))
    taken = sum(kind.n_gpus for kind in kinds)
    if taken > n_gpus:
        raise ForerunError(f"{place}: mixed lists {taken} GPUs, but the run has {n_gpus}; raise training.num_nodes")
    for rank in section.slow_gpus:
        if rank >= n_gpus:
            raise ForerunError(
                f"{place}: slow_gpus: there is no rank {rank}; choose one of the ranks 0 to {n_gpus - 1}"
            )
    return kinds


def memory_bytes(own_bytes: int, memory_gb: float | None) -> int:
    """Returns the memory of a GPU: its usable memory if `memory_gb` is the advertised size, else `memory_gb` GiB."""
    own_gib = own_bytes / GIB
    if memory_gb is None or is_whole(own_gib, memory_gb):
        return own_bytes
    return round(memory_gb * GIB)


def _of_gpu_model(name: str, place: str) -> Cluster:
    word = name.strip().lower()
    clusters = {each.lower() for row in cluster_table() for each in (row.name, *row.aliases)}
    if word not in clusters:
        with at(f"{place}: gpu_model"):
            load_device(name)
    return load_cluster(word)


def _of_cluster(given: str | dict[str, Any], place: str) -> Cluster:
    with at(place):
        if isinstance(given, dict):
            return cluster_from_keys({str(key): each for key, each in given.items()}, "cluster", Path(), "keys")
        return load_cluster(Path(given)) if is_path(given) else load_cluster(given)


def is_path(text: str) -> bool:
    """Returns whether a name means a path: it contains a folder or has the ending of a file."""
    return "/" in text or "\\" in text or text.lower().endswith((".yaml", ".yml", ".json"))


def _device(own: Device, section: HardwareSection, dtype: str, place: str) -> Device:
    peaks = dict(own.peak_flops)
    if section.compute_tflops is not None:
        if dtype not in peaks:
            raise ForerunError(
                f"{place}: compute_tflops is the peak of {dtype}, which {own.name} lacks; train in {', '.join(peaks)}"
            )
        ratio = section.compute_tflops * TERA / peaks[dtype]
        peaks = {name: peak * ratio for name, peak in peaks.items()} | {dtype: section.compute_tflops * TERA}
    rate = section.memory_bandwidth_gb_s
    return replace(
        own,
        peak_flops=peaks,
        memory_bytes=memory_bytes(own.memory_bytes, section.memory_gb),
        memory_bytes_per_s=own.memory_bytes_per_s if rate is None else rate * GIGA,
    )


def _bytes_per_s(gbit_s: float) -> float:
    return gbit_s * GIGA / BITS_PER_BYTE


def _kind(entry: MixedEntry, node_size: int, place: str) -> RankKind:
    device = _of_gpu_model(entry.gpu_model, place).device
    n_gpus = entry.num_gpus or (entry.num_nodes or 0) * node_size
    return RankKind(device.name, n_gpus, device, entry.slowdown, entry.batch_size_per_gpu)
