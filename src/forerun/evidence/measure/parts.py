"""The parts of a cost profile that are fitted separately, each with its measurements.

A part fits its constants to rows, predicts the time of rows from constants, and knows which rows a left-out error must
omit together: shapes that differ only in the size over which a fit interpolates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from forerun.common.units import GIGA, TERA, US
from forerun.core.cost.attention import AttentionRates, attention_s
from forerun.core.cost.gemm import DGRAD, DTYPE_BYTES, WGRAD, GemmRates, gemm_s
from forerun.core.cost.measured import ANY
from forerun.core.cost.profile import AttentionEntry, GemmEntry, HostCopyEntry, MemoryEntry, Profile
from forerun.core.network.constants import NodeOp
from forerun.core.program.kinds import Attention
from forerun.core.program.types import F64
from forerun.describe.cluster.types import Device
from forerun.describe.kernels.attention import fused_kernel
from forerun.evidence.measure.fit import (
    LEAST_ROWS,
    Peaks,
    Switches,
    attention_constants,
    attention_shapes,
    cache_pass_s,
    collective_s,
    fit_attention,
    fit_bytes,
    fit_collective,
    fit_gemm,
    fit_rate,
    gemm_constants,
)
from forerun.evidence.measure.samples import OPS, Mask, Samples, Table

FOLDS = 5
ALL = "all"
"""name of the class of all rows"""
BACKWARD_ROLES = {DGRAD: "dgrad", WGRAD: "wgrad"}


@dataclass(frozen=True)
class Fitted:
    """Fitted constants and the times that they predict."""

    entry: Any
    time_s: Callable[[Table], F64]
    cache_passes: float = 0.0
    """passes over keys and values, which serving adds to attention; no profile holds them"""


@dataclass(frozen=True)
class Part:
    """One group of constants that is fitted together."""

    section: str
    """place in a profile: gemm.bf16, attention.head_dim.128, memory_bound, collectives.all_reduce"""
    table: Table
    least: int
    """least number of rows for a fit"""
    fit: Callable[[Table], Fitted]
    before: Callable[[Fitted, Table], F64]
    """seconds of rows under the profile's present constants; takes from the fit only constants that no profile holds"""
    together: F64
    """(rows, any): the folds omit rows that agree in all columns together"""
    classes: Mapping[str, Mask]
    """subsets of the rows whose errors are reported, by name"""
    kept: bool = True
    """whether the constants go into the profile"""
    folds: int = FOLDS
    """number of fits for the left-out error, each without one share of the rows"""

    def __len__(self) -> int:
        return len(self.table["latency_us"])


def rows_of(table: Table, mask: Mask) -> Table:
    """Returns the rows of a table where `mask` is true."""
    return {name: column[mask] for name, column in table.items()}


def parts_of(samples: Samples, old: Profile, device: Device, link_gb_s: float, host_gb_s: float) -> Iterator[Part]:
    """Returns the parts that the samples measure, in the order of a profile.

    `old` is stated at the peaks of `device`; `link_gb_s` is 0 if the profile's collectives do not apply.
    """
    for dtype, table in samples.gemm.items():
        forward = table["layout"] == 0 if "layout" in table else np.ones(len(table["m"]), np.bool_)
        if dtype in device.peak_flops and forward.any():
            yield _gemm(dtype, rows_of(table, forward), old, device, samples.serving)
    yield from _attention(samples, old, device)
    if samples.memory:
        yield _bytes("memory_bound", samples.memory, old, device.memory_bytes_per_s / GIGA)
    if samples.host_copy:
        yield _bytes("host_copy", samples.host_copy, old, host_gb_s)
    for name, table in samples.collectives.items():
        if link_gb_s > 0:
            yield _collective(name, table, old, Switches(device.architecture, link_gb_s))


def peaks_of(device: Device, dtype: str) -> Peaks:
    """Returns the datasheet figures of a device for fits in `dtype`."""
    known = dtype if dtype in device.peak_flops else "fp16"
    return Peaks(device.peak(known) / TERA, device.memory_bytes_per_s / GIGA, device.multiprocessors)


# -- matrix multiplication ---------------------------------------------------------------------------------------


