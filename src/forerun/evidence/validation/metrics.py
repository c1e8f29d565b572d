"""Computes the accuracy of predictions: signed errors, parallelism classes, rank regret.

An error is predicted / measured - 1. The module does not depend on how predictions are made.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from forerun.evidence.validation.rows import Measurement

CLASSES = ("FSDP/ZeRO-3 only", "FSDP+TP/PP", "TP/PP Megatron-style", "CP", "MoE", "DP/ZeRO<=2 only")
_GPUS_UP_TO = {"1 GPU": 1, "2-8 GPUs": 8, "9-64 GPUs": 64, "65-512 GPUs": 512, "> 512 GPUs": math.inf}
_PARAMETERS_BELOW = {"< 1 B": 1e9, "1-10 B": 1e10, "10-100 B": 1e11, ">= 100 B": math.inf}
GPU_RANGES = (*_GPUS_UP_TO, "not stated")
PARAMETER_RANGES = tuple(_PARAMETERS_BELOW)
COMPARED_MEMORY = {"allocated": "peak_allocated_gib", "reserved": "peak_reserved_gib", "nvidia-smi": "device_gib"}
"""kind of measured memory -> the predicted figure to compare; other kinds have no stated unit"""
MIN_GROUP = 4
"""least number of rows with a measured time for a group's ranking"""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted figures of one row; None if there is none."""

    step_time_s: float | None = None
    peak_allocated_gib: float | None = None
    peak_reserved_gib: float | None = None
    device_gib: float | None = None
    fits: bool | None = None


def tokens_per_gpu(row: Measurement) -> float | None:
    """Returns the tokens of one optimizer step for each GPU."""
    if not (row.global_batch_seqs and row.seq_len and row.n_gpus):
        return None
    return row.global_batch_seqs * row.seq_len / row.n_gpus


def measured_time_s(row: Measurement) -> float | None:
    """Returns the seconds of a step: measured, else derived by the source's own formula, else from the throughput.

    Rows whose source computes FLOPs with a known error have a time only where their table corrects it.
    """
    if row.outcome != "ok":
        return None
    if row.flops_convention == "simple_pytorch_buggy" and row.step_time_s_derived is None:
        return None
    time = row.step_time_s or row.step_time_s_derived
    tokens = tokens_per_gpu(row)
    if time is None and row.tokens_per_s_per_gpu and tokens:
        return tokens / row.tokens_per_s_per_gpu
    return time


def measured_memory_gib(row: Measurement) -> float | None:
    """Returns the peak memory of a finished run in GiB."""
    return row.peak_mem_gib if row.outcome == "ok" else None


def parallelism_class(row: Measurement) -> str:
    """Returns the row's class: the first that applies of MoE, CP, FSDP+TP/PP, TP/PP, FSDP, DP."""
    if row.is_moe:
        return "MoE"
    if (row.cp or 1) > 1:
        return "CP"
    if (row.tp or 1) > 1 or (row.pp or 1) > 1:
        return "FSDP+TP/PP" if row.zero_stage == 3 else "TP/PP Megatron-style"
    return "FSDP/ZeRO-3 only" if row.zero_stage == 3 else "DP/ZeRO<=2 only"


def gpu_range(row: Measurement) -> str:
    """Returns the range of the cluster's size: one of GPU_RANGES."""
    if row.n_gpus is None:
        return GPU_RANGES[-1]
    return next(name for name, most in _GPUS_UP_TO.items() if row.n_gpus <= most)


def parameter_range(parameters: int) -> str:
    """Returns the range of the model's size: one of PARAMETER_RANGES."""
    return next(name for name, below in _PARAMETERS_BELOW.items() if parameters < below)


@dataclass(frozen=True, slots=True)
class ErrorStats:
    """Errors of one set of rows, as fractions; nan if no row has both figures."""

    compared: int
    total: int
    mape: float
    median: float
    p90: float
    signed: float
    within_10: float
    """share of rows with an error of at most 10 %"""


