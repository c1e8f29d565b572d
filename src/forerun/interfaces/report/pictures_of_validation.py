"""Pictures of a validation run: predicted against measured, and errors by device, class and size. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.common.errors import ForerunError
from forerun.evidence.validation import metrics
from forerun.interfaces.report.drawing import drawing_is_possible, legend_below, logarithmic_ticks, panels, png
from forerun.interfaces.report.pictures import write_pictures
from forerun.interfaces.report.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION

if TYPE_CHECKING:
    from forerun.evidence.validation.run import RowResult

_MARKS = dict(
    zip(
        metrics.CLASSES,
        (("o", BLUE), ("X", VERMILLION), ("^", GREEN), ("s", PURPLE), ("D", ORANGE), ("v", SKY)),
        strict=True,
    )
)
"""class -> marker and colour; the markers tell them apart in grey"""
_TIERS = {"A": "tier A: all inputs stated", "B": "tier B: some inputs assumed"}
_NEAR = 0.1
"""errors between the thin lines"""
_FAR = 0.6
"""larger errors are drawn at the edge"""
_MANY_DECADES = 3
"""decades of a scale from which only powers of ten have ticks"""
_ROW_INCHES = 0.5
_SPREAD = 0.15
"""half of the height over which the points of a group spread, as a share of a row"""
_WIDTH_INCHES = 8.0


def write_validation_pictures(folder: Path, results: Sequence[RowResult]) -> list[Path]:
    """Writes every picture that the rows give as a PNG file into `folder`, which is made; each appears whole.

    Raises ForerunError if matplotlib is not installed or a file can't be written.
    """
    if not drawing_is_possible():
        raise ForerunError("--plots needs matplotlib: pip install 'forerun[plot]'")
    return write_pictures(folder, validation_pictures(results))


def validation_pictures(results: Sequence[RowResult]) -> dict[str, bytes]:
    """Returns PNG files by name. A picture without any point is left out."""
    timed = [each for each in results if _error(each) is not None]
    shown = [each for each in timed if each.row.tier in _TIERS]
    out = {}
    if shown:
        out["step_time"] = _predicted_against_measured(shown)
        for name, title, key in (
            ("by_device", "device", lambda each: each.row.gpu),
            ("by_class", "parallelism", lambda each: metrics.parallelism_class(each.row)),
        ):
            out[f"residuals_{name}"] = _errors(shown, title, key)
        out["residuals_by_gpus"] = _errors(
            shown, "number of GPUs", lambda each: metrics.gpu_range(each.row), metrics.GPU_RANGES
        )
    memory = {
        kind: [each for each in results if each.row.peak_mem_kind == kind and _memory(each)]
        for kind in ("allocated", "reserved")
    }
    if any(memory.values()):
        out["memory"] = _memory_picture(memory)
    return out


def _error(result: RowResult) -> float | None:
    """Returns the relative error of the step time."""
    time = metrics.measured_time_s(result.row)
    return None if time is None or result.prediction is None else result.prediction.step_time_s / time - 1


def _memory(result: RowResult) -> tuple[float, float] | None:
    """Returns the (measured, predicted) peak in GiB."""
    measured = metrics.measured_memory_gib(result.row)
    if measured is None or result.prediction is None:
        return None
    return measured, getattr(result.prediction, metrics.COMPARED_MEMORY[result.row.peak_mem_kind])


def _predicted_against_measured(results: Sequence[RowResult]) -> bytes:
    figure, axes = panels(_WIDTH_INCHES, 4.9, len(_TIERS))
    times = [(metrics.measured_time_s(each.row) or 1.0, _predicted_s(each)) for each in results]
    for panel, (tier, title) in zip(axes, _TIERS.items(), strict=True):
        _diagonal(panel, times)
        for name, (marker, colour) in _MARKS.items():
            points = [
                point
                for each, point in zip(results, times, strict=True)
                if each.row.tier == tier and metrics.parallelism_class(each.row) == name
            ]
            _points(panel, points, marker, colour, name)
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_xlabel("measured step time, s")
    axes[0].set_ylabel("predicted step time, s")
    legend_below(figure, 3)
    return png(figure)


def _predicted_s(result: RowResult) -> float:
    assert result.prediction is not None
    return result.prediction.step_time_s


def _points(axes: Any, points: Sequence[tuple[float, float]], marker: str, colour: str, label: str) -> None:
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        marker,
        label=label,
        color=colour,
        markersize=5,
        markeredgecolor="white",
        markeredgewidth=0.4,
        alpha=0.85,
    )


def _diagonal(axes: Any, points: Sequence[tuple[float, float]]) -> None:
    """Makes both scales logarithmic and equal, and draws the lines of equality and of small errors."""
    low, high = 0.7 * min(min(point) for point in points), 1.4 * max(max(point) for point in points)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_aspect("equal")
    decades = math.log10(high / low)
    for axis in (axes.xaxis, axes.yaxis):
        logarithmic_ticks(axis, (1.0, 2.0, 5.0) if decades < _MANY_DECADES else (1.0,))
    axes.plot([low, high], [low, high], color=BLACK, linewidth=0.8)
    for factor in (1 - _NEAR, 1 + _NEAR):
        axes.plot([low, high], [low * factor, high * factor], color=GREY, linewidth=0.6, linestyle="--")


def _errors(
    results: Sequence[RowResult], what: str, key: Callable[[RowResult], str], order: Sequence[str] = ()
) -> bytes:
    """Returns errors of the step time by group: a box of the middle half, whiskers to 80 %, and every row.

    Groups stand in `order`, or the largest first.
    """
    groups: dict[str, list[RowResult]] = {}
    for each in results:
        groups.setdefault(key(each), []).append(each)
    largest = sorted(groups, key=lambda name: (-sum(each.row.tier == "A" for each in groups[name]), name))
    names = [name for name in order or largest if name in groups]
    figure, (axes,) = panels(_WIDTH_INCHES, 1.3 + _ROW_INCHES * len(names))
    for edge in (-_NEAR, _NEAR):
        axes.axvline(100 * edge, color=GREY, linewidth=0.6, linestyle="--")
    axes.axvline(0, color=BLACK, linewidth=0.8)
    for y, name in enumerate(reversed(names)):
        for tier, lift, colour, face in (("B", 0.2, GREY, "white"), ("A", -0.05, BLUE, BLUE)):
            errors = [_error(each) or 0.0 for each in groups[name] if each.row.tier == tier]
            _strip(axes, y + lift, errors, colour, face)
        _box(axes, y - 0.28, [_error(each) or 0.0 for each in groups[name] if each.row.tier == "A"])
    axes.plot([], [], "o", color=BLUE, markersize=4, label="a tier A row")
    axes.plot([], [], "o", color=GREY, markerfacecolor="white", markersize=4, label="a tier B row")
    axes.plot([], [], color=BLACK, linewidth=4, label="the middle half of tier A, whiskers to 80 %")
    counts = {name: sum(each.row.tier == "A" for each in groups[name]) for name in names}
    axes.set_yticks(
        range(len(names)), [f"{name}, {counts[name]} + {len(groups[name]) - counts[name]}" for name in reversed(names)]
    )
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlim(-105 * _FAR, 105 * _FAR)
    axes.set_xlabel(f"predicted / measured step time - 1, %; beyond {100 * _FAR:.0f} at the edge")
    axes.set_title(f"Errors by {what} (rows of tiers A + B)", loc="left", fontsize=10)
    axes.grid(False, axis="y")
    legend_below(figure, 3)
    return png(figure)


def _strip(axes: Any, y: float, errors: Sequence[float], colour: str, face: str) -> None:
    """Draws a point for each error around the height `y`; neighbours stand at different heights."""
    ordered = sorted(errors)
    heights = [y + _SPREAD * ((3 * i) % 7 - 3) / 3 for i in range(len(ordered))]
    shown = [100 * max(-_FAR, min(_FAR, error)) for error in ordered]
    axes.plot(
        shown, heights, "o", color=colour, markerfacecolor=face, markersize=2.6, markeredgewidth=0.6, alpha=0.7,
        clip_on=False,
    )  # fmt: skip


def _box(axes: Any, y: float, errors: Sequence[float]) -> None:
    """Draws the median, the middle half and the middle 80 % of `errors` as bars of three widths."""
    if len(errors) < metrics.MIN_GROUP:
        return
    at = [100 * max(-_FAR, min(_FAR, metrics.quantile(errors, share))) for share in (0.1, 0.25, 0.5, 0.75, 0.9)]
    axes.plot([at[0], at[4]], [y, y], color=BLACK, linewidth=1)
    axes.plot([at[1], at[3]], [y, y], color=BLACK, linewidth=4, solid_capstyle="butt")
    axes.plot([at[2]], [y], "|", color="white", markersize=6, markeredgewidth=1.5)


def _memory_picture(results: Mapping[str, Sequence[RowResult]]) -> bytes:
    figure, axes = panels(_WIDTH_INCHES, 4.7, len(results))
    points = {kind: [_memory(each) or (1.0, 1.0) for each in rows] for kind, rows in results.items()}
    every = [point for of_kind in points.values() for point in of_kind]
    for panel, (kind, rows) in zip(axes, results.items(), strict=True):
        _diagonal(panel, every)
        for tier, marker, colour in (("A", "o", BLUE), ("B", "^", VERMILLION)):
            of_tier = [point for each, point in zip(rows, points[kind], strict=True) if each.row.tier == tier]
            _points(panel, of_tier, marker, colour, _TIERS[tier])
        panel.set_title(f"{kind} peak memory", loc="left", fontsize=10)
        panel.set_xlabel("measured, GiB")
    axes[0].set_ylabel("predicted, GiB")
    legend_below(figure, 2)
    return png(figure)
