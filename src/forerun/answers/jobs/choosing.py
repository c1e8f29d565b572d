"""Chooses one option for each of many jobs, so that GPUs of each kind suffice and the sum of worths is nearly the best.

An option is a number of GPUs of a kind. Each kind has a price. A job goes up its options in the order of what they
gain for their price, along their concave hull, and of all jobs the step goes first that gains the most. On equal GPUs
no choice is better by more than what one step gains. On unlike ones prices come from the relaxed problem, in which a
job may have parts of several options: its best solution has at most as many such jobs as there are kinds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.answers.jobs.interior_point import Vector
from forerun.common.jit import kernel
from forerun.core.program.types import F64, I64

NONE = -1
"""the option of a job that gets no GPUs"""
_SOFTEST, _HARDEST, _COOLING = 0.2, 0.004, 0.2
"""how far worths may differ that jobs take for alike, while prices are sought: at first, at last, and how it falls"""
_MOST_STEPS = 12
"""Newton steps at each of them"""
_NEAR = 0.01
"""part of the GPUs of a kind by which demand may miss them when prices are found"""
_LEAST_STEP = 1e-3
_RISE, _MOST_RISES = 1.01, 100
"""of prices at which more GPUs are wanted than there are"""
_DIGITS = 6
"""of prices, so that processors that round otherwise choose alike"""


class Offers(NamedTuple):
    """Holds the options of all jobs in columns; those of job i stand from begin[i] to begin[i + 1]."""

    begin: I64
    kind: I64
    gpus: I64
    worth: F64


def best_options(offers: Offers, without: float, free: I64) -> I64:
    """Returns for each job the option that it gets, counted over all jobs, or NONE.

    Args:
        without: what no GPUs are worth.
        free: GPUs of each kind.
    """
    jobs, options, kinds = len(offers.begin) - 1, len(offers.gpus), len(free)
    chosen, left, price = np.full(jobs, NONE), free.copy(), np.ones(kinds)
    if kinds > 1:
        if not _exceeds(offers, np.zeros(kinds), without, free).any():
            _take_preferred(offers, np.zeros(kinds), without, chosen, left)
            return chosen
        price = _raised(offers, without, free, prices(offers, without, free))
        _take_preferred(offers, price, without, chosen, left)
    cost = offers.gpus * price[offers.kind]
    order, hull, count = np.arange(options), np.empty(options, np.int64), np.empty(jobs, np.int64)
    _sort(offers.begin, cost, order)
    _hulls(offers, cost, without, order, hull, count)
    queue = Queue(np.empty(jobs), np.empty(jobs, np.int64))
    _climb(offers, cost, without, order, hull, count, queue, chosen, left)
    while kinds > 1 and _improve(offers, without, order, chosen, left):
        pass
    return chosen


def prices(offers: Offers, without: float, free: I64) -> Vector:
    """Returns the price of a GPU of each kind at which jobs that choose what is best for them need those there are.

    Jobs choose softly, the better option more than the worse one, so that demand is smooth and Newton's method finds
    the prices; then more and more sharply.
    """
    total, kinds = np.maximum(free.astype(np.float64), 1e-3), len(free)
    price = np.full(kinds, (len(offers.begin) - 1) / float(total.sum()))
    wanted = Wanted(np.empty(kinds), np.empty((kinds, kinds)), np.empty(kinds), np.empty(len(offers.gpus)))

    def cost(price: Vector) -> float:
        """Returns what the best prices make the least, and fills in what jobs want."""
        found = _demand(offers, without, softness, price, wanted)
        return float(found + price @ total - softness * np.log(price).sum())

    softness = _SOFTEST
    while softness > _HARDEST:
        value = cost(price)
        for _ in range(_MOST_STEPS):
            slope = total - wanted.gpus - softness / price
            if (np.abs(slope) < _NEAR * total).all():
                break
            bend = wanted.spread / softness + np.diag(softness / price**2)
            step = np.linalg.solve(bend, -slope)
            far = min(1.0, float(np.min(-0.9 * price[step < 0] / step[step < 0], initial=1.0)))
            before = value
            while far > _LEAST_STEP:
                value = cost(price + far * step)
                if value <= before + 0.1 * far * float(slope @ step):
                    break
                far /= 2.0
            price = price + far * step
        softness *= _COOLING
    return np.asarray([float(f"{each:.{_DIGITS}g}") for each in price])


def _exceeds(offers: Offers, price: Vector, without: float, free: I64) -> npt.NDArray[np.bool_]:
    """Returns for each kind whether too few GPUs are there for what is best for each job alone at the prices."""
    wanted = np.empty(len(free), np.int64)
    _want(offers, price, without, wanted)
    return wanted > free


def _raised(offers: Offers, without: float, free: I64, price: Vector) -> Vector:
    """Returns prices, raised by little, at which the GPUs suffice for what is best for each job alone."""
    for _ in range(_MOST_RISES):
        exceeded = _exceeds(offers, price, without, free)
        if not exceeded.any():
            break
        price = np.where(exceeded, price * _RISE, price)
    return price


class Wanted(NamedTuple):
    """Holds the demand of all jobs at given prices, and the arrays in which it is computed."""

    gpus: F64
    """of each kind"""
    spread: F64
    """the covariance of what they want of two kinds"""
    of_job: F64
    """the GPUs of each kind that one job wants"""
    chance: F64
    """of each of its options"""


@kernel
def _demand(offers: Offers, without: float, softness: float, price: F64, wanted: Wanted) -> float:
    """Fills in what jobs want, and returns what they gain, softly."""
    kinds = len(price)
    wanted.gpus[:] = 0.0
    wanted.spread[:] = 0.0
    gain = 0.0
    for job in range(len(offers.begin) - 1):
        first, end = offers.begin[job], offers.begin[job + 1]
        most = without
        for i in range(first, end):
            wanted.chance[i] = offers.worth[i] - price[offers.kind[i]] * offers.gpus[i]
            most = max(most, wanted.chance[i])
        whole = np.exp((without - most) / softness)
        for i in range(first, end):
            wanted.chance[i] = np.exp((wanted.chance[i] - most) / softness)
            whole += wanted.chance[i]
        gain += most + softness * np.log(whole)
        wanted.of_job[:] = 0.0
        for i in range(first, end):
            kind, gpus = offers.kind[i], offers.gpus[i]
            mean = gpus * wanted.chance[i] / whole
            wanted.of_job[kind] += mean
            wanted.spread[kind, kind] += gpus * mean
        for kind in range(kinds):
            wanted.gpus[kind] += wanted.of_job[kind]
            for other in range(kinds):
                wanted.spread[kind, other] -= wanted.of_job[kind] * wanted.of_job[other]
    return gain


@kernel
def _sort(begin: I64, price: F64, order: I64) -> None:
    """Orders the options of each job by their price."""
    for job in range(len(begin) - 1):
        for i in range(begin[job] + 1, begin[job + 1]):
            option, j = order[i], i
            while j > begin[job] and price[order[j - 1]] > price[option]:
                order[j] = order[j - 1]
                j -= 1
            order[j] = option


@kernel
def _slope(offers: Offers, price: F64, without: float, option: int, better: int) -> float:
    """Returns what a step from an option, or from NONE, to a better one loses for its price: it is negative."""
    worth, paid = (without, 0.0) if option == NONE else (offers.worth[option], price[option])
    return float((worth - offers.worth[better]) / (price[better] - paid))


@kernel
def _hulls(offers: Offers, price: F64, without: float, order: I64, hull: I64, count: I64) -> None:
    """Writes for each job the options on the concave hull from none to the best one, and how many there are."""
    for job in range(len(offers.begin) - 1):
        first = offers.begin[job]
        n = 0
        for i in range(first, offers.begin[job + 1]):
            option = order[i]
            if offers.worth[option] <= (without if n == 0 else offers.worth[hull[first + n - 1]]):
                continue
            while n:
                before = NONE if n == 1 else hull[first + n - 2]
                last = _slope(offers, price, without, before, hull[first + n - 1])
                if last < _slope(offers, price, without, before, option):
                    break
                n -= 1
            hull[first + n] = option
            n += 1
        count[job] = n


class Queue(NamedTuple):
    """The next step of each job, as a heap."""

    slope: F64
    job: I64


@kernel
def _sink(queue: Queue, size: int) -> None:
    """Lets the first element of a heap sink to its place."""
    slope, job = queue.slope[0], queue.job[0]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            queue.slope[right] < queue.slope[child]
            or (queue.slope[right] == queue.slope[child] and queue.job[right] < queue.job[child])
        ):
            child = right
        if queue.slope[child] > slope or (queue.slope[child] == slope and queue.job[child] > job):
            break
        queue.slope[at], queue.job[at] = queue.slope[child], queue.job[child]
        at = child
    queue.slope[at], queue.job[at] = slope, job


@kernel
def _rise(queue: Queue, at: int) -> None:
    """Lets an element of a heap rise to its place."""
    slope, job = queue.slope[at], queue.job[at]
    while at:
        parent = (at - 1) // 2
        if queue.slope[parent] < slope or (queue.slope[parent] == slope and queue.job[parent] < job):
            break
        queue.slope[at], queue.job[at] = queue.slope[parent], queue.job[parent]
        at = parent
    queue.slope[at], queue.job[at] = slope, job


@kernel
def _lacks(offers: Offers, own: int, option: int, left: I64) -> bool:
    """Returns whether too few GPUs are left for an option of a job that gives those of its own one back."""
    kind = offers.kind[option]
    given = offers.gpus[own] if own != NONE and offers.kind[own] == kind else 0
    return bool(offers.gpus[option] > left[kind] + given)


@kernel
def _take(offers: Offers, job: int, option: int, chosen: I64, left: I64) -> None:
    """Gives a job an option instead of its own one."""
    own = chosen[job]
    if own != NONE:
        left[offers.kind[own]] += offers.gpus[own]
    left[offers.kind[option]] -= offers.gpus[option]
    chosen[job] = option


@kernel
def _take_best(offers: Offers, without: float, job: int, order: I64, chosen: I64, left: I64) -> bool:
    """Gives a job the best option that is left and better than its own one; returns whether there is one."""
    own = chosen[job]
    best, most = NONE, without if own == NONE else offers.worth[own]
    for i in range(offers.begin[job], offers.begin[job + 1]):
        option = order[i]
        if offers.worth[option] > most and not _lacks(offers, own, option, left):
            best, most = option, offers.worth[option]
    if best != NONE:
        _take(offers, job, best, chosen, left)
    return bool(best != NONE)


@kernel
def _preferred(offers: Offers, price: F64, without: float, job: int) -> int:
    """Returns the option that is best for a job at the prices of GPUs, or NONE."""
    best, most = NONE, without
    for option in range(offers.begin[job], offers.begin[job + 1]):
        gain = offers.worth[option] - price[offers.kind[option]] * offers.gpus[option]
        if gain > most:
            best, most = option, gain
    return best


@kernel
def _want(offers: Offers, price: F64, without: float, wanted: I64) -> None:
    """Fills in the GPUs of each kind of what all jobs prefer."""
    wanted[:] = 0
    for job in range(len(offers.begin) - 1):
        option = _preferred(offers, price, without, job)
        if option != NONE:
            wanted[offers.kind[option]] += offers.gpus[option]


@kernel
def _take_preferred(offers: Offers, price: F64, without: float, chosen: I64, left: I64) -> None:
    """Gives each job in turn what it prefers, if that is left."""
    for job in range(len(offers.begin) - 1):
        option = _preferred(offers, price, without, job)
        if option != NONE and not _lacks(offers, NONE, option, left):
            _take(offers, job, option, chosen, left)


@kernel
def _next(offers: Offers, hull: I64, count: I64, job: int, own: int) -> int:
    """Returns the place on the hulls of the option above a job's own one, or NONE if there is none."""
    first = offers.begin[job]
    end = first + count[job]
    if own == NONE:
        return int(first) if count[job] else NONE
    for at in range(first, end - 1):
        if hull[at] == own:
            return int(at + 1)
    return NONE


