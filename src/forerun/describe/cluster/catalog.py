"""Loads devices and clusters by name or from a user's file, and builds a cluster from its parts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from forerun.common.admission import read_bytes
from forerun.common.errors import ForerunError, UnknownName
from forerun.common.shipped import shipped_text
from forerun.common.units import GIB, GIGA, TERA
from forerun.common.yaml_files import check, parse_yaml, read_yaml
from forerun.describe.cluster.schema import (
    BITS_PER_BYTE,
    US_PER_S,
    ClusterEntry,
    CudaEntry,
    DeviceEntry,
    LinkEntry,
    LinkKindEntry,
    SystemEntry,
)
from forerun.describe.cluster.types import Cluster, Device, Link, LinkKind, is_profile_file

INTRA_NODE = "intra-node"
INTER_NODE = "inter-node"
_LINKS = ("intra_node", "inter_node")
_FILE_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class ClusterRow:
    """One cluster preset, as `forerun clusters` lists it."""

    name: str
    aliases: tuple[str, ...]
    device: str
    gpus_per_node: int
    memory_gib: float
    bf16_tflops: float | None
    """dense; None if the device has no bf16 matrix unit"""
    intra_node: str
    intra_node_gb_s: float
    """for each GPU and direction"""
    inter_node: str | None
    inter_node_gbit_s: float | None
    """for each GPU and direction"""
    price_per_gpu_hour: float | None


@dataclass(frozen=True)
class _Catalog:
    devices: Mapping[str, DeviceEntry]
    raw_devices: Mapping[str, dict[str, Any]]
    device_by_alias: Mapping[str, str]
    kernels: Mapping[str, dict[str, Any]]
    clusters: Mapping[str, ClusterEntry]
    cluster_aliases: Mapping[str, tuple[str, ...]]
    cluster_by_alias: Mapping[str, str]
    latency_s: Mapping[str, float]


def device_names() -> list[str]:
    """Returns the sorted names of the known devices, without their aliases."""
    return list(_catalog().devices)


def cluster_names() -> list[str]:
    """Returns the names of the cluster presets, without their aliases, in the order of the file."""
    return list(_catalog().clusters)


def device_kernels() -> Mapping[str, dict[str, Any]]:
    """Returns the kernel constants of the device files by the name that `cost_profile` gives, unchecked."""
    return _catalog().kernels


def cuda_entries() -> dict[str, CudaEntry]:
    """Returns the properties that CUDA reports about a GPU, by the name of the device, for each device file that has
    them.
    """
    return {name: entry.cuda for name, entry in _catalog().devices.items() if entry.cuda is not None}


def load_device(name: str) -> Device:
    """Returns the device of a name or alias, in any case. Raises UnknownName, which lists the known devices."""
    key, entry = _known_device(name)
    return entry.device(key)


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Returns the cluster of a preset's name or alias (in any case), or of a user's YAML file.

    A device's name stands for the reference system of its vendor. Raises UnknownName, which lists the presets, and
    ForerunError of one line naming file and key for a file that is missing or wrong.
    """
    text = str(name_or_path)
    catalog = _catalog()
    key = catalog.cluster_by_alias.get(text.strip().lower())
    if key is not None and not isinstance(name_or_path, Path):
        return _cluster(catalog.clusters[key], key, key)
    if isinstance(name_or_path, Path) or text.lower().endswith(_FILE_SUFFIXES) or _is_file(text):
        path = Path(text)
        return cluster_from_keys(read_yaml(path), path.stem, path.parent, str(path))
    if text.strip().lower() in catalog.device_by_alias:
        return cluster_from_parts(catalog.device_by_alias[text.strip().lower()], text)
    raise UnknownName("cluster or file", text, cluster_names(), "forerun clusters")


def cluster_from_keys(data: dict[str, Any], name: str, folder: Path, place: str) -> Cluster:
    """Returns the cluster that the keys of a cluster file describe; it is called `name` where the keys name none.

    The paths of its network file and of its device's cost profile are relative to `folder`. Raises
    ForerunError, which starts with `place`.
    """
    entry = check(ClusterEntry, data, place)
    cluster = _cluster(entry, entry.name or name, place)
    if is_profile_file(cluster.device.cost_profile):
        cluster = replace(cluster, device=_with_profile_file(cluster.device, folder, place))
    return cluster if entry.network is None else replace(cluster, network=str(folder / entry.network))


