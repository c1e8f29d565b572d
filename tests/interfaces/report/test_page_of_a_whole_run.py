"""The page of a whole run: its parts, its plots by hand, and a row of CSV for each run."""

from __future__ import annotations

from types import SimpleNamespace as Hand

import figures_by_hand as by_hand
import pytest

from forerun.answers.goodput.outcome import Event, Outcome, Spent
from forerun.interfaces.report import document_of_whole_run as whole
from forerun.interfaces.report.page import Figures, Heading, Plot, Table
from forerun.interfaces.report.style import BLUE, GREEN, GREY, ORANGE, VERMILLION
from forerun.interfaces.report.whole_run import run_rows

DAY_S = 86_400.0
FIRST = Hand(
    wall_s=10 * DAY_S,
    events=(
        Event(DAY_S, DAY_S + 90, "failure", "gpu, switch"),
        Event(2 * DAY_S, 2 * DAY_S + 7200, "slow", "steps take 2 times as long"),
        Event(3 * DAY_S, 3 * DAY_S + 60, "failure", "gpu"),
        Event(4 * DAY_S, 4 * DAY_S, "else", "x"),
    ),
)


def study(**changes):
    outcomes = [Hand(goodput=goodput) for goodput in (0.8, 0.8, 0.831, 0.86)]
    return by_hand.study(**{"outcomes": outcomes, **changes})


def headings(document):
    return [part.text for part in document.parts if isinstance(part, Heading)]


def test_the_parts_of_the_page():
    page = whole.whole_run_document(study(), FIRST, "forerun run x", [study(), study()])
    assert headings(page)[:-1] == [
        "Figures over all runs", "Alternatives, by time to train", "Where the time goes",
        "One of the runs, event by event", "Failures", "Checkpoint intervals", "What would change it", "Assumptions",
    ]  # fmt: skip
    figures = page.parts[0]
    assert isinstance(figures, Figures)
    assert figures.entries == (
        ("goodput", "85.3%", "median over all runs"),
        ("wall time", "9.5 days", "95 % of the runs take less than 10.4 days"),
        ("failures", "77", "one every 2.5 h"),
        ("cost", "$1,234,567.80, 12.3 MWh at the GPUs' power limit", "mean"),
    )
    by_title = dict(zip(headings(page), (part for part in page.parts if isinstance(part, Table)), strict=False))
    assert by_title["Figures over all runs"].numeric == {1, 2, 3, 4}
    for table in (part for part in page.parts if isinstance(part, Table)):
        words = {i for i, name in enumerate(table.columns) if name.startswith("class") or not name}
        assert table.numeric == set(range(1, len(table.columns))) - words
        assert all(len(row) == len(table.columns) for row in table.rows)


def test_a_page_without_what_did_not_happen():
    nothing = study(badput={}, failures={}, intervals=[], gains=[], notes=(), dollars=None, energy_mwh=None)
    page = whole.whole_run_document(nothing, Hand(events=()))
    assert headings(page) == ["Figures over all runs", "Configuration"]
    assert len(page.parts[0].entries) == 3
    clock = whole.whole_run_document(study(by_the_clock=True), FIRST).parts[0]
    assert clock.entries[1] == ("tokens", "2.50T", "in 9.5 days")


def test_the_spread_of_goodput():
    """From 80 to 86 % there are thirty bars of 0.2 %: two runs in the first, one in the middle and one in the last."""
    plot = whole._goodputs(study())
    (bars,) = plot.data
    assert (len(bars["x"]), sum(bars["y"]), bars["width"]) == (30, 4, 0.2)
    assert (bars["x"][0], bars["x"][1], bars["x"][-1]) == (80.1, 80.3, 85.9)
    assert {i: count for i, count in enumerate(bars["y"]) if count} == {0: 2, 15: 1, 29: 1}
    assert bars["marker"] == {"color": BLUE}
    assert plot.about == "Goodput of all runs: from 81.0% to 89.0%, median 85.3%"


def test_where_the_time_goes_is_a_waterfall_from_all_time_to_useful_steps():
    """7.1 and 3.04 % are lost, and 89.86 % left; the axis begins 0.15 x 10.14 % below that."""
    plot = whole._waterfall(study())
    (bars,) = plot.data
    assert (bars["x"], bars["base"]) == ([7.1, 3.04, 1.521], [92.9, 89.86, 88.339])
    assert bars["marker"]["color"] == [VERMILLION, VERMILLION, GREEN]
    assert plot.layout["xaxis"]["range"] == pytest.approx([88.339, 100.0])
    assert plot.layout["xaxis"]["title"]["text"] == "share of wall time, % (from 88.3 on)"
    assert plot.about.startswith("What badput leaves: ")
    assert plot.about.endswith("3.04%; useful steps: 89.9%")
    most = whole._waterfall(study(badput={Spent.WASTED: 0.95}))
    assert most.layout["xaxis"]["range"] == [0.0, 100.0]
    assert most.layout["xaxis"]["title"]["text"] == "share of wall time, %"
    assert [isinstance(one, Plot) for one in whole.whole_run_plots(study())] == [True, True]
    assert len(whole.whole_run_plots(study(badput={}))) == 1


def test_the_events_of_one_run_stand_in_lanes():
    plot = whole._time_line(FIRST)
    assert plot.about == "4 events of one run of 10.0 days: 2 gpu, 1 slow, 1 else"
    gpu, slow, other = plot.data
    assert (gpu["x"], gpu["y"]) == ([1.0, 3.0], ["gpu", "gpu"])
    assert gpu["customdata"] == ["gpu, switch, 90.0 s", "gpu, 60.0 s"]
    assert slow["customdata"] == ["steps take 2 times as long, 2.0 h"]
    assert [one["marker"]["color"] for one in (gpu, slow, other)] == [VERMILLION, ORANGE, GREY]
    assert plot.layout["xaxis"]["range"] == [0, 10.0]
    assert plot.layout["yaxis"]["categoryarray"] == ["else", "slow", "gpu"]
    assert plot.height_px == 3 * 34 + 140


def test_pictures_are_those_of_what_happened(monkeypatch):
    monkeypatch.setattr(whole, "picture", lambda title, plot, note: (title, note))
    assert list(whole.whole_run_pictures(study(), FIRST)) == ["goodput", "lost-time", "time-line"]
    assert list(whole.whole_run_pictures(study(badput={}), Hand(events=()))) == ["goodput"]


def test_a_row_for_each_run():
    spent = {Spent.SAVE: 100.0, Spent.SLOW: 50.0}
    one = Outcome(1000.0, 850.0, spent, 85, 8.5e6, True, {"gpu": 2, "nic": 1}, 123.0, 45.0)
    rows = run_rows([one, one])
    assert [row["run"] for row in rows] == [0, 1]
    times = {f"{what.value}_s": 0.0 for what in Spent} | {"save_s": 100.0, "slow_steps_s": 50.0}
    assert rows[0] == {
        "run": 0, "wall_s": 1000.0, "goodput": 0.85, "ettr": 0.9, "steps": 85, "tokens": 8.5e6, "finished": True,
        "failures": 3, "lost_tokens": 123.0, "longest_stop_s": 45.0, "productive_s": 850.0, **times,
    }  # fmt: skip
