"""Fits the constants of a cost profile to measured kernel times.

Every function takes columns (a pandas DataFrame, or a mapping of names to arrays) and returns the entry of a profile
(core/cost/profile.py). A fit minimises a soft-L1 of log(predicted / measured) over the logarithms of positive
constants, so that outliers have little weight. It needs scipy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from forerun.common.errors import ForerunError
from forerun.common.shipped import shipped
from forerun.common.units import GIGA, TERA, US
from forerun.core.cost.attention import AttentionRates, attention_s
from forerun.core.cost.gemm import GemmRates, gemm_s
from forerun.core.cost.kernel_constants import kernel_constants
from forerun.core.cost.profile import AttentionEntry, GemmEntry
from forerun.core.network.constants import NodeOp, fabrics
from forerun.core.network.lines import N_LINES, Lines, smooth_minimum_s
from forerun.core.network.nccl import measured_lines, switch_lines
from forerun.core.program.kinds import Attention
from forerun.core.program.types import F64, Collective

Columns = Mapping[str, npt.ArrayLike]
_SCALE = 0.1
"""logarithmic error beyond which a measurement loses weight"""
LEAST_ROWS = {"gemm": 10, "attention": 7, "bytes": 4, "collectives": 9}
"""least number of measurements for a fit"""


@dataclass(frozen=True, slots=True)
class Peaks:
    """The datasheet figures of the measured device."""

    tflops: float
    """dense peak in TFLOP/s, in the dtype of the measurements"""
    hbm_gb_s: float
    multiprocessors: int


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One constant's start and range (starts.yaml), as fractions of the device's figure `of` where it has one."""

    name: str
    start: float
    low: float
    high: float
    shift: float = 0.0
    prior: float = 0.0
    of: Literal["", "tflops", "hbm_gb_s", "link_gb_s"] = ""

    def on(self, figures: Mapping[str, float]) -> _Parameter:
        """Returns the parameter in the units of the constant, given the device's `figures` by name."""
        scale = figures[self.of] if self.of else 1.0
        return replace(self, start=self.start * scale, low=self.low * scale, high=self.high * scale, of="")


@dataclass(frozen=True, slots=True)
class _Starts:
    """Starts and ranges of all constants, from starts.yaml, which explains them."""

    attention_hbm_fraction: float
    gemm: tuple[_Parameter, ...]
    quantisation: tuple[_Parameter, ...]
    rate: tuple[_Parameter, ...]
    attention: tuple[_Parameter, ...]
    serving_cache: tuple[_Parameter, ...]
    bytes: tuple[_Parameter, ...]
    collectives: tuple[_Parameter, ...]
    all_to_all_h_us: float
    source: str


def _starts() -> _Starts:
    return shipped(_Starts, "forerun.evidence.measure", "starts.yaml")


def mape(predicted_s: F64, measured_s: F64) -> float:
    """Returns the mean absolute error in percent of the measured time."""
    return float(np.mean(np.abs(predicted_s / measured_s - 1.0)) * 100)


def _columns(data: Columns, names: Sequence[str], least: int) -> list[F64]:
    missing = [name for name in names if name not in data]
    if missing:
        raise ForerunError(f"measurements: column {missing[0]!r} is missing; needed: {', '.join(names)}")
    found = [np.asarray(data[name], np.float64) for name in names]
    if len(found[0]) < least:
        raise ForerunError(f"measurements: {len(found[0])} rows are too few to fit {least} constants; measure more")
    if any(not (np.isfinite(column) & (column > 0)).all() for column in found):
        raise ForerunError(f"measurements: every value of {', '.join(names)} must be a positive number")
    return found


def _optional(data: Columns, name: str, default: F64) -> F64:
    return np.asarray(data[name], np.float64) if name in data else default


def _fit(
    parameters: Sequence[_Parameter], model_s: Callable[[F64], F64], measured_s: F64, weight: F64
) -> tuple[F64, float]:
    """Returns the constants that explain `measured_s` best, and their mean absolute error in percent."""
    try:
        import scipy.optimize as optimize
    except ImportError:
        raise ForerunError("fitting constants needs scipy: pip install 'forerun[measure]'") from None
    shift, prior = (np.array([getattr(p, key) for p in parameters]) for key in ("shift", "prior"))

    def residual(x: F64) -> F64:
        error = np.sqrt(weight) * np.log(model_s(np.exp(x) - shift) / measured_s)
        return np.concatenate([error, prior * (x - start)])

    low, high, start = (
        np.log(np.array([getattr(p, key) for p in parameters]) + shift) for key in ("low", "high", "start")
    )
    solution = optimize.least_squares(residual, start, bounds=(low, high), loss="soft_l1", f_scale=_SCALE, x_scale=0.1)
    best: F64 = np.exp(solution.x) - shift
    return best, mape(model_s(best), measured_s)


# -- matrix multiplication ---------------------------------------------------------------------------------------