def _gemm(dtype: str, table: Table, old: Profile, device: Device, serving: bool) -> Part:
    peaks, (in_bytes, out_bytes) = peaks_of(device, dtype), DTYPE_BYTES[dtype]
    quantises = serving and in_bytes < 2

    def under(entry: GemmEntry, rows: Table) -> F64:
        constants = gemm_constants(entry, peaks, in_bytes, out_bytes)
        return gemm_s(rows["m"], rows["n"], rows["k"], constants, rows.get("batch", 1.0))

    def fit(rows: Table) -> Fitted:
        entry, _ = fit_gemm(rows, peaks, "", in_bytes, quantises, out_bytes)
        return Fitted(entry, partial(under, entry))

    def before(fitted: Fitted, rows: Table) -> F64:
        inside = {name: getattr(fitted.entry, name) for name in ("quant_passes", "odd_rows")}
        return under(replace(present(old, dtype), **inside), rows)

    m, n, k = (table[name] for name in "mnk")
    large = (m >= 2048) & (np.minimum(n, k) >= 1024)
    return Part(
        section=f"gemm.{dtype}",
        table=table,
        least=LEAST_ROWS["gemm"] + quantises,
        fit=fit,
        before=before,
        together=np.array([np.minimum(n, k), np.maximum(n, k)]).T,
        classes={"m 2048+, n, k 1024+": large, ALL: np.ones_like(large)},
        kept=not quantises,
    )


def present(profile: Profile, dtype: str) -> GemmEntry:
    """Returns the constants of `dtype` in a profile: its own, or bf16's fractions of the peak."""
    if dtype in profile.gemm:
        return profile.gemm[dtype]
    peaks, bf16 = profile.reference.peak_tflops, profile.gemm["bf16"]
    return replace(bf16, p_tflops=bf16.p_tflops * peaks.get(dtype, peaks["bf16"]) / peaks["bf16"])


@dataclass(frozen=True)
class RoleRate:
    """The rate of the products of one layout of the backward pass, relative to forward products."""

    name: str
    rows: int
    rate: float
    error_percent: float


def role_rates(samples: Samples, entry: GemmEntry, device: Device) -> Iterator[RoleRate]:
    """Returns the rates of dgrad and wgrad in bf16, relative to the forward products of `entry`."""
    table = samples.gemm.get("bf16", {})
    for layout, role in BACKWARD_ROLES.items():
        if "layout" not in table or not (table["layout"] == layout).any():
            continue
        rows = rows_of(table, table["layout"] == layout)
        constants = gemm_constants(entry, peaks_of(device, "bf16"))

        def seconds(rate: float, rows: Table = rows, constants: GemmRates = constants) -> F64:
            return gemm_s(rows["m"], rows["n"], rows["k"], constants, rows["batch"], speed=rate)

        rate, error = fit_rate(seconds, rows["latency_us"] * US)
        yield RoleRate(role, len(rows["m"]), rate, error)


# -- attention ---------------------------------------------------------------------------------------------------


def kernel_rate(kernel: str, device: Device, head_dim: float, backward: bool = False) -> float:
    """Returns a kernel's rate at a head size on this architecture relative to the profile (backward: to its forward
    rate); 1 for ANY.

    Raises:
        UnknownName: There is no such fused kernel.
    """
    if kernel == ANY:
        return 1.0
    return fused_kernel(kernel).rate_on(device.architecture).at(head_dim)[backward]


def _attention(samples: Samples, old: Profile, device: Device) -> Iterator[Part]:
    """Returns a part for each head size, with the forward kernels of all names."""
    tables = []
    for kernel, table in samples.attention.items():
        forward = table.get("backward", np.zeros_like(table["seq"])) == 0
        speed = np.array([kernel_rate(kernel, device, size) for size in table["head_dim"].tolist()])
        tables.append(rows_of({**table, "speed": speed}, forward))
    if not tables:
        return
    joined = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
    for head_dim in np.unique(joined["head_dim"]).tolist():
        rows = rows_of(joined, joined["head_dim"] == head_dim)
        yield _head(int(head_dim), rows, old, device, samples.serving)


