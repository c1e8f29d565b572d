"""Reasons of an exploration as sentences: every figure in them is one of the two points that are compared.

Here are also the words for strategies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.astrasim.dse.limits import BYTES_OF_UNIT
from forerun.astrasim.dse.reasons import COMPUTE, HELD, IDLE, MADE, Change, Reason
from forerun.astrasim.dse.result import PairResult
from forerun.astrasim.dse.workload import Strategy
from forerun.interfaces.report.wording import seconds, three_digits

_MOST_NAMED = 3
_LEAST_SHARE = 0.05
"""changes below this share of their sum are added up"""
_OF_MEMORY = {HELD: "weights and inputs, which are there from the start,", MADE: "activations and gradients"}
_SAME = 0.0005
"""numbers of operations with a smaller relative difference count as equal"""


def reason_words(reason: Reason, pair: PairResult) -> str:
    """A sentence on what changes from one point to the other, and one for each kind of term that makes it change."""
    before, after = reason.total
    first, second = (strategy_words(row.point.strategy) for row in (reason.before, reason.after))
    if reason.axis is None:
        start = f"within {pair.memory_limit}" + (": fastest" if reason.what == "time" else ": memory of the fastest")
    else:
        old, new = (value_words(getattr(row.point.strategy, reason.axis)) for row in (reason.before, reason.after))
        aim = "fastest" if reason.what == "time" else "least memory"
        start = f"{reason.axis.replace('_', ' ')} {old} -> {new}: {aim}"
    amounts = [_amount(size, reason, pair) for size in (before, after)]
    head = f"{start} {amounts[0]} -> {amounts[1]} ({_relative(before, after)}), {first} -> {second}."
    return " ".join([head, *(f"{words[0].upper()}{words[1:]}." for words in _why(reason, pair))])


def reason_record(reason: Reason, pair: PairResult) -> dict[str, Any]:
    """The same as plain data, with the sentence."""
    return {
        "what": reason.what,
        "axis": reason.axis,
        "before": strategy_words(reason.before.point.strategy),
        "after": strategy_words(reason.after.point.strategy),
        "total": list(reason.total),
        "changes": [{"term": one.term, "before": one.before, "after": one.after} for one in reason.changes],
        "text": reason_words(reason, pair),
    }


def _why(reason: Reason, pair: PairResult) -> list[str]:
    """What drives the change first: exposed communication as a whole, or compute, or memory by kind."""
    if reason.what == "memory":
        return [
            f"{_OF_MEMORY[one.term]} {_verb(one.by).removesuffix('s')} from {_amount(one.before, reason, pair)} to "
            f"{_amount(one.after, reason, pair)}"
            for one in reason.changes
        ]
    communication = [one for one in reason.changes if one.is_communication]
    exposed = sum(one.by for one in communication)
    whole = sum(abs(one.by) for one in reason.changes)
    parts = [(abs(one.by), _other_words(one, reason)) for one in reason.changes if not one.is_communication]
    if communication:
        verb = f"{_verb(exposed)} by {_seconds(abs(exposed))}" if exposed else "stays the same"
        parts.append(
            (abs(exposed), f"exposed communication {verb}: {_communication_words(communication, whole, pair)}")
        )
    return [words for _, words in sorted(parts, key=lambda part: -part[0])]


def _communication_words(changes: Sequence[Change], whole: int, pair: PairResult) -> str:
    named = [one for one in changes[:_MOST_NAMED] if abs(one.by) >= _LEAST_SHARE * whole] or list(changes[:1])
    words = [
        f"{one.term} {_signed(one.by)} ({one.calls[0]:,} -> {one.calls[1]:,} calls, "
        f"{_size(one.size_bytes[0], pair)} -> {_size(one.size_bytes[1], pair)})"
        for one in named
    ]
    rest = sum(one.by for one in changes if one not in named)
    return ", ".join(words + [f"others {_signed(rest)}"] * (len(named) < len(changes)))


def _other_words(change: Change, reason: Reason) -> str:
    if change.term == IDLE:
        return f"idle time {_verb(change.by)} by {_seconds(abs(change.by))}"
    assert change.term == COMPUTE
    before, after = reason.before.figures, reason.after.figures
    before_strategy, after_strategy = reason.before.point.strategy, reason.after.point.strategy
    assert before
    assert after
    again = after_strategy.activation_recompute and not before_strategy.activation_recompute
    return (
        f"compute {_verb(change.by)} by {_seconds(abs(change.by))}: "
        f"{_operations(before.terms.operations, after.terms.operations)}"
        f"{', as activations are computed again' * again}; "
        f"compute utilization {before.avg_compute_util_pct:.1f} % -> {after.avg_compute_util_pct:.1f} %"
    )


def _operations(before: int, after: int) -> str:
    if before and abs(after / before - 1) < _SAME:
        return "the same operations"
    return f"operations {_relative(before, after)}"


def _verb(by: float) -> str:
    return "grows" if by > 0 else "shrinks"


def _relative(before: int, after: int) -> str:
    return f"{after / before - 1:+.1%}" if before else "from nothing"


def _amount(value: int, reason: Reason, pair: PairResult) -> str:
    return _seconds(value) if reason.what == "time" else _size(value, pair)


def _seconds(time_ns: int) -> str:
    return seconds(time_ns * 1e-9)


def _signed(time_ns: int) -> str:
    return f"{'-' if time_ns < 0 else '+'}{_seconds(abs(time_ns))}"


def _size(n_bytes: int, pair: PairResult) -> str:
    size = n_bytes * pair.bytes_per_element / BYTES_OF_UNIT[pair.memory_unit]
    return f"{three_digits(size) if size >= 1 else f'{size:.3g}'} {pair.memory_unit}"


_DEGREES = ("dp", "tp", "sp", "pp", "ep")


def strategy_words(strategy: Strategy) -> str:
    """`dp8 tp4 sp2 sharded recompute`; degrees of pp and ep above 1 only."""
    words = [
        f"{name}{getattr(strategy, name)}" for name in _DEGREES if name in _DEGREES[:3] or _above_1(strategy, name)
    ]
    words += ["sharded"] * strategy.weight_sharded + ["recompute"] * strategy.activation_recompute
    return " ".join(words)


def _above_1(strategy: Strategy, name: str) -> bool:
    return bool(getattr(strategy, name) > 1)


def value_words(value: int | bool) -> str:
    """The value of an axis: a number, yes or no."""
    return str(value) if not isinstance(value, bool) else "yes" if value else "no"
