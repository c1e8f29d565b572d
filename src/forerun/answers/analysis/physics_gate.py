"""Checks every Prediction: a result that breaks arithmetic or physics becomes a bug report instead of a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isclose, isfinite

import numpy as np

from forerun.answers.analysis.prediction import Prediction
from forerun.common.errors import ForerunError, ImpossibleResult
from forerun.core.cost.physics import least_compute_s
from forerun.core.program.types import F64, I64, Program
from forerun.describe.cluster.types import Device

_ROUNDING = 1e-6
_FIGURES = (
    *("step_time_s", "step_time_low_s", "step_time_high_s", "hfu", "utilization", "peak_allocated_gib"),
    *("peak_reserved_gib", "peak_reserved_low_gib", "peak_reserved_high_gib", "device_gib", "memory_limit_gib"),
    *("exposed_comm_s", "bubble_s", "coverage", "shared_links_s"),
)
"""figures that every Prediction has: finite, and none below 0"""


def utilization(program: Program, counts: I64, devices: Sequence[Device], step_s: float) -> float:
    """Returns the share of a step that the FLOPs of products, attention and recurrences take at the peaks of their own
    dtypes. It is the mean over ranks, and masked attention pairs do not count.

    `counts` (n_classes, n_ops) says how often each rank class runs each op. `devices` has the device of each rank
    class, or one of them all.
    """
    ranks = np.array([cls.n_ranks for cls in program.rank_classes], np.float64)
    multiplies = ~program.ops.is_memory_bound
    by_device = {device: np.where(multiplies, least_compute_s(program.ops, device), 0.0) for device in devices}
    per_class: list[F64] = [by_device[devices[i % len(devices)]] @ row for i, row in enumerate(counts)]
    return float((np.array(per_class) * ranks).sum() / ranks.sum()) / step_s


def checked(prediction: Prediction, is_measured: bool = False) -> Prediction:
    """Returns `prediction`.

    Raises ImpossibleResult, with the numbers, if it breaks physics or arithmetic, or ForerunError if it does so because
    of times that the user measured.
    """
    wrong = next(_impossible(prediction), None)
    if wrong is None:
        return prediction
    where = f"{prediction.model} on {prediction.n_gpus} x {prediction.cluster}"
    if is_measured:
        raise ForerunError(f"{where}: {wrong}; the measured times of kernels or collectives are faster than the GPU")
    plan = "" if prediction.plan is None else f" under {prediction.plan.describe()}"
    raise ImpossibleResult(f"a bug of Forerun: {where}{plan}: {wrong}; please report this line")


def _impossible(made: Prediction) -> Iterator[str]:
    for name in _FIGURES:
        value = getattr(made, name)
        if not (isfinite(value) and value >= 0):
            yield f"{name} is {value}"
    for name in ("mfu", "tokens_per_s_per_gpu", "samples_per_s_per_gpu", "dollars_per_billion_tokens"):
        value = getattr(made, name)
        if value is not None and not (isfinite(value) and value >= 0):
            yield f"{name} is {value}"
    step = made.step_time_s
    if not made.step_time_low_s <= step <= made.step_time_high_s:
        band = f"{made.step_time_low_s:.6g} to {made.step_time_high_s:.6g}"
        yield f"a step takes {step:.6g} s, outside its band of {band} s"
    if made.utilization > 1.0 + _ROUNDING:
        yield f"products and attention use {made.utilization:.4f} of the peaks of their dtypes"
    parts = sum(made.breakdown.values())
    if not isclose(parts, step, rel_tol=_ROUNDING):
        yield f"the parts of the step sum to {parts:.6g} s, the step takes {step:.6g} s"
    for name in ("exposed_comm_s", "bubble_s"):
        if getattr(made, name) > step * (1 + _ROUNDING):
            yield f"{name} is {getattr(made, name):.6g} s of a step of {step:.6g} s"
    if made.mfu is not None and made.hfu < made.mfu * (1 - _ROUNDING):
        yield f"HFU {made.hfu:.4f} is below MFU {made.mfu:.4f}"
    if made.peak_reserved_gib < made.peak_allocated_gib * (1 - _ROUNDING):
        yield f"{made.peak_reserved_gib:.4f} GiB are reserved for {made.peak_allocated_gib:.4f} GiB of tensors"
    if not made.peak_reserved_low_gib <= made.peak_reserved_gib * (1 + _ROUNDING):
        yield f"{made.peak_reserved_gib:.4f} GiB reserved lie below their band from {made.peak_reserved_low_gib:.4f}"
    if not made.peak_reserved_gib * (1 - _ROUNDING) <= made.peak_reserved_high_gib:
        yield f"{made.peak_reserved_gib:.4f} GiB reserved lie above their band to {made.peak_reserved_high_gib:.4f}"
    held = sum(made.memory_by_category_gib.values())
    if not isclose(held, made.peak_allocated_gib, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
        yield f"memory by category sums to {held:.6g} GiB, the peak is {made.peak_allocated_gib:.6g} GiB"
