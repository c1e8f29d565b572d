"""Explorations of design spaces as text and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from forerun.astrasim.dse.limits import BYTES_OF_UNIT
from forerun.astrasim.dse.reasons import reasons
from forerun.astrasim.dse.result import Explored, PairResult, Row, TrendRow
from forerun.common.units import GIB
from forerun.interfaces.report.console import make_table, print_title
from forerun.interfaces.report.reasons import reason_record, reason_words, strategy_words, value_words
from forerun.interfaces.report.wording import percent, seconds

_MOST_ERRORS = 3


def print_exploration(out: Console, explored: Explored, top: int) -> None:
    """Best points with and without a limit of memory, Pareto front and trends of each workload on each system."""
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
    """The same figures as one JSON object."""
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
