"""Counts the measured figures inside the bands of their predictions, and finds the bands that the rows would give."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from forerun.answers.analysis.uncertainty import Quantiles, group_of, residuals, scale_of, widening
from forerun.core.cost.clock import is_known
from forerun.describe.stacks.catalog import load_stack
from forerun.evidence.validation.metrics import COMPARED_MEMORY, mean, measured_memory_gib, measured_time_s
from forerun.evidence.validation.run import RowResult


@dataclass(frozen=True, slots=True)
class Held:
    """Shares of the rows whose measured figure is inside, below and above its band; nan for no rows."""

    rows: int
    inside: float
    below: float
    """share of rows whose figure is below the band: faster, smaller"""
    above: float
    width: float
    """mean of upper end / lower end - 1"""


def time_held(results: Iterable[RowResult]) -> Held:
    """Returns how many measured step times their bands hold."""
    return _held(
        (time, p.step_time_low_s, p.step_time_high_s)
        for result in results
        if (p := result.prediction) is not None and (time := measured_time_s(result.row)) is not None
    )


def reserved_held(results: Iterable[RowResult]) -> Held:
    """Returns how many measured peaks of reserved memory their bands hold."""
    return _held(
        (memory, p.peak_reserved_low_gib, p.peak_reserved_high_gib)
        for result in results
        if (p := result.prediction) is not None
        and result.row.peak_mem_kind == "reserved"
        and (memory := measured_memory_gib(result.row)) is not None
    )


def _held(triples: Iterable[tuple[float, float, float]]) -> Held:
    rows = list(triples)
    below = mean([float(measured < low) for measured, low, _ in rows])
    above = mean([float(measured > high) for measured, _, high in rows])
    return Held(len(rows), 1 - below - above, below, above, mean([high / low - 1 for _, low, high in rows]))


def stack_group(result: RowResult) -> str:
    """Returns `fitted` or `unfitted` for the row's stack, or `not expressed`."""
    return "not expressed" if result.inputs is None else group_of(load_stack(result.inputs.plan.stack))


def time_quantiles(results: Iterable[RowResult]) -> dict[str, Quantiles]:
    """Returns the `time` of uncertainty.yaml that these rows would give, by group of stacks."""
    return {name: conformal(scores, residuals().share) for name, scores in sorted(time_scores(results).items())}


def time_scores(results: Iterable[RowResult]) -> dict[str, list[float]]:
    """Returns ln(measured / predicted) / widening, by group of stacks.

    It omits rows on devices whose clock under load is not known, as their bands have a further part.
    """
    scores: dict[str, list[float]] = {}
    for result in results:
        score = _time_score(result)
        if score is not None:
            scores.setdefault(stack_group(result), []).append(score)
    return scores


def _time_score(result: RowResult) -> float | None:
    time, p = measured_time_s(result.row), result.prediction
    if p is None or time is None or result.inputs is None or not is_known(result.inputs.cluster.device):
        return None
    return math.log(time / p.step_time_s) / widening(p.coverage, p.exposed_comm_s / p.step_time_s)


def source_quantiles(results: Iterable[RowResult]) -> dict[str, Quantiles]:
    """Returns the `few` and `many` of uncertainty.yaml that these rows would give, each with its source left out."""
    scores: dict[str, list[tuple[str, float]]] = {}
    for result in results:
        score = _time_score(result)
        if score is not None and result.prediction is not None:
            scores.setdefault(scale_of(result.prediction.n_gpus), []).append((result.row.source_id, score))
    return {name: of_sources(found) for name, found in sorted(scores.items())}


def of_sources(scores: Sequence[tuple[str, float]]) -> Quantiles:
    """Returns the band that holds its share of `scores`, pairs of source and score, where each source counts once."""
    counts = Counter(source for source, _ in scores)
    ordered = sorted((score, 1 / counts[source] / len(counts)) for source, score in scores)
    tail = (1 - residuals().share) / 2
    low, high = (_weighted(ordered, share) for share in (tail, 1 - tail))
    return Quantiles(low, high, len(scores), len(counts))


def _weighted(ordered: Sequence[tuple[float, float]], share: float) -> float:
    """Returns the smallest value up to which values of (value, weight) have `share` of the weight."""
    total = accumulate(weight for _, weight in ordered)
    return next((value for (value, _), sum_ in zip(ordered, total, strict=True) if sum_ >= share), ordered[-1][0])


def memory_quantiles(results: Iterable[RowResult], kind: str) -> dict[str, Quantiles]:
    """Returns the `allocated` or `reserved` of uncertainty.yaml that these rows would give, by group of stacks."""
    scores: dict[str, list[float]] = {}
    for result in results:
        memory, p = measured_memory_gib(result.row), result.prediction
        if p is not None and memory is not None and result.row.peak_mem_kind == kind:
            predicted: float = getattr(p, COMPARED_MEMORY[kind])
            scores.setdefault(stack_group(result), []).append(math.log(memory / predicted))
    return {name: conformal(of_group, residuals().share) for name, of_group in sorted(scores.items())}


def conformal(scores: Sequence[float], share: float) -> Quantiles:
    """Returns both ends of the band that holds at least `share` of further scores that are exchangeable with these.

    They are the ceil((n + 1) (1 + share) / 2)-th smallest and largest scores; of few scores the extremes, which hold a
    smaller share.
    """
    ordered = sorted(scores)
    rank = min(len(ordered), math.ceil((len(ordered) + 1) * (1 + share) / 2))
    return Quantiles(ordered[-rank], ordered[rank - 1], len(ordered))
