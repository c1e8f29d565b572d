"""Restates a profile at another device's peaks, and replaces its constants by fitted ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from forerun.common.units import GIGA, TERA
from forerun.core.cost.profile import (
    AttentionEntry,
    GemmEntry,
    HostCopyEntry,
    MemoryEntry,
    Profile,
    Reference,
)
from forerun.core.network.constants import NodeCollectives, NodeOp
from forerun.core.network.nccl import node_constants, node_op
from forerun.describe.cluster.types import Cluster
from forerun.evidence.measure.samples import OPS, Samples

LINKS = ("nvlink", "nvswitch")
"""kinds of links to which a profile's collectives apply"""
_NOTHING = 1e-6
"""fitted values below this are 0: a fit stops a little above a bound of 0"""
_OF_GRADIENTS = ("gradient_slowdown", "own_wgrad_rate")
"""constants of a dtype that its forward products do not tell"""
Entry = TypeVar("Entry", GemmEntry, AttentionEntry, NodeOp)


@dataclass(frozen=True)
class NewPart:
    """The constants of one part of a profile, with the number of their rows and their errors."""

    section: str
    """gemm.DTYPE, attention.head_dim.SIZE, memory_bound, host_copy, collectives.NAME"""
    entry: Any
    """GemmEntry, AttentionEntry, NodeOp, or a pair of launch in microseconds and share of the peak bandwidth"""
    rows: int
    error_percent: float
    """mean absolute error on the rows of the fit"""
    left_out_percent: float | None

    def figures(self) -> str:
        """Returns in words how well the constants explain the rows."""
        unseen = "" if self.left_out_percent is None else f", {self.left_out_percent:.1f} % on shapes left out"
        return f"{self.rows} rows, mean error {self.error_percent:.1f} % in sample{unseen}"


def at_device(profile: Profile, cluster: Cluster) -> Profile:
    """Returns the profile with its rates stated at the peaks of the cluster's device, not of the measured one."""
    device, reference = cluster.device, profile.reference
    own = {dtype: rounded(flops / TERA, 6) for dtype, flops in device.peak_flops.items()}
    if "bf16" not in own and "fp16" in own:
        own["bf16"] = own["fp16"]
    peaks = {dtype: own.get(dtype, peak) for dtype, peak in reference.peak_tflops.items()}
    hbm_gb_s = rounded(device.memory_bytes_per_s / GIGA, 6)
    gemm = {
        dtype: replace(
            entry,
            p_tflops=_scaled(entry.p_tflops, peaks[dtype], reference.peak_tflops[dtype]),
            hbm_gb_s=_scaled(entry.hbm_gb_s, hbm_gb_s, reference.hbm_gb_s),
        )
        for dtype, entry in profile.gemm.items()
    }
    heads = {
        size: replace(entry, p_tflops=_scaled(entry.p_tflops, peaks["bf16"], reference.peak_tflops["bf16"]))
        for size, entry in profile.attention.head_dim.items()
    }
    return replace(
        profile,
        name=device.name,
        reference=Reference(peaks, hbm_gb_s),
        gemm=gemm,
        attention=replace(profile.attention, head_dim=heads),
        collectives=_at_link(profile, cluster),
    )


def _at_link(profile: Profile, cluster: Cluster) -> NodeCollectives | None:
    """Returns collectives stated at the rate of the cluster's links, and unchanged where those are not NVLink."""
    if cluster.links[0].kind not in LINKS:
        return profile.collectives
    found, speed = node_constants(cluster, profile.collectives)
    if speed == 1.0:
        return found
    scaled = {
        name: replace(op, **{key: rounded(getattr(op, key) * speed) for key in ("bw1", "bw2", "bw3")})
        for name, op in ((name, node_op(kind, found)) for name, kind in OPS.items())
    }
    return NodeCollectives(link_gb_s=rounded(cluster.links[0].bytes_per_s / GIGA, 6), source=found.source, **scaled)


def _scaled(value: float, peak: float, old_peak: float) -> float:
    return value if peak == old_peak else min(rounded(value * peak / old_peak), peak)


