"""Recommendations: changes that would make a run faster or cheaper, or make it fit in memory.

Forerun simulates every candidate (`candidates.py`, `machine.py`, `plans.py`) on the undisturbed iteration. It
recommends one only if it fits in memory and improves the run by at least 1 %. It recommends the best candidate of each
kind, and also simulates compatible candidates together if they keep the global batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from forerun.answers.analysis.prediction import Prediction
from forerun.answers.analysis.reading import TIGHT, Simulation
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.experiment.advice.candidates import candidates, plan_candidate, savers
from forerun.answers.experiment.advice.change import Candidate, Kind
from forerun.answers.experiment.advice.machine import DEVICE
from forerun.answers.experiment.advice.plans import plans_by_bound
from forerun.answers.experiment.bill import bill_of
from forerun.answers.experiment.request import Request
from forerun.common.errors import ForerunError

LEAST_GAIN = 0.01
"""the least gain that makes a change worth recommending"""
_LEAST_MEMORY = 0.10
"""the least share of the memory that a change frees if that is its purpose"""
_TRIED_TOGETHER = 8

Aim = Literal["memory", "speed", "cost"]


@dataclass(frozen=True)
class Figures:
    """The figures of one iteration of a setup."""

    step_time_s: float
    samples_per_step: int
    samples_per_s: float
    peak_reserved_gib: float
    memory_limit_gib: float
    fits: bool
    tight: bool
    """it fits only because the allocator returns memory and asks again; the figures leave out this time"""
    dollars_per_million_samples: float | None


@dataclass(frozen=True)
class Advice:
    """A recommended change, and the figures before and after it."""

    kind: Kind
    aim: Aim
    """the purpose: memory (it makes the run fit, or frees memory), speed, or cost"""
    title: str
    """the instruction"""
    text: str
    """the instruction and its effect, in words"""
    change: dict[str, Any]
    """`section.key` of the experiment -> its new value, None to remove the key (`description.read.changed`)"""
    before: Figures
    after: Figures
    gain: float
    """samples/s after the change over samples/s before it, less 1 (before: as if the run fitted)"""
    caveat: str
    """other effects of the change; "" for none"""
    setup: Setup


@dataclass(frozen=True)
class _Trial:
    """A candidate and the results of its simulation."""

    candidate: Candidate
    after: Figures


@dataclass
class _Desk:
    """The trials of one request, each simulated once."""

    request: Request
    before: Figures
    trials: list[_Trial] = field(default_factory=list)

    def try_all(self, some: Iterable[Candidate]) -> None:
        """Simulates `some` candidates, and leaves out those that can't run."""
        for candidate in some:
            after = _simulated(self.request, candidate)
            if after is not None:
                self.trials.append(_Trial(candidate, after))

    def gain(self, after: Figures) -> float:
        return after.samples_per_s / self.before.samples_per_s - 1.0

    def aims(self, trial: _Trial) -> Iterator[Aim]:
        """Yields the purposes that a trial serves."""
        before, after = self.before, trial.after
        if not after.fits:
            return
        if not before.fits:
            yield "memory"
        elif not after.tight or before.tight:
            faster = self.gain(after) > LEAST_GAIN
            if faster:
                yield "speed"
            if trial.candidate.kind == DEVICE and _is_cheaper(before, after):
                yield "cost"
            if not faster and self._frees_memory(after) and trial.candidate.kind != DEVICE:
                yield "memory"

    def _frees_memory(self, after: Figures) -> bool:
        """Returns whether memory is short and the trial frees much of it without losing speed."""
        before, limit = self.before, self.before.memory_limit_gib
        short = before.peak_reserved_gib > self.request.thresholds.memory * limit
        freed = before.peak_reserved_gib - after.peak_reserved_gib
        return short and freed > _LEAST_MEMORY * limit and self.gain(after) >= 0


def _is_cheaper(before: Figures, after: Figures) -> bool:
    old, new = before.dollars_per_million_samples, after.dollars_per_million_samples
    return old is not None and new is not None and new < (1.0 - LEAST_GAIN) * old