def gemm_constants(entry: GemmEntry, peaks: Peaks, input_bytes: float = 2.0, output_bytes: float = 2.0) -> GemmRates:
    """Returns `entry` as the forward constants of the measured device."""
    return GemmRates(
        flops_per_s=entry.p_tflops * TERA,
        peak_flops_per_s=peaks.tflops * TERA,
        bytes_per_s=entry.hbm_gb_s * GIGA,
        launch_s=entry.launch_us * US,
        wave_outputs=entry.wave_fraction * 128 * 128 * peaks.multiprocessors,
        depth_pad=entry.depth_pad,
        slowdown=entry.slowdown,
        slowdown_tau_s=entry.slowdown_tau_us * US,
        overlap=entry.overlap,
        odd_rows=entry.odd_rows,
        quant_passes=entry.quant_passes,
        input_bytes=input_bytes,
        output_bytes=output_bytes,
        dgrad_rate=1.0,
        wgrad_rate=1.0,
        accumulate_exposed=1.0,
    )


def gemm_weights(m: F64, n: F64, k: F64) -> F64:
    """Returns weights: 3 for training shapes (m >= 2048, n and k >= 1024), 1.5 for other large ones, else 0.5."""
    large = np.minimum(np.minimum(m, n), k) >= 512
    training = (m >= 2048) & (np.minimum(n, k) >= 1024)
    return np.where(training, 3.0, np.where(large, 1.5, 0.5))


def fit_gemm(
    data: Columns,
    peaks: Peaks,
    source: str,
    input_bytes: float = 2.0,
    quantises: bool = False,
    output_bytes: float = 2.0,
) -> tuple[GemmEntry, float]:
    """Fits forward products (columns m, n, k, latency_us); returns constants and their mean absolute error in percent.

    An optional column `batch` is the number of products of one kernel. `quantises`: the measured times include the cast
    of the first operand, which is padded to 16 rows.
    """
    m, n, k, latency_us = _columns(data, ("m", "n", "k", "latency_us"), LEAST_ROWS["gemm"])
    batch = _optional(data, "batch", np.ones_like(m))
    starts, figures = _starts(), {"tflops": peaks.tflops, "hbm_gb_s": peaks.hbm_gb_s}
    parameters = [each.on(figures) for each in starts.gemm + starts.quantisation * quantises]

    def entry(x: F64) -> GemmEntry:
        p, bandwidth, launch, wave, depth, slow, tau, overlap, *rest = (float(value) for value in x)
        passes, odd_rows = rest or (0.0, 0.0)
        return GemmEntry(
            p, bandwidth, launch, wave, depth, slow, tau, source, overlap, odd_rows=odd_rows, quant_passes=passes
        )

    def model_s(x: F64) -> F64:
        return gemm_s(m, n, k, gemm_constants(entry(x), peaks, input_bytes, output_bytes), batch)

    best, error = _fit(parameters, model_s, latency_us * US, gemm_weights(m, n, k))
    return entry(best), error


def fit_rate(model_s: Callable[[float], F64], measured_s: F64) -> tuple[float, float]:
    """Returns the rate relative to the forward kernel's that explains `measured_s` best, and the error in percent."""
    best, error = _fit(_starts().rate, lambda x: model_s(float(x[0])), measured_s, np.ones_like(measured_s))
    return float(best[0]), error


# -- attention ---------------------------------------------------------------------------------------------------


def attention_constants(entry: AttentionEntry, peaks: Peaks) -> AttentionRates:
    """Returns `entry` as the constants of the measured device and kernel."""
    return AttentionRates(
        flops_per_s=entry.p_tflops * TERA,
        peak_flops_per_s=peaks.tflops * TERA,
        backward_rate=1.0,
        extra_keys=entry.extra_keys,
        backward_extra_keys=entry.extra_keys,
        launch_s=entry.launch_us * US,
        tail_rows=entry.tail * 128 * peaks.multiprocessors,
        slowdown=entry.slowdown,
        slowdown_tau_s=entry.slowdown_tau_us * US,
        element_bytes=kernel_constants().attention.element_bytes,
        bytes_per_s=_starts().attention_hbm_fraction * peaks.hbm_gb_s * GIGA,
        padded=1.0,
        calibrated=True,
    )


def attention_shapes(data: Columns) -> Attention[F64]:
    """Returns the shapes, of causal forward kernels unless columns seq_kv, causal, backward or v_head_dim differ."""
    batch, seq, heads, kv_heads, head_dim = _columns(data, ("batch", "seq", "heads", "kv_heads", "head_dim"), 1)
    causal, backward = _optional(data, "causal", np.ones_like(seq)), _optional(data, "backward", np.zeros_like(seq))
    seq_kv, width = _optional(data, "seq_kv", seq), _optional(data, "v_head_dim", head_dim)
    return Attention(batch, heads, kv_heads, seq, seq_kv, head_dim, causal, backward, width)


def cache_pass_s(shapes: Attention[F64], peaks: Peaks) -> F64:
    """Returns the seconds of one pass over keys and values, as filling a serving cache takes."""
    elements = shapes.batch * shapes.seq_q * shapes.kv_heads * shapes.head_dim
    return np.asarray(4.0 * elements / (peaks.hbm_gb_s * GIGA), np.float64)


