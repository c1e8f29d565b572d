"""The verdict of a comparison in words: by how much the step differs, and which parts explain the difference."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.answers.comparison.compare import Comparison
from forerun.answers.comparison.matching import Pair
from forerun.answers.comparison.ran_step import COPIES, HELD, HOST, PARTS, WAITING, Line
from forerun.answers.comparison.ranks import PartDifference, RankDifference
from forerun.common.units import GIGA, TERA

LEAST = 0.01
"""share of the predicted step from which on a part is named"""
_MOST_PARTS = 5
_ALIKE = 0.03
"""share by which two rates may differ and still count as equal"""
_MORE_LATE = 0.1
"""share of the time of collectives by which more of it is launched late before the verdict says so"""
_BROKEN = 0.1
"""share of the host's lost time from which on graph breaks are named"""


def verdict(found: Comparison) -> str:
    """Returns the verdict on the slowest rank in one sentence; the parts with the most time come first."""
    whole = found.predicted_s
    ranked = sorted(found.parts, key=lambda part: -abs(part.lost_s))
    parts = [part for part in ranked if abs(part.lost_s) >= LEAST * whole][:_MOST_PARTS]
    if not parts and abs(found.slowdown) >= LEAST:
        parts = ranked[:2]
    if abs(found.slowdown) < LEAST:
        head = f"as fast as predicted, within {max(0.001, abs(found.slowdown)):.1%}"
    else:
        head = f"{abs(found.slowdown):.1%} {'slower' if found.slowdown > 0 else 'faster'} than predicted"
    if len(found.ranks) > 1:
        head += f", as {name_of(found.rank, found)} shows, which waits least"
    if not parts:
        return head
    return f"{head}: " + "; ".join(f"{part.lost_s / whole:+.1%} {_words(found, part)}" for part in parts)


def name_of(rank: RankDifference, found: Comparison) -> str:
    """Returns the name of a rank, with its stage where the prediction has several."""
    name = f"rank {rank.rank}"
    several = len(found.simulation.program.rank_classes) > 1 and rank.stage != name
    return f"{name} ({rank.stage})" if several else name


def _words(found: Comparison, part: PartDifference) -> str:
    pairs = [pair for pair in found.pairs if pair.part == part.part]
    if part.part == HOST:
        where = max(found.measured.idle_before.items(), key=lambda item: item[1], default=("", 0.0))[0]
        most = f", most before {_place(where)}" if where else ""
        return (
            f"host: the GPU runs nothing for {_time(part.measured_s)} where {_time(part.predicted_s)} were"
            f" expected{most}{_after_breaks(found, part)}"
        )
    if part.part in (HELD, WAITING, COPIES) or not pairs:
        return f"{part.label}: {_time(part.measured_s)} where {_time(part.predicted_s)} were expected"
    if part.part in PARTS:
        return _kernels(part, pairs)
    return _collectives(found, part, pairs)


def _after_breaks(found: Comparison, part: PartDifference) -> str:
    """Returns a sentence on the host's time after graph breaks, and on the place of most of them, if this time is a
    large share.
    """
    idle_s = sum(one.idle_s for one in found.graph_breaks)
    if idle_s < _BROKEN * max(part.lost_s, 0.0) or idle_s <= 0:
        return ""
    first = found.graph_breaks[0]
    where = f" of {first.module.rpartition('.')[2]}" if first.module else ""
    more = f" and {len(found.graph_breaks) - 1} more places" if len(found.graph_breaks) > 1 else ""
    return f", {_time(idle_s)} of it after graph breaks in {first.function} ({first.place}){where}{more}"


