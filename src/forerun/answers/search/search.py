"""search: finds the best plan of a space, and says why the others are not.

Lower bounds of all plans screen the whole space at once: plans that certainly do not fit are discarded. Plans that may
still reach one of the places that were asked for get a closer bound, and are simulated in its order until the bound
passes the last place. The places are therefore exact under the model. The answer does not depend on the number of
processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from heapq import heappop, heappush, nsmallest
from itertools import chain, repeat
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from forerun.answers.analysis.predict import predict
from forerun.answers.analysis.prediction import Prediction
from forerun.answers.search.executor import AnswersPlans, Predictor, Question, Refused, executor_of
from forerun.answers.search.front import Front, time_and_memory_front
from forerun.answers.search.names import Renamed
from forerun.answers.search.orders import Groups
from forerun.answers.search.outcome import Outcome, Status
from forerun.answers.search.result import REFUSED_RULE, Objective, SearchResult
from forerun.answers.search.screening import Screening
from forerun.answers.search.space import Extent, Limits, Space, Tally, make_space
from forerun.answers.search.space_table import SpaceTable
from forerun.answers.search.store import AnswerStore, Remembering
from forerun.answers.search.time_bound import TimeBound
from forerun.answers.search.unit_runs import UnitRuns
from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.common.units import GIB
from forerun.core.cost.measured import Measured
from forerun.core.network.network_file import Network
from forerun.core.network.on_topology import check_size
from forerun.core.program.types import F64
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec

BATCHES = (16, 16, 32, 64)
"""sizes of the batches that are simulated before the bound is read again; the last one repeats. They are fixed so that
every machine simulates the same plans"""
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
    exhaustive: bool = False,
    pareto: int | None = None,
    workers: int | None = None,
    network: Network | None = None,
    measured: Measured | None = None,
    predictor: Predictor = predict,
    executor: Literal["local", "ray"] = "local",
    ray_address: str | None = None,
    store: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
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
        exhaustive: simulate every plan that could fit.
        pareto: also find the front of step time and memory, simulating at most this many more plans for it.
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

    Raises:
        ImpossiblePlan: no combination can run at all; the message says why.
        ForerunError: an argument is wrong, the objective is cost on a cluster without a price, the network has fewer
            NPUs than GPUs, the store can't be read or written, or the Ray cluster can't be used.
    """
    check_objective(objective, cluster)
    if keep < 1:
        raise ForerunError(f"keep must be at least 1, got {keep}")
    if network is not None:
        check_size(network, n_gpus)
    cluster = limited(cluster, memory_limit_gib)
    question, tally = Question(predictor, model, cluster, network, measured), Tally()
    with ExitStack() as stack:
        answers = stack.enter_context(executor_of(question, executor, workers, ray_address))
        if store is not None:
            answers = Remembering(answers, stack.enter_context(AnswerStore(Path(store), question.basis())))
        chosen = make_space(model, cluster, n_gpus, seq_len, global_batch, fixed, limits, space, network is not None)
        table = chosen.table(tally)
        if not len(table):
            raise ImpossiblePlan(_nothing_possible(tally, n_gpus))
        screening = Screening(UnitRuns(model, cluster, network, measured), chosen.stack)
        run = Simulating(screening, table, objective, keep, exhaustive or predictor is not predict, tally)
        run.run(answers, progress)
        front = None if pareto is None else run.front(answers, pareto, progress)
    if not run.predictions and not run.screened.too_large.any():
        raise ImpossiblePlan(_nothing_possible(tally, n_gpus))
    assert tally.renamed is not None  # `Space.table` sets it
    outcome = run.outcome(chosen, tally.renamed, cluster.device.memory_bytes / GIB)
    return SearchResult(
        model=model.name,
        cluster=cluster.name,
        n_gpus=n_gpus,
        seq_len=seq_len,
        global_batch=global_batch,
        objective=objective,
        memory_limit_gib=cluster.device.memory_bytes / GIB,
        ranked=tuple(run.predictions[row] for _, row in sorted(run.ranked)),
        too_large=outcome.too_large(),
        skipped=outcome.skipped(),
        considered=tally.considered,
        impossible=dict(Counter(tally.impossible).most_common()),
        impossible_examples=dict(tally.examples),
        same=tally.same,
        keep=keep,
        outcome=outcome,
        front=front,
    )


def check_objective(objective: str, cluster: Cluster) -> None:
    """Raises ForerunError for an unknown objective, and for objective cost where `cluster` has no price."""
    if objective not in KEYS:
        raise ForerunError(f"objective must be one of {', '.join(KEYS)}, got {objective!r}")
    if objective == "cost" and cluster.price_per_gpu_hour is None:
        raise ForerunError(
            f"objective cost: cluster {cluster.name} has no price_per_gpu_hour; set it in a cluster file"
        )


_SOLD = 1.05
"""largest ratio of the memory that a GPU is sold with to the memory that programs can use"""


def limited(cluster: Cluster, memory_limit_gib: float | None) -> Cluster:
    """Returns the cluster with only `memory_limit_gib` of each GPU; the size that a GPU is sold with means all of it.

    Raises ForerunError for more than a GPU has.
    """
    if memory_limit_gib is None:
        return cluster
    own = cluster.device.memory_bytes / GIB
    if own < memory_limit_gib <= own * _SOLD:
        return cluster
    if not 0 < memory_limit_gib <= own:
        raise ForerunError(
            f"memory limit of {memory_limit_gib} GiB: expected more than 0 and at most the {own:.1f} GiB of"
            f" {cluster.device.name}"
        )
    return replace(cluster, device=replace(cluster.device, memory_bytes=int(memory_limit_gib * GIB)))