def _with_profile_file(device: Device, folder: Path, place: str) -> Device:
    """Returns the device with the path (under `folder`) and the digest of its cost profile's file."""
    path = folder / device.cost_profile
    try:
        digest = hashlib.sha256(read_bytes(path)).hexdigest()
    except ForerunError as error:
        raise ForerunError(f"{place}: device.cost_profile: {error}") from None
    return replace(device, cost_profile=str(path), profile_digest=digest)


def cluster_table() -> list[ClusterRow]:
    """Returns one row for each cluster preset, in the order of the file."""
    catalog = _catalog()
    return [
        _row(_cluster(entry, name, name), catalog.cluster_aliases[name]) for name, entry in catalog.clusters.items()
    ]


def cluster_from_parts(
    name: str,
    device: str | Device,
    gpus_per_node: int | None = None,
    *,
    intra_bytes_per_s: float | None = None,
    intra_kind: LinkKind | None = None,
    inter_bytes_per_s: float | None = None,
    inter_kind: LinkKind | None = None,
    host_bytes_per_s: float | None = None,
    price_per_gpu_hour: float | None = None,
    mtbf_gpu_hours: float | None = None,
) -> Cluster:
    """Builds a cluster of one device. The reference system of the device's vendor fills in missing arguments.

    Rates are bytes/s for each GPU and direction (NVLink: half of the vendor's figure). A kind without a rate keeps the
    reference rate, and a rate without a kind the reference kind. Raises ForerunError if a Device that is not in the
    catalogue needs a default, or a figure is not positive.
    """
    place = f"cluster {name}"
    known = load_device(device) if isinstance(device, str) else device
    reference = _catalog().devices.get(known.name)
    own = check(ClusterEntry, {"device": known.name, "gpus_per_node": gpus_per_node}, place)
    node = _reference_node(own, reference)
    intra = _changed(node.intra, INTRA_NODE, node.size or 0, intra_bytes_per_s, intra_kind, place)
    inter = _changed(node.inter, INTER_NODE, 0, inter_bytes_per_s, inter_kind, place)
    node = replace(node, intra=intra, inter=inter)
    if host_bytes_per_s is not None:
        node = replace(node, host_bytes_per_s=_positive(host_bytes_per_s, "host_bytes_per_s", place))
    return _assemble(name, known, node, price_per_gpu_hour, mtbf_gpu_hours, place)


def _changed(
    link: Link | None, name: str, size: int, bytes_per_s: float | None, kind: LinkKind | None, place: str
) -> Link | None:
    """Returns a reference link with another rate or kind; a new kind brings its own latency."""
    if kind is not None and link is not None:
        own = link if link.kind == kind else replace(link, peer_to_peer=True, host_path_bytes_per_s=None, reduces=None)
        link = replace(own, kind=kind, latency_s=link_latency_s(kind), source=f"kind as given; rate: {link.source}")
    if bytes_per_s is None:
        return link
    rate = _positive(bytes_per_s, f"{name} bytes_per_s", place)
    if link is not None:
        return replace(link, bytes_per_s=rate, source="as given")
    if kind is None:
        raise ForerunError(f"{place}: the {name} link needs a kind, as its device is not a known one")
    return Link(name, kind, size, rate, link_latency_s(kind), "as given")


def _positive(value: float, what: str, place: str) -> float:
    if not 0 < value < float("inf"):
        raise ForerunError(f"{place}: {what} is {value!r}, expected a positive number")
    return value


@lru_cache(maxsize=1)
def _catalog() -> _Catalog:
    links = _preset("links.yaml")
    files_of_devices, documents = _device_files(), _preset("documents.yaml")
    kernels = {name: raw.pop("kernels") for name, raw in files_of_devices.items() if "kernels" in raw}
    raw_devices, device_aliases = _without_aliases(files_of_devices)
    raw_devices = {name: _with_documents(raw, documents) for name, raw in raw_devices.items()}
    devices = {name: check(DeviceEntry, raw, f"devices/{name}.yaml") for name, raw in raw_devices.items()}
    raw_clusters, cluster_aliases = _without_aliases(_preset("clusters.yaml")["clusters"])
    clusters = {name: check(ClusterEntry, raw, f"clusters.yaml: {name}") for name, raw in raw_clusters.items()}
    return _Catalog(
        devices=devices,
        raw_devices=raw_devices,
        device_by_alias=_names_of(device_aliases),
        kernels={raw.pop("name", name): raw for name, raw in kernels.items()},
        clusters=clusters,
        cluster_aliases=cluster_aliases,
        cluster_by_alias=_names_of(cluster_aliases),
        latency_s={k: check(LinkKindEntry, raw, f"links.yaml: {k}").latency_us / US_PER_S for k, raw in links.items()},
    )