def advise(request: Request, base: Simulation | None = None, *, most: int = 40, plans: int = 16) -> tuple[Advice, ...]:
    """Simulates changes of the run of `request` and returns those that help, the largest gain first.

    If the run does not fit in memory, all advice makes it fit, the fastest first and plans that only just fit last.
    Otherwise advice on speed comes first, then advice that frees memory at no loss of speed. Other devices follow:
    faster ones, then those that are only cheaper for a sample.

    Args:
        base: its undisturbed iteration, simulated unless given.
        most: candidates that are simulated at most.
        plans: plans of other meshes that are simulated beside them at most.

    Raises ForerunError if the request itself can't be simulated.
    """
    prediction = (base or simulate_setup(request.setup, folded=True)).prediction
    desk = _Desk(request, _figures(request, request.setup, prediction))
    desk.try_all(islice(candidates(request, desk.before.fits), most))
    best_plan = _best_plan(desk, plans)
    if best_plan is not None:
        desk.trials.append(best_plan)
    if not desk.before.fits and not any(trial.after.fits for trial in desk.trials):
        desk.try_all(islice(savers(request), most))
    useful = [(aim, trial) for trial in _plain(desk.trials) for aim in desk.aims(trial)]
    advice = [_advice(desk, aim, trial) for aim, trial in _best_of_kinds(desk, useful)]
    together = _together(desk, [trial for aim, trial in useful if aim != "cost"])
    if together is not None:
        advice.append(together)
    return tuple(sorted(advice, key=_order))


def _order(advice: Advice) -> tuple[int, float]:
    if advice.aim == "cost":
        return 3, advice.after.dollars_per_million_samples or 0.0
    if advice.kind == DEVICE:
        return 2, -advice.gain
    later = advice.aim == "memory" if advice.before.fits else advice.after.tight
    return int(later), -advice.gain


def _figures(request: Request, setup: Setup, prediction: Prediction) -> Figures:
    step_s, samples = prediction.step_time_s, setup.samples_per_step
    prices = request.prices
    if setup.cluster.device.name != request.setup.cluster.device.name:
        prices = replace(prices, dollars_per_gpu_hour=None)  # the price is that of the run's own GPUs
    bill = bill_of(replace(request, setup=setup, prices=prices), step_s, samples, None)
    return Figures(
        step_time_s=step_s,
        samples_per_step=samples,
        samples_per_s=samples / step_s,
        peak_reserved_gib=prediction.peak_reserved_gib,
        memory_limit_gib=prediction.memory_limit_gib,
        fits=prediction.fits,
        tight=TIGHT in prediction.warnings,
        dollars_per_million_samples=bill.dollars_per_million_samples,
    )


def _simulated(request: Request, candidate: Candidate) -> Figures | None:
    """Returns the figures of a candidate; None if it can't run."""
    try:
        prediction = simulate_setup(candidate.setup, folded=True).prediction
    except ForerunError:
        return None
    return _figures(request, candidate.setup, prediction)


def _best_plan(desk: _Desk, most: int) -> _Trial | None:
    """Returns the fastest of the first `most` plans in the order of their bounds; None if none is possible."""
    best: _Trial | None = None
    for bound, plan in plans_by_bound(desk.request.setup)[:most] if most else ():
        if best is not None and bound >= best.after.step_time_s:
            break
        candidate = plan_candidate(desk.request, plan)
        after = _simulated(desk.request, candidate) if candidate.fields else None
        if after is None or not after.fits or (after.tight and not desk.before.tight):
            continue
        if best is None or after.step_time_s < best.after.step_time_s:
            best = _Trial(candidate, after)
    return best


def _plain(trials: list[_Trial]) -> Iterator[_Trial]:
    """Yields `trials`, without those that gain no more than a part of themselves: the simpler change is better."""
    parts = [(set(map(repr, trial.candidate.change.items())), trial) for trial in trials]
    for number, (change, trial) in enumerate(parts):
        simpler = (
            other.after.fits and other.after.samples_per_s >= trial.after.samples_per_s
            for place, (part, other) in enumerate(parts)
            if part < change or (part == change and place < number)
        )
        if not any(simpler):
            yield trial


def _best_of_kinds(desk: _Desk, useful: Iterable[tuple[Aim, _Trial]]) -> Iterator[tuple[Aim, _Trial]]:
    """Yields the best trial of each kind and aim, the first of equal ones; a trial that is best for two aims appears
    once."""
    best: dict[tuple[str, Aim], _Trial] = {}
    for aim, trial in useful:
        key = (trial.candidate.kind, aim)
        if key not in best or _better(aim, trial.after, best[key].after):
            best[key] = trial
    told: list[_Trial] = []
    for (_, aim), trial in best.items():
        if not any(trial is other for other in told):
            told.append(trial)
            yield aim, trial