def _kernels(part: PartDifference, pairs: Sequence[Pair]) -> str:
    if not part.predicted_busy_s:
        return f"{part.label} that the prediction lacks, most of them {pairs[0].kernel[:60]}"
    if not part.measured_busy_s:
        return f"{part.label} that the profile lacks"
    ratio = part.measured_busy_s / part.predicted_busy_s
    counts = [sum(pair.counts[side] for pair in pairs) for side in (0, 1)]
    most = max(pairs, key=lambda pair: abs(pair.lost_s))
    text = f"{part.label}, which take {abs(ratio - 1):.1%} {'longer' if ratio > 1 else 'less'}"
    if part.part == "product" and (rates := _rates(pairs, "flops")) is not None:
        text += f" ({rates[0] / TERA:,.0f} TFLOP/s where {rates[1] / TERA:,.0f} were expected)"
    if counts[0] != counts[1]:
        text += f", {counts[0]:,} kernels where {counts[1]:,} were expected"
    return f"{text}, most in {most.name[:60]}{_of(most)}"


def _collectives(found: Comparison, part: PartDifference, pairs: Sequence[Pair]) -> str:
    nodes = _nodes(found, [line for pair in pairs for line in pair.predicted])
    where = f" on {nodes} nodes" if nodes > 1 else ""
    rates = _rates(pairs, "moved_bytes")
    if rates is not None and abs(rates[0] / rates[1] - 1) > _ALIKE:
        return f"{part.label} at {rates[0] / GIGA:,.1f} GB/s where {rates[1] / GIGA:,.1f} were expected{where}"
    if not part.predicted_busy_s:
        return f"{part.label} that the prediction lacks"
    if not part.measured_busy_s:
        return f"{part.label} that the profile lacks"
    ratio = part.measured_busy_s / part.predicted_busy_s
    if abs(ratio - 1) > _ALIKE:
        return f"{part.label}, which take {abs(ratio - 1):.1%} {'longer' if ratio > 1 else 'less'}{where}"
    late = [_late_share([line for pair in pairs for line in getattr(pair, side)]) for side in ("measured", "predicted")]
    why = ", because the host launches them late" if part.lost_s > 0 and late[0] > late[1] + _MORE_LATE else ""
    exposed = f"of which {_time(part.measured_s)} are exposed where {_time(part.predicted_s)} were expected"
    return f"{part.label}, {exposed}{why}"


def _late_share(lines: Sequence[Line]) -> float:
    """Returns the share of the time of work that starts as soon as the host launches it."""
    time_s = sum(line.time_s for line in lines)
    return sum(line.late_s for line in lines) / time_s if time_s > 0 else 0.0


def _rates(pairs: Sequence[Pair], amount: str) -> tuple[float, float] | None:
    """Returns the measured and the predicted amount per second, over the pairs whose amount is known on both sides."""
    both = [pair for pair in pairs if pair.rate(pair.measured, amount) and pair.rate(pair.predicted, amount)]
    measured, predicted = (
        _rate([line for pair in both for line in getattr(pair, side)], amount) for side in ("measured", "predicted")
    )
    return (measured, predicted) if measured and predicted else None


def _rate(lines: Sequence[Line], amount: str) -> float:
    time_s = sum(line.time_s - line.held_s for line in lines)
    return sum(float(getattr(line, amount)) for line in lines) / time_s if time_s > 0 else 0.0


def _nodes(found: Comparison, lines: Sequence[Line]) -> int:
    """Returns the most nodes that a group of these collectives spans."""
    program = found.simulation.program
    rows = {row for line in lines for row in line.ops if program.ops.group[row] >= 0}
    return max((program.groups[program.ops.group[row]].nodes for row in rows), default=0)


def _of(pair: Pair) -> str:
    modules = [module for module in pair.modules if module]
    return f" of {modules[0]}" if modules else ""


def _place(module: str) -> str:
    return module if module == "the end of the step" else f"kernels of {module}"


def _time(time_s: float) -> str:
    if 0 < time_s < 1e-4:
        return f"{time_s * 1e6:,.3g} us"
    return f"{time_s * 1e3:,.3g} ms" if time_s < 1 else f"{time_s:,.3g} s"
