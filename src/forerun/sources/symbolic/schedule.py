"""Pipeline schedules: the order of forward, backward and weight passes on every pipeline rank."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from forerun.common.errors import ImpossiblePlan
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import V_SCHEDULES, Plan
from forerun.describe.stacks.stack import Stack

Pass = Literal["F", "B", "W"]


class Action(NamedTuple):
    """One pass of one micro batch through one stage."""

    kind: Pass
    stage: int
    microbatch: int


def stage_rank(plan: Plan, stage: int) -> int:
    """Returns the pipeline rank that holds a stage: round robin, or down and up again in the V schedules."""
    if plan.pp_schedule in V_SCHEDULES:
        return stage if stage < plan.pp else 2 * plan.pp - 1 - stage
    return stage % plan.pp


def rank_stages(plan: Plan, rank: int) -> list[int]:
    """Returns the stages of a pipeline rank, in model order."""
    return [stage for stage in range(plan.n_stages) if stage_rank(plan, stage) == rank]


def actions(plan: Plan) -> list[list[Action]]:
    """Returns the actions of every pipeline rank, in order."""
    return [list(row) for row in _actions(plan.pp_schedule, plan.pp, plan.virtual_stages, plan.n_microbatches)]


def rank_actions(plan: Plan, rank: int) -> tuple[Action, ...]:
    """Returns the actions of one pipeline rank, in order."""
    return _rank_actions(plan.pp_schedule, plan.pp, rank, plan.virtual_stages, plan.n_microbatches)


@lru_cache(maxsize=256)
def _actions(schedule: str, p: int, v: int, m: int) -> tuple[tuple[Action, ...], ...]:
    return tuple(_rank_actions(schedule, p, rank, v, m) for rank in range(p))


def _rank_actions(schedule: str, p: int, r: int, v: int, m: int) -> tuple[Action, ...]:
    if p == 1:
        return tuple(a for i in range(m) for a in (Action("F", 0, i), Action("B", 0, i)))
    if schedule == "GPipe":
        return (*(Action("F", r, i) for i in range(m)), *(Action("B", r, i) for i in range(m)))
    if schedule == "1F1B" and v == 1:
        return _one_f_one_b(p, r, m)
    if schedule in ("1F1B", "Interleaved1F1B"):
        return _interleaved(p, r, v, m)
    if schedule == "ZB1P":
        return _zero_bubble(p, r, m)
    if schedule == "ZBV":
        return _zbv(p, r, m)
    return _dual_pipe_v(p, r, m)


def _one_f_one_b(p: int, rank: int, m: int) -> tuple[Action, ...]:
    warmup = min(p - 1 - rank, m)
    order = [Action("F", rank, i) for i in range(warmup)]
    for i in range(m - warmup):
        order += [Action("F", rank, warmup + i), Action("B", rank, i)]
    order += [Action("B", rank, i) for i in range(m - warmup, m)]
    return tuple(order)


def _interleaved(p: int, rank: int, v: int, m: int) -> tuple[Action, ...]:
    """Returns Megatron-LM's interleaved schedule (arXiv 2104.04473, section 2.2): micro batches in groups of p."""
    if m % p:
        raise ImpossiblePlan(f"impossible plan: Interleaved1F1B: {m} micro batches are not divisible by pp {p}")
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
    """Returns ZB-H1 (arXiv 2401.10241), with 1F1B's memory: weight passes trail backward by `rank` micro batches."""
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


class _VRank:
    """The passes of one rank of a V schedule in order: its stage on the way down is half 0, on the way up half 1."""

    def __init__(self, p: int, rank: int) -> None:
        self.stages = (rank, 2 * p - 1 - rank)
        self.order: list[Action] = []
        self.later: list[tuple[int, int]] = []
        """(half, micro batch) of the weight passes that were put off"""
        self.next: dict[Pass, list[int]] = {"F": [0, 0], "B": [0, 0]}

    def _add(self, kind: Pass, half: int) -> int:
        number = self.next[kind][half]
        self.next[kind][half] += 1
        self.order.append(Action(kind, self.stages[half], number))
        return number

    def forward(self, half: int) -> None:
        """Appends the forward pass of this half's next micro batch."""
        self._add("F", half)

    def backward(self, half: int, put_off: bool = False) -> None:
        """Appends the backward pass of this half's next micro batch, and its weight pass unless `put_off`."""
        self.later.append((half, self._add("B", half)))
        if not put_off:
            self.weights(len(self.later) - 1)

    def weights(self, place: int = 0) -> None:
        """Appends a weight pass that was put off: the oldest, or the one at index `place`."""
        half, number = self.later.pop(place)
        self.order.append(Action("W", self.stages[half], number))


