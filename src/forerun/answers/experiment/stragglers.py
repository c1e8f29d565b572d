"""study: the distribution of step times under an experiment's disturbances, and the cost of the slowest rank.

The cost is the additional time of each iteration, compared with an iteration in which all ranks are as fast as the
median rank (`waiting`, experiment/pace.py): in seconds, as a share of the run, and in dollars at the price of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path

from forerun.answers.experiment.conditions import Weather
from forerun.answers.experiment.digest import digest
from forerun.answers.experiment.pace import WAITING
from forerun.answers.experiment.request import Disturbance, Request
from forerun.answers.experiment.result import RunResult, Severity, StragglerStudy
from forerun.answers.experiment.run import run
from forerun.answers.experiment.store import Progress, Store, points_of, workers_of
from forerun.common.errors import ForerunError
from forerun.common.workers import HERE, Workers

_STEPS = 100_000
"""iterations beyond which a study lists the times of a part of them"""
_SWEPT = 1000
"""iterations of each run of a sweep, at most"""
_TIMES = (0.5, 1.0, 2.0)
"""the factors by which a sweep multiplies the probability and the excess of stragglers"""


def study(
    request: Request,
    sweep: Sequence[tuple[float, float]] | None = None,
    folder: Path | None = None,
    progress: Progress | None = None,
    workers: Workers = HERE,
) -> StragglerStudy:
    """Runs `request` under its disturbances, and shortly with other stragglers.

    Args:
        sweep: (probability, slowdown) of other stragglers; None: half, once and twice those that the request has.
        folder: where finished runs are kept, so that a study that is broken off goes on from there.
        workers: who simulates; this process alone where the request has handlers.

    Raises ForerunError if nothing disturbs the run or the folder can't be written, and as `run` does.
    """
    if not _disturbed(request):
        raise ForerunError(
            f"{request.name}: nothing disturbs the run; set training.jitter, training.stragglers, hardware.slow_gpus"
            " or hardware.mixed"
        )
    severities = _around(request.disturbance) if sweep is None else tuple(sweep)
    requests = [request, *(_with(request, *severity) for severity in severities)]
    labels = [request.name, *(f"{request.name}, stragglers {p:g} x {slow:g}" for p, slow in severities)]
    whole, *swept = points_of(
        [digest("stragglers", each) for each in requests],
        labels,
        partial(_simulated, requests),
        Store(_Spread, folder),
        progress,
        workers_of(request, workers),
    )
    return StragglerStudy(
        request=request,
        undisturbed_s=whole.undisturbed_s,
        mean_s=whole.mean_s,
        p50_s=whole.p50_s,
        p99_s=whole.p99_s,
        steps_s=whole.steps_s,
        lost_share=whole.lost_s / whole.total_s,
        lost_dollars=_lost_dollars(whole),
        blame=tuple((rank, count) for rank, count, _ in whole.blame),
        blame_s=tuple(waited_s for _, _, waited_s in whole.blame),
        lost_s=whole.lost_s,
        sweep=tuple(_severity(*pair) for pair in zip(severities, swept, strict=True)),
        notes=whole.notes,
    )


@dataclass(frozen=True)
class _Spread:
    """One run."""

    undisturbed_s: float
    total_s: float
    mean_s: float
    p50_s: float
    p99_s: float
    steps_s: tuple[float, ...]
    lost_s: float
    dollars: float | None
    blame: tuple[tuple[int, int, float], ...]
    """(rank, iterations in which it was the slowest, seconds that the others waited for it), most iterations first"""
    notes: tuple[str, ...]


def _simulated(requests: Sequence[Request], number: int) -> _Spread:
    return _spread(run(requests[number]))


def _spread(result: RunResult) -> _Spread:
    counts: Counter[int] = Counter()
    waited_s: dict[int, float] = {}
    for each in result.iterations:
        if each.slowest_rank >= 0:
            counts[each.slowest_rank] += each.repeats
            waiting_s = each.repeats * each.breakdown_s[WAITING]
            waited_s[each.slowest_rank] = waited_s.get(each.slowest_rank, 0.0) + waiting_s
    steps_s, note = _steps(result)
    return _Spread(
        undisturbed_s=result.prediction.step_time_s,
        total_s=result.total_s,
        mean_s=result.mean_s,
        p50_s=result.p50_s,
        p99_s=result.p99_s,
        steps_s=steps_s,
        lost_s=sum(each.repeats * each.breakdown_s[WAITING] for each in result.iterations),
        dollars=result.bill.dollars,
        blame=tuple(
            (rank, counts[rank], waited_s[rank]) for rank in sorted(counts, key=lambda rank: (-counts[rank], rank))
        ),
        notes=(*result.notes, *note),
    )


def _steps(result: RunResult) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """Times of all iterations, or of every n-th of very many, and a note that says so."""
    every = ceil(result.request.num_iterations / _STEPS)
    steps = []
    for each in result.iterations:
        first = -(-each.first // every) * every
        steps += [each.step_time_s] * len(range(first, each.first + each.repeats, every))
    return tuple(steps), (f"times are listed of one iteration in {every:,}",) if every > 1 else ()


def _severity(severity: tuple[float, float], spread: _Spread) -> Severity:
    share = spread.lost_s / spread.total_s
    return Severity(*severity, spread.mean_s, spread.p99_s, share, _lost_dollars(spread))


def _lost_dollars(spread: _Spread) -> float | None:
    return None if spread.dollars is None else spread.dollars * spread.lost_s / spread.total_s


def _with(request: Request, probability: float, slowdown: float) -> Request:
    """Returns a short run with other stragglers."""
    other = replace(request.disturbance, straggler_probability=probability, straggler_slowdown=slowdown)
    return replace(request, num_iterations=min(request.num_iterations, _SWEPT), disturbance=other)


def _around(disturbance: Disturbance) -> tuple[tuple[float, float], ...]:
    """Returns half, once and twice the stragglers of the run. The result is empty without stragglers."""
    probability, excess = disturbance.straggler_probability, disturbance.straggler_slowdown - 1.0
    if not probability or not excess:
        return ()
    chances = sorted({min(1.0, times * probability) for times in _TIMES})
    return tuple((chance, 1.0 + times * excess) for chance in chances for times in _TIMES)


def _disturbed(request: Request) -> bool:
    weather = Weather(request.disturbance, request.setup.n_gpus)
    steady = not weather.is_random and not weather.warmup_iterations and weather.at(0).slowest_rank < 0
    return bool(not steady or request.setup.kinds or request.handlers)
