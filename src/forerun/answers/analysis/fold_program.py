"""Folds a Program before its simulation: blocks that always take the same time are simulated once.

A *closed* block starts and ends on the compute stream, waits for no event and has no rendezvous. It takes the same time
alone as anywhere in the step, provided that no gradient reduction or parameter gather runs beside it and that the host
stays ahead of the device. A run of closed blocks becomes one node of their time, and a second one for the rest of the
host's work. Blocks that wait for the host, and everything from the first overlapping collective on, stay as they are,
so the folded run equals the unfolded one to the picosecond (tests/answers/analysis/test_fold_program.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forerun.answers.analysis.breakdown import breakdown_ps
from forerun.answers.analysis.link_sharing import shared_ps
from forerun.core.cost.step_costs import StepCosts
from forerun.core.engine.sharing import crowded_links, joined_demand, pairs_of_program
from forerun.core.engine.simulate import simulate
from forerun.core.program.builder import BlockBuilder, OpTableBuilder
from forerun.core.program.causes import N_CAUSES
from forerun.core.program.types import I64, N_CATEGORIES, Block, OpTable, Program, RankClass, Stream, joined_ops
from forerun.core.program.unfold import unfold

Mask = npt.NDArray[np.bool_]
_COMPUTE = int(Stream.COMPUTE)
"""as a plain int, which numpy compares in a third of the time"""
FOLDED_BLOCKS, FOLDED_HOST = "folded blocks", "folded host work"
"""names of ops that stand for a run of blocks"""


@dataclass(frozen=True, slots=True)
class Folded:
    """A folded Program with the costs of its ops."""

    program: Program
    costs: StepCosts
    split_ps: I64
    """picoseconds by Cause inside each op that stands for a run of blocks, (n_ops, N_CAUSES); 0 for other ops"""
    shared_ps: I64
    """picoseconds that sharing links adds inside each op that stands for a run of blocks, (n_ops,); 0 for other ops"""


@dataclass(slots=True)
class _Closed:
    """The times of one closed block that runs alone."""

    duration_ps: int
    first_issue_ps: int
    issue_ps: int
    lead_ps: int
    """how far the host must be ahead of the device at the start so that no node of the block waits for it"""
    split_ps: I64
    shared_ps: int


def fold(program: Program, costs: StepCosts) -> Folded:
    """Returns `program` with each run of closed blocks as a single node."""
    may_close = _used_and_closed(program)
    closed = _closed_blocks(program, costs, np.flatnonzero(may_close).tolist())
    if not closed:
        return _unfolded(program, costs)
    runs: dict[bytes, int] = {}
    blocks = list(program.blocks)
    macros: list[_Closed] = []
    classes = []
    n_ops = len(program.ops)
    traffic = _traffic(program, costs, may_close)
    is_closed = np.zeros(len(blocks), np.bool_)
    is_closed[list(closed)] = True
    for cls in program.rank_classes:
        foldable = is_closed[cls.block] & _quiet(cls, traffic)
        steps, stays = np.arange(len(foldable)), ~foldable
        for start, end in _runs(foldable):
            numbers = cls.block[start:end]
            key = numbers.tobytes()
            if key not in runs:
                parts = [closed[int(number)] for number in numbers]
                if _host_stays_ahead(parts):
                    runs[key] = len(blocks)
                    blocks.append(_macro_block(n_ops + 2 * len(macros)))
                    macros.append(_sum(parts))
                else:
                    runs[key] = -1
            if runs[key] < 0:
                stays[start:end] = True
            else:
                steps[start], stays[start] = -1 - runs[key], True
        classes.append(_rewrite(cls, steps[stays]))
    folded = replace(program, ops=_with_macros(program.ops, macros), blocks=tuple(blocks), rank_classes=tuple(classes))
    split_ps, inside_ps = _macro_splits(n_ops, macros)
    return Folded(folded, _macro_costs(costs, macros), split_ps, inside_ps)


def _unfolded(program: Program, costs: StepCosts) -> Folded:
    nothing = np.zeros(len(program.ops), np.int64)
    return Folded(program, costs, np.zeros((len(program.ops), N_CAUSES), np.int64), nothing)


def unfolded(program: Program, costs: StepCosts) -> Folded:
    """Returns `program` as it is, for timelines that people read node by node."""
    return _unfolded(program, costs)


# -- which blocks are closed -------------------------------------------------------------------------------------------


def _is_closed(block: Block) -> bool:
    if not len(block) or block.stream[0] != _COMPUTE or block.stream[-1] != _COMPUTE:
        return False
    if (block.pred < 0).any() or (block.record >= 0).any() or (block.channel >= 0).any() or block.sync.any():
        return False
    away = np.flatnonzero(block.stream != _COMPUTE)
    if not len(away):
        return True
    joined = np.zeros(len(block), np.bool_)
    on_compute = np.repeat(block.stream == _COMPUTE, block.n_pred)
    joined[block.pred[on_compute]] = True
    return bool(joined[away].all())


def _used_and_closed(program: Program) -> Mask:
    """Returns a mask of the blocks that are closed and that some rank class runs, (n_blocks,)."""
    out = np.zeros(len(program.blocks), np.bool_)
    for cls in program.rank_classes:
        out[cls.block] = True
    for number in np.flatnonzero(out).tolist():
        out[number] = _is_closed(program.blocks[number])
    return out


def _closed_blocks(program: Program, costs: StepCosts, numbers: list[int]) -> dict[int, _Closed]:
    """Simulates each of the closed blocks `numbers` alone."""
    if not numbers:
        return {}
    zero = np.zeros(N_CATEGORIES, np.int64)
    alone = replace(
        program,
        rank_classes=tuple(
            RankClass("", 1, np.array([n], np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32), zero)
            for n in numbers
        ),
        channels=(),
    )
    flat = unfold(alone)
    free = np.zeros_like(costs.issue_ps)
    rates = (costs.slow_compute, costs.slow_network, costs.network_op)
    timeline = simulate(flat, costs.duration_ps, free, *rates, demand=costs.demand)
    split = breakdown_ps(flat, program, timeline, alone=True)
    shared = shared_ps(flat, costs, timeline)
    out = {}
    for i, number in enumerate(numbers):
        nodes = slice(int(flat.class_ptr[i]), int(flat.class_ptr[i + 1]))
        ops = flat.op[nodes]
        issue = np.cumsum(costs.issue_ps[ops])
        start, end = timeline.start_ps[nodes], int(timeline.class_end_ps[i])
        out[number] = _Closed(
            duration_ps=end,
            first_issue_ps=int(issue[0]),
            issue_ps=int(issue[-1]),
            lead_ps=int((issue - start).max()),
            split_ps=split[i],
            shared_ps=int(shared[i]),
        )
    return out


# -- where they may be folded ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Traffic:
    """The blocks that have collectives that affect the blocks around them; masks are (n_blocks,)."""

    lasting: list[tuple[Mask, Mask]]
    """for every event slot that collectives record: the blocks that start one, and the blocks that wait for it"""
    early: list[tuple[Mask, Mask]]
    """for every event that a collective waits for: the blocks whose collective may start before compute reaches them,
    and the blocks that record the event"""


def _traffic(program: Program, costs: StepCosts, closed: Mask) -> _Traffic:
    """Finds the collectives and transfers that run beside other blocks and may slow the nodes of `closed` blocks."""
    disturbs = _shares_links_with(program, costs, closed)
    if costs.slow_compute.any() or costs.slow_network.any():
        disturbs = disturbs | costs.network_op
    if not disturbs.any():
        return _Traffic([], [])
    starts: dict[int, list[int]] = {}
    early: dict[int, list[int]] = {}
    waits: dict[int, list[int]] = {}
    records: dict[int, list[int]] = {}
    for number in np.flatnonzero(~closed).tolist():
        block = program.blocks[number]
        collective = disturbs[block.op]
        compute = block.stream == _COMPUTE
        waited, waiting_compute = block.pred, np.repeat(compute, block.n_pred)
        if collective.any():
            starts.setdefault(int(block.record[collective].max()), []).append(number)
            if not compute[0]:
                for slot in (-1 - waited[waited < 0]).tolist() or [-1]:
                    early.setdefault(slot, []).append(number)
        for slot in (-1 - waited[waiting_compute & (waited < 0)]).tolist():
            waits.setdefault(slot, []).append(number)
        for slot in block.record[compute & (block.record >= 0)].tolist():
            records.setdefault(slot, []).append(number)

    def mask(numbers: list[int]) -> Mask:
        out = np.zeros(len(program.blocks), np.bool_)
        out[numbers] = True
        return out

    return _Traffic(
        [(mask(numbers), mask(waits.get(slot, []))) for slot, numbers in starts.items()],
        [(mask(numbers), mask(records.get(slot, []))) for slot, numbers in early.items()],
    )


def _shares_links_with(program: Program, costs: StepCosts, closed: Mask) -> Mask:
    """Finds ops that share a link with ops of the `closed` blocks, if the link may be too slow for both, (n_ops,)."""
    out = np.zeros(len(program.ops), np.bool_)
    if costs.demand is None:
        return out
    demand = crowded_links(costs.demand, pairs_of_program(program))
    inside = [program.blocks[number].op for number in np.flatnonzero(closed).tolist()]
    if demand is None or not inside:
        return out
    links = demand.share[np.concatenate(inside)].any(axis=0)
    out |= demand.share[:, links].any(axis=1)
    return out


def _quiet(cls: RankClass, traffic: _Traffic) -> Mask:
    """Finds the steps of `cls` beside which no collective of another step can run, (steps,)."""
    n = len(cls.block)
    index = np.arange(1, n + 1)
    quiet = np.ones(n, np.bool_)
    for starts, waits in traffic.lasting:
        started = np.maximum.accumulate(np.where(starts[cls.block], index, 0))
        waited = np.maximum.accumulate(np.where(waits[cls.block], index, 0))
        quiet[1:] &= started[:-1] <= waited[:-1]
    for early, records in traffic.early:
        recorded = np.maximum.accumulate(np.where(records[cls.block], index, 0))
        steps = np.flatnonzero(early[cls.block])
        beside = np.zeros(n + 1, np.int64)
        np.add.at(beside, np.where(steps > 0, recorded[steps - 1], 0), 1)
        np.subtract.at(beside, steps, 1)
        quiet &= np.cumsum(beside[:n]) == 0
    return quiet


def _runs(foldable: Mask) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of every run of foldable steps."""
    edges = np.flatnonzero(np.diff(foldable, prepend=False, append=False))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _rewrite(cls: RankClass, chosen: I64) -> RankClass:
    """Returns `cls` with the steps `chosen`: a number from 0 keeps that step, a negative one is a folded block."""
    stays = np.maximum(chosen, 0)
    block = np.where(chosen >= 0, cls.block[stays], -1 - chosen)
    return replace(
        cls,
        block=block.astype(np.int32),
        microbatch=cls.microbatch[stays],
        layer=np.where(chosen >= 0, cls.layer[stays], -1).astype(np.int32),
    )