def _preset(file_name: str) -> dict[str, Any]:
    return parse_yaml(shipped_text("forerun.describe.cluster", f"presets/{file_name}"), file_name)


def _device_files() -> dict[str, dict[str, Any]]:
    """Returns the contents of each file of the folder `devices`, by file name without .yaml."""
    found = (entry.name for entry in (files("forerun.describe.cluster") / "devices").iterdir())
    paths = {name.removesuffix(".yaml"): f"devices/{name}" for name in sorted(found) if name.endswith(".yaml")}
    return {name: parse_yaml(shipped_text("forerun.describe.cluster", path), path) for name, path in paths.items()}


def _with_documents(raw: dict[str, Any], documents: Mapping[str, str]) -> dict[str, Any]:
    """Returns `raw` with each document key in a `source` replaced by the document's text."""

    def text(source: Any) -> Any:
        if isinstance(source, dict):
            return {key: text(value) for key, value in source.items()}
        return documents.get(source, source) if isinstance(source, str) else source

    linked = {key: {**link, "source": text(link.get("source", ""))} for key, link in raw.items() if key in _LINKS}
    return {**raw, **linked, "source": text(raw.get("source", {}))}


def _without_aliases(raw: dict[str, dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], dict[str, tuple[str, ...]]]:
    """Splits entries into those that a user could write and their aliases."""
    entries = {name: {key: value for key, value in entry.items() if key != "aliases"} for name, entry in raw.items()}
    return entries, {name: tuple(entry.get("aliases", ())) for name, entry in raw.items()}


