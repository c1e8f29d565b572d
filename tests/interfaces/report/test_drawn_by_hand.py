"""What pictures hold where they are drawn: boxes, lines, words, scales and ticks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace as Hand

import figures_by_hand as by_hand
import numpy as np
import pytest
from matplotlib.colors import to_hex

from forerun.evidence.validation import metrics
from forerun.interfaces.report import pareto_plot, pictures, pictures_of_validation
from forerun.interfaces.report.drawing import panels
from forerun.interfaces.report.page import Plot
from forerun.interfaces.report.plots import axis, layout
from forerun.interfaces.report.style import BLACK

RED, SKY = "#ff0000", "#00ffff"


def drawn(*data, x=None, y=None, **more):
    _, (axes,) = panels(6, 4)
    pictures._draw(axes, Plot(list(data), layout(x or axis("x"), y or axis("y"), **more), "about"))
    return axes


def boxes(axes):
    """The corners (left, bottom, right, top) of each box, with its colour."""
    found = []
    for group in axes.collections:
        colour = to_hex(group.get_facecolor()[0])
        for path in group.get_paths():
            found.append((*np.round(path.vertices.min(axis=0), 6), *np.round(path.vertices.max(axis=0), 6), colour))
    return found


def names(artist):
    """The name in the legend; matplotlib gives those without one a name that begins with an underscore."""
    return [text for text in [artist.get_label()] if text and not text.startswith("_")]


def bar(y, **more):
    return {"type": "bar", "x": ["a", "b"], "y": y, "name": "bars", "marker": {"color": RED}} | more


def test_bars_stand_where_the_page_has_them():
    assert boxes(drawn(bar([1.0, 2.0]))) == [(-0.4, 0.0, 0.4, 1.0, RED), (0.6, 0.0, 1.4, 2.0, RED)]
    assert boxes(drawn(bar([1.0, 2.0]), bargap=0.5))[0][:3] == (-0.25, 0.0, 0.25)
    assert boxes(drawn(bar([1.0, 2.0], width=1.0)))[0][:3] == (-0.5, 0.0, 0.5)
    stacked = drawn(bar([1.0, 2.0]), bar([3.0, 4.0], marker={"color": SKY}), barmode="stack")
    assert boxes(stacked)[2:] == [(-0.4, 1.0, 0.4, 4.0, SKY), (0.6, 2.0, 1.4, 6.0, SKY)]
    beside = drawn(bar([1.0, 2.0]), bar([3.0, 4.0], marker={"color": SKY}))
    assert [box[1] for box in boxes(beside)] == [0.0] * 4
    lying = {"type": "bar", "orientation": "h", "y": ["a"], "x": [2.0], "base": [3.0], "marker": {"color": RED}}
    assert boxes(drawn(lying)) == [(3.0, -0.4, 5.0, 0.4, RED)]


def test_bars_of_one_look_are_one_collection_with_one_name():
    axes = drawn(bar([1.0, 2.0], marker={"color": [RED, SKY], "pattern": {"shape": ["", "/"]}}))
    assert [names(group) for group in axes.collections] == [["bars"], []]
    assert [group.get_hatch() for group in axes.collections] == ["//", ""]  # hatched ones lie below the others
    assert [group.get_linewidth()[0] for group in axes.collections] == [0.4, 0.4]
    hidden = drawn(bar([1.0, 2.0], showlegend=False))
    assert [names(group) for group in hidden.collections] == [[]]
    bare = drawn(bar([1.0, 2.0], marker={"color": RED, "line": {"width": 0}}))
    assert (bare.collections[0].get_linewidth()[0], to_hex(bare.collections[0].get_edgecolor()[0])) == (0.3, RED)
    hatched = drawn(bar([1.0, 2.0], marker={"color": RED, "line": {"width": 0}, "pattern": {"shape": "x"}}))
    assert hatched.collections[0].get_linewidth()[0] == 0.0
    assert to_hex(hatched.collections[0].get_edgecolor()[0]) == "#ffffff"


def test_words_stand_in_the_middle_of_their_bars():
    axes = drawn(bar([1.0, 2.0], text=["50%", ""], marker={"color": [RED, "#ffff00"]}))
    first, second = axes.texts
    assert (first.get_text(), first.get_position(), first.get_color()) == ("50%", (0.0, 0.5), "white")
    assert (second.get_text(), second.get_position(), second.get_color()) == ("", (1.0, 1.0), BLACK)
    assert (first.get_bbox_patch() is not None, second.get_bbox_patch()) == (True, None)
    chosen = drawn(bar([1.0, 2.0], text=["a", "b"], insidetextfont={"color": [SKY, RED]}))
    assert [text.get_color() for text in chosen.texts] == [SKY, RED]


@pytest.mark.parametrize(
    ("colour", "words"),
    [("#ffffff", BLACK), ("#000000", "white"), ("#00ff00", "white"), ("#ff0000", "white"), ("#0000ff", "white"),
     ("#ffff00", BLACK), ("#00ffff", BLACK), ("#ff00ff", "white"), ("#999999", "white"), ("#9a9a9a", BLACK)],
)  # fmt: skip
def test_words_on_pale_colours_are_black(colour, words):
    """The luminance is 0.299 of red, 0.587 of green and 0.114 of blue."""
    assert pictures._on(colour) == words


def line(**more):
    return {"type": "scatter", "mode": "lines", "name": "a line", "x": [1.0, 2.0], "y": [3.0, 4.0]} | more


def test_lines_and_markers_have_the_looks_of_the_page():
    axes = drawn(line(line={"color": RED, "dash": "dash", "width": 3, "shape": "hv"}))
    (found,) = axes.lines
    assert (found.get_color(), found.get_linestyle(), found.get_drawstyle()) == (RED, "--", "steps-post")
    assert (found.get_marker(), found.get_linewidth(), found.get_label()) == ("", pytest.approx(2.4), "a line")
    assert (list(found.get_xdata()), list(found.get_ydata())) == ([1.0, 2.0], [3.0, 4.0])
    (marks,) = drawn(line(mode="markers", marker={"color": SKY, "symbol": "x", "size": 10, "opacity": 0.5})).lines
    assert (marks.get_linestyle(), marks.get_marker(), marks.get_markersize()) == ("None", "X", 8.0)
    assert (marks.get_markerfacecolor(), marks.get_markeredgecolor(), marks.get_alpha()) == (SKY, "white", 0.5)
    assert marks.get_markeredgewidth() == 0.4
    (rings,) = drawn(line(mode="markers", marker={"color": SKY, "symbol": "circle-open", "line": {"width": 3}})).lines
    assert (rings.get_markerfacecolor(), rings.get_markeredgecolor(), rings.get_markeredgewidth()) == ("none", SKY, 3)
    (plain,) = drawn(line()).lines
    assert (plain.get_color(), plain.get_clip_on(), plain.get_markersize()) == (BLACK, True, pytest.approx(4.8))
    (free,) = drawn(line(cliponaxis=False)).lines
    assert not free.get_clip_on()


@pytest.mark.parametrize(("side", "shift", "stands"), [("bottom center", -9, "top"), ("top center", 9, "bottom")])
def test_words_at_points_stand_below_or_above_them(side, shift, stands):
    axes = drawn(line(mode="lines+markers+text", text=["<br>a", "b"], textposition=side))
    first, second = axes.texts
    assert (first.get_text(), second.get_text()) == ("a", "b")
    assert (first.xy, first.xyann, first.get_va()) == ((1.0, 3.0), (0, shift), stands)


def test_areas_stand_on_each_other():
    def area(y):
        look = {"fillcolor": RED, "fillpattern": {"shape": "/"}}
        return {"type": "scatter", "stackgroup": "all", "name": "part", "x": [0.0, 1.0], "y": y} | look

    axes = drawn(area([1.0, 2.0]), area([3.0, 4.0]))
    highest = [group.get_paths()[0].vertices[:, 1].max() for group in axes.collections]
    assert highest == [2.0, 6.0]
    assert [group.get_hatch() for group in axes.collections] == ["//", "//"]


def test_areas_stand_on_each_other_where_places_repeat():
    def area(y):
        look = {"fillcolor": RED, "fillpattern": {"shape": ""}}
        return {"type": "scatter", "stackgroup": "all", "name": "part", "x": [0.0, 1.0, 1.0, 2.0], "y": y} | look

    axes = drawn(area([1.0, 5.0, 2.0, 2.0]), area([3.0, 3.0, 3.0, 3.0]))
    lower, upper = (group.get_paths()[0].vertices[:, 1] for group in axes.collections)
    assert (lower.min(), lower.max()) == (0.0, 5.0)
    assert (upper.min(), upper.max()) == (1.0, 8.0)


def test_notes_point_at_their_place():
    note = {"text": "peak", "x": 1.5, "y": 3.5, "ax": -50, "ay": -18}
    (found,) = drawn(line(), annotations=[note, {**note, "ax": 50}]).texts[:1]
    assert (found.get_text(), found.xy, found.get_ha()) == ("peak", (1.5, 3.5), "right")
    assert found.xyann == (pytest.approx(-50 * 72 / 76), pytest.approx(18 * 72 / 76))
    assert drawn(line(), annotations=[{**note, "ax": 50}]).texts[0].get_ha() == "left"
    assert drawn(line(), annotations=[{**note, "ax": 0}]).texts[0].get_ha() == "left"


def test_scales_and_limits_are_those_of_the_page():
    axes = drawn(line(), x=axis("time, s", type="log", range=[0, 2]), y=axis("memory", range=[0, 7]))
    assert (axes.get_xscale(), axes.get_xlim(), axes.get_ylim()) == ("log", (1.0, 100.0), (0.0, 7.0))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("time, s", "memory")
    from_zero = drawn(line(), y=axis("y", rangemode="tozero"))
    assert from_zero.get_ylim()[0] == 0.0
    assert drawn(line()).get_ylim()[0] > 2.0
    reversed_ = drawn(line(), y=axis("y", autorange="reversed"))
    assert reversed_.yaxis_inverted()
    assert not drawn(line()).yaxis_inverted()


def test_ticks_outside_of_the_limits_are_left_out():
    ticks = {"tickvals": [0, 1, 2, 3], "ticktext": ["a", "b<br>c", "d", "e"], "range": [1, 2]}
    axes = drawn(line(), x=axis("x", **ticks))
    assert [text.get_text() for text in axes.get_xticklabels()] == ["b\nc", "d"]
    assert list(axes.get_xticks()) == [1.0, 2.0]


def test_categories_stand_at_whole_numbers_in_their_order():
    axes = drawn(bar([1.0, 2.0], x=["b", "c"]), x=axis("x", categoryarray=["a", "b"]))
    assert [text.get_text() for text in axes.get_xticklabels()] == ["a", "b", "c"]
    assert (list(axes.get_xticks()), axes.get_xlim()) == ([0.0, 1.0, 2.0], (-0.6, 2.6))
    long = drawn(bar([1.0, 2.0], x=["x" * 80, "b"]))
    assert len(long.get_xticklabels()[0].get_text()) == pictures._LABEL_LETTERS


def test_a_picture_is_as_wide_as_its_plots(monkeypatch):
    sizes, notes = [], []
    monkeypatch.setattr(pictures, "png", lambda figure: notes.append(figure.get_suptitle()) or b"")

    def asked(width, height, columns):
        sizes.append((width, height, columns))
        return panels(width, height, columns)

    monkeypatch.setattr(pictures, "panels", asked)
    plots = [Plot([line()], layout(axis("x"), axis("y")), "about", height) for height in (380, 760)]
    pictures.picture("title", plots[0])
    pictures.picture("title", *plots, note="n" * 500)
    assert sizes == [(10.0, 5.0, 1), (13.0, 10.0, 2)]
    assert notes[0] == "title"
    assert len(notes[1].split("\n")[1]) == int(10.5 * 13)


# -- validation --------------------------------------------------------------------------------------------------------


def test_equal_scales_with_lines_of_small_errors():
    _, (axes,) = panels(4, 4)
    pictures_of_validation._diagonal(axes, [(1.0, 2.0), (10.0, 5.0)])
    assert axes.get_xlim() == axes.get_ylim() == (pytest.approx(0.7), pytest.approx(14.0))
    assert (axes.get_xscale(), axes.get_yscale(), axes.get_aspect()) == ("log", "log", 1.0)
    same, low, high = ([float(y) for y in found.get_ydata()] for found in axes.lines)
    assert same == pytest.approx([0.7, 14.0])
    assert (low, high) == (pytest.approx([0.63, 12.6]), pytest.approx([0.77, 15.4]))


@pytest.mark.parametrize(("most", "places"), [(700.0, (1.0, 2.0, 5.0)), (1000.0, (1.0,))])
def test_many_decades_have_ticks_at_powers_of_ten_only(most, places, monkeypatch):
    asked = []
    monkeypatch.setattr(pictures_of_validation, "logarithmic_ticks", lambda axis, ticks: asked.append(ticks))
    _, (axes,) = panels(4, 4)
    pictures_of_validation._diagonal(axes, [(1 / 0.7, 1 / 0.7), (most / 1.4, most / 1.4)])
    assert asked == [places] * 2


def test_errors_beyond_the_edge_are_drawn_at_it():
    _, (axes,) = panels(4, 4)
    pictures_of_validation._strip(axes, 2.0, [0.5, -0.9, 0.7, 0.0], RED, SKY)
    (found,) = axes.lines
    assert list(found.get_xdata()) == [-60.0, 0.0, 50.0, 60.0]
    assert list(found.get_ydata()) == pytest.approx([2 - 0.15, 2.0, 2 + 0.15, 2 - 0.05])
    assert (found.get_color(), found.get_markerfacecolor()) == (RED, SKY)


def test_a_box_is_the_middle_of_enough_errors():
    _, (axes,) = panels(4, 4)
    least = metrics.MIN_GROUP
    pictures_of_validation._box(axes, 1.0, [0.1] * (least - 1))
    assert len(axes.lines) == 0
    errors = [n / 100 for n in range(101)]
    pictures_of_validation._box(axes, 1.0, errors)
    whiskers, box, median = axes.lines
    assert list(whiskers.get_xdata()) == pytest.approx([10.0, 60.0])  # 90 % is drawn at the edge
    assert list(box.get_xdata()) == pytest.approx([25.0, 60.0])
    assert list(median.get_xdata()) == pytest.approx([50.0])
    assert {y for each in axes.lines for y in each.get_ydata()} == {1.0}
    _, (few,) = panels(4, 4)
    pictures_of_validation._box(few, 1.0, [0.1] * least)
    assert len(few.lines) == 3


def test_errors_stand_in_rows_of_groups(monkeypatch):
    kept = []
    monkeypatch.setattr(pictures_of_validation, "png", lambda figure: kept.append(figure) or b"")
    monkeypatch.setattr(pictures_of_validation, "_error", lambda each: each.error)

    def row(group, tier, error=0.1):
        return Hand(row=Hand(gpu=group, tier=tier), error=error)

    results = [row("h100", "A"), row("a100", "A"), row("a100", "A"), row("b200", "B"), row("a100", "B")]
    pictures_of_validation._errors(results, "device", lambda each: each.row.gpu)
    (axes,) = kept[0].axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["b200, 0 + 1", "h100, 1 + 0", "a100, 2 + 1"]
    assert (axes.get_ylim(), axes.get_xlim()) == ((-0.6, 2.6), (-63.0, 63.0))
    assert [list(each.get_xdata()) for each in axes.lines[:3]] == [[-10.0, -10.0], [10.0, 10.0], [0, 0]]
    assert axes.get_title(loc="left") == "Errors by device (rows of tiers A + B)"
    assert kept[0].get_size_inches()[1] == pytest.approx(1.3 + 0.5 * 3)
    pictures_of_validation._errors(results, "device", lambda each: each.row.gpu, ("h100", "x", "b200"))
    (ordered,) = kept[1].axes
    assert [text.get_text() for text in ordered.get_yticklabels()] == ["b200, 0 + 1", "h100, 1 + 0"]


def test_a_panel_of_an_exploration_has_its_points_its_front_and_its_limit():
    pair = by_hand.explored().pairs[0]
    _, (axes,) = panels(8, 5)
    pareto_plot._panel(axes, pair)
    kept, again, rings = axes.collections
    assert [group.get_label() for group in (kept, again)] == ["keeps activations", "recomputes"]
    assert sorted(map(tuple, kept.get_offsets().tolist())) == [
        (2.0, pytest.approx(150e-6)), (4.0, pytest.approx(100e-6)), (12.5, pytest.approx(1.2e-3)),
    ]  # fmt: skip
    assert again.get_offsets().tolist() == [[1.0, pytest.approx(200e-6)]]
    front, limit = axes.lines
    assert (front.get_label(), limit.get_label(), front.get_drawstyle()) == (
        "Pareto front",
        "memory limit",
        "steps-pre",
    )
    points = [(row.peak_memory_gib, row.figures.time_ns * 1e-9) for row in pair.pareto]
    assert list(zip(front.get_xdata(), front.get_ydata(), strict=True)) == points
    assert list(limit.get_xdata()) == [3.0, 3.0]
    assert [tuple(offset) for offset in rings.get_offsets().tolist()] == [pytest.approx(point) for point in points]
    assert axes.get_title() == "gpt on torus"
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    *numbers, key = axes.texts
    assert [text.get_text() for text in numbers] == [str(n) for n in range(1, len(points) + 1)]
    assert len(key.get_text().splitlines()) == len(points)


def test_a_panel_without_a_limit_and_with_points_that_lie_close():
    rows = tuple(by_hand.point(by_hand.Strategy(dp=4), time_us, gib) for time_us, gib in ((100, 3.0), (300, 1.0)))
    pair = replace(by_hand.explored().pairs[0], rows=rows, memory_limit=None)
    _, (axes,) = panels(8, 5)
    pareto_plot._panel(axes, pair)
    assert [line.get_label() for line in axes.lines] == ["Pareto front"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear")