def _zbv(p: int, rank: int, m: int) -> tuple[Action, ...]:
    """Returns ZBV (arXiv 2405.15362, section 4), in the fixed order that torch.distributed.pipelining runs.

    The order is made for at least 2 p - 1 micro batches; passes of micro batches from `m` on are left out.
    """
    v = _VRank(p, rank)
    n = max(m, 2 * p - 1)
    for _ in range(2 * (p - rank) - 1):
        v.forward(0)
    for _ in range(rank):
        v.forward(1)
        v.forward(0)
    for _ in range(p - rank):
        v.forward(1)
        v.backward(1)
    forwards = v.next["F"]
    while forwards[1] < n:
        if forwards[0] < n:
            v.forward(0)
        v.backward(0)
        v.forward(1)
        v.backward(1)
    for _ in range(rank):
        v.backward(0, put_off=True)
        v.backward(1, put_off=True)
    v.later.sort()  # weight passes of the way down go first
    for _ in range(p - rank):
        v.backward(0, put_off=True)
        v.later.sort()
        v.weights()
    while v.later:
        v.weights(next((i for i, (half, _) in enumerate(v.later) if half), 0))
    return tuple(action for action in v.order if action.microbatch < m)


def _dual_pipe_v(p: int, rank: int, m: int) -> tuple[Action, ...]:
    """Returns DualPipeV's eight phases (half of DeepSeek's DualPipe, arXiv 2412.19437, section 3.2.1); m >= 2 p."""
    v = _VRank(p, rank)
    for _ in range(2 * (p - rank - 1)):
        v.forward(0)
    for _ in range(rank + 1):
        v.forward(0)
        v.forward(1)
    for _ in range(p - rank - 1):
        v.backward(1)
        v.forward(1)
    for _ in range(m - 2 * p + rank + 1):
        v.forward(0)
        v.backward(1)
        v.forward(1)
        v.backward(0)
    for _ in range(p - rank - 1):
        v.backward(1)
        v.forward(1)
        v.backward(0)
    half = (rank + 1) // 2
    for i in range(rank + 1):
        v.backward(1, put_off=i > half or (i == half and rank % 2 == 1))
        v.backward(0, put_off=i >= half)
    for _ in range(p - rank - 1):
        v.weights()
        v.backward(0, put_off=True)
    while v.later:
        v.weights()
    return tuple(v.order)


def layers_of_stages(n_layers: int, plan: Plan) -> list[int]:
    """Returns the number of layers of each stage in model order.

    Stages get equal numbers, the first ones the remainder. With `balance_ends` embedding and head count as layers.
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
        raise ImpossiblePlan(f"impossible plan: {n_layers} layers do not spread over {stages} stages")
    return sizes


def stage_layers(model: ModelSpec, plan: Plan, stack: Stack) -> list[int]:
    """Returns the number of layers of each stage in model order; `stack` cuts `model` where the plan does not."""
    if not stack.stages_by_cost or plan.n_stages == 1 or plan.layers_per_stage is not None or plan.balance_ends:
        return layers_of_stages(model.n_layers, plan)
    return _by_cost(model, plan.n_stages)


def _by_cost(model: ModelSpec, stages: int) -> list[int]:
    """Returns the number of layers of each stage, where a stage ends at the layer that fills its share of the cost.

    A layer costs four attention matrices of all query heads and three of a gated feed-forward, the head costs its
    matrix, the embedding nothing (huggingface/nanotron, get_block_compute_costs and build_model). The head always
    stays in the last stage.
    """
    layer = 4 * model.n_heads * model.head_dim * model.hidden + 3 * model.ffn_hidden * model.hidden
    share = (model.n_layers * layer + model.vocab * model.hidden) / stages
    sizes, stage = [0] * stages, 0
    for number in range(1, model.n_layers + 1):
        sizes[stage] += 1
        if number * layer > share * (stage + 1):
            stage += 1
    return sizes
