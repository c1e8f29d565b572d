"""A user's own measurements: times of kernels by shape and of collectives by size, which replace modelled times.

Matrix multiplications and attention are looked up by their exact shape. Times of memory-bound kernels and collectives
are curves over bytes: lines between measurements, with both axes in logarithms, and beyond the measurements the
bandwidth and latency of the nearest segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt

from forerun.common.errors import ForerunError
from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import Attention, Gemm, OpKind
from forerun.core.program.types import F64, Collective, OpTable

GemmShape = tuple[str, int, int, int, int]
"""dtype, m, n, k, batch"""
AttentionShape = tuple[int, ...]
"""the columns of `kinds.Attention`"""
CollectiveShape = tuple[Collective, int, int]
"""kind, ranks of the group, ranks between its neighbours"""
_MOST_S = 100_000
"""seconds that an op of a step may take, some 28 hours"""
ANY = ""
"""stands for every name of an attention kernel or memory-bound op"""


@dataclass(frozen=True)
class Curve:
    """Measured seconds by bytes, in rising order of bytes."""

    size_bytes: tuple[float, ...]
    time_s: tuple[float, ...]

    def seconds(self, size_bytes: float) -> tuple[float, bool]:
        """Returns the seconds of `size_bytes`, and whether the size lies between measurements."""
        sizes, times = self.size_bytes, self.time_s
        if sizes[0] <= size_bytes <= sizes[-1]:
            return float(np.exp(np.interp(np.log(size_bytes), np.log(sizes), np.log(times)))), True
        if size_bytes < sizes[0]:
            slope = min(self._s_per_byte(0), times[0] / sizes[0]) if len(sizes) > 1 else 0.0
            return times[0] - slope * (sizes[0] - size_bytes), False
        slope = self._s_per_byte(len(sizes) - 2) if len(sizes) > 1 else times[-1] / sizes[-1]
        return times[-1] + slope * (size_bytes - sizes[-1]), False

    def _s_per_byte(self, segment: int) -> float:
        """Returns the slope of a segment; where noise makes times fall, seconds per byte of its larger measurement."""
        bytes_ = self.size_bytes[segment + 1] - self.size_bytes[segment]
        time = self.time_s[segment + 1] - self.time_s[segment]
        return time / bytes_ if time > 0 else self.time_s[segment + 1] / self.size_bytes[segment + 1]


@dataclass(frozen=True)
class KernelProfile:
    """Measured times of kernels."""

    gemm: Mapping[GemmShape, float] = field(default_factory=dict)
    """shape -> seconds"""
    attention: Mapping[tuple[str, AttentionShape], float] = field(default_factory=dict)
    """(kernel or ANY, shape) -> seconds"""
    memory: Mapping[str, Curve] = field(default_factory=dict)
    """op or ANY -> curve over bytes read and written"""
    gemm_of_layout: Mapping[tuple[int, GemmShape], float] = field(default_factory=dict)
    """(0 forward, 1 dgrad, 2 wgrad; shape) -> seconds; looked up before `gemm`"""
    host_copy: Curve | None = None
    """copies between device and pinned host memory"""


@dataclass(frozen=True)
class NetworkProfile:
    """Measured times of collectives; bytes are those of the full buffer (nccl-tests' convention)."""

    curves: Mapping[CollectiveShape, Curve]


@dataclass(frozen=True)
class Found:
    """The times of an op table that were measured."""

    time_s: F64
    """(n_ops,) seconds; NaN if nothing was measured"""
    inside: npt.NDArray[np.bool_]
    """(n_ops,): whether the size is within the measured range"""
    lacks: dict[int, str]
    """op -> the measurement that is missing or was extrapolated"""


@dataclass(frozen=True)
class Measured:
    """Measurements of kernels, of the network, or of both; None means that the user gave none."""

    kernels: KernelProfile | None = None
    network: NetworkProfile | None = None

    def lookup(self, ops: OpTable, groups: Sequence[CommGroup]) -> Found:
        """Looks up the times of the rows of `ops`, whose collectives run in `groups`."""
        found = Found(np.full(len(ops), np.nan), np.zeros(len(ops), np.bool_), {})
        for row, kind in enumerate(ops.kind.tolist()):
            if self.kernels is not None and kind in _KERNELS:
                _KERNELS[kind](self.kernels, ops, row, found)
        if self.network is not None:
            for row in np.flatnonzero(ops.is_communication).tolist():
                _collective(self.network, ops, row, groups[ops.group[row]], found)
        return found


def _credible(time_s: float, what: str) -> float:
    """Returns `time_s`. Raises ForerunError where no op of a step takes that long."""
    if not time_s <= _MOST_S:
        raise ForerunError(
            f"{what} takes {time_s:.3g} s by the measurements given, and no op takes over {_MOST_S:,} s; check the unit"
            " of its times and sizes"
        )
    return time_s


def _take(found: Found, row: int, time_s: float | None, what: str) -> None:
    """Records an exact time, or that it is missing."""
    if time_s is None:
        found.lacks[row] = f"{what}: not measured"
    else:
        found.time_s[row], found.inside[row] = _credible(time_s, what), True


def _along(found: Found, row: int, curve: Curve | None, size: float, what: str, times: int = 1) -> None:
    """Records the time of `times` pieces of `size` bytes, read from a curve."""
    if curve is None:
        found.lacks[row] = f"{what}: not measured"
        return
    time_s, inside = curve.seconds(size)
    found.time_s[row], found.inside[row] = _credible(times * time_s, what), inside
    if not inside:
        low, high = (f"{end:,.0f}" for end in (curve.size_bytes[0], curve.size_bytes[-1]))
        found.lacks[row] = f"{what}, {size:,.0f} bytes: extrapolated from {low} to {high} bytes"


def _gemm(profile: KernelProfile, ops: OpTable, row: int, found: Found) -> None:
    of = cast(Gemm[int], ops.details_of(row))
    what = f"gemm m {of.m} n {of.n} k {of.k} batch {of.batch} {ops.dtype[row]}"
    if of.accumulate_bytes or of.kernels > 1:  # not the kernel of the plain product of this shape
        _take(found, row, None, what + (" grouped" if of.kernels > 1 else " accumulating"))
        return
    shape = (ops.dtype[row], of.m, of.n, of.k, of.batch)
    _take(found, row, profile.gemm_of_layout.get((of.role, shape), profile.gemm.get(shape)), what)


def _attention(profile: KernelProfile, ops: OpTable, row: int, found: Found) -> None:
    of = cast(Attention[int], ops.details_of(row))
    shape, kernel = of.values(), ops.kernel[row]
    named = profile.attention.get((kernel, shape))
    time_s = profile.attention.get((ANY, shape)) if named is None else named
    what = (
        f"attention batch {of.batch} heads {of.heads}/{of.kv_heads} seq {of.seq_q}/{of.seq_kv} head_dim {of.head_dim}"
        f"{' causal' if of.causal else ''}{' backward' if of.backward else ''} {kernel}"
    )
    _take(found, row, time_s, what)


def _memory(profile: KernelProfile, ops: OpTable, row: int, found: Found) -> None:
    size = float(ops.bytes_read[row] + ops.bytes_written[row])
    if size == 0:  # joins streams and runs no kernel
        return
    curve = profile.memory.get(ops.name[row]) or profile.memory.get(ANY)
    launches = max(1, int(ops.launches[row]))
    _along(found, row, curve, size / launches, f"memory-bound {ops.name[row]}", launches)


def _host_copy(profile: KernelProfile, ops: OpTable, row: int, found: Found) -> None:
    if profile.host_copy is not None:
        _along(found, row, profile.host_copy, float(ops.bytes_comm[row]), "host copy")


_KERNELS: dict[int, Callable[[KernelProfile, OpTable, int, Found], None]] = {
    OpKind.GEMM: _gemm,
    OpKind.ATTENTION: _attention,
    OpKind.MEMORY: _memory,
    OpKind.HOST_COPY: _host_copy,
}
"""look-up of the rows of each kind of kernel"""


def _collective(profile: NetworkProfile, ops: OpTable, row: int, group: CommGroup, found: Found) -> None:
    kind, size = Collective(int(ops.collective[row])), float(ops.bytes_comm[row])
    if group.size == 1 or kind == Collective.NONE or size == 0:
        return
    what = f"{kind.name.lower()} over {group.size} ranks, stride {group.inner}"
    _along(found, row, profile.curves.get((kind, group.size, group.inner)), size, what)