def _better(aim: Aim, one: Figures, other: Figures) -> bool:
    if aim == "cost":
        return (one.dollars_per_million_samples or 0.0) < (other.dollars_per_million_samples or 0.0)
    return (not one.tight, one.samples_per_s) > (not other.tight, other.samples_per_s)


def _together(desk: _Desk, useful: list[_Trial]) -> Advice | None:
    """Returns several useful changes together, added one by one while each helps; None if fewer than two remain."""
    same = desk.before.samples_per_step
    keeping = [trial for trial in useful if trial.candidate.kind != DEVICE and trial.after.samples_per_step == same]
    if not keeping:
        return None
    keeping.sort(key=lambda trial: (trial.after.tight, -trial.after.samples_per_s))
    chosen, now = [keeping[0].candidate], keeping[0].after
    # in a run that does not fit, a change that doesn't make it fit alone may still speed up one that does
    others = keeping[1:] if desk.before.fits else [trial for trial in desk.trials if trial is not keeping[0]]
    others = [t for t in others if t.candidate.kind != DEVICE and t.after.samples_per_step == same]
    others.sort(key=lambda trial: -trial.after.samples_per_s)
    setup, tried = chosen[0].setup, 0
    for trial in others:
        candidate = trial.candidate
        clashes = any(candidate.touches & other.touches for other in chosen)
        if clashes or desk.gain(trial.after) <= LEAST_GAIN or tried == _TRIED_TOGETHER:
            continue
        tried += 1
        both = _both(candidate, setup)
        after = _simulated(desk.request, both) if both else None
        roomy = after is not None and after.fits and (not after.tight or now.tight)
        if both and after and roomy and after.samples_per_s > now.samples_per_s * (1 + LEAST_GAIN / 2):
            chosen, now, setup = [*chosen, candidate], after, both.setup
    if len(chosen) < 2:
        return None
    change = {key: value for candidate in chosen for key, value in candidate.change.items()}
    caveat = "; ".join(dict.fromkeys(candidate.caveat for candidate in chosen if candidate.caveat))
    title = "; ".join(candidate.title for candidate in chosen)
    whole = Candidate("all together", title, setup, change, {}, caveat)
    return _advice(desk, "speed" if desk.before.fits else "memory", _Trial(whole, now))


def _both(candidate: Candidate, setup: Setup) -> Candidate | None:
    try:
        return replace(candidate, setup=candidate.on(setup))
    except ForerunError:
        return None


def _advice(desk: _Desk, aim: Aim, trial: _Trial) -> Advice:
    candidate, after, gain = trial.candidate, trial.after, desk.gain(trial.after)
    text = f"{candidate.title}: {_brings(desk, aim, after, gain)}"
    return Advice(
        kind=candidate.kind,
        aim=aim,
        title=candidate.title,
        text=f"{text}; {candidate.caveat}" if candidate.caveat else text,
        change=candidate.change,
        before=desk.before,
        after=after,
        gain=gain,
        caveat=candidate.caveat,
        setup=candidate.setup,
    )


def _brings(desk: _Desk, aim: Aim, after: Figures, gain: float) -> str:
    """Returns the effect of a change, in words."""
    before, word = desk.before, f"{desk.request.sample}s"
    if not before.fits:
        memory = f"{after.peak_reserved_gib:.1f} of {after.memory_limit_gib:.1f} GiB"
        fits = "fits in memory, but only just" if after.tight else "fits in memory"
        return f"{fits} ({memory}), {_number(after.samples_per_s)} {word}/s"
    parts = [_faster(before.samples_per_s, after.samples_per_s, gain, word)]
    if aim == "memory":
        parts.insert(0, f"{after.peak_reserved_gib:.1f} GiB instead of {before.peak_reserved_gib:.1f}")
    old, new = before.dollars_per_million_samples, after.dollars_per_million_samples
    if (old is not None and new is not None and after.memory_limit_gib != before.memory_limit_gib) or aim == "cost":
        parts.insert(0 if aim == "cost" else 1, f"${_number(new)} instead of ${_number(old)} for a million {word}")
    return ", ".join(parts)


def _faster(before: float, after: float, gain: float, word: str) -> str:
    values = f"{_number(after)} instead of {_number(before)}"
    if gain >= 1:
        return f"{1 + gain:.1f} times the {word}/s ({values})"
    return f"{abs(gain):.1%} {'more' if gain >= 0 else 'fewer'} {word}/s ({values})"


def _number(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