def fit_attention(data: Columns, peaks: Peaks, kv_cache: bool = False) -> tuple[AttentionEntry, float, float]:
    """Fits forward kernels of one head size; returns constants, passes over a serving cache, and the error in percent.

    Columns: batch, seq, heads, kv_heads, head_dim, latency_us, those of `attention_shapes`, and `speed`: the rate of a
    row's kernel relative to the constants, 1 by default. `kv_cache`: the measured kernels also write keys and values to
    a serving cache; the fit determines these passes apart from the constants.
    """
    (latency_us,) = _columns(data, ("latency_us",), LEAST_ROWS["attention"])
    shapes = attention_shapes(data)
    speed = _optional(data, "speed", np.ones_like(latency_us))
    if len(np.unique(shapes.head_dim)) > 1:
        raise ForerunError("measurements: several values of head_dim; fit one at a time")
    cache_s = cache_pass_s(shapes, peaks)
    starts = _starts()
    parameters = [each.on({"tflops": peaks.tflops}) for each in starts.attention + starts.serving_cache * kv_cache]

    def entry(x: F64) -> AttentionEntry:
        return AttentionEntry(*(float(value) for value in x[:6]))

    def passes(x: F64) -> float:
        return float(x[6]) if kv_cache else 0.0

    def model_s(x: F64) -> F64:
        kernel_s = attention_s(shapes, attention_constants(entry(x), peaks), speed)
        return np.asarray(kernel_s + passes(x) * cache_s, np.float64)

    training = (shapes.seq_q >= 2048) & (shapes.batch * shapes.heads >= 16)
    weight = np.where(training, 3.0, np.where(shapes.seq_q >= 1024, 1.5, 0.5))
    best, error = _fit(parameters, model_s, latency_us * US, weight)
    return entry(best), passes(best), error


# -- bytes -------------------------------------------------------------------------------------------------------


def fit_bytes(data: Columns, peak_gb_s: float) -> tuple[float, float, float]:
    """Fits kernels or copies that move bytes; returns launch in us, share of `peak_gb_s`, and the error in percent.

    Columns: bytes, latency_us. It serves memory-bound kernels and copies to the host.
    """
    size, latency_us = _columns(data, ("bytes", "latency_us"), LEAST_ROWS["bytes"])
    slope = 1.0 / (peak_gb_s * GIGA)

    def model_s(x: F64) -> F64:
        return np.asarray(x[0] * US + size * slope / x[1], np.float64)

    best, error = _fit(_starts().bytes, model_s, latency_us * US, np.ones_like(size))
    return float(best[0]), float(best[1]), error


# -- collectives -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Switches:
    """The switches of a node that add all-reduces on GPUs of an architecture, if theirs do, beside measured rings."""

    architecture: str = ""
    link_gb_s: float = 0.0

    def lines(self, kind: Collective, ranks: int) -> Lines:
        """Returns the lines of a collective among `ranks` that the switches add; none where none does."""
        found = fabrics().in_switch.of(self.architecture, ranks) if kind == Collective.ALL_REDUCE else None
        return Lines((), ()) if found is None else switch_lines(found, ranks, self.link_gb_s * GIGA)


def collective_s(kind: Collective, op: NodeOp, ranks: F64, size_bytes: F64, switches: Switches = Switches()) -> F64:
    """Returns the seconds of collectives inside a node under `op`, for columns of ranks and sizes."""
    latency = np.empty((len(ranks), N_LINES))
    slope = np.empty_like(latency)
    for count in np.unique(ranks).tolist():
        ring, added = measured_lines(kind, int(count), op, 1.0), switches.lines(kind, int(count))
        lines = Lines(ring.latency_s + added.latency_s, ring.s_per_byte + added.s_per_byte)
        latency[ranks == count], slope[ranks == count] = lines.columns()
    return smooth_minimum_s(latency, slope, size_bytes)


def fit_collective(
    kind: Collective, data: Columns, link_gb_s: float, switches: Switches = Switches()
) -> tuple[NodeOp, float]:
    """Fits one collective inside a node, all group sizes together; returns constants and their error in percent.

    Columns: num_gpus, message_bytes, latency_us. `link_gb_s`, the rate of a GPU's links in one direction, bounds the
    bandwidths. Weak priors, from the fits of five devices, hold constants that a few dozen points cannot separate. The
    terms that `switches` add beside rings have the constants that all devices share.
    """
    ranks, size, latency_us = _columns(data, ("num_gpus", "message_bytes", "latency_us"), LEAST_ROWS["collectives"])
    starts = _starts()
    parameters = [each.on({"link_gb_s": link_gb_s}) for each in starts.collectives]
    if kind == Collective.ALL_TO_ALL:
        parameters = [replace(p, start=starts.all_to_all_h_us) if p.name == "h_us" else p for p in parameters]

    def model_s(x: F64) -> F64:
        return collective_s(kind, NodeOp(*(float(value) for value in x)), ranks, size, switches)

    best, error = _fit(parameters, model_s, latency_us * US, np.where(size >= 2**20, 2.0, 1.0))
    return NodeOp(*(float(value) for value in best)), error
