"""Two slow simulators in plain Python, written from the docstring of `simulate` alone."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from forerun.core.program.types import FlatProgram, Stream


def class_of(flat: FlatProgram) -> list[int]:
    owner = []
    for c in range(len(flat.class_ptr) - 1):
        owner += [c] * int(flat.class_ptr[c + 1] - flat.class_ptr[c])
    return owner


def stream_predecessors(flat: FlatProgram) -> list[int | None]:
    owner, last, result = class_of(flat), {}, []
    for i in range(len(flat)):
        key = (owner[i], int(flat.stream[i]))
        result.append(last.get(key))
        last[key] = i
    return result


def preds(flat: FlatProgram, i: int) -> list[int]:
    return [int(p) for p in flat.pred[flat.pred_ptr[i] : flat.pred_ptr[i + 1]]]


def longest_path(flat: FlatProgram, duration: list[int], issue: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Start, end and issue end by relaxation from zero until nothing changes: no order is assumed."""
    n, owner, before = len(flat), class_of(flat), stream_predecessors(flat)
    start, end, issued = [0] * n, [0] * n, [0] * n
    members: dict[int, list[int]] = {}
    for i in range(n):
        members.setdefault(int(flat.meeting[i]) if flat.meeting[i] >= 0 else -1 - i, []).append(i)
    changed = True
    while changed:
        changed = False
        for i in range(n):
            host = 0
            if i and owner[i - 1] == owner[i]:
                host = max(issued[i - 1], end[i - 1] if flat.sync[i - 1] else 0)
            issued_i = host + issue[flat.op[i]]
            ready = max([issued_i, *(end[p] for p in preds(flat, i))])
            if before[i] is not None:
                ready = max(ready, end[before[i]])
            changed |= issued_i != issued[i] or ready > start[i]
            issued[i], start[i] = issued_i, max(start[i], ready)
            end[i] = start[i] + duration[flat.op[i]]
        for group in members.values():
            together = max(start[i] for i in group)
            for i in group:
                changed |= start[i] != together
                start[i], end[i] = together, together + duration[flat.op[i]]
    return start, end, issued


def contended(
    flat: FlatProgram,
    duration: list[int],
    issue: list[int],
    slow_compute: list[Fraction],
    slow_network: list[Fraction],
    network: list[bool],
    asks: Callable[[int, int], list[Fraction]] = lambda _op, _stream: [],
) -> tuple[list[Fraction], list[Fraction]]:
    """Exact start and end of every node: one event at a time, all rates worked out anew after each.

    `asks` says what part of each link an op on a stream keeps busy.
    """
    n, owner, before = len(flat), class_of(flat), stream_predecessors(flat)
    start: list[Fraction | None] = [None] * n
    end: list[Fraction | None] = [None] * n
    left = [Fraction(duration[op]) for op in flat.op]
    issued: list[Fraction | None] = [None] * n
    now = Fraction(0)

    def side(i: int) -> str:
        if network[flat.op[i]]:
            return "network"
        return "compute" if flat.stream[i] == Stream.COMPUTE and flat.meeting[i] < 0 else "neutral"

    asked = [asks(int(flat.op[i]), int(flat.stream[i])) for i in range(n)]

    def fullest(i: int, running: list[int]) -> Fraction:
        loads = [sum((asked[j][k] for j in running if owner[j] == owner[i]), Fraction(0)) for k in range(len(asked[i]))]
        return max([Fraction(1), *(load for load, own in zip(loads, asked[i], strict=True) if own)])

    def rate(i: int, running: list[int]) -> Fraction:
        together = [j for j in running if j == i or (flat.meeting[i] >= 0 and flat.meeting[j] == flat.meeting[i])]
        return beside_compute(i, running) / max(fullest(j, running) for j in together)

    def beside_compute(i: int, running: list[int]) -> Fraction:
        beside = {side(j) for j in running if owner[j] == owner[i]}
        if side(i) == "compute" and "network" in beside:
            return 1 / (1 + slow_compute[flat.op[i]])
        if side(i) == "network" and "compute" in beside:
            return 1 / (1 + slow_network[flat.op[i]])
        return Fraction(1)

    while True:
        settled = False
        while not settled:
            settled = True
            for i in range(n):
                first = i == 0 or owner[i - 1] != owner[i]
                released = Fraction(0) if first else issued[i - 1]
                if not first and flat.sync[i - 1]:
                    done = end[i - 1]
                    released = None if done is None or released is None else max(done, released)
                if issued[i] is None and released is not None:
                    issued[i], settled = released + issue[flat.op[i]], False
            ready = [
                i
                for i in range(n)
                if start[i] is None
                and issued[i] is not None
                and issued[i] <= now
                and all(end[p] is not None for p in preds(flat, i))
                and (before[i] is None or end[before[i]] is not None)
            ]
            for i in ready:
                together = [j for j in ready if flat.meeting[j] == flat.meeting[i]]
                if flat.meeting[i] < 0 or len(together) == flat.meeting_size[flat.meeting[i]]:
                    start[i], settled = now, False
            for i in range(n):
                if start[i] is not None and end[i] is None and left[i] == 0:
                    end[i], settled = now, False
        running = [i for i in range(n) if start[i] is not None and end[i] is None]
        rates = {i: rate(i, running) for i in running}
        steps = [left[i] / rates[i] for i in running]
        steps += [t - now for t in issued if t is not None and t > now]
        if not steps:
            assert all(e is not None for e in end), "the reference is stuck"
            return [s for s in start if s is not None], [e for e in end if e is not None]
        step = min(steps)
        for i in running:
            left[i] -= step * rates[i]
        now += step