def quantile(values: Iterable[float], share: float) -> float:
    """Returns a quantile by linear interpolation; nan for no values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    position = (len(ordered) - 1) * share
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def mean(values: Sequence[float]) -> float:
    """Returns the arithmetic mean; nan for no values."""
    return sum(values) / len(values) if values else math.nan


def error_stats(pairs: Iterable[tuple[float | None, float]]) -> ErrorStats:
    """Returns statistics of (predicted, measured) pairs; a pair without a prediction counts in `total` only."""
    all_pairs = list(pairs)
    errors = [predicted / measured - 1 for predicted, measured in all_pairs if predicted is not None]
    sizes = [abs(error) for error in errors]
    return ErrorStats(
        compared=len(errors),
        total=len(all_pairs),
        mape=mean(sizes),
        median=quantile(sizes, 0.5),
        p90=quantile(sizes, 0.9),
        signed=mean(errors),
        within_10=mean([float(size <= 0.1) for size in sizes]),
    )


def time_stats(rows: Iterable[Measurement], forecasts: Mapping[str, Forecast]) -> ErrorStats:
    """Returns the step time errors of the rows that have a measured time."""
    nothing = Forecast()
    return error_stats(
        (forecasts.get(row.id, nothing).step_time_s, time) for row in rows if (time := measured_time_s(row)) is not None
    )


def memory_stats(rows: Iterable[Measurement], forecasts: Mapping[str, Forecast], kind: str) -> ErrorStats:
    """Returns the peak memory errors of the rows measured as `kind`, a key of COMPARED_MEMORY."""
    column = COMPARED_MEMORY[kind]
    nothing = Forecast()
    return error_stats(
        (getattr(forecasts.get(row.id, nothing), column), memory)
        for row in rows
        if row.peak_mem_kind == kind and (memory := measured_memory_gib(row)) is not None
    )


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """Numbers of rows for which Forerun judged rightly or wrongly whether the run fits in memory."""

    oom_rows: int
    oom_judged: int
    oom_found: int
    ok_rows: int
    ok_judged: int
    ok_refused: int
    refused_by_source: dict[str, int]


def out_of_memory(rows: Sequence[Measurement], forecasts: Mapping[str, Forecast]) -> OutOfMemory:
    """Counts out-of-memory rows that Forerun foresaw, and finished rows that it wrongly refused."""
    fits = {row.id: forecasts[row.id].fits for row in rows if row.id in forecasts}
    oom = [row for row in rows if row.outcome == "oom"]
    ok = [row for row in rows if row.outcome == "ok"]
    refused = [row for row in ok if fits.get(row.id) is False]
    return OutOfMemory(
        oom_rows=len(oom),
        oom_judged=sum(fits.get(row.id) is not None for row in oom),
        oom_found=sum(fits.get(row.id) is False for row in oom),
        ok_rows=len(ok),
        ok_judged=sum(fits.get(row.id) is not None for row in ok),
        ok_refused=len(refused),
        refused_by_source=dict(Counter(row.source_id for row in refused).most_common()),
    )


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the rank correlation, with mean ranks for ties; nan if one side is constant."""
    a, b = _ranks(first), _ranks(second)
    mean_a, mean_b = mean(a), mean(b)
    scale = math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))
    if not scale:
        return math.nan
    return sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True)) / scale


def _ranks(values: Sequence[float]) -> list[float]:
    """Returns the rank of each value, from 0; ties share their mean rank."""
    places: dict[float, list[int]] = defaultdict(list)
    for place, value in enumerate(sorted(values)):
        places[value].append(place)
    return [mean(places[value]) for value in values]


@dataclass(frozen=True, slots=True)
class GroupRegret:
    """The throughput that the predictor's first choice loses in one group of configurations, as a fraction."""

    key: tuple[str, ...]
    measured: int
    covered: int
    regret: float
    """loss against the best of the whole group"""
    covered_regret: float
    """loss against the best of the rows that the predictor covers"""
    spearman: float