# -- folded ops --------------------------------------------------------------------------------------------------------


def _host_stays_ahead(parts: list[_Closed]) -> bool:
    """Returns whether no node of these consecutive blocks waits for the host, which has just issued the first node."""
    lead = parts[0].first_issue_ps
    for part in parts:
        if part.lead_ps > lead:
            return False
        lead += part.duration_ps - part.issue_ps
    return True


def _sum(parts: list[_Closed]) -> _Closed:
    return _Closed(
        sum(p.duration_ps for p in parts),
        parts[0].first_issue_ps,
        sum(p.issue_ps for p in parts),
        0,
        np.sum([p.split_ps for p in parts], axis=0),
        sum(p.shared_ps for p in parts),
    )


def _macro_block(op: int) -> Block:
    block = BlockBuilder()
    block.node(op)
    block.node(op + 1)
    return block.build("folded")


def _with_macros(ops: OpTable, macros: list[_Closed]) -> OpTable:
    """Adds two rows for each macro to `ops`: its time, and the rest of the host's work."""
    n = 2 * len(macros)
    blank = OpTableBuilder()
    blank.delay("", 0)
    rows = replace(blank.build().take([0] * n), name=(FOLDED_BLOCKS, FOLDED_HOST) * len(macros))
    return joined_ops([ops, rows])


