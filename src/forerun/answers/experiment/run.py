"""run: simulates the iterations of a Request. Equal iterations are simulated once.

Iterations differ by warm-up, by the schedules of batch and sequence length, by random draws (jitter, stragglers) and by
changes of handlers. All others are equal: a million equal iterations cost as much as one. If more than MOST iterations
differ by draws or warm-up, a sample is simulated: the first iteration of every stretch of equal length represents the
others, and the result says so. Iterations are drawn independently, so this sample is as random as any other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil

import numpy as np

from forerun.answers.analysis.prediction import Prediction
from forerun.answers.analysis.reading import Simulation
from forerun.answers.analysis.setup import Setup
from forerun.answers.experiment.bill import bill_of, busy_share
from forerun.answers.experiment.conditions import Conditions, Weather, joined
from forerun.answers.experiment.handlers import Audience, NodeEvent, tell_events
from forerun.answers.experiment.pace import Pace, PacedStep
from forerun.answers.experiment.request import Request
from forerun.answers.experiment.result import Iteration, RunResult, mean_breakdown_s, percentile_s
from forerun.common.errors import ForerunError
from forerun.common.units import PS_PER_S
from forerun.core.program.types import Stream
from forerun.describe.model.spec import ModelSpec

MOST = 10_000
"""iterations that differ by draws or warm-up beyond which a sample of them is simulated"""
_KEPT = 4
"""shapes (batch, sequence length) whose Programs are kept: schedules that come back do so to few"""

_COMPUTE = "compute"
"""the one of CAUSES in which kernels run"""

Progress = Callable[[int, int], None]
"""called with (iterations done, iterations to do)"""
Schedule = Sequence[tuple[int, int]]


def run(request: Request, progress: Progress | None = None, most: int = MOST) -> RunResult:
    """Simulates the iterations of `request`.

    The same request gives the same result to the bit. Its handlers are called on the way (experiment/handlers.py).

    Args:
        most: iterations that differ by draws or warm-up beyond which a sample of them is simulated.

    Raises:
        ImpossiblePlan: the plan cannot run; the message says why.
        ForerunError: as `simulate_setup`; fewer than one iteration; a disturbance, a schedule or a handler that makes
            no sense.
    """
    if request.num_iterations < 1:
        raise ForerunError(f"{request.name}: num_iterations must be at least 1, got {request.num_iterations}")
    audience = Audience(request.handlers)
    running = _Running(request, Weather(request.disturbance, request.setup.n_gpus), audience, most)
    simulation = running.paces.at(0).stepper.simulation
    audience.run_start(request)
    for start, count in running.stretches():
        running.simulate(start, count)
        if progress:
            progress(start + count, request.num_iterations)
    result = _result(request, simulation, running)
    audience.run_end(result)
    return result


class _Paces:
    """The Setup of every iteration, ready to be stepped."""

    def __init__(self, request: Request) -> None:
        self._request = request
        for name, schedule in (("batch", request.batch_schedule), ("sequence length", request.seq_len_schedule)):
            starts = [start for start, _ in schedule]
            if starts != sorted(set(starts)) or any(start < 0 for start in starts):
                raise ForerunError(
                    f"{request.name}: iterations of the {name} schedule must rise from 0 or later, got {starts}"
                )
        self._kept: OrderedDict[tuple[int, int], Pace] = OrderedDict()
        self._known: set[tuple[int, int]] = set()
        self.fullest: Prediction | None = None
        """the iteration so far that takes most memory"""

    def at(self, iteration: int) -> Pace:
        """Returns the Pace of one iteration."""
        setup = scheduled(self._request, iteration)
        shape = (setup.plan.micro_batch, setup.plan.seq_len)
        if shape not in self._kept:
            self._kept[shape] = Pace(setup)
            if shape not in self._known:
                self._known.add(shape)
                self._weigh(self._kept[shape].stepper.simulation.prediction)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(shape)
        return self._kept[shape]

    def _weigh(self, prediction: Prediction) -> None:
        if self.fullest is None or prediction.peak_reserved_gib > self.fullest.peak_reserved_gib:
            self.fullest = prediction

    def note(self, iteration: int) -> str:
        """Returns the batch and the sequence length that schedules give to an iteration, in words. The text is empty if
        no schedule has begun.
        """
        request = self._request
        batch, seq_len = _entry(request.batch_schedule, iteration), _entry(request.seq_len_schedule, iteration)
        return joined("" if batch is None else f"batch {batch}", "" if seq_len is None else f"sequence {seq_len}")


def scheduled(request: Request, iteration: int) -> Setup:
    """Returns the Setup of one iteration."""
    setup = request.setup
    batch, seq_len = _entry(request.batch_schedule, iteration), _entry(request.seq_len_schedule, iteration)
    if batch is None and seq_len is None:
        return setup
    plan = setup.plan
    micro_batch = plan.micro_batch if batch is None else batch
    return replace(
        setup, plan=replace(plan, micro_batch=micro_batch, seq_len=plan.seq_len if seq_len is None else seq_len)
    )


def _entry(schedule: Schedule, iteration: int) -> int | None:
    """Returns the value that holds in an iteration, None before the first."""
    place = bisect_right(schedule, iteration, key=lambda entry: entry[0])
    return schedule[place - 1][1] if place else None


class _Running:
    """A run as far as it has come."""

    def __init__(self, request: Request, weather: Weather, audience: Audience, most: int) -> None:
        self.request, self.weather, self.audience = request, weather, audience
        self.paces = _Paces(request)
        differing = request.num_iterations if weather.is_random else weather.warmup_iterations
        self.sample_of = ceil(min(differing, request.num_iterations) / most)
        """iterations that a simulated one stands for, where they differ"""
        self.iterations: list[Iteration] = []
        self.now_ps = 0
        self._last: Conditions | None = None

    def stretches(self) -> Iterator[tuple[int, int]]:
        """Yields (first iteration, how many) that are simulated once, in order. Stretches of more than one iteration
        are equal, or the sample of those that are not."""
        request, end = self.request, self.request.num_iterations
        warm = min(self.weather.warmup_iterations, end)
        schedules = (*request.batch_schedule, *request.seq_len_schedule)
        borders = sorted({0, warm, end, *(start for start, _ in schedules if start < end)})
        for start, stop in pairwise(borders):
            if self.weather.is_random or start < warm:
                length = max(1, self.sample_of)
            else:
                length = 1 if self.audience else stop - start
            for first in range(start, stop, length):
                yield first, min(length, stop - first)

    def simulate(self, start: int, count: int) -> None:
        """Adds iteration `start`, which stands for `count`."""
        pace = self.paces.at(start)
        conditions = self.audience.iteration_start(start, self.weather.at(start))
        step = pace.step(conditions)
        listeners = self.audience.event_listeners(start)
        if listeners:
            tell_events(listeners, node_events(pace, conditions, start, self.now_ps))
        iteration = self._iteration(start, count, pace.setup, step, joined(conditions.note, self.paces.note(start)))
        self.audience.iteration_end(iteration)
        self._add(iteration, conditions)
        self.now_ps += count * step.time_ps

    def _iteration(self, start: int, count: int, setup: Setup, step: PacedStep, note: str) -> Iteration:
        return Iteration(
            first=start,
            repeats=count,
            start_s=self.now_ps / PS_PER_S,
            step_time_s=step.time_ps / PS_PER_S,
            samples=setup.samples_per_step,
            seq_len=setup.plan.seq_len,
            breakdown_s=step.breakdown_s,
            slowest_rank=step.slowest_rank,
            note=note,
        )

    def _add(self, iteration: Iteration, conditions: Conditions) -> None:
        """Folds the iteration into the one before where both are equal."""
        last = self.iterations[-1] if self.iterations else None
        shape = (iteration.samples, iteration.seq_len, iteration.note)
        if (
            last is not None
            and self._last is not None
            and self._last.same(conditions)
            and shape == (last.samples, last.seq_len, last.note)
        ):
            self.iterations[-1] = replace(last, repeats=last.repeats + iteration.repeats)
        else:
            self.iterations.append(iteration)
        self._last = conditions

    @property
    def notes(self) -> tuple[str, ...]:
        """Returns the remarks that belong to the result."""
        plan, disturbance = self.request.setup.plan, self.request.disturbance
        notes = []
        if self.sample_of > 1:
            notes.append(
                f"one of every {self.sample_of:,} different iterations is simulated, with the random"
                f" numbers of seed {disturbance.seed}, and represents the others"
            )
        if plan.pp > 1 and plan.dp > 1 and self.weather.differs_by_rank:
            notes.append(
                "the simulation places all slow ranks of an iteration in one pipeline replica, so times"
                " are upper bounds"
            )
        return tuple(notes)


def _result(request: Request, simulation: Simulation, running: _Running) -> RunResult:
    iterations = tuple(running.iterations)
    total_s = running.now_ps / PS_PER_S
    samples = sum(each.repeats * each.samples for each in iterations)
    tokens = sum(each.repeats * each.samples * each.seq_len for each in iterations)
    has_tokens = isinstance(request.setup.model, ModelSpec)
    return RunResult(
        request=request,
        simulation=simulation,
        iterations=iterations,
        total_s=total_s,
        mean_s=total_s / request.num_iterations,
        p50_s=percentile_s(iterations, 50),
        p99_s=percentile_s(iterations, 99),
        samples_per_s=samples / total_s,
        tokens_per_s=tokens / total_s if has_tokens else None,
        bill=bill_of(request, total_s, samples, tokens if has_tokens else None, _busy_share(simulation, running)),
        notes=running.notes,
        fullest=running.paces.fullest,
    )


def _busy_share(simulation: Simulation, running: _Running) -> float:
    """Returns the share of the run in which kernels run, mean over GPUs. It is the share of the undisturbed iteration,
    reduced if waiting, communication or the host take a larger share of the run.
    """
    stepper = running.paces.at(0).stepper
    undisturbed = stepper.step([1.0] * stepper.n_classes)
    mean = mean_breakdown_s(running.iterations)
    share = mean[_COMPUTE] / sum(mean.values())
    usual = undisturbed.breakdown_s[_COMPUTE] / undisturbed.time_s
    return min(1.0, busy_share(simulation) * share / usual) if usual else busy_share(simulation)


def node_events(pace: Pace, conditions: Conditions, iteration: int, begins_ps: int) -> Iterator[NodeEvent]:
    """Returns two events for each node of every rank class, the iteration starting `begins_ps` after the run.

    At one time nodes end first, then others start, in the order of rank classes and of issue; one that takes no time
    ends right after it starts.
    """
    flat, program = pace.stepper.simulation.flat, pace.stepper.simulation.program
    timeline = pace.stepper.timeline(pace.class_factors(conditions), conditions.network, conditions.host)
    start, end = timeline.start_ps, timeline.end_ps
    n = len(flat)
    time = np.concatenate((start, end))
    is_end = np.arange(2 * n) >= n
    late = np.concatenate((np.ones(n, bool), end == start))
    owner = np.repeat(np.arange(len(program.rank_classes)), np.diff(flat.class_ptr))
    for event in np.lexsort((is_end, np.tile(np.arange(n), 2), late, time)).tolist():
        node = event % n
        yield NodeEvent(
            time_s=(begins_ps + int(time[event])) / PS_PER_S,
            starts=event < n,
            iteration=iteration,
            rank_class=program.rank_classes[owner[node]].name,
            name=program.ops.name[flat.op[node]],
            stream=Stream(flat.stream[node]).name.lower(),
        )