def _names_of(names: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Returns the name for each lower-case name or alias. Raises ForerunError if a word names two things."""
    found: dict[str, str] = {}
    for name, aliases in names.items():
        for word in (name, *aliases):
            if found.setdefault(word.lower(), name) != name:
                raise ForerunError(f"{word!r} names both {found[word.lower()]} and {name}; rename one")
    return found


def _known_device(name: str) -> tuple[str, DeviceEntry]:
    catalog = _catalog()
    key = catalog.device_by_alias.get(name.strip().lower())
    if key is None:
        raise UnknownName("device", name, device_names())
    return key, catalog.devices[key]


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _cluster(entry: ClusterEntry, name: str, place: str) -> Cluster:
    """Returns the cluster of an entry; the reference system of its device fills the gaps."""
    if isinstance(entry.device, str):
        try:
            device_name, reference = _known_device(entry.device)
        except UnknownName as error:
            raise ForerunError(f"{place}: device: {error}") from None
    else:
        device_name, reference = _inline_device(entry.device, name, place)
    device = reference.device(device_name, entry.sustained)
    node = _reference_node(entry, reference)
    return _assemble(name, device, node, entry.price_per_gpu_hour, entry.mtbf_gpu_hours, place)


def _inline_device(data: dict[str, Any], cluster_name: str, place: str) -> tuple[str, DeviceEntry]:
    """Returns name and entry of a device that a cluster file spells out, over those of the device that `like` names."""
    own = {str(key): value for key, value in data.items()}
    name, like = own.pop("name", f"device of {cluster_name}"), own.pop("like", None)
    for key, value in (("name", name), ("like", like)):
        if not isinstance(value, str) and not (key == "like" and value is None):
            raise ForerunError(f"{place}: device.{key}: expected text, got {value!r}")
    if like is not None:
        try:
            base = dict(_catalog().raw_devices[_known_device(like)[0]])
        except UnknownName as error:
            raise ForerunError(f"{place}: device.like: {error}") from None
        own = _overlay(base, own)
    entry = check(DeviceEntry, own, f"{place}: device")
    known = sorted({one.architecture for one in _catalog().devices.values()})
    if entry.architecture not in known:
        raise ForerunError(f"{place}: device: architecture: {UnknownName('architecture', entry.architecture, known)}")
    return name, entry


def _overlay(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Returns `base` with the keys of `own` over it, and without the sources of the figures that `own` replaces."""
    replaced = set(own)
    if replaced & {"memory_gb", "memory_gib"}:
        replaced |= {"memory_gb", "memory_gib"}
    kept = {key: value for key, value in base.items() if key not in replaced}
    sources = {key: text for key, text in base["source"].items() if key not in replaced}
    own_sources = own.get("source", {})
    return kept | own | {"source": sources | own_sources if isinstance(own_sources, dict) else own_sources}


@dataclass(frozen=True)
class _Node:
    """The parts of a cluster other than its device; None if neither the entry nor a reference system states one."""

    size: int | None
    intra: Link | None
    inter: Link | None
    host_bytes_per_s: float | None
    host_speed: float
    source: dict[str, str]


def _reference_node(entry: ClusterEntry, reference: DeviceEntry | None) -> _Node:
    """Returns the parts of an entry; the reference system of its device fills the gaps."""
    parts: list[SystemEntry] = [entry] if reference is None else [entry, reference]
    size = next((part.gpus_per_node for part in parts if part.gpus_per_node is not None), None)
    intra = _with_peers_of(*(part.intra_node for part in parts if part.intra_node is not None))
    inter = next((part.inter_node for part in parts if part.inter_node is not None), None)
    host_gb_s = next((part.host_gb_s for part in parts if part.host_gb_s is not None), None)
    source = {
        key: reference.source[key]
        for key in ("gpus_per_node", "host_gb_s", "host_speed")
        if reference is not None and key in reference.source and getattr(entry, key) is None
    }
    return _Node(
        size=size,
        intra=None if intra is None or size is None else intra.link(INTRA_NODE, size, link_latency_s(intra.kind)),
        inter=None if inter is None else inter.link(INTER_NODE, 0, link_latency_s(inter.kind)),
        host_bytes_per_s=None if host_gb_s is None else host_gb_s * GIGA,
        host_speed=next((part.host_speed for part in parts if part.host_speed is not None), 1.0),
        source=source | entry.source,
    )


def _with_peers_of(own: LinkEntry | None = None, reference: LinkEntry | None = None) -> LinkEntry | None:
    """Returns the first link; it takes peer access from a reference link of its kind where it states none."""
    if own is None or reference is None or own.peer_to_peer is not None or own.kind != reference.kind:
        return own
    return own.model_copy(update={"peer_to_peer": reference.peer_to_peer, "host_path_gb_s": reference.host_path_gb_s})


def link_latency_s(kind: LinkKind) -> float:
    """Returns the seconds of one hop of a small message on a link of `kind`."""
    return _catalog().latency_s[kind]


def _assemble(
    name: str, device: Device, node: _Node, price_per_gpu_hour: float | None, mtbf_gpu_hours: float | None, place: str
) -> Cluster:
    """Puts a cluster together, its links ordered from the inside out; without a link between nodes it is one node."""
    parts = {"gpus_per_node": node.size, "intra_node": node.intra, "host_gb_s": node.host_bytes_per_s}
    missing = [key for key, value in parts.items() if value is None]
    if missing or node.intra is None or node.host_bytes_per_s is None:
        raise ForerunError(f"{place}: key {missing[0]!r} is missing, and only known devices have a reference system")
    return Cluster(
        name=name,
        device=device,
        links=(node.intra,) if node.inter is None else (node.intra, node.inter),
        host_bytes_per_s=node.host_bytes_per_s,
        host_speed=node.host_speed,
        price_per_gpu_hour=price_per_gpu_hour,
        mtbf_gpu_hours=mtbf_gpu_hours,
        source=node.source,
    )


def _row(cluster: Cluster, aliases: tuple[str, ...]) -> ClusterRow:
    device, intra = cluster.device, cluster.links[0]
    inter = cluster.links[1] if len(cluster.links) > 1 else None
    bf16 = device.peak_flops.get("bf16")
    return ClusterRow(
        name=cluster.name,
        aliases=aliases,
        device=device.name,
        gpus_per_node=cluster.node_size,
        memory_gib=device.memory_bytes / GIB,
        bf16_tflops=None if bf16 is None else bf16 / TERA,
        intra_node=intra.kind,
        intra_node_gb_s=intra.bytes_per_s / GIGA,
        inter_node=inter.kind if inter else None,
        inter_node_gbit_s=inter.bytes_per_s * BITS_PER_BYTE / GIGA if inter else None,
        price_per_gpu_hour=cluster.price_per_gpu_hour,
    )
