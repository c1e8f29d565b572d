"""Pipelines: the units of each stage and rank of a pipeline, and the activations that its schedule keeps at once.

A pipeline is (pp, schedule, virtual stages, layers of stages). Its times are linear in the times of units, so one
matrix product gives the times of many plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.common.jit import njit
from forerun.core.program.types import F64, I8, I32, I64
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.fsdp_units import n_unit_kinds, staged_kinds
from forerun.sources.symbolic.schedule import Action, actions, rank_turns, stage_rank

STAGED = (
    "pp",
    "pp_schedule",
    "virtual_stages",
    "layers_per_stage",
    "balance_ends",
    "checkpoint_every",
    "expert_overlap",
)
"""plan fields that a Pipeline depends on"""
_MOST_ROUNDS = 4
"""multiple of the pipeline ranks: more micro batches than this add nothing to what a rank holds at once, except with
GPipe"""
_KINDS = {"F": 0, "B": 1, "W": 2}


@dataclass(frozen=True)
class Held:
    """The units whose activations and gradients a rank holds when it starts a backward pass."""

    passes: I64
    """number of forward passes whose activations are alive, by UnitKind, (n_unit_kinds,)"""
    gradients: I64
    """number of units with gradients of an earlier micro batch, by UnitKind, (n_unit_kinds,)"""
    part: int
    """the UnitKind whose backward pass comes first"""


class Pipeline:
    """The stages of a plan and the times of their schedule."""

    def __init__(self, model: ModelSpec, plan: Plan) -> None:
        self.plan, self.tied = plan, model.ends_share
        self.pp, self.n_stages = plan.pp, plan.n_stages
        self.split = plan.splits_backward
        stages = staged_kinds(model, plan, load_stack(plan.stack))
        self.units: I64 = np.array([kind for stage in stages for kind in stage], np.int64)
        """UnitKind of every unit in model order, (n_units,)"""
        self.starts: I64 = np.array([0, *accumulate(map(len, stages))], np.int64)
        """index of the first unit of each stage, (n_stages + 1,)"""
        self.rank: I64 = np.array([stage_rank(plan, stage) for stage in range(self.n_stages)], np.int64)
        """pipeline rank of each stage, (n_stages,)"""
        self.counts = np.zeros((self.n_stages, n_unit_kinds(model)))
        """units of each kind in each stage, (n_stages, n_unit_kinds)"""
        for number, stage in enumerate(stages):
            np.add.at(self.counts[number], stage, 1)

    @cached_property
    def on_ranks(self) -> F64:
        """Returns the number of units of each kind on each rank, (pp, n_unit_kinds)."""
        out: F64 = self._ranks.T @ self.counts
        return out

    @cached_property
    def fullest(self) -> int:
        """Returns the first of the ranks with the most units of the commonest kind.

        Earlier ranks hold the activations of more micro batches, but the first one may have fewer or lighter layers.
        """
        return int(np.argmax(self.on_ranks[:, np.argmax(self.counts.sum(axis=0))]))

    @property
    def both_ends(self) -> bool:
        """Returns whether the first rank has both embedding and head."""
        return bool(self.rank[-1] == 0)

    def elements(self, of_units: F64 | I64, tied: F64 | float) -> F64:
        """Returns the elements of each rank, (..., pp), from the elements of a unit by UnitKind, (..., n_unit_kinds).

        A rank with embedding and head of a tied model counts their `tied` elements, (...), once.
        """
        out: F64 = of_units @ self.on_ranks.T
        if self.tied and self.both_ends:
            out[..., 0] -= tied
        return out

    @cached_property
    def _ranks(self) -> F64:
        """Returns (n_stages, pp): 1 if a rank holds a stage."""
        out: F64 = (self.rank[:, None] == np.arange(self.pp)).astype(np.float64)
        return out

    def least_end_s(self, forward: F64, backward: F64, weights: F64, again: F64, n_microbatches: I64) -> F64:
        """Returns a lower bound, in seconds, of the end of the first rank's last pass, (n,); in split schedules, of any
        rank's.

        `forward`, `backward` and `weights` are seconds of units, (n, n_unit_kinds); `again` is the extra time of every
        backward pass but the first.

        A rank starts when one micro batch has come through the stages before its first, then runs all of them; after
        its last backward pass through that stage the gradients go back through the stages before.
        """
        f, b, w, more = (times @ self.counts.T for times in (forward, backward, weights, again))
        m = n_microbatches[:, None] / self.plan.stage_copies
        busy = m * ((f + b + w + more) @ self._ranks) - more @ self._ranks
        before = np.zeros((len(f), self.pp))
        if self.plan.stage_copies == 1:
            before[:, 1:] = np.cumsum(f[:, : self.pp - 1], axis=1)
        if self.split:
            out: F64 = (before + busy).max(axis=1)
            return out
        before[:, 1:] += np.cumsum(b[:, : self.pp - 1], axis=1)
        out = (before + busy).max(axis=1)
        return out

    def held(self, n_microbatches: int, rank: int = 0) -> tuple[Held, Held]:
        """Returns the memory contents of `rank` at two moments. The first is its first backward pass. The second is the
        last backward pass at which it holds the most micro batches; then it also has the most gradients.

        A forward pass beside a backward pass has not kept anything when both start.
        """
        plan = self.plan
        some = n_microbatches if plan.pp_schedule == "GPipe" else min(n_microbatches, _MOST_ROUNDS * plan.pp)
        turns = rank_turns(replace(plan, n_microbatches=some), rank)
        kind, stage, _ = _columns([action for turn in turns for action in sorted(turn, key=_after_backward)])
        return self._at(rank, kind, stage, first=True), self._at(rank, kind, stage, first=False)

    def _at(self, rank: int, kind: I8, stage: I32, first: bool) -> Held:
        live = np.cumsum((kind == 0).astype(np.int64) - _before(kind == 1))
        backward = np.flatnonzero(kind == 1)
        at = int(backward[0] if first else backward[len(backward) - 1 - np.argmax(live[backward][::-1])])
        done = _KINDS["W"] if self.split else _KINDS["B"]
        passes, gradients = (np.zeros(self.counts.shape[1], np.int64) for _ in range(2))
        for own in np.flatnonzero(self.rank == rank).tolist():
            mine = stage[:at] == own
            counts = self.counts[own].astype(np.int64)
            passes += counts * int((mine & (kind[:at] == 0)).sum() - (mine & (kind[:at] == 1)).sum())
            gradients += counts * bool((mine & (kind[:at] == done)).any())
        return Held(passes, gradients, int(self.units[self.starts[stage[at] + 1] - 1]))

    def _actions(self, n_microbatches: int) -> _Actions:
        plan = self.plan
        return _actions_of(plan.pp_schedule, plan.pp, plan.virtual_stages, n_microbatches, plan.expert_overlap)

    def chained_s(self, pass_s: F64, waits_s: F64, backward: bool) -> F64:
        """Returns the seconds of a pass through each stage, (n_stages,), in which every unit but the first waits for a
        gather or copy that starts together with the unit before it.

        `pass_s` and `waits_s` are seconds by UnitKind, (n_unit_kinds,).
        """
        here, other = self.units[:-1], self.units[1:]
        before, after = (other, here) if backward else (here, other)
        extra = np.concatenate([[0.0], np.maximum(0.0, waits_s[after] - pass_s[before])])
        extra[self.starts[:-1]] = 0.0  # the first unit of a stage has no unit before it in the stage
        out: F64 = self.counts @ pass_s + np.add.reduceat(extra, self.starts[:-1]) * (np.diff(self.starts) > 0)
        return out

    # -- the schedule ----------------------------------------------------------------------------------------

    def run(self, times: StageTimes, n_microbatches: int, blocking: bool) -> F64:
        """Returns the seconds at which each rank ends its last pass, (pp,), with the schedule's order and transfers.

        With `blocking` a transfer starts only when the receiver, too, has reached it.
        """
        order = self._actions(n_microbatches)
        return _run(order, times, n_microbatches, blocking, self.split, self.plan.distinct_stages)


class StageTimes(NamedTuple):
    """Seconds of the passes of each stage, (n_stages,)."""

    first: F64
    """forward pass of the first micro batch"""
    forward: F64
    backward: F64
    weights: F64
    again: F64
    """extra time of every backward pass (in split schedules, weight pass) but the first"""
    border: F64
    """transfer to the next stage; 0 if both stages are on one rank"""


def _after_backward(action: Action) -> bool:
    """Says whether an action comes last among those that start together: a forward pass keeps nothing yet."""
    return action.kind == "F"


def _before(flags: npt.NDArray[np.bool_]) -> I64:
    """Returns `flags` shifted by one place, as 0 and 1: the flag of the place before."""
    out = np.zeros(len(flags), np.int64)
    out[1:] = flags[:-1]
    return out


class _Actions(NamedTuple):
    """The passes of all ranks in order, as columns; rank r has the passes from start[r] to start[r + 1]."""

    start: I64
    kind: I8
    stage: I32
    microbatch: I32


@lru_cache(maxsize=512)
def _actions_of(schedule: str, pp: int, virtual: int, n_microbatches: int, overlap: bool) -> _Actions:
    sizes = {"pp": pp, "virtual_stages": virtual, "n_microbatches": n_microbatches}
    plan = Plan(1, pp_schedule=schedule, expert_overlap=overlap, **sizes)  # type: ignore[arg-type]
    ranks = actions(plan)
    first = np.array([0, *accumulate(map(len, ranks))], np.int64)
    return _Actions(first, *_columns([action for rank in ranks for action in rank]))


def _columns(order: Sequence[Action]) -> tuple[I8, I32, I32]:
    """Returns the kind, stage and micro batch of passes, (passes,) each."""
    kinds, stages, microbatches = zip(*order, strict=True)
    kind = np.array([_KINDS[kind] for kind in kinds], np.int8)
    return kind, np.array(stages, np.int32), np.array(microbatches, np.int32)


@njit
def _run(order: _Actions, times: StageTimes, n_microbatches: int, blocking: bool, split: bool, chain: int) -> F64:
    """Runs the passes of every rank in order, each when its inputs have arrived; returns the last end of each rank.

    Stages follow each other in chains of `chain` stages.
    """
    first, kind, stage, microbatch = order
    first_s, forward, backward, weights, again, border = times
    pp, n_stages = len(first) - 1, len(border)
    end_f = np.full((n_stages, n_microbatches), -1.0)
    end_b = np.full((n_stages, n_microbatches), -1.0)
    free = np.zeros(pp)
    head = first[:-1].copy()
    moved = True
    while moved:
        moved = False
        for r in range(pp):
            while head[r] < first[r + 1]:
                i = head[r]
                s, m = stage[i], microbatch[i]
                needed, wire = 0.0, 0.0
                if kind[i] == 0 and s % chain > 0:
                    needed, wire = end_f[s - 1, m], border[s - 1]
                elif kind[i] == 1 and s % chain < chain - 1:
                    needed, wire = end_b[s + 1, m], border[s]
                if needed < 0:
                    break
                start = max(free[r], needed + wire)
                if wire > 0 and blocking:
                    start = max(free[r], needed) + wire
                if kind[i] == 0:
                    free[r] = start + (first_s[s] if m == 0 else forward[s])
                    end_f[s, m] = free[r]
                elif kind[i] == 1:
                    free[r] = start + backward[s] + (0.0 if m == 0 or split else again[s])
                    end_b[s, m] = free[r]
                else:
                    free[r] = start + weights[s] + (0.0 if m == 0 else again[s])
                head[r] += 1
                moved = True
    return free
