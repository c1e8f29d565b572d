"""Data for the plots of a range of searches: a line over GPUs for each batch, or one over batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forerun.answers.search.sweep import Sweep, SweepPoint
from forerun.interfaces.report.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, VERMILLION
from forerun.interfaces.report.wording import plan_words, rate, seconds


@dataclass(frozen=True, slots=True)
class LineLook:
    """How a line is told from others, also in grey, in plotly's names."""

    colour: str
    symbol: str
    dash: str


LINE_LOOKS = (
    LineLook(BLUE, "circle", "solid"),
    LineLook(VERMILLION, "square", "dash"),
    LineLook(GREEN, "triangle-up", "dot"),
    LineLook(ORANGE, "diamond", "dashdot"),
    LineLook(PURPLE, "x", "solid"),
    LineLook(BLACK, "star", "dash"),
)


@dataclass(frozen=True, slots=True)
class Line:
    """Points in the order of x."""

    label: str
    x: list[int]
    points: list[SweepPoint]


@dataclass(frozen=True, slots=True)
class Panel:
    """A figure of points; the title names its unit."""

    title: str
    value: Callable[[SweepPoint], float]


def x_name(sweep: Sweep) -> str:
    """The title of the x axis."""
    return "global batch, sequences" if _has_one_size(sweep) else "GPUs, number"


def lines(sweep: Sweep) -> list[Line]:
    """Points where something fits: a line over GPUs for each batch, or one over batches for one number of GPUs."""
    found = [point for point in sweep.points if point.best is not None]
    if _has_one_size(sweep):
        return [Line(f"{found[0].n_gpus:,} GPUs", [point.global_batch for point in found], found)] if found else []
    by_batch: dict[int, list[SweepPoint]] = {}
    for point in found:
        by_batch.setdefault(point.global_batch, []).append(point)
    return [
        Line(f"batch {batch:,}", [point.n_gpus for point in some], some) for batch, some in sorted(by_batch.items())
    ]


def figures_of(sweep: Sweep) -> list[Panel]:
    """The two figures to draw: tokens/s, and dollars per token if known, else tokens/s of a GPU."""
    best = [point.best for point in sweep.points if point.best is not None]
    if all(each.dollars_per_billion_tokens is not None for each in best):
        each = Panel("price of tokens, dollars per billion", _dollars)
    else:
        each = Panel("throughput of a GPU, tokens/s", lambda point: (point.tokens_per_s or 0.0) / point.n_gpus)
    return [Panel("throughput, tokens/s", lambda point: point.tokens_per_s or 0.0), each]


def hover(point: SweepPoint) -> str:
    """A point in one line."""
    question = f"{point.n_gpus:,} GPUs, batch {point.global_batch:,}"
    if point.best is None:
        return f"{question}: {point.reason}"
    figures = f"{seconds(point.best.step_time_s)}, {rate(point.tokens_per_s)} tokens/s"
    return f"{question}: {figures}, {plan_words(point.best.own_plan())}"


def _has_one_size(sweep: Sweep) -> bool:
    return len({point.n_gpus for point in sweep.points}) == 1


def _dollars(point: SweepPoint) -> float:
    return 0.0 if point.best is None else point.best.dollars_per_billion_tokens or 0.0
