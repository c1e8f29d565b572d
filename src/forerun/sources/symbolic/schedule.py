"""Pipeline schedules: the order of forward, backward and weight passes on every pipeline rank."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from forerun.common.errors import ImpossiblePlan
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import V_SCHEDULES, Plan
from forerun.describe.stacks.catalog import load_stack
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
    return [list(rank_actions(plan, rank)) for rank in range(plan.pp)]


def rank_actions(plan: Plan, rank: int) -> tuple[Action, ...]:
    """Returns the actions of one pipeline rank, in order."""
    return tuple(action for turn in rank_turns(plan, rank) for action in turn)


Turn = tuple[Action, ...]
"""one action; or a forward pass and a backward pass side by side, with the latter's weight pass where there is one"""


def rank_turns(plan: Plan, rank: int) -> tuple[Turn, ...]:
    """Returns the actions of one pipeline rank in order, and which of them run side by side (`expert_overlap`)."""
    sizes = plan.pp, rank, plan.virtual_stages, plan.n_microbatches
    all_forward_first = plan.n_microbatches == plan.pp and load_stack(plan.stack).all_forward_first
    return _rank_turns(plan.pp_schedule, *sizes, plan.expert_overlap, all_forward_first)


@lru_cache(maxsize=4096)
def _rank_turns(
    schedule: str, p: int, r: int, v: int, m: int, overlap: bool, all_forward_first: bool
) -> tuple[Turn, ...]:
    """Returns the turns of rank `r`.

    To pair passes of different micro batches, 1F1B starts with one more forward pass. With `all_forward_first`,
    interleaved stages run every forward pass before the first backward pass.
    """
    if p == 1:
        found = _one_f_one_b(p, r, m, int(overlap))
    elif schedule == "GPipe":
        found = [*((Action("F", r, i),) for i in range(m)), *((Action("B", r, i),) for i in range(m))]
    elif schedule == "1F1B" and v == 1:
        found = _one_f_one_b(p, r, m, int(overlap))
    elif schedule in ("1F1B", "Interleaved1F1B"):
        found = _interleaved(p, r, v, m, m * v if all_forward_first else int(overlap))
    elif schedule == "ZB1P":
        found = [(action,) for action in _zero_bubble(p, r, m)]
    elif schedule == "ZBV":
        found = [(action,) for action in _zbv(p, r, m)]
    else:
        found = _dual_pipe(p, r, m) if schedule == "DualPipe" else _dual_pipe_v(p, r, m)
    return tuple(found) if overlap else tuple((action,) for turn in found for action in turn)


def _one_f_one_b(p: int, rank: int, m: int, ahead: int) -> list[Turn]:
    warmup = min(p - 1 - rank + ahead, m)
    order: list[Turn] = [(Action("F", rank, i),) for i in range(warmup)]
    order += [(Action("F", rank, warmup + i), Action("B", rank, i)) for i in range(m - warmup)]
    order += [(Action("B", rank, i),) for i in range(m - warmup, m)]
    return order


def _interleaved(p: int, rank: int, v: int, m: int, ahead: int) -> list[Turn]:
    """Returns Megatron-LM's interleaved schedule (arXiv 2104.04473, section 2.2): micro batches in groups of p.

    `ahead` forward passes more than it needs come before the first backward pass.
    """
    if m % p:
        raise ImpossiblePlan(f"impossible plan: Interleaved1F1B: {m} micro batches are not divisible by pp {p}")
    total = m * v

    def forward(k: int) -> Action:
        group, inside = divmod(k, p * v)
        return Action("F", (inside // p) * p + rank, group * p + inside % p)

    def backward(k: int) -> Action:
        group, inside = divmod(k, p * v)
        return Action("B", (v - 1 - inside // p) * p + rank, group * p + inside % p)

    warmup = min(total, (p - rank - 1) * 2 + (v - 1) * p + ahead)
    order: list[Turn] = [(forward(k),) for k in range(warmup)]
    order += [(forward(warmup + k), backward(k)) for k in range(total - warmup)]
    order += [(backward(k),) for k in range(total - warmup, total)]
    return order


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
        self.order: list[Turn] = []
        self.later: list[tuple[int, int]] = []
        """(half, micro batch) of the weight passes that were put off"""
        self.next: dict[Pass, list[int]] = {"F": [0, 0], "B": [0, 0]}

    def _add(self, kind: Pass, half: int) -> int:
        number = self.next[kind][half]
        self.next[kind][half] += 1
        self.order.append((Action(kind, self.stages[half], number),))
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
        self.order.append((Action("W", self.stages[half], number),))

    def beside(self, forward: int, backward: int) -> None:
        """Appends a forward pass of one half and a whole backward pass of the other one, side by side."""
        first = len(self.order)
        self.forward(forward)
        self.backward(backward)
        self.order[first:] = [tuple(action for turn in self.order[first:] for action in turn)]


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
    return tuple(action for turn in v.order for action in turn if action.microbatch < m)


def _dual_pipe_v(p: int, rank: int, m: int) -> list[Turn]:
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
        v.beside(0, 1)
        v.beside(1, 0)
    for _ in range(p - rank - 1):
        v.backward(1)
        v.beside(1, 0)
    half = (rank + 1) // 2
    for i in range(rank + 1):
        v.backward(1, put_off=i > half or (i == half and rank % 2 == 1))
        v.backward(0, put_off=i >= half)
    for _ in range(p - rank - 1):
        v.weights()
        v.backward(0, put_off=True)
    while v.later:
        v.weights()
    return v.order


def _dual_pipe(p: int, rank: int, m: int) -> list[Turn]:
    """Returns DualPipe (arXiv 2412.19437, section 3.2.1): micro batches enter at both ends of the pipeline.

    Half of them go through stages 0 to p - 1, the others through stages p to 2 p - 1, which are copies of the former on
    the ranks in reverse. A rank and its mirror image do the same, in the order of a rank of a DualPipeV half as long.
    """
    near = min(rank, p - 1 - rank)
    own = (rank, 2 * p - 1 - rank) if rank < p // 2 else (2 * p - 1 - rank, rank)

    def here(action: Action) -> Action:
        stage = own[action.stage != near]
        return Action(action.kind, stage, action.microbatch + (m // 2 if stage >= p else 0))

    return [tuple(here(action) for action in turn) for turn in _dual_pipe_v(p // 2, near, m // 2)]


def layers_of_stages(n_layers: int, plan: Plan) -> list[int]:
    """Returns the number of layers of each stage in model order.

    Stages get equal numbers, the first ones the remainder. With `balance_ends` embedding and head count as layers.
    Copies of stages are not listed.
    """
    stages = plan.distinct_stages
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
    return _by_cost(model, plan.distinct_stages)


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