def with_parts(old: Profile, parts: Iterable[NewPart], samples: Samples, cluster: Cluster) -> Profile:
    """Returns `old`, which is stated at the peaks of the cluster's device, with the constants of `parts`."""
    by_kind: dict[str, dict[str, NewPart]] = {}
    for part in parts:
        by_kind.setdefault(part.section.partition(".")[0], {})[part.section.rpartition(".")[2]] = part
    profile = _with_gemm(old, by_kind.get("gemm", {}), samples, cluster)
    profile = _with_heads(profile, by_kind.get("attention", {}), samples)
    profile = _with_collectives(profile, by_kind.get("collectives", {}), samples)
    for part in by_kind.get("memory_bound", {}).values():
        launch_us, share = (rounded(value) for value in part.entry)
        profile = replace(
            profile, memory_bound=MemoryEntry(share, launch_us, fitted_on(samples.of_kernels, part.figures()))
        )
    for part in by_kind.get("host_copy", {}).values():
        launch_us, share = (rounded(value) for value in part.entry)
        profile = replace(
            profile, host_copy=HostCopyEntry(share, launch_us, fitted_on(samples.of_kernels, part.figures()))
        )
    files = ", ".join(name for name in (samples.of_kernels, samples.of_network) if name)
    named = Path(cluster.device.cost_profile).name
    source = f"forerun calibrate on {files}; what they do not tell about is of cost profile {named}"
    return replace(profile, source=source, calibrated=old.calibrated or "bf16" in by_kind.get("gemm", {}))


def with_roles(profile: Profile, rates: Mapping[str, float], words: str) -> Profile:
    """Returns `profile` with new rates of dgrad and wgrad (keys of `rates`), and `words` as their source."""
    if not rates:
        return profile
    own = profile.gemm_roles
    roles = replace(
        own,
        dgrad_rate=rounded(rates.get("dgrad", own.dgrad_rate)),
        wgrad_rate=rounded(rates.get("wgrad", own.wgrad_rate)),
        source=f"{words}; what it does not name: {own.source}",
    )
    return replace(profile, gemm_roles=roles)


def _with_gemm(old: Profile, parts: Mapping[str, NewPart], samples: Samples, cluster: Cluster) -> Profile:
    peaks, gemm, hbm_gb_s = dict(old.reference.peak_tflops), dict(old.gemm), old.reference.hbm_gb_s
    for dtype, part in parts.items():
        peaks[dtype] = rounded(cluster.device.peak(dtype) / TERA, 6)
        entry: GemmEntry = rounded_entry(part.entry)
        known = {name: getattr(gemm[dtype], name) for name in _OF_GRADIENTS} if dtype in gemm else {}
        gemm[dtype] = replace(
            entry,
            **known,
            p_tflops=min(entry.p_tflops, peaks[dtype]),
            hbm_gb_s=min(entry.hbm_gb_s, hbm_gb_s),
            source=fitted_on(samples.of_kernels, part.figures()),
        )
    return replace(old, reference=Reference(peaks, hbm_gb_s), gemm=gemm)


def _with_heads(old: Profile, parts: Mapping[str, NewPart], samples: Samples) -> Profile:
    if not parts:
        return old
    peak, heads = old.reference.peak_tflops["bf16"], dict(old.attention.head_dim)
    for size, part in parts.items():
        entry: AttentionEntry = rounded_entry(part.entry)
        heads[int(size)] = replace(entry, p_tflops=min(entry.p_tflops, peak))
    source = _of_several(parts, {str(size) for size in heads}, samples.of_kernels, old.attention.source)
    return replace(old, attention=replace(old.attention, head_dim=heads, source=source))


def _with_collectives(old: Profile, parts: Mapping[str, NewPart], samples: Samples) -> Profile:
    if not parts or old.collectives is None:
        return old
    source = _of_several(parts, set(OPS), samples.of_network, old.collectives.source)
    ops = {name: rounded_entry(part.entry) for name, part in parts.items()}
    return replace(old, collectives=replace(old.collectives, **ops, source=source))


def _of_several(parts: Mapping[str, NewPart], every: set[str], files: str, old_source: str) -> str:
    """Returns the source that several entries share."""
    found = fitted_on(files, "; ".join(f"{name}: {part.figures()}" for name, part in parts.items()))
    return found if every <= set(parts) else f"{found}; others: {old_source}"


def fitted_on(files: str, figures: str) -> str:
    """Returns the source of constants that were fitted here."""
    return f"forerun calibrate on {files}: {figures}"


def rounded_entry(entry: Entry) -> Entry:
    """Returns fitted constants with four digits: the fifth is noise, and would clutter a diff."""
    changed: dict[str, Any] = {
        name: rounded(value) for name, value in asdict(entry).items() if not isinstance(value, str)
    }
    return replace(entry, **changed)


def rounded(value: float, digits: int = 4) -> float:
    """Returns `value` with so many digits, and 0 if it is nearly 0."""
    return 0.0 if abs(value) < _NOTHING else float(f"{value:.{digits}g}")
