"""How fast jobs that share links go on in the long run, by the phases of their steps.

Jobs hold each other up until their phases stand to each other in a way that repeats itself, or drift past each other
for ever. So the first steps of jobs say little about their pace over hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from forerun.common.jit import kernel, njit
from forerun.core.program.types import F64, I64, Mask

Phase = tuple[float, tuple[tuple[int, float], ...]]
"""seconds alone, and the load on each link by number; no links: it computes"""
Step = tuple[Phase, ...]
_STEPS = 1_000
"""steps of the slowest job, alone, over which paces are measured where nothing repeats itself"""
_STEPS_OF_A_CHOICE = 40
"""the same while moments to begin at are compared"""
_MOST_PHASES = 250_000
"""phases of all jobs after which they are measured in any case"""
_MOST_LOADS = 10_000_000
"""the same, times the loads on links of all phases"""
_SHIFTS = 24
"""places in a job's step at which it may begin, beside those at which its phases adjoin those of others"""
_NOTHING = 1e-12
_SAME = 1e-9
"""difference, over the longest step, between two states that count as equal"""


class _Phases(NamedTuple):
    """The phases of all jobs, one job after the other, in columns."""

    first: I64
    """(jobs + 1,) the first phase of each job"""
    seconds: F64
    first_load: I64
    """(phases + 1,) the first load of each phase"""
    link: I64
    load: F64
    """room that a phase takes on a link at its full rate"""
    capacity: F64
    """(links,)"""


@lru_cache(maxsize=4096)
def paces_together(steps: tuple[Step, ...], capacities: tuple[float, ...], shifts: bool) -> tuple[float, ...]:
    """Returns the pace of each job beside the others, relative to its pace alone.

    Args:
        steps: the phases of each job's step. The first one of each computes.
        capacities: of each link.
        shifts: choose, one job after the other, the moment at which its step begins, so that jobs slow each other
            least; otherwise all jobs begin a step at once.
    """
    begins_s = [0.0] * len(steps)
    links = [{link for _, loads in step for link, _ in loads} for step in steps]
    for i in range(1, len(steps)) if shifts else ():
        near = [j for j in range(i) if links[i] & links[j]]
        some = _in_columns([*(steps[j] for j in near), steps[i]], capacities)
        before_s = [begins_s[j] for j in near]
        begins_s[i] = max(
            _moments([steps[j] for j in near], before_s, steps[i]),
            key=lambda begin_s: round(sum(_paces(some, [*before_s, begin_s], _STEPS_OF_A_CHOICE)), 9),
        )
    return tuple(_paces(_in_columns(steps, capacities), begins_s, _STEPS))


def _moments(others: Sequence[Step], begins_s: Sequence[float], own: Step) -> list[float]:
    """Returns when the step of a job may begin: so that its phases adjoin those of the others, and in equal parts."""
    ends_s = list(accumulate(seconds for seconds, _ in own))
    adjoining = {
        (begin_s + other_s - own_s) % ends_s[-1]
        for begin_s, other in zip(begins_s, others, strict=True)
        for other_s in accumulate(seconds for seconds, _ in other)
        for own_s in ends_s
    }
    return sorted(adjoining) + [ends_s[-1] * n / _SHIFTS for n in range(_SHIFTS)]


def _in_columns(steps: Sequence[Step], capacities: tuple[float, ...]) -> _Phases:
    phases = [phase for step in steps for phase in step]
    loads = [load for _, links in phases for load in links]
    return _Phases(
        first=_begins([len(step) for step in steps]),
        seconds=np.array([seconds for seconds, _ in phases], np.float64),
        first_load=_begins([len(links) for _, links in phases]),
        link=np.array([link for link, _ in loads], np.int64),
        load=np.array([load for _, load in loads], np.float64),
        capacity=np.array(capacities, np.float64),
    )


def _begins(lengths: Sequence[int]) -> I64:
    return np.cumsum([0, *lengths], dtype=np.int64)


