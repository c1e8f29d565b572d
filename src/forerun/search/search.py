"""search: the best plan of a space, and why the others are not.

Closed-form lower bounds screen the whole space: what certainly does not fit is discarded, the rest is simulated in the
order of the bound of the objective, until the bound passes the last place that was asked for. The places are
therefore exact under the model. The answer does not depend on the number of processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from forerun.analysis.predict import predict
from forerun.analysis.prediction import Prediction
from forerun.cluster.types import Cluster
from forerun.cost.measured import Measured
from forerun.errors import ForerunError, ImpossiblePlan
from forerun.memory.reserved import outside_allocator_bytes
from forerun.model.spec import ModelSpec
from forerun.network.network_file import Network
from forerun.network.on_topology import check_size
from forerun.plan.plan import Plan
from forerun.search.executor import AnswersPlans, Predictor, Question, Refused, executor_of
from forerun.search.memory_bound import MemoryBound, MemoryBounds
from forerun.search.result import REFUSED_RULE, Objective, SearchResult, Skipped, TooLarge
from forerun.search.space import Limits, Tally, make_space
from forerun.search.store import AnswerStore, Remembering
from forerun.search.time_bound import least_step_s
from forerun.search.units import UnitRuns
from forerun.units import GIB

BATCH = 256
"""plans simulated between two looks at the bound; fixed, so that the same plans are simulated whatever the machine"""
KEYS: dict[Objective, Callable[[Prediction], float]] = {
    "time": lambda p: p.step_time_s,
    "tokens": lambda p: p.step_time_s,  # the tokens of a step are given
    "cost": lambda p: p.step_time_s,  # the GPUs are given, so their time is the price
    "memory": lambda p: p.peak_reserved_gib,
}


def search(
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
    keep: int = 10,
    exhaustive: bool = False,
    workers: int | None = None,
    network: Network | None = None,
    measured: Measured | None = None,
    predictor: Predictor = predict,
    executor: Literal["local", "ray"] = "local",
    ray_address: str | None = None,
    store: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """The best plans to train `model` on `n_gpus` of `cluster`, with `global_batch` sequences of `seq_len` per step.

    Args:
        objective: step time, tokens per second, dollars per token, or peak reserved memory; the first three have the
            same best plan for given GPUs and batch.
        memory_limit_gib: memory of a GPU to use at most; its own unless given.
        fixed: Plan field -> a value, or a list of values to try.
        limits: upper ends of axes that are not fixed.
        keep: how many places have to be exact; the rest may be skipped where a bound shows that it comes after them.
        exhaustive: simulate everything that could fit.
        workers: processes, or CPUs of a Ray cluster; one for each CPU, or all of them, unless given.
        network: what the GPUs communicate over in place of the links of the cluster.
        measured: the user's own times of kernels and collectives, which go over the shipped ones.
        predictor: what predicts a plan, all of them as the bounds are about `predict`; it has to be importable where
            processes are not forked, and knows about its network and measurements by itself.
        executor: what simulates: `local` processes, or a `ray` cluster, which needs Ray.
        ray_address: of that cluster (HOST:PORT, ray://HOST:PORT, auto); RAY_ADDRESS, or a cluster on this machine for
            the time of the search, unless given.
        store: a file that keeps every answer as it comes, and gives what it knows already; made where it is not there.
        progress: called with how many plans are done and how many there are.

    Raises:
        ImpossiblePlan: no combination can run at all; the message says why.
        ForerunError: bad arguments, objective cost on a cluster without a price, a network with fewer NPUs than GPUs,
            a store that can't be read or written, a Ray cluster that can't be used.
    """
    if objective not in KEYS:
        raise ForerunError(f"objective must be one of {', '.join(KEYS)}, got {objective!r}")
    if keep < 1:
        raise ForerunError(f"keep must be at least 1, got {keep}")
    if objective == "cost" and cluster.price_per_gpu_hour is None:
        raise ForerunError(
            f"objective cost: cluster {cluster.name} has no price_per_gpu_hour; set it in a cluster file"
        )
    if network is not None:
        check_size(network, n_gpus)
    cluster = limited(cluster, memory_limit_gib)
    question, tally = Question(predictor, model, cluster, network, measured), Tally()
    with ExitStack() as stack:
        answers = stack.enter_context(executor_of(question, executor, workers, ray_address))
        if store is not None:
            answers = Remembering(answers, stack.enter_context(AnswerStore(Path(store), question.basis())))
        plans = list(make_space(model, cluster, n_gpus, seq_len, global_batch, fixed, limits).plans(tally))
        if not plans:
            raise ImpossiblePlan(_nothing_possible(tally, n_gpus))
        run = _Search(model, cluster, network, measured, objective, keep, exhaustive or predictor is not predict, tally)
        run.simulate(run.screen(plans), answers, progress)
    if not run.ranked and not run.too_large:
        raise ImpossiblePlan(_nothing_possible(tally, n_gpus))
    run.ranked.sort(key=lambda each: (each[0], each[1]))
    run.too_large.sort(key=lambda each: (each[0], each[1]))
    return SearchResult(
        model=model.name,
        cluster=cluster.name,
        n_gpus=n_gpus,
        seq_len=seq_len,
        global_batch=global_batch,
        objective=objective,
        memory_limit_gib=cluster.device.memory_bytes / GIB,
        ranked=tuple(prediction for _, _, prediction in run.ranked),
        too_large=tuple(each for _, _, each in run.too_large),
        skipped=tuple(run.skipped),
        considered=tally.considered,
        impossible=dict(Counter(tally.impossible).most_common()),
        impossible_examples=dict(tally.examples),
        keep=keep,
    )


_SOLD = 1.05
"""what a GPU is sold as having over what programs can use, at most"""


def limited(cluster: Cluster, memory_limit_gib: float | None) -> Cluster:
    """The cluster, `memory_limit_gib` of each GPU only; a GPU's size as it is sold (80 GB) means all of it.

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


@dataclass(frozen=True, slots=True)
class _Queued:
    """A plan that may fit; `bound` is of the objective."""

    bound: float
    number: int
    plan: Plan


@dataclass
class _Search:
    model: ModelSpec
    cluster: Cluster
    network: Network | None
    measured: Measured | None
    objective: Objective
    keep: int
    exhaustive: bool
    tally: Tally
    ranked: list[tuple[float, int, Prediction]] = field(default_factory=list)
    too_large: list[tuple[float, int, TooLarge]] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def screen(self, plans: list[Plan]) -> list[_Queued]:
        """Discard what certainly does not fit; the rest by bound."""
        bounds, runs = MemoryBounds(self.model), UnitRuns(self.model, self.cluster, self.network, self.measured)
        limit = self.cluster.device.memory_bytes
        available = limit - outside_allocator_bytes(0)
        queue = []
        for number, plan in enumerate(plans):
            memory = bounds.of_states(plan)
            if memory.total <= available:
                units = runs.of(plan)
                memory = max(memory, bounds.of_first_rank(plan, units), key=lambda bound: bound.total)
            if memory.total > available:
                self.too_large.append((memory.total / GIB, number, _certainly_too_large(plan, memory, limit)))
                continue
            bound = memory.total / GIB if self.objective == "memory" else least_step_s(plan, units)
            queue.append(_Queued(0.0 if self.exhaustive else bound, number, plan))
        return sorted(queue, key=lambda each: (each.bound, each.number))

    def simulate(
        self, queue: list[_Queued], answers: AnswersPlans, progress: Callable[[int, int], None] | None
    ) -> None:
        """Simulate batch after batch until the bound passes the last place."""
        for first in range(0, len(queue), BATCH):
            batch = queue[first : first + BATCH]
            last_place = self._last_place()
            if not self.exhaustive and batch[0].bound > last_place:
                self._skip(queue[first:], last_place)
                break
            for i, answer in enumerate(answers.run([each.plan for each in batch])):
                self._record(batch[i], answer)
                if progress:
                    progress(first + i + 1, len(queue))
        if progress:
            progress(len(queue), len(queue))

    def _last_place(self) -> float:
        """Objective of the last place that has to be exact; infinite until so many plans fit."""
        values = sorted(value for value, _, _ in self.ranked)
        return values[self.keep - 1] if len(values) >= self.keep else float("inf")

    def _skip(self, queue: list[_Queued], last_place: float) -> None:
        unit = "GiB" if self.objective == "memory" else "s"
        for each in queue:
            reason = f"at least {each.bound:.4g} {unit}, place {self.keep} has {last_place:.4g} {unit}"
            self.skipped.append(Skipped(each.plan, each.bound, reason))

    def _record(self, queued: _Queued, answer: Prediction | Refused) -> None:
        if isinstance(answer, Refused):
            self.tally.refuse(REFUSED_RULE, answer.reason)
        elif answer.fits:
            self.ranked.append((KEYS[self.objective](answer), queued.number, answer))
        else:
            self.too_large.append((answer.peak_reserved_gib, queued.number, _too_large(answer)))


def _certainly_too_large(plan: Plan, memory: MemoryBound, limit_bytes: int) -> TooLarge:
    cause = max(memory.by_category, key=lambda name: memory.by_category[name])
    reason = (
        f"needs at least {memory.total / GIB:.1f} GiB at {memory.where}, {limit_bytes / GIB:.1f} available:"
        f" {cause} {memory.by_category[cause] / GIB:.1f}"
    )
    return TooLarge(plan, memory.total / GIB, cause, reason, None)


def _too_large(prediction: Prediction) -> TooLarge:
    parts = prediction.memory_by_category_gib
    cause = max(parts, key=lambda name: parts[name])
    beside = "" if prediction.peak_reserved_gib > prediction.memory_limit_gib else " beside CUDA and NCCL"
    reason = (
        f"needs {prediction.peak_reserved_gib:.1f} GiB{beside} at {prediction.peak_rank_class},"
        f" {prediction.memory_limit_gib:.1f} available: {cause} {parts[cause]:.1f}"
    )
    return TooLarge(prediction.own_plan(), prediction.peak_reserved_gib, cause, reason, prediction)


def _nothing_possible(tally: Tally, n_gpus: int) -> str:
    if not tally.considered:
        return f"no plan: the fixed degrees do not divide {n_gpus} GPUs"
    reasons = [f"{rule} ({n}): {tally.examples[rule]}" for rule, n in tally.impossible.most_common(3)]
    return f"no plan of {tally.considered} is possible: {'; '.join(reasons)}"
