"""Many runs with different random failures: distributions, the best checkpoint interval, and gains of improvements.

All results use the same seeds, so that runs differ only by the change. Several processes share the runs; their number
does not affect the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from forerun.answers.goodput.formulas import daly_interval_s, young_interval_s
from forerun.answers.goodput.outcome import Outcome, Spent
from forerun.answers.goodput.request import RunRequest, Spares
from forerun.answers.goodput.walks import Walks
from forerun.common.errors import ForerunError

_INTERVALS = 9
"""intervals tried in each round of the search, evenly on a logarithmic scale"""
_ROUNDS = 2
_WIDEST = 8.0
"""the first round tries intervals up to this factor from Daly's"""
_RUNS_OF_SEARCH = 24
_MOST_EVENTS = 5e6
"""failures and slow periods that one command may simulate"""

Key = TypeVar("Key")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The 5th, 50th and 95th percentile and the mean of a figure over all runs."""

    p5: float
    p50: float
    p95: float
    mean: float

    @staticmethod
    def of(values: Sequence[float]) -> Quantiles:
        """Returns the quantiles of `values`."""
        low, middle, high = np.quantile(values, (0.05, 0.5, 0.95)).tolist()
        return Quantiles(low, middle, high, float(np.mean(values)))


@dataclass(frozen=True, slots=True)
class Gain:
    """A change of the system and the effect that it would have."""

    change: str
    goodput: float
    """mean over all runs"""
    saved_s: float
    """mean seconds by which the run ends earlier; with an end by the clock, seconds of useful steps more"""


@dataclass(frozen=True, slots=True)
class Interval:
    """A checkpoint interval and the mean goodput under it."""

    name: str
    save_every_s: float
    goodput: float


@dataclass(frozen=True)
class RunStudy:
    """The outcomes of one run under different luck, and figures over all of them."""

    request: RunRequest
    seed: int
    outcomes: tuple[Outcome, ...]
    intervals: tuple[Interval, ...] = ()
    """the best interval found, Young's and Daly's"""
    gains: tuple[Gain, ...] = ()

    @property
    def goodput(self) -> Quantiles:
        """Returns the share of wall time that kept steps need without any disturbance."""
        return Quantiles.of([one.goodput for one in self.outcomes])

    @property
    def ettr(self) -> Quantiles:
        """Returns the share of wall time in which steps run that the run keeps."""
        return Quantiles.of([one.ettr for one in self.outcomes])

    @property
    def wall_s(self) -> Quantiles:
        """Returns the seconds until the last step, or until the run's end by the clock."""
        return Quantiles.of([one.wall_s for one in self.outcomes])

    @property
    def tokens(self) -> Quantiles:
        """Returns the tokens of the steps that the run keeps."""
        return Quantiles.of([one.tokens for one in self.outcomes])

    @property
    def lost_tokens(self) -> Quantiles:
        """Returns the tokens of the steps that the run loses and repeats."""
        return Quantiles.of([one.lost_tokens for one in self.outcomes])

    @property
    def interruptions(self) -> Quantiles:
        """Returns the failures of all kinds."""
        return Quantiles.of([float(one.interruptions) for one in self.outcomes])

    @property
    def finished(self) -> float:
        """Returns the share of runs that reach their last step."""
        return sum(one.finished for one in self.outcomes) / len(self.outcomes)

    @property
    def mttf_s(self) -> float:
        """Returns the mean seconds from one failure to the next; infinite if nothing failed."""
        failures = sum(one.interruptions for one in self.outcomes)
        return sum(one.wall_s for one in self.outcomes) / failures if failures else inf

    @property
    def badput(self) -> dict[Spent, float]:
        """Returns the mean share of wall time that each class of badput takes, the largest first."""
        shares: defaultdict[Spent, float] = defaultdict(float)
        for one in self.outcomes:
            for what, seconds in one.spent_s.items():
                shares[what] += seconds / one.wall_s / len(self.outcomes)
        return _largest_first(shares)

    @property
    def failures(self) -> dict[str, float]:
        """Returns the mean number of failures of each kind."""
        counts: defaultdict[str, float] = defaultdict(float)
        for one in self.outcomes:
            for name, number in one.failures.items():
                counts[name] += number / len(self.outcomes)
        return _largest_first(counts)

    @property
    def dollars(self) -> float | None:
        """Returns the mean cost of all GPUs, spares included; None without a price."""
        price = self.request.dollars_per_gpu_hour
        return None if price is None else price * _gpus(self.request) * self.wall_s.mean / 3600.0

    @property
    def energy_mwh(self) -> float | None:
        """Returns the mean energy of the GPUs of the run in MWh, at their power limit; None if that is unknown."""
        power = self.request.gpu_power_w
        return None if power is None else power * self.request.gpus * self.wall_s.mean / 3.6e9