@kernel
def _climb(
    offers: Offers,
    price: F64,
    without: float,
    order: I64,
    hull: I64,
    count: I64,
    queue: Queue,
    chosen: I64,
    left: I64,
) -> None:
    """Lets jobs go up their hulls, the step with the most gain for its price first, as long as GPUs are left.

    A job whose next step doesn't fit takes the best of what does, and goes no further. `count` ends as the steps made.
    """
    size = 0
    for job in range(len(offers.begin) - 1):
        at = _next(offers, hull, count, job, chosen[job])
        if at != NONE:
            queue.slope[size], queue.job[size] = _slope(offers, price, without, chosen[job], hull[at]), job
            _rise(queue, size)
            size += 1
    rest = 0
    for kind in range(len(left)):
        rest += left[kind]
    while size and rest:
        job = queue.job[0]
        own = chosen[job]
        at = _next(offers, hull, count, job, own)
        if _lacks(offers, own, hull[at], left):
            _take_best(offers, without, job, order, chosen, left)
            ends = True
        else:
            _take(offers, job, hull[at], chosen, left)
            ends = at + 1 == offers.begin[job] + count[job]
        rest += (0 if own == NONE else offers.gpus[own]) - (0 if chosen[job] == NONE else offers.gpus[chosen[job]])
        if ends:
            size -= 1
            queue.slope[0], queue.job[0] = queue.slope[size], queue.job[size]
        else:
            queue.slope[0] = _slope(offers, price, without, hull[at], hull[at + 1])
        if size:
            _sink(queue, size)


@kernel
def _improve(offers: Offers, without: float, order: I64, chosen: I64, left: I64) -> bool:
    """Gives each job the best option that is left, if it is better than its own; returns whether any job has one."""
    found = False
    for job in range(len(offers.begin) - 1):
        if _take_best(offers, without, job, order, chosen, left):
            found = True
    return found