class Simulating:
    """Simulates the plans of a table in the order of their bounds."""

    def __init__(
        self, screening: Screening, table: SpaceTable, objective: Objective, keep: int, exhaustive: bool, tally: Tally
    ) -> None:
        self._table, self._objective, self._keep, self._tally = table, objective, keep, tally
        self._screening = screening
        self.screened = screening.run(table)
        self._memory = objective == "memory"
        self._bound = self.screened.held_bytes / GIB if self._memory else self.screened.time_s.copy()
        self._status = np.where(self.screened.too_large, Status.TOO_LARGE, Status.SKIPPED).astype(np.uint8)
        self._close = None if self._memory or exhaustive else TimeBound(screening)
        if exhaustive:
            self._bound[:] = 0.0
        self.ranked: list[tuple[float, int]] = []
        """(objective, row) of the plans that fit"""
        self.predictions: dict[int, Prediction] = {}

    def run(self, answers: AnswersPlans, progress: Callable[[int, int], None] | None) -> None:
        """Simulates batch after batch until the bound passes the last place."""
        rows = np.flatnonzero(~self.screened.too_large)
        queue = _Queue(rows, self._bound, self._closer if self._close else None)
        done, total, sizes = 0, len(rows), chain(BATCHES, repeat(BATCHES[-1]))
        while batch := queue.next(next(sizes), self.last_place):
            plans = [self._table.plan(row) for row in batch]
            for row, answer in zip(batch, answers.run(plans), strict=True):
                self._record(row, answer)
                done += 1
                if progress:
                    progress(done, total)
        if progress:
            progress(total, total)

    def front(self, answers: AnswersPlans, most: int, progress: Callable[[int, int], None] | None) -> Front:
        """Finds the front of step time and memory of the plans that fit, simulating at most `most` more plans."""
        rows = np.flatnonzero(self._status == Status.SKIPPED)
        close = TimeBound(self._screening) if self._close is None else self._close

        def closer(place: int) -> float:
            row = int(rows[place])
            return close.least_step_s(self._table.plan(row), self._groups(row))

        return time_and_memory_front(
            [self.predictions[row] for _, row in sorted(self.ranked)],
            self.screened.time_s[rows],
            self.screened.held_bytes[rows] / GIB,
            lambda place: self._table.plan(int(rows[place])),
            answers,
            most,
            closer,
            progress,
        )

    def _groups(self, row: int) -> Groups:
        groups = self._table.groups[int(self._table.mesh[row])]
        assert groups is not None  # a plan without groups is impossible
        return groups

    @property
    def last_place(self) -> float:
        """Returns the objective of the last place that must be exact; infinite until enough plans fit."""
        values = nsmallest(self._keep, (value for value, _ in self.ranked))
        return values[-1] if len(values) == self._keep else float("inf")

    def _closer(self, row: int) -> float:
        """Returns a closer bound of the time of the plan in `row`, in seconds."""
        assert self._close is not None
        close = self._close.least_step_s(self._table.plan(row), self._groups(row))
        self._bound[row] = max(float(self._bound[row]), close)
        return float(self._bound[row])

    def _record(self, row: int, answer: Prediction | Refused) -> None:
        if isinstance(answer, Refused):
            self._tally.refuse(REFUSED_RULE, answer.reason)
            self._status[row] = Status.REFUSED
            return
        self.predictions[row] = answer
        self._status[row] = Status.OK if answer.fits else Status.TOO_LARGE
        if answer.fits:
            self.ranked.append((KEYS[self._objective](answer), row))

    def outcome(self, space: Space, renamed: Renamed, limit_gib: float) -> Outcome:
        """Returns the results for every plan."""
        screened = self.screened
        return Outcome(
            space=space,
            table=self._table,
            renamed=renamed,
            status=self._status,
            bound=self._bound,
            need_gib=screened.need_bytes / GIB,
            cause=screened.cause,
            cause_gib=screened.cause_bytes / GIB,
            predictions=self.predictions,
            is_memory=self._memory,
            keep=self._keep,
            last_place=self.last_place,
            limit_gib=limit_gib,
        )


class _Queue:
    """A queue of rows in the order of their bounds, with closer bounds for the rows that come first."""

    def __init__(self, rows: npt.NDArray[np.int64], bound: F64, closer: Callable[[int], float] | None) -> None:
        order = np.argsort(bound[rows], kind="stable")
        self._rows, self._bounds = rows[order], bound[rows][order]
        self._closer, self._next = closer, 0
        self._heap: list[tuple[float, int]] = []

    def next(self, most: int, last_place: float) -> list[int]:
        """Returns up to `most` rows that may have a place, the least bound first."""
        batch: list[int] = []
        while len(batch) < most:
            while self._next < len(self._rows) and (not self._heap or self._bounds[self._next] <= self._heap[0][0]):
                bound, row = float(self._bounds[self._next]), int(self._rows[self._next])
                if bound > last_place:
                    break
                heappush(self._heap, (bound if self._closer is None else self._closer(row), row))
                self._next += 1
            if not self._heap or self._heap[0][0] > last_place:
                break
            batch.append(heappop(self._heap)[1])
        return batch


def _nothing_possible(tally: Tally, n_gpus: int) -> str:
    if not tally.considered:
        return f"no plan: the fixed degrees do not divide {n_gpus} GPUs"
    reasons = [f"{rule} ({n}): {tally.examples[rule]}" for rule, n in tally.impossible.most_common(3)]
    return f"no plan of {tally.considered} is possible: {'; '.join(reasons)}"