def study_run(
    request: RunRequest,
    runs: int = 100,
    seed: int = 0,
    workers: int | None = None,
    gains: bool = True,
    progress: Progress | None = None,
    store: str | Path | None = None,
    executor: str = "local",
    ray_address: str | None = None,
) -> RunStudy:
    """Simulates `runs` runs, and with `gains` as many again under each change that `changes` lists.

    With `store` outcomes are kept in that file, and a study that was broken off goes on from there to the same result.
    With executor `ray` runs are simulated on a Ray cluster, by default that of RAY_ADDRESS or one on this machine.

    Raises ForerunError for fewer than one run, for more events than a computer simulates in an hour, or for a store
    that can't be used.
    """
    if runs < 1:
        raise ForerunError(f"runs must be at least 1, got {runs}")
    _check_work(request, runs)
    with Walks(workers, store, executor, ray_address) as walks:
        intervals: tuple[Interval, ...] = ()
        if request.searches_interval:
            request, intervals = _best_interval(request, seed, min(runs, _RUNS_OF_SEARCH), walks)
        tried = changes(request) if gains else []
        requests = [request, *(changed for _, changed in tried)]
        outcomes: list[Outcome] = []
        tasks = [(each, seed, run) for each in requests for run in range(runs)]
        for number, outcome in enumerate(walks.run(tasks), 1):
            outcomes.append(outcome)
            if progress is not None:
                progress(number, len(tasks))
    own = tuple(outcomes[:runs])
    found = [_gain(name, own, outcomes[runs * i : runs * (i + 1)]) for i, (name, _) in enumerate(tried, 1)]
    return RunStudy(request, seed, own, intervals, tuple(sorted(found, key=lambda gain: -gain.saved_s)))


def by_time_to_train(studies: Sequence[RunStudy]) -> list[RunStudy]:
    """Returns studies of alternatives, the best first (`time_to_train`)."""
    clock = all(study.request.by_the_clock for study in studies)
    return sorted(studies, key=lambda study: time_to_train(study, clock))


def time_to_train(study: RunStudy, by_the_clock: bool) -> tuple[float, float, float]:
    """Returns a key by which runs are ranked: the least is the best.

    That is the run whose last step is reached under most seeds, of equal ones that with the least median time, and
    then that with the most tokens. Of runs that end by the clock it is the one with the most tokens.
    """
    tokens = -study.tokens.p50
    return (0.0, 0.0, tokens) if by_the_clock else (-study.finished, study.wall_s.p50, tokens)


