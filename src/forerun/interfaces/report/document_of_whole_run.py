"""The contents of the page of a whole run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.common.units import DAY_S
from forerun.interfaces.report.figures import percent
from forerun.interfaces.report.page import Document, Figures, Heading, Listing, Part, Plot, Table
from forerun.interfaces.report.page_sections import reproduce_section
from forerun.interfaces.report.pictures import picture
from forerun.interfaces.report.plots import axis, layout, rounded
from forerun.interfaces.report.style import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILLION
from forerun.interfaces.report.whole_run import (
    BADPUT_COLUMNS,
    FAILURE_COLUMNS,
    GAIN_COLUMNS,
    INTERVAL_COLUMNS,
    QUANTILE_COLUMNS,
    RIVAL_COLUMNS,
    badput_rows,
    conditions,
    cost_words,
    duration,
    failure_rows,
    gain_rows,
    heading,
    interval_rows,
    quantile_rows,
    rival_rows,
    tokens_words,
)

if TYPE_CHECKING:
    from forerun.answers.goodput.outcome import Event, Outcome
    from forerun.answers.goodput.study import RunStudy

_COLOURS = {"failure": VERMILLION, "maintenance": PURPLE, "slow": ORANGE, "resize": GREEN}
_BINS = 30
_LANE_PX, _AXIS_PX = 34, 140
_BELOW = 0.15
"""extent of the axis of lost time below the useful steps, as a share of the lost time"""


def whole_run_document(study: RunStudy, first: Outcome, command: str = "", ranked: Sequence[RunStudy] = ()) -> Document:
    """Returns the page of a study; `first` is one run with its events, and `ranked` are alternatives, best first."""
    parts: list[Part] = [
        _figures(study),
        Heading("Figures over all runs"),
        _table(QUANTILE_COLUMNS, quantile_rows(study)),
        _goodputs(study),
    ]
    if ranked:
        parts += [Heading("Alternatives, by time to train"), _table(RIVAL_COLUMNS, rival_rows(ranked))]
    if study.badput:
        parts += [Heading("Where the time goes"), _waterfall(study), _table(BADPUT_COLUMNS, badput_rows(study))]
    if first.events:
        parts += [Heading("One of the runs, event by event"), _time_line(first)]
    if study.failures:
        parts += [Heading("Failures"), _table(FAILURE_COLUMNS, failure_rows(study))]
    if study.intervals:
        parts += [Heading("Checkpoint intervals"), _table(INTERVAL_COLUMNS, interval_rows(study))]
    if study.gains:
        parts += [Heading("What would change it"), _table(GAIN_COLUMNS, gain_rows(study))]
    if study.request.notes:
        parts += [Heading("Assumptions"), Listing(study.request.notes)]
    parts += reproduce_section(command, {}, "", ())
    return Document(heading(study), conditions(study), tuple(parts))


def whole_run_plots(study: RunStudy) -> list[Plot]:
    """Returns the spread of goodput and, where time is lost, its classes."""
    return [_goodputs(study), *([_waterfall(study)] if study.badput else [])]


def whole_run_pictures(study: RunStudy, first: Outcome) -> dict[str, bytes]:
    """Returns the plots of the page as PNG files by name; `first` is one run with its events. Needs matplotlib."""
    plots = {"goodput": ("Goodput of all runs", _goodputs(study))}
    if study.badput:
        plots["lost-time"] = ("Where the time goes", _waterfall(study))
    if first.events:
        plots["time-line"] = ("One of the runs, event by event", _time_line(first))
    return {name: picture(title, plot, note=heading(study)) for name, (title, plot) in plots.items()}


def _table(columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    numeric = {i for i in range(1, len(columns)) if not columns[i].startswith("class") and columns[i]}
    return Table(tuple(columns), tuple(rows), numeric=frozenset(numeric))


def _figures(study: RunStudy) -> Figures:
    entries = [("goodput", percent(study.goodput.p50), "median over all runs")]
    if study.request.by_the_clock:
        entries.append(("tokens", tokens_words(study.tokens.p50), f"in {duration(study.wall_s.p50)}"))
    else:
        remark = f"95 % of the runs take less than {duration(study.wall_s.p95)}"
        entries.append(("wall time", duration(study.wall_s.p50), remark))
    entries += [
        ("failures", f"{study.interruptions.p50:,.0f}", f"one every {duration(study.mttf_s)}"),
    ]
    if words := cost_words(study):
        entries.append(("cost", words, "mean"))
    return Figures(tuple(entries))


def _goodputs(study: RunStudy) -> Plot:
    counts, edges = np.histogram([100.0 * one.goodput for one in study.outcomes], _BINS)
    middles = rounded(((edges[:-1] + edges[1:]) / 2).tolist())
    bars = {"type": "bar", "x": middles, "y": counts.tolist(), "width": float(f"{edges[1] - edges[0]:.6g}")}
    about_each = {"name": "runs", "hovertemplate": "%{y} runs near %{x:.4~g} %<extra></extra>"}
    data = [bars | about_each | {"marker": {"color": BLUE}}]
    goodput = study.goodput
    about = f"Goodput of all runs: from {percent(goodput.p5)} to {percent(goodput.p95)}, median {percent(goodput.p50)}"
    return Plot(data, layout(axis("goodput, %"), axis("runs, number"), showlegend=False), about)


def _waterfall(study: RunStudy) -> Plot:
    """Shows the share of each class of badput from 100 % of the time down to the useful steps."""
    losses = [
        (name, share, 100.0 * value)
        for (name, share, _), value in zip(badput_rows(study), study.badput.values(), strict=True)
    ]
    below = 100.0 - np.cumsum([value for *_, value in losses])
    left = float(below[-1])
    first = max(0.0, left - _BELOW * (100.0 - left))
    rows = [*losses, ("useful steps", percent(left / 100.0), left - first)]
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": [f"{name}<br>{share}" for name, share, _ in rows],
        "x": rounded([value for *_, value in rows]),
        "base": rounded([*below.tolist(), first]),
        "marker": {"color": [VERMILLION] * len(losses) + [GREEN]},
        "hovertemplate": "%{y}<extra></extra>",
    }
    said = "; ".join(f"{name}: {share}" for name, share, _ in rows)
    title = f"share of wall time, % (from {first:.3g} on)" if first else "share of wall time, %"
    x = axis(title, range=[first, 100.0], fixedrange=True)
    y = axis("", autorange="reversed", fixedrange=True)
    height_px = _AXIS_PX + _LANE_PX * len(rows)
    return Plot([bars], layout(x, y, showlegend=False, bargap=0.3), f"What badput leaves: {said}", height_px)


def _time_line(first: Outcome) -> Plot:
    lanes = list(dict.fromkeys(_lane_of(event) for event in first.events))
    data = [_lane(lane, [event for event in first.events if _lane_of(event) == lane]) for lane in lanes]
    about = f"{len(first.events):,} events of one run of {duration(first.wall_s)}: " + ", ".join(
        f"{len(each['x']):,} {lane}" for lane, each in zip(lanes, data, strict=True)
    )
    y = axis("", type="category", categoryarray=lanes[::-1])
    x = axis("days since the start", range=[0, first.wall_s / DAY_S])
    return Plot(data, layout(x, y), about, _LANE_PX * len(lanes) + _AXIS_PX)


def _lane_of(event: Event) -> str:
    """Returns the cause of a failure, or the kind of any other event."""
    return event.detail.split(", ")[0] if event.what == "failure" else event.what


def _lane(name: str, events: Sequence[Event]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "showlegend": False,
        "x": rounded([event.start_s / DAY_S for event in events]),
        "y": [name] * len(events),
        "marker": {
            "symbol": "line-ns-open",
            "size": 22,
            "color": _COLOURS.get(events[0].what, GREY),
            "line": {"width": 2},
        },
        "customdata": [f"{event.detail}, {duration(event.end_s - event.start_s)}" for event in events],
        "hovertemplate": "day %{x:.2f}: %{customdata}<extra></extra>",
    }