def _macro_costs(costs: StepCosts, macros: list[_Closed]) -> StepCosts:
    n = 2 * len(macros)
    duration, issue = np.zeros(n, np.int64), np.zeros(n, np.int64)
    duration[::2] = [macro.duration_ps for macro in macros]
    issue[::2] = [macro.first_issue_ps for macro in macros]
    issue[1::2] = [macro.issue_ps - macro.first_issue_ps for macro in macros]
    return StepCosts(
        duration_ps=np.concatenate([costs.duration_ps, duration]),
        issue_ps=np.concatenate([costs.issue_ps, issue]),
        slow_compute=np.concatenate([costs.slow_compute, np.zeros(n)]),
        slow_network=np.concatenate([costs.slow_network, np.zeros(n)]),
        network_op=np.concatenate([costs.network_op, np.zeros(n, np.bool_)]),
        demand=joined_demand([costs.demand, None], [len(costs.duration_ps), n]),
        calibrated=np.concatenate([costs.calibrated, np.ones(n)]),  # coverage is read before folding
    )


def _macro_splits(n_ops: int, macros: list[_Closed]) -> tuple[I64, I64]:
    """Returns `split_ps` and `shared_ps` of all ops."""
    split = np.zeros((n_ops + 2 * len(macros), N_CAUSES), np.int64)
    shared = np.zeros(n_ops + 2 * len(macros), np.int64)
    for i, macro in enumerate(macros):
        split[n_ops + 2 * i] = macro.split_ps
        shared[n_ops + 2 * i] = macro.shared_ps
    return split, shared