def changes(request: RunRequest) -> list[tuple[str, RunRequest]]:
    """Returns the changes whose gain is worth knowing, each with the run that has it."""
    recovery, spares = request.recovery, request.spares
    found: list[tuple[str, RunRequest]] = []
    if request.failures:
        rarer = tuple(replace(kind, rate_per_s=kind.rate_per_s / 2) for kind in request.failures)
        found.append(("failures half as often", replace(request, failures=rarer)))
        faster = {name: getattr(recovery, name) / 2 for name in ("restart_s", "communicators_s", "warmup_s")}
        found.append(("restarts twice as fast", replace(request, recovery=replace(recovery, **faster))))
        sooner = replace(recovery, crash_detect_s=recovery.crash_detect_s / 2, hang_detect_s=recovery.hang_detect_s / 2)
        found.append(("failures detected in half the time", replace(request, recovery=sooner)))
    if request.levels and request.failures:
        halved: dict[str, Any] = {"blocking_s": 0.5, "persist_s": 0.5}
        levels = tuple(
            replace(level, **{name: getattr(level, name) * factor for name, factor in halved.items()})
            for level in request.levels
        )
        found.append(("saves twice as fast", replace(request, levels=levels)))
        loads = tuple(replace(level, load_s=level.load_s / 2) for level in request.levels)
        found.append(("loads twice as fast", replace(request, levels=loads)))
        found.append(("saves twice as often", replace(request, save_every_s=request.save_every_s / 2)))
    if spares is not None:
        more = Spares(spares.nodes + max(1, ceil(request.nodes / 100)), spares.swap_s, spares.replace_s)
        found.append((f"{more.nodes - spares.nodes} more spare nodes", replace(request, spares=more)))
    if request.slowdowns:
        found.append(("no slow nodes or links", replace(request, slowdowns=())))
    return found


def _gain(name: str, before: Sequence[Outcome], after: Sequence[Outcome]) -> Gain:
    pairs = list(zip(before, after, strict=True))
    ends = all(old.finished and new.finished for old, new in pairs)
    saved = [old.wall_s - new.wall_s if ends else new.productive_s - old.productive_s for old, new in pairs]
    return Gain(name, float(np.mean([one.goodput for one in after])), float(np.mean(saved)))


def _best_interval(request: RunRequest, seed: int, runs: int, walks: Walks) -> tuple[RunRequest, tuple[Interval, ...]]:
    """Returns the run with the interval of the highest mean goodput, and that interval beside Young's and Daly's."""
    first = request.levels[0]
    cost_s = max(first.blocking_s, 1.0)
    mttf_s = 1.0 / request.failures_per_s
    least_s = min(phase.step_s for phase in request.phases)
    known: dict[float, float] = {}

    def goodputs(intervals: Sequence[float]) -> None:
        new = [each for each in dict.fromkeys(intervals) if each not in known]
        tasks = [(replace(request, save_every_s=each), seed, run) for each in new for run in range(runs)]
        found = [outcome.goodput for outcome in walks.run(tasks)]
        known.update({each: float(np.mean(found[i * runs : (i + 1) * runs])) for i, each in enumerate(new)})

    middle_s, width = max(request.save_every_s, least_s), _WIDEST
    for _ in range(_ROUNDS):
        around = (middle_s * width ** (2.0 * i / (_INTERVALS - 1) - 1.0) for i in range(_INTERVALS))
        goodputs([max(least_s, each) for each in around])
        middle_s, width = max(known, key=lambda each: (known[each], each)), width ** (2.0 / (_INTERVALS - 1))
    by_hand = {"Young": young_interval_s(cost_s, mttf_s), "Daly": daly_interval_s(cost_s, mttf_s)}
    goodputs(list(by_hand.values()))
    best_s = max(known, key=lambda each: (known[each], each))
    rows = [Interval("best", best_s, known[best_s])]
    rows += [Interval(name, each, known[each]) for name, each in by_hand.items()]
    return replace(request, save_every_s=best_s, searches_interval=False), tuple(rows)


def _check_work(request: RunRequest, runs: int) -> None:
    wall_s = request.ideal_s if request.wall_s is None else min(request.wall_s, 10 * request.ideal_s)
    events = wall_s * (request.failures_per_s + sum(one.rate_per_s for one in request.slowdowns))
    if runs * events > _MOST_EVENTS:
        raise ForerunError(
            f"{runs:,} runs with {events:,.0f} failures and slow periods each are too many to simulate; lower --runs,"
            " or the rates"
        )


def _largest_first(values: Mapping[Key, float]) -> dict[Key, float]:
    return dict(sorted(values.items(), key=lambda item: -item[1]))


def _gpus(request: RunRequest) -> float:
    standing_by = 0 if request.spares is None else request.spares.nodes
    return request.gpus * (1.0 + standing_by / request.nodes)