def _head(head_dim: int, table: Table, old: Profile, device: Device, serving: bool) -> Part:
    peaks = peaks_of(device, "bf16")

    def under(entry: AttentionEntry, passes: float, rows: Table) -> F64:
        shapes = attention_shapes(rows)
        kernel_s = attention_s(shapes, attention_constants(entry, peaks), rows["speed"])
        return np.asarray(kernel_s + passes * cache_pass_s(shapes, peaks), np.float64)

    def fit(rows: Table) -> Fitted:
        entry, passes, _ = fit_attention(rows, peaks, serving)
        return Fitted(entry, partial(under, entry, passes), passes)

    def before(fitted: Fitted, rows: Table) -> F64:
        return under(old.attention.head_dim.get(head_dim, nearest(old, head_dim)), fitted.cache_passes, rows)

    long = table["seq"] >= 2048
    return Part(
        section=f"attention.head_dim.{head_dim}",
        table=table,
        least=LEAST_ROWS["attention"] + serving,
        fit=fit,
        before=before,
        together=np.array([table["heads"], table["kv_heads"]]).T,
        classes={"seq >= 2048": long, ALL: np.ones_like(long)},
    )


def nearest(profile: Profile, head_dim: int) -> AttentionEntry:
    """Returns the constants of a profile for the head size nearest to `head_dim`."""
    table = profile.attention.head_dim
    return table[min(table, key=lambda size: (abs(size - head_dim), size))]


def backward_rates(samples: Samples, profile: Profile, device: Device) -> Iterator[tuple[str, int, float, float]]:
    """Returns kernel, rows, and measured and shipped backward rate over the forward's, where a backward was timed."""
    for kernel, table in samples.attention.items():
        backward = table.get("backward", np.zeros_like(table["seq"])) > 0
        for head_dim in np.unique(table["head_dim"][backward]).tolist():
            rows = rows_of(table, backward & (table["head_dim"] == head_dim))
            entry = profile.attention.head_dim.get(int(head_dim), nearest(profile, int(head_dim)))
            constants, shapes = attention_constants(entry, peaks_of(device, "bf16")), attention_shapes(rows)
            forward = kernel_rate(kernel, device, head_dim)

            def seconds(
                rate: float,
                constants: AttentionRates = constants,
                shapes: Attention[F64] = shapes,
                forward: float = forward,
            ) -> F64:
                return attention_s(shapes, constants, rate * forward)

            rate, _ = fit_rate(seconds, rows["latency_us"] * US)
            label = f"{kernel or 'any kernel'}, head size {int(head_dim)}"
            yield label, len(shapes.batch), rate, kernel_rate(kernel, device, head_dim, backward=True)


# -- bytes and collectives ---------------------------------------------------------------------------------------


def _bytes(section: str, table: Table, old: Profile, peak_gb_s: float) -> Part:
    present_entry = old.memory_bound if section == "memory_bound" else old.host_copy

    def under(launch_us: float, share: float, rows: Table) -> F64:
        return np.asarray(launch_us * US + rows["bytes"] / (share * peak_gb_s * GIGA), np.float64)

    def fit(rows: Table) -> Fitted:
        launch_us, share, _ = fit_bytes(rows, peak_gb_s)
        return Fitted((launch_us, share), partial(under, launch_us, share))

    def before(_: Fitted, rows: Table) -> F64:
        return under(present_entry.launch_us, _share_of(present_entry), rows)

    return Part(section, table, LEAST_ROWS["bytes"], fit, before, table["bytes"][:, None], _by_size(table["bytes"]))


def _share_of(entry: MemoryEntry | HostCopyEntry) -> float:
    return entry.hbm_fraction if isinstance(entry, MemoryEntry) else entry.link_fraction


def _collective(name: str, table: Table, old: Profile, switches: Switches) -> Part:
    kind = OPS[name]

    def under(op: NodeOp, rows: Table) -> F64:
        return collective_s(kind, op, rows["num_gpus"], rows["message_bytes"], switches)

    def fit(rows: Table) -> Fitted:
        op, _ = fit_collective(kind, rows, switches.link_gb_s, switches)
        return Fitted(op, partial(under, op))

    def before(_: Fitted, rows: Table) -> F64:
        assert old.collectives is not None
        return under(getattr(old.collectives, name), rows)

    size = table["message_bytes"]
    section, together, least = f"collectives.{name}", size[:, None], LEAST_ROWS["collectives"]
    return Part(section, table, least, fit, before, together, _by_size(size), folds=len(np.unique(size)))


def _by_size(size: F64) -> dict[str, Mask]:
    large = size >= 2**20
    return {"below 1 MiB": ~large, "1 MiB and more": large, ALL: np.ones_like(large)}