@dataclass(frozen=True, slots=True)
class RegretSummary:
    """The regrets of all groups of one grouping, worst first."""

    groups: tuple[GroupRegret, ...]
    groups_total: int

    @property
    def mean(self) -> float:
        return mean([group.regret for group in self.groups])

    @property
    def worst(self) -> float:
        return max((group.regret for group in self.groups), default=math.nan)

    @property
    def mean_covered(self) -> float:
        return mean([group.covered_regret for group in self.groups])

    @property
    def median_spearman(self) -> float:
        return quantile((group.spearman for group in self.groups if not math.isnan(group.spearman)), 0.5)


def cluster_key(row: Measurement) -> tuple[Hashable, ...]:
    """Returns a key that rows of one source, model, device and number of devices share."""
    return (row.source_id, row.model, row.gpu, row.n_gpus)


def workload_key(row: Measurement) -> tuple[Hashable, ...]:
    """Returns a key for `cluster_key` and the workload: sequence length, precision and global batch."""
    return (*cluster_key(row), row.seq_len, row.precision, row.global_batch_seqs)


def rank_regret(
    rows: Iterable[Measurement],
    forecasts: Mapping[str, Forecast],
    key: Callable[[Measurement], tuple[Hashable, ...]] = cluster_key,
) -> RegretSummary:
    """Returns the regret of every group of rows (tiers A and B) with at least MIN_GROUP measured times.

    The predictor ranks the rows that it covers and doesn't refuse by predicted throughput; ties share the mean. An
    out-of-memory row counts, with throughput 0, only if the predictor judged whether it fits.
    """
    groups: dict[tuple[Hashable, ...], list[Measurement]] = defaultdict(list)
    for row in rows:
        if row.tier in ("A", "B") and tokens_per_gpu(row):
            groups[key(row)].append(row)
    judged = [
        group for group in groups.items() if sum(measured_time_s(row) is not None for row in group[1]) >= MIN_GROUP
    ]
    found = [regret for name, group in judged if (regret := _group_regret(name, group, forecasts)) is not None]
    return RegretSummary(tuple(sorted(found, key=lambda group: (-group.regret, group.key))), len(judged))


def _group_regret(
    name: tuple[Hashable, ...], rows: Sequence[Measurement], forecasts: Mapping[str, Forecast]
) -> GroupRegret | None:
    candidates = [entry for row in rows if (entry := _candidate(row, forecasts.get(row.id))) is not None]
    real = [(predicted, measured) for predicted, measured, _ in candidates if measured > 0]
    picks = [(predicted, measured) for predicted, measured, fits in candidates if fits is not False]
    if len(real) < 2 or not picks:
        return None
    top = max(predicted for predicted, _ in picks)
    got = mean([measured for predicted, measured in picks if predicted >= top * (1 - 1e-9)])
    best = max(_throughput(row, time) for row in rows if (time := measured_time_s(row)) is not None)
    best_covered = max(measured for _, measured in real)
    return GroupRegret(
        key=tuple(str(part) for part in name),
        measured=sum(measured_time_s(row) is not None for row in rows),
        covered=len(real),
        regret=1 - got / best,
        covered_regret=max(0.0, 1 - got / best_covered),
        spearman=spearman([p for p, _ in real], [m for _, m in real]),
    )


def _throughput(row: Measurement, time_s: float) -> float:
    """Returns the tokens per second and GPU."""
    return (tokens_per_gpu(row) or 0.0) / time_s


def _candidate(row: Measurement, forecast: Forecast | None) -> tuple[float, float, bool | None] | None:
    """Returns (predicted throughput, measured throughput, fits) of a row in the ranking, None of any other."""
    if forecast is None or forecast.step_time_s is None:
        return None
    predicted = _throughput(row, forecast.step_time_s)
    if row.outcome == "oom":
        return None if forecast.fits is None else (predicted, 0.0, forecast.fits)
    time = measured_time_s(row)
    return None if time is None else (predicted, _throughput(row, time), forecast.fits)
