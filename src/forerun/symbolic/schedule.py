"""Pipeline schedules: the order of forward, backward and weight passes on every pipeline rank."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from forerun.errors import ImpossiblePlan
from forerun.plan.plan import Plan

Pass = Literal["F", "B", "W"]


class Action(NamedTuple):
    """One pass of one micro batch through one stage."""

    kind: Pass
    stage: int
    microbatch: int


V_SCHEDULES = ("ZBV", "DualPipeV")
"""schedules with two stages a rank, down the ranks and up again"""
SPLIT = ("ZB1P", *V_SCHEDULES)
"""schedules that run weight gradients apart from input gradients"""


def stage_rank(plan: Plan, stage: int) -> int:
    """Pipeline rank that holds a stage: round robin, or down and up again for the V schedules."""
    if plan.pp_schedule in V_SCHEDULES:
        return stage if stage < plan.pp else 2 * plan.pp - 1 - stage
    return stage % plan.pp


def rank_stages(plan: Plan, rank: int) -> list[int]:
    """Stages of a pipeline rank, in model order."""
    return [stage for stage in range(plan.n_stages) if stage_rank(plan, stage) == rank]


def actions(plan: Plan) -> list[list[Action]]:
    """Actions of every pipeline rank, in order."""
    return [list(row) for row in _actions(plan.pp_schedule, plan.pp, plan.virtual_stages, plan.n_microbatches)]


@lru_cache(maxsize=256)
def _actions(schedule: str, p: int, v: int, m: int) -> tuple[tuple[Action, ...], ...]:
    if p == 1:
        return (tuple(a for i in range(m) for a in (Action("F", 0, i), Action("B", 0, i))),)
    if schedule == "GPipe":
        return tuple((*(Action("F", r, i) for i in range(m)), *(Action("B", r, i) for i in range(m))) for r in range(p))
    if schedule == "1F1B" and v == 1:
        return tuple(_one_f_one_b(p, r, m) for r in range(p))
    if schedule in ("1F1B", "Interleaved1F1B"):
        return tuple(_interleaved(p, r, v, m) for r in range(p))
    if schedule == "ZB1P":
        return tuple(_zero_bubble(p, r, m) for r in range(p))
    return _v_schedule(p, m, overlap=schedule == "DualPipeV")


def _one_f_one_b(p: int, rank: int, m: int) -> tuple[Action, ...]:
    warmup = min(p - 1 - rank, m)
    order = [Action("F", rank, i) for i in range(warmup)]
    for i in range(m - warmup):
        order += [Action("F", rank, warmup + i), Action("B", rank, i)]
    order += [Action("B", rank, i) for i in range(m - warmup, m)]
    return tuple(order)


def _interleaved(p: int, rank: int, v: int, m: int) -> tuple[Action, ...]:
    """Megatron-LM's interleaved schedule (arXiv 2104.04473, section 2.2): micro batches in groups of p."""
    if m % p:
        raise ImpossiblePlan(f"Interleaved1F1B needs micro batches in multiples of pp {p}, got {m}")
    total = m * v

    def forward(k: int) -> Action:
        group, inside = divmod(k, p * v)
        return Action("F", (inside // p) * p + rank, group * p + inside % p)

    def backward(k: int) -> Action:
        group, inside = divmod(k, p * v)
        return Action("B", (v - 1 - inside // p) * p + rank, group * p + inside % p)

    warmup = total if m == p else min(total, (p - rank - 1) * 2 + (v - 1) * p)
    order = [forward(k) for k in range(warmup)]
    for k in range(total - warmup):
        order += [forward(warmup + k), backward(k)]
    order += [backward(k) for k in range(total - warmup, total)]
    return tuple(order)


def _zero_bubble(p: int, rank: int, m: int) -> tuple[Action, ...]:
    """ZB-H1 (arXiv 2401.10241): 1F1B's memory; weight passes trail their backward by `rank` micro batches."""
    warmup = min(p - 1 - rank, m)
    order = [Action("F", rank, i) for i in range(warmup)]
    done = 0
    for i in range(m):
        if warmup + i < m:
            order.append(Action("F", rank, warmup + i))
        order.append(Action("B", rank, i))
        if i - done >= rank:
            order.append(Action("W", rank, done))
            done += 1
    order += [Action("W", rank, i) for i in range(done, m)]
    return tuple(order)


def _v_schedule(p: int, m: int, overlap: bool) -> tuple[tuple[Action, ...], ...]:
    """Two stages a rank in a V (ZBV, arXiv 2405.15362; DualPipeV), by list scheduling in unit passes.

    Every rank takes, in each time slot, the first that is ready of: a backward, a forward of its later stage, a
    forward of its earlier one while fewer than 2 p micro-batch halves are in flight, a weight pass. DualPipeV keeps
    p more in flight.
    """
    scheduler = _VScheduler(p, m, 3 * p if overlap else 2 * p)
    while scheduler.left:
        scheduler.slot()
    return tuple(tuple(row) for row in scheduler.order)


class _VScheduler:
    """State of the list scheduling of a V."""

    def __init__(self, p: int, m: int, limit: int) -> None:
        self.p, self.m, self.limit = p, m, limit
        self.left = 6 * m * p
        self.now = 0
        self.finish: dict[Action, int] = {}
        self.order: list[list[Action]] = [[] for _ in range(p)]
        self.waiting: list[list[Action]] = [[] for _ in range(p)]
        self.next: list[dict[Pass, list[int]]] = [{"F": [0, 0], "B": [0, 0]} for _ in range(p)]
        self.in_flight = [0] * p

    def slot(self) -> None:
        """Choose what every rank runs in this slot."""
        for rank, action in enumerate([self._choose(rank) for rank in range(self.p)]):
            if action is not None:
                self.order[rank].append(action)
                self.finish[action] = self.now + 1
                self.left -= 1
                if action.kind == "B":
                    self.waiting[rank].append(Action("W", action.stage, action.microbatch))
        self.now += 1

    def _choose(self, rank: int) -> Action | None:
        for kind, half in (("B", 0), ("B", 1), ("F", 1), ("F", 0)):
            if kind == "F" and half == 0 and self.in_flight[rank] >= self.limit:
                continue
            action = Action(kind, (rank, 2 * self.p - 1 - rank)[half], self.next[rank][kind][half])  # type: ignore[arg-type,index]
            if action.microbatch < self.m and self._ready(action):
                self.next[rank][action.kind][half] += 1
                self.in_flight[rank] += kind == "F"
                return action
        if not self.waiting[rank]:
            return None
        self.in_flight[rank] -= 1  # a micro batch holds its activations until its weight pass
        return self.waiting[rank].pop(0)

    def _done(self, action: Action) -> bool:
        return self.finish.get(action, self.now + 1) <= self.now

    def _ready(self, action: Action) -> bool:
        stage, i = action.stage, action.microbatch
        if action.kind == "F":
            return stage == 0 or self._done(Action("F", stage - 1, i))
        return self._done(Action("F", stage, i)) and (stage == 2 * self.p - 1 or self._done(Action("B", stage + 1, i)))


def layers_of_stages(n_layers: int, plan: Plan) -> list[int]:
    """Layers of each stage in model order.

    Spread evenly, the remainder to the first stages; with `balance_ends` embedding and head count as a layer each.
    """
    stages = plan.n_stages
    if plan.layers_per_stage is not None:
        return list(plan.layers_per_stage)
    ends = 2 if plan.balance_ends and stages > 1 else 0
    base, more = divmod(n_layers + ends, stages)
    sizes = [base + (i < more) for i in range(stages)]
    if ends:
        sizes[0] -= 1
        sizes[-1] -= 1
    if min(sizes) < 0:
        raise ImpossiblePlan(f"{n_layers} layers do not spread over {stages} stages")
    return sizes
