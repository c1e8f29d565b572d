"""search: finds the best plan of a space, and says why the others are not.

Coarse lower bounds of all plans screen the whole space at once: plans that certainly do not fit are discarded. Plans
that may still reach one of the wanted places get closer bounds, in the order of the coarse ones. They are simulated in
the order of the closer bounds, until the bound passes the last place. The places are therefore exact under the model.
The answer does not depend on the number of processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from heapq import nsmallest
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forerun.answers.analysis.predict import predict
from forerun.answers.analysis.prediction import DoesNotFit, Prediction
from forerun.answers.search.choices import LISTED, OTHER_NUMERICS, UNMEASURED, Choice, narrower
from forerun.answers.search.executor import Answer, AnswersPlans, Predictor, Question, Refused, executor_of
from forerun.answers.search.front import Front, time_and_memory_front
from forerun.answers.search.outcome import Outcome, Rows, Status
from forerun.answers.search.plan_queue import Queue
from forerun.answers.search.result import REFUSED_RULE, Objective, SearchResult
from forerun.answers.search.space import Extent, Limits, Tally, make_spaces
from forerun.answers.search.space_table import SpaceTable
from forerun.answers.search.spaces import Bounds, Spaces
from forerun.answers.search.store import AnswerStore, Remembering
from forerun.answers.search.unit_runs import UnitRuns
from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.common.processes import Processes, default_workers
from forerun.common.units import GIB
from forerun.core.cost.measured import Measured
from forerun.core.network.network_file import Network
from forerun.core.network.on_topology import check_size
from forerun.describe.cluster.memory_limit import limited
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec

BATCHES = (8, 8, 16, 32, 64)
"""sizes of the batches after the first that are simulated before the bound is read again; the last one repeats. They
are fixed so that every machine simulates the same plans"""
_FIRST = (4, 16)
"""least and greatest size of the first batch, which has as many plans as there are places"""
Place = tuple[ModelSpec, Cluster, int, int, int]
"""model, cluster, number of GPUs, sequence length and global batch of a question"""
_OF_A_CHOICE = 2
"""plans that are simulated together in order to find the best one with another choice"""
KEYS: dict[Objective, Callable[[Prediction], float]] = {
    "time": lambda p: p.step_time_s,
    "tokens": lambda p: p.step_time_s,  # the tokens of a step are given
    "cost": lambda p: p.step_time_s,  # the GPUs are given, so their time is the price
    "memory": lambda p: p.peak_reserved_gib,
}


def search(  # noqa: PLR0913 - a public function whose keyword arguments users name
    model: ModelSpec,
    cluster: Cluster,
    n_gpus: int,
    seq_len: int,
    global_batch: int,
    *,
    objective: Objective = "time",
    memory_limit_gib: float | None = None,
    fixed: Mapping[str, object] | None = None,
    limits: Limits | None = None,
    space: Extent = "default",
    keep: int = 10,
    within_s: float = 0.0,
    exhaustive: bool = False,
    pareto: int | None = None,
    choices: Sequence[str] | None = None,
    workers: int | None = None,
    network: Network | None = None,
    measured: Measured | None = None,
    predictor: Predictor = predict,
    executor: Literal["local", "ray"] = "local",
    ray_address: str | None = None,
    store: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    found: Callable[[Sequence[Prediction]], None] | None = None,
    proved: Callable[[SearchResult], None] | None = None,
) -> SearchResult:
    """Finds the best plans to train `model` on `n_gpus` of `cluster` with `global_batch` sequences of `seq_len` a step.

    Args:
        objective: step time, tokens per second, dollars per token, or peak reserved memory; the first three have the
            same best plan for given GPUs and batch.
        memory_limit_gib: memory of a GPU to use at most; unless given, all of it.
        fixed: Plan field -> a value, or a list of values to try.
        limits: upper limits of the axes that are not fixed.
        space: `default`: the plans that stacks offer today; `whole`: all plans that they could run, in every order of
            the mesh axes on the nodes (see `search.space`).
        keep: the number of places that must be exact; plans whose bounds come after these places may be skipped.
        within_s: also find all plans whose step takes at most so long; their places are exact too. Not for objective
            memory.
        exhaustive: simulate every plan that could fit.
        pareto: also find the front of step time and memory, simulating at most this many more plans for it.
        choices: also say what single choices are worth (`SearchResult.choices`): compilation, precision and the stacks
            of `fixed`, and these stacks, whose plans have no place otherwise. Not for objective memory.
        workers: number of processes, or CPUs of a Ray cluster; unless given, one process for each CPU, or all CPUs.
        network: the network of the GPUs in place of the links of the cluster.
        measured: the user's own times of kernels and collectives, which replace the shipped ones.
        predictor: a function that predicts a plan. With one, every plan is predicted, as the bounds are about
            `predict`. It must be importable where processes are not forked, and brings its own network and times.
        executor: `local` processes or a `ray` cluster, which needs Ray.
        ray_address: address of the Ray cluster (HOST:PORT, ray://HOST:PORT, auto); unless given, RAY_ADDRESS, or a
            cluster on this machine for the time of the search.
        store: a file that keeps every answer as it comes, and supplies the answers that it has; created where missing.
        progress: called with the number of plans that are done and the number of all.
        found: called after every batch with the plans that fit so far, the best first, before their places are proved.
        proved: called once with the result as soon as the places are exact, before the front and the choices.

    Raises:
        ImpossiblePlan: no combination can run at all; the message says why.
        ForerunError: an argument is wrong, the objective is cost on a cluster without a price, the network has fewer
            NPUs than GPUs, the store can't be read or written, or the Ray cluster can't be used.
    """
    check_objective(objective, cluster)
    if keep < 1:
        raise ForerunError(f"keep must be at least 1, got {keep}")
    if within_s and objective == "memory":
        raise ForerunError("within_s is about the time of a step; leave it out for objective memory")
    if network is not None:
        check_size(network, n_gpus)
    cluster = limited(cluster, memory_limit_gib)
    question, tally = Question(predictor, model, cluster, network, measured), Tally()
    with ExitStack() as stack:
        answers = stack.enter_context(executor_of(question, executor, workers, ray_address))
        if store is not None:
            answers = Remembering(answers, stack.enter_context(AnswerStore(Path(store), question.basis())))
        place = (model, cluster, n_gpus, seq_len, global_batch)
        chosen = Spaces.of(make_spaces(*place, fixed, limits, space, network is not None), tally)
        if not len(chosen.table):
            raise ImpossiblePlan(_nothing_possible(tally, n_gpus))
        own_workers = workers if workers is not None and executor == "local" else default_workers()
        runs = stack.enter_context(UnitRuns(model, cluster, network, measured, n_gpus, own_workers))
        bounds = Bounds(chosen, runs)
        every = exhaustive or predictor is not predict
        front_too = pareto is not None and proved is None
        # A search of another stack has little for several processes to do, so it is a process beside this search.
        is_beside = executor == "local" and store is None and own_workers > 1
        how: dict[str, Any] = {"limits": limits, "space": space, "network": network, "measured": measured}
        how |= {"executor": executor, "ray_address": ray_address, "store": store}
        alone = partial(search, keep=1, workers=1 if is_beside else workers, **how)
        elsewhere = Processes(partial(_best_on, place, fixed, alone), own_workers if is_beside else 1, 1)
        names = choices if choices and objective != "memory" else ()
        on_others = stack.enter_context(elsewhere).begin(names)
        run = Simulating(bounds, chosen.table, objective, keep, every, front_too, tally, within_s)
        run.run(answers, progress, found)
        if not run.predictions and not run.unfit and not run.screened.too_large.any():
            raise ImpossiblePlan(_nothing_possible(tally, n_gpus))
        result = _result(place, objective, keep, run, chosen, tally)
        if proved is not None:
            proved(result)
        front = None if pareto is None else run.front(answers, pareto, progress)
        others: tuple[Choice, ...] = ()
        if choices is not None and run.best is not None and objective != "memory":
            others = run.choices(answers) + run.narrower(model, cluster, answers)
            found_there = zip(names, on_others, strict=True)
            others += tuple(
                Choice("stack", name, best, run.best, UNMEASURED) for name, best in found_there if best is not None
            )
    if pareto is None and choices is None:
        return result
    result = _result(place, objective, keep, run, chosen, tally)
    return replace(result, front=front, choices=others)


def _result(
    place: Place, objective: Objective, keep: int, run: Simulating, chosen: Spaces, tally: Tally
) -> SearchResult:
    """Returns the present result of `run` for the plans of `chosen`."""
    model, cluster, n_gpus, seq_len, global_batch = place
    limit_gib = cluster.device.memory_bytes / GIB
    outcome = run.outcome(chosen, limit_gib)
    return SearchResult(
        model=model.name,
        cluster=cluster.name,
        n_gpus=n_gpus,
        seq_len=seq_len,
        global_batch=global_batch,
        objective=objective,
        memory_limit_gib=limit_gib,
        ranked=tuple(run.predictions[row] for _, row in sorted(run.ranked)),
        too_large=outcome.too_large(),
        skipped=outcome.skipped(),
        considered=tally.considered,
        impossible=dict(Counter(tally.impossible).most_common()),
        impossible_examples=dict(tally.examples),
        same=tally.same,
        keep=keep,
        outcome=outcome,
    )


def check_objective(objective: str, cluster: Cluster) -> None:
    """Raises ForerunError for an unknown objective, and for objective cost where `cluster` has no price."""
    if objective not in KEYS:
        raise ForerunError(f"objective must be one of {', '.join(KEYS)}, got {objective!r}")
    if objective == "cost" and cluster.price_per_gpu_hour is None:
        raise ForerunError(
            f"objective cost: cluster {cluster.name} has no price_per_gpu_hour; set it in a cluster file"
        )


def _best_on(
    place: Place, fixed: Mapping[str, object] | None, searched: Callable[..., SearchResult], stack: str
) -> Prediction | None:
    """Returns the best plan on another stack; None if it can't run the question, or where nothing fits."""
    try:
        return searched(*place, fixed={**(fixed or {}), "stack": stack}).best
    except ImpossiblePlan:
        return None


class Simulating:
    """Simulates the plans of a table in the order of their bounds."""

    def __init__(
        self,
        bounds: Bounds,
        table: SpaceTable,
        objective: Objective,
        keep: int,
        exhaustive: bool,
        with_front: bool,
        tally: Tally,
        within_s: float = 0.0,
    ) -> None:
        """Starts a search. `with_front`: whether the bounds of plans that are not simulated are needed too, and nobody
        waits for the places alone."""
        self._table, self._objective, self._keep, self._tally = table, objective, keep, tally
        self._within_s = within_s
        self._bounds = bounds
        self._memory = objective == "memory"
        self._is_coarse = not (self._memory or exhaustive or with_front)
        self.screened = bounds.coarse() if self._is_coarse else bounds.all()
        self._is_fine = np.full(len(table), not self._is_coarse)
        """whether the bounds of a row are those of `Bounds.all`"""
        self._bound = self.screened.held_bytes / GIB if self._memory else self.screened.time_s.copy()
        self._status = np.where(self.screened.too_large, Status.TOO_LARGE, Status.SKIPPED).astype(np.uint8)
        self._by_closer = not (self._memory or exhaustive)
        if exhaustive:
            self._bound[:] = 0.0
        self.ranked: list[tuple[float, int]] = []
        """(objective, row) of the plans that fit"""
        self.predictions: dict[int, Prediction] = {}
        self.unfit: dict[int, DoesNotFit] = {}
        """plans that were not run because they do not fit"""

    def run(
        self,
        answers: AnswersPlans,
        progress: Callable[[int, int], None] | None,
        found: Callable[[Sequence[Prediction]], None] | None = None,
    ) -> None:
        """Simulates batch after batch until the bound passes the last place."""
        rows = np.flatnonzero(~self.screened.too_large)
        queue = self._queue(rows)
        first = min(max(self._keep, _FIRST[0]), _FIRST[1])
        done, total, sizes = 0, len(rows), chain((first, *BATCHES), repeat(BATCHES[-1]))
        size = next(sizes)
        while batch := queue.next(size, max(self.last_place, self._within_s)):
            answered = answers.run([self._table.plan(row) for row in batch])
            size = next(sizes)
            queue.look_ahead(size, max(self.last_place, self._within_s))
            for row, answer in zip(batch, answered, strict=True):
                self._record(row, answer)
                done += 1
                if progress:
                    progress(done, total)
            if found:
                found([self.predictions[row] for _, row in nsmallest(self._keep, self.ranked)])
        if progress:
            progress(total, total)

    def _queue(self, rows: Rows) -> Queue:
        closer = self._closer if self._by_closer else None
        return Queue(rows, self._bound, self._refined if self._is_coarse else None, closer)

    def front(self, answers: AnswersPlans, most: int, progress: Callable[[int, int], None] | None) -> Front:
        """Finds the front of step time and memory of the plans that fit, simulating at most `most` more plans."""
        if self._is_coarse:
            self._refined(np.flatnonzero((self._status == Status.SKIPPED) & ~self._is_fine))
            self._is_coarse = False
        rows = np.flatnonzero(self._status == Status.SKIPPED)
        return time_and_memory_front(
            [self.predictions[row] for _, row in sorted(self.ranked)],
            self.screened.time_s[rows],
            self.screened.held_bytes[rows] / GIB,
            lambda place: self._table.plan(int(rows[place])),
            answers,
            most,
            lambda place: self._bounds.closer(int(rows[place])),
            progress,
        )

    @property
    def best(self) -> Prediction | None:
        """Returns the best plan so far that fits."""
        return self.predictions[min(self.ranked)[1]] if self.ranked else None

    def choices(self, answers: AnswersPlans) -> tuple[Choice, ...]:
        """Returns the best plan of each stack with the other compilation, and the best plan of each other stack."""
        assert self.best is not None
        every, found = self._table.variants, []
        stack, compiled = (
            np.array(every.values[name], object)[self._table.codes_of(name)] for name in ("stack", "compile")
        )
        for name in every.values["stack"]:
            best = self._best_of(np.flatnonzero(stack == name), answers)
            if best is None:
                continue
            if name != self.best.own_plan().stack:
                found.append(Choice("stack", str(name), best, self.best))
            is_compiled = best.own_plan().compile
            other = self._best_of(np.flatnonzero((stack == name) & (compiled != is_compiled)), answers)
            if other is not None:
                found.append(Choice("compile", "off" if is_compiled else "on", other, best))
        return tuple(found)

    def narrower(self, model: ModelSpec, cluster: Cluster, answers: AnswersPlans) -> tuple[Choice, ...]:
        """Returns the first of the best plans that fits in a narrower precision, in the one that makes it fastest."""
        assert self.best is not None
        for _, row in sorted(self.ranked)[:LISTED]:
            plans = narrower(model, self._table.plan(row), cluster)
            fit = [one for one in answers.run(plans) if isinstance(one, Prediction) and one.fits]
            if fit:
                fastest = min(fit, key=lambda one: one.step_time_s)
                value = f"{fastest.own_plan().precision} ({fastest.own_plan().fp8_recipe})"
                return (Choice("precision", value, fastest, self.best, OTHER_NUMERICS),)
        return ()

    def _best_of(self, rows: Rows, answers: AnswersPlans) -> Prediction | None:
        """Returns the best plan of `rows`, simulating those that may be it; None if none fits."""
        queue = self._queue(rows[self._status[rows] == Status.SKIPPED])

        def fit() -> list[tuple[float, int]]:
            return [(self._value(row), row) for row in rows[self._status[rows] == Status.OK].tolist()]

        while batch := queue.next(_OF_A_CHOICE, min(fit(), default=(np.inf, -1))[0]):
            answered = answers.run([self._table.plan(row) for row in batch])
            queue.look_ahead(_OF_A_CHOICE, min(fit(), default=(np.inf, -1))[0])
            for row, answer in zip(batch, answered, strict=True):
                self._record(row, answer)
        best = min(fit(), default=None)
        return None if best is None else self.predictions[best[1]]

    def _value(self, row: int) -> float:
        return KEYS[self._objective](self.predictions[row])

    @property
    def last_place(self) -> float:
        """Returns the objective of the last place that must be exact; infinite until enough plans fit."""
        values = nsmallest(self._keep, (value for value, _ in self.ranked))
        return values[-1] if len(values) == self._keep else float("inf")

    def _closer(self, row: int) -> float:
        """Returns a closer bound of the time of the plan in `row`, in seconds."""
        self._bound[row] = max(float(self._bound[row]), self._bounds.closer(row))
        return float(self._bound[row])

    def _refined(self, rows: Rows) -> Rows:
        """Computes the bounds of `rows`, which are coarse, and returns those of them that may fit."""
        self._bounds.refine(self.screened, rows)
        self._is_fine[rows] = True
        too_large = self.screened.too_large[rows]
        self._status[rows[too_large]] = Status.TOO_LARGE
        self._bound[rows] = self.screened.time_s[rows]
        return rows[~too_large]

    def _record(self, row: int, answer: Answer) -> None:
        if isinstance(answer, Refused):
            self._tally.refuse(REFUSED_RULE, answer.reason)
            self._status[row] = Status.REFUSED
            return
        if isinstance(answer, DoesNotFit):
            self.unfit[row] = answer
            self._status[row] = Status.TOO_LARGE
            return
        self.predictions[row] = answer
        self._status[row] = Status.OK if answer.fits else Status.TOO_LARGE
        if answer.fits:
            self.ranked.append((KEYS[self._objective](answer), row))

    def outcome(self, spaces: Spaces, limit_gib: float) -> Outcome:
        """Returns the results for every plan, as they are now."""
        screened = self.screened
        return Outcome(
            spaces={space.stack: space for space in spaces.parts},
            table=self._table,
            renamed=spaces.renamed,
            status=self._status.copy(),
            bound=self._bound.copy(),
            need_gib=screened.need_bytes / GIB,
            cause=screened.cause.copy(),
            cause_gib=screened.cause_bytes / GIB,
            predictions=dict(self.predictions),
            unfit=dict(self.unfit),
            is_memory=self._memory,
            keep=self._keep,
            last_place=self.last_place,
            limit_gib=limit_gib,
        )


def _nothing_possible(tally: Tally, n_gpus: int) -> str:
    if not tally.considered:
        return f"no plan: the fixed degrees do not divide {n_gpus} GPUs; change a degree or the number of GPUs"
    reasons = [f"{rule} ({n}): {tally.examples[rule]}" for rule, n in tally.impossible.most_common(3)]
    return f"none of the {tally.considered} plans is possible: {'; '.join(reasons)}"
