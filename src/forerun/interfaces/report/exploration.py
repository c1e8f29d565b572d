"""Explorations of design spaces as text and as plain data, with sentences that explain the results.

Every figure in a sentence comes from one of the two compared points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from forerun.astrasim.dse.limits import BYTES_OF_UNIT
from forerun.astrasim.dse.reasons import COMPUTE, HELD, IDLE, MADE, Change, Reason, reasons
from forerun.common.units import GIB
from forerun.interfaces.report.console import make_table, print_title
from forerun.interfaces.report.figures import percent, seconds, three_digits

if TYPE_CHECKING:
    from forerun.astrasim.dse.result import Explored, PairResult, Row, TrendRow
    from forerun.astrasim.dse.workload import Strategy

_MOST_ERRORS = 3


def print_exploration(out: Console, explored: Explored, top: int) -> None:
    """Prints the best points with and without a limit of memory, Pareto front and trends of each workload on each
    system."""
    for pair in explored.pairs:
        _print_pair(out, pair, top)
    speed = explored.points_per_s
    counts = f"{len(explored.rows):,} points: {explored.computed:,} simulated, {explored.known:,} known from before"
    out.print(counts + (f"; {explored.seconds:.2f} s, {_speed(speed)} points/s" if speed else ""))


def _print_pair(out: Console, pair: PairResult, top: int) -> None:
    print_title(out, f"{pair.workload} on {pair.system}: {pair.npus:,} NPUs, {len(pair.rows):,} points")
    for row in pair.failed[:_MOST_ERRORS]:
        out.print(f"  failed: {strategy_words(row.point.strategy)}: {row.error}", soft_wrap=True)
    if len(pair.failed) > _MOST_ERRORS:
        out.print(f"  and {len(pair.failed) - _MOST_ERRORS:,} more failed")
    if not pair.ranked:
        out.print("  no point could be simulated")
        out.print()
        return
    out.print()
    _print_points(out, "Fastest, memory unlimited", pair.ranked[:top], pair.memory_unit)
    if pair.memory_limit is not None:
        within = pair.ranked_within_limit
        title = f"Fastest within {pair.memory_limit} ({len(within):,} of {len(pair.ranked):,} points fit)"
        if within:
            _print_points(out, title, within[:top], pair.memory_unit)
        else:
            least = min(row.peak_memory_gib or 0.0 for row in pair.ranked)
            print_title(out, f"{title}: the smallest needs {_size(least, pair.memory_unit)} {pair.memory_unit}")
            out.print()
    _print_points(out, "Pareto front, time against peak memory", pair.pareto, pair.memory_unit)
    if pair.trends:
        _print_trends(out, pair.trends, pair.memory_unit)
        _print_reasons(out, pair)


def _print_points(out: Console, title: str, rows: Sequence[Row], unit: str) -> None:
    cells = []
    for rank, row in enumerate(rows, 1):
        figures = row.figures
        assert figures
        exposed = figures.exposed_communication_ns / figures.time_ns if figures.time_ns else 0.0
        cells.append(
            (
                str(rank),
                strategy_words(row.point.strategy),
                seconds(figures.time_ns * 1e-9),
                percent(exposed),
                seconds(figures.comm_time_ns * 1e-9),
                f"{figures.avg_compute_util_pct:.1f}%",
                _size(row.peak_memory_gib or 0.0, unit) + ("!" if row.fits is False else ""),
            )
        )
    headings = ("", "strategy", "time", "exposed", "comm", "compute\nutil.", f"peak\n{unit}")
    print_title(out, title)
    out.print(make_table("rlrrrrr", headings, cells, whole="r"))
    if any(row.fits is False for row in rows):
        out.print("! beyond the memory limit")
    out.print()


def _print_trends(out: Console, trends: Sequence[TrendRow], unit: str) -> None:
    cells, before = [], ""
    for row in trends:
        cells.append(
            (
                row.axis.replace("_", " ") if row.axis != before else "",
                value_words(row.value),
                f"{row.points:,}",
                seconds(row.best_ns * 1e-9),
                seconds(row.median_ns * 1e-9),
                _size(row.least_memory_gib, unit),
            )
        )
        before = row.axis
    print_title(out, "Trend of each axis")
    headings = ("axis", "value", "points", "best time", "median", f"least {unit}")
    out.print(make_table("lrrrrr", headings, cells, whole="r"))
    out.print()


def _print_reasons(out: Console, pair: PairResult) -> None:
    print_title(out, "Why")
    for reason in reasons(pair):
        out.print(f"- {reason_words(reason, pair)}", soft_wrap=True, highlight=False)
    out.print()


def _speed(points_per_s: float) -> str:
    return f"{points_per_s:,.0f}" if points_per_s >= 10 else f"{points_per_s:.2g}"


def _size(gib: float, unit: str) -> str:
    size = gib * GIB / BYTES_OF_UNIT[unit]
    return f"{size:.1f}" if size >= 10 else f"{size:.3g}"


def exploration_record(explored: Explored, top: int) -> dict[str, Any]:
    """Returns the same figures as one JSON object."""
    return {
        "points": len(explored.rows),
        "simulated": explored.computed,
        "known": explored.known,
        "failed": sum(len(pair.failed) for pair in explored.pairs),
        "seconds": round(explored.seconds, 3),
        "points_per_s": None if explored.points_per_s is None else round(explored.points_per_s, 1),
        "pairs": [_pair_record(pair, top) for pair in explored.pairs],
    }


def _pair_record(pair: PairResult, top: int) -> dict[str, Any]:
    return {
        "workload": pair.workload,
        "system": pair.system,
        "npus": pair.npus,
        "memory_limit": str(pair.memory_limit) if pair.memory_limit else None,
        "memory_limit_gib": pair.memory_limit_gib,
        "best": [row.flat() for row in pair.ranked[:top]],
        "best_within_limit": [row.flat() for row in pair.ranked_within_limit[:top]],
        "pareto": [row.flat() for row in pair.pareto],
        "trends": [asdict(row) for row in pair.trends],
        "reasons": [reason_record(reason, pair) for reason in reasons(pair)],
        "failed": [row.flat() for row in pair.failed],
    }


_MOST_NAMED = 3
_LEAST_SHARE = 0.05
"""changes below this share of their sum are added up"""
_OF_MEMORY = {HELD: "weights and inputs, which are there from the start,", MADE: "activations and gradients"}
_SAME = 0.0005
"""numbers of operations with a smaller relative difference count as equal"""


def reason_words(reason: Reason, pair: PairResult) -> str:
    """Returns a sentence on the change from one point to the other, and a sentence for each kind of term that causes
    it.
    """
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
    """Returns the same as plain data, with the sentence."""
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
    """Returns the main causes of the change: exposed communication as a whole, compute, or memory by kind."""
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
        f"{_amount_of_bytes(one.size_bytes[0], pair)} -> {_amount_of_bytes(one.size_bytes[1], pair)})"
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
    return _seconds(value) if reason.what == "time" else _amount_of_bytes(value, pair)


def _seconds(time_ns: int) -> str:
    return seconds(time_ns * 1e-9)


def _signed(time_ns: int) -> str:
    return f"{'-' if time_ns < 0 else '+'}{_seconds(abs(time_ns))}"


def _amount_of_bytes(n_bytes: int, pair: PairResult) -> str:
    size = n_bytes * pair.bytes_per_element / BYTES_OF_UNIT[pair.memory_unit]
    return f"{three_digits(size) if size >= 1 else f'{size:.3g}'} {pair.memory_unit}"


_DEGREES = ("dp", "tp", "sp", "pp", "ep")


def strategy_words(strategy: Strategy) -> str:
    """Returns words like `dp8 tp4 sp2 sharded recompute`; degrees of pp and ep above 1 only."""
    words = [
        f"{name}{getattr(strategy, name)}" for name in _DEGREES if name in _DEGREES[:3] or getattr(strategy, name) > 1
    ]
    words += ["sharded"] * strategy.weight_sharded + ["recompute"] * strategy.activation_recompute
    return " ".join(words)


def value_words(value: int | bool) -> str:
    """Returns the value of an axis: a number, yes or no."""
    return str(value) if not isinstance(value, bool) else "yes" if value else "no"