def _paces(phases: _Phases, begins_s: Sequence[float], steps: int) -> list[float]:
    most = min(_MOST_PHASES, max(len(phases.seconds), _MOST_LOADS // (1 + len(phases.load)))) * steps // _STEPS
    found: list[float] = _measured(phases, np.array(begins_s), steps, most).tolist()
    return found


@njit
def _measured(phases: _Phases, begins_s: F64, most_steps: int, most_phases: int) -> F64:
    """Runs the phases of all jobs, and returns what each does in a second of the seconds that its steps take alone.

    It looks at all jobs whenever the first one begins a step. Where they stand as at an earlier look (Brent's way to
    find a cycle), they do for ever what they did since.
    """
    jobs = len(begins_s)
    at, left_s, longest_s = np.zeros(jobs, np.int64), np.zeros(jobs), 0.0
    for i in range(jobs):
        at[i] = phases.first[i]
        left_s[i] = begins_s[i] + phases.seconds[at[i]]
        longest_s = max(longest_s, phases.seconds[phases.first[i] : phases.first[i + 1]].sum())
    until_s = most_steps * longest_s
    rates, growing = np.zeros(jobs), np.zeros(jobs, np.bool_)
    room, used = np.zeros(len(phases.capacity)), np.zeros(len(phases.capacity))
    done_s, now_s = np.zeros(jobs), 0.0
    mark_at, mark_left_s, mark_done_s, mark_s = np.zeros(jobs, np.int64), np.zeros(jobs), np.zeros(jobs), 0.0
    before_done_s, before_s = np.zeros(jobs), 0.0
    looks, next_mark, repeats = 0, 1, False
    for _ in range(most_phases):
        _share(phases, at, rates, growing, room, used)
        begins, pass_s = _pass(phases, at, left_s, done_s, rates, _NOTHING * until_s)
        now_s += pass_s
        if begins:
            looks += 1
            repeats = looks > 1
            for i in range(jobs):
                repeats &= at[i] == mark_at[i] and abs(left_s[i] - mark_left_s[i]) <= _SAME * longest_s
            if looks == next_mark and not repeats:
                next_mark *= 2
                before_s, mark_s = mark_s, now_s
                for i in range(jobs):
                    before_done_s[i], mark_done_s[i] = mark_done_s[i], done_s[i]
                    mark_at[i], mark_left_s[i] = at[i], left_s[i]
        if repeats or now_s >= until_s:
            break
    since_s = mark_s if repeats else before_s
    paces = np.zeros(jobs)
    for i in range(jobs):
        did_s = done_s[i] - (mark_done_s[i] if repeats else before_done_s[i])
        paces[i] = min(1.0, did_s / (now_s - since_s))
    return paces


@kernel
def _pass(phases: _Phases, at: I64, left_s: F64, done_s: F64, rates: F64, nothing_s: float) -> tuple[bool, float]:
    """Goes on to the end of a phase; returns whether the first job begins a step, and the seconds that passed."""
    pass_s, begins = np.inf, False
    for i in range(len(at)):
        pass_s = min(pass_s, left_s[i] / rates[i])
    for i in range(len(at)):
        did_s = pass_s * rates[i]
        left_s[i] -= did_s
        done_s[i] += did_s
        while left_s[i] <= nothing_s:
            at[i] += 1
            if at[i] == phases.first[i + 1]:
                at[i] = phases.first[i]
                begins |= i == 0
            left_s[i] += phases.seconds[at[i]]
    return begins, pass_s


@kernel
def _share(phases: _Phases, at: I64, rates: F64, growing: Mask, room: F64, used: F64) -> None:
    """Writes the max-min fair rate of each job in its phase, at most 1 (progressive filling)."""
    left = 0
    for i in range(len(at)):
        growing[i] = phases.first_load[at[i]] < phases.first_load[at[i] + 1]
        rates[i] = 0.0 if growing[i] else 1.0
        left += growing[i]
    for link in range(len(room)):
        room[link] = phases.capacity[link]
    while left:
        more = 1.0
        for link in range(len(used)):
            used[link] = 0.0
        for i in range(len(at)):
            if growing[i]:
                more = min(more, 1.0 - rates[i])
                for k in range(phases.first_load[at[i]], phases.first_load[at[i] + 1]):
                    used[phases.link[k]] += phases.load[k]
        for link in range(len(room)):
            if used[link] > 0.0:
                more = min(more, room[link] / used[link])
        for link in range(len(room)):
            room[link] -= more * used[link]
        for i in range(len(at)):
            if not growing[i]:
                continue
            rates[i] += more
            stops = rates[i] >= 1.0 - _NOTHING
            for k in range(phases.first_load[at[i]], phases.first_load[at[i] + 1]):
                stops |= room[phases.link[k]] <= _NOTHING * phases.capacity[phases.link[k]]
            if stops:
                growing[i] = False
                left -= 1
