"""Pictures are whole PNG files, the same for the same result, whatever a result holds."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from functools import partial

import documents_by_hand
import numpy as np
import pytest
import results_by_hand as by_hand
from matplotlib.axes import Axes

from forerun.answers.analysis.bottlenecks import Usage
from forerun.answers.analysis.timeline_lanes import WORK
from forerun.answers.experiment.result import CAUSES
from forerun.answers.search.heat import telling_maps
from forerun.core.program.types import Category
from forerun.interfaces.report import pictures
from forerun.interfaces.report.page import Plot
from forerun.interfaces.report.pictures_of_results import Study, run_pictures, study_pictures
from forerun.interfaces.report.plots import axis, layout, stacked_areas
from forerun.interfaces.report.plots_of_searches import heat_plot
from forerun.interfaces.report.plots_of_studies import throughput_plot
from forerun.interfaces.report.series import cumulated, iteration_bars, memory_curve
from forerun.interfaces.report.style import BLUE, CAUSE_LOOKS, MEMORY_LOOKS, VERMILLION, WORK_LOOKS, Look

USES = [Usage("compute", 0.9, 0.8, ""), Usage("memory", 1.2, 0.7, ""), Usage("network", 0.0, 0.3, "")]
ODD = r"a $\frac{ <b> \n"
RUN = ("iteration_breakdown", "resource_utilization", "memory_over_time", "timeline")
STUDIES = {
    "strong": by_hand.scaling_study,
    "weak": lambda name: by_hand.scaling_study(name, strong=False),
    "comparison": by_hand.comparison,
    "stragglers": by_hand.straggler_study,
}


def of_run(which: str, name: str, differing: bool = True) -> bytes:
    return run_pictures(by_hand.run_result(name, differing=differing), USES)[which]()


def of_study(study: Study) -> bytes:
    (draw,) = study_pictures(study).values()
    return draw()


DRAWN = {
    **{which: partial(of_run, which) for which in RUN},
    "iterations that are alike": partial(of_run, "iteration_breakdown", differing=False),
    **{kind: lambda name, make=make: of_study(make(name)) for kind, make in STUDIES.items()},
}


def chunks(png: bytes) -> dict[bytes, bytes]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    found, at = {}, 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        found[kind] = found.get(kind, b"") + body
        at += 12 + length
    return found


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN.keys())
def test_a_picture_is_the_same_each_time_and_says_nothing_of_when_it_was_made(draw) -> None:
    first = draw("study")
    found = chunks(first)
    assert not {b"tIME", b"tEXt", b"iTXt", b"zTXt"} & set(found)
    width, height = struct.unpack(">II", found[b"IHDR"][:8])
    pixels = zlib.decompress(found[b"IDAT"])
    assert width >= 1300
    assert len(pixels) == height * (4 * width + 1)
    assert len(set(pixels)) > 20
    assert draw("study") == first


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN.keys())
def test_names_may_hold_anything(draw) -> None:
    chunks(draw(ODD))


def test_a_study_in_which_nothing_ran_has_a_picture() -> None:
    study = by_hand.scaling_study()
    failed = tuple(replace(point, error="impossible") for point in study.points)
    chunks(of_study(replace(study, points=failed, break_down=None)))


def test_bars_of_many_iterations_keep_their_time() -> None:
    iterations = by_hand.run_result().iterations
    bars = iteration_bars(iterations, most=37)
    assert len(bars) <= 38
    assert [bar.first for bar in bars[1:]] == [bar.first + bar.count for bar in bars[:-1]]
    total = sum(sum(bar.breakdown_s.values()) * bar.count for bar in bars)
    assert total == pytest.approx(sum(each.step_time_s * each.repeats for each in iterations))
    assert bars[0].note == "warm-up"


def test_memory_stacks_up_to_the_peak_of_the_prediction() -> None:
    curve, prediction = memory_curve(by_hand.simulated(), points=100), by_hand.simulated().prediction
    assert curve.total_gib[curve.peak] == pytest.approx(prediction.peak_allocated_gib)
    assert sum(part[curve.peak] for _, part in curve.parts_gib) == pytest.approx(prediction.peak_allocated_gib)
    assert curve.rank_class == prediction.peak_rank_class


def test_everything_has_a_look_of_its_own() -> None:
    assert set(WORK_LOOKS) == set(WORK)
    assert set(CAUSE_LOOKS) == set(CAUSES)
    assert set(MEMORY_LOOKS) == {category.name.lower() for category in Category}
    for looks in (WORK_LOOKS, CAUSE_LOOKS, MEMORY_LOOKS):
        assert len({(look.colour, look.hatch) for look in looks.values()}) == len(looks)
        assert len({look.label for look in looks.values()}) == len(looks)


def test_shares_count_equal_times_together() -> None:
    assert cumulated([2.0, 1.0, 2.0, 4.0]) == ([1.0, 2.0, 4.0], [25.0, 75.0, 100.0])


def drawn(monkeypatch: pytest.MonkeyPatch, plot: Plot) -> Axes:
    """The axes on which a picture of the plot is drawn."""
    kept = []
    monkeypatch.setattr(pictures, "png", lambda figure: kept.append(figure.axes[0]) or b"")
    pictures.picture("title", plot)
    return kept[0]


def boxes(axes: Axes) -> list[tuple[float, float, float, float]]:
    """Left, bottom, right and top of every rectangle."""
    paths = [path for collection in axes.collections for path in collection.get_paths()]
    return sorted(tuple(np.round(path.get_extents().extents, 6).tolist()) for path in paths)


def bars(lying: bool, **more: object) -> dict[str, object]:
    names, values = ["a", "b<br>c"], [1.0, 2.0]
    at = {"orientation": "h", "y": names, "x": values} if lying else {"x": names, "y": values}
    return {"type": "bar", "name": "one", "marker": {"color": BLUE}, **at, **more}


def test_a_logarithmic_axis_has_plain_numbers_at_one_two_and_five(monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"type": "scatter", "mode": "lines", "name": "one", "x": [1.0, 100.0], "y": [1.0, 100.0]}
    sides = {"type": "log", "range": [0.0, 2.0]}
    axes = drawn(monkeypatch, Plot([line], layout(axis("x", **sides), axis("y", **sides)), "about"))
    for each in (axes.xaxis, axes.yaxis):
        inside = [tick for tick in each.get_majorticklocs() if 1 <= tick <= 100]
        assert inside == pytest.approx([1, 2, 5, 10, 20, 50, 100])
        assert each.get_major_formatter()(2000.0) == "2,000"


def test_bars_stand_on_each_other_and_lie_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = axis("names"), axis("number", rangemode="tozero")
    upright = drawn(monkeypatch, Plot([bars(False), bars(False)], layout(x, y, barmode="stack", bargap=0.5), ""))
    assert boxes(upright) == [(-0.25, 0, 0.25, 1), (-0.25, 1, 0.25, 2), (0.75, 0, 1.25, 2), (0.75, 2, 1.25, 4)]
    assert [label.get_text() for label in upright.get_xticklabels()] == ["a", "b\nc"]
    assert upright.get_ylim()[0] == 0
    assert upright.get_ylim()[1] >= 4
    lying = drawn(
        monkeypatch, Plot([bars(True, base=[3.0, 4.0], width=1)], layout(y, axis("", autorange="reversed")), "")
    )
    assert boxes(lying) == [(3, -0.5, 4, 0.5), (4, 0.5, 6, 1.5)]
    assert lying.get_ylim()[0] > lying.get_ylim()[1]


def test_areas_hold_their_level_until_the_next_place(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [(Look("one", BLUE), [1.0, 2.0, 2.0]), (Look("two", VERMILLION, "/"), [3.0, 0.0, 0.0])]
    axes = drawn(monkeypatch, Plot(stacked_areas([0.0, 1.0, 4.0], parts, "s"), layout(axis("x"), axis("y")), ""))
    lower, upper = (collection.get_paths()[0] for collection in axes.collections)
    assert lower.contains_point((0.9, 0.9))
    assert lower.contains_point((1.1, 1.9))
    assert not lower.contains_point((0.9, 1.1))
    assert upper.contains_point((0.9, 3.9))
    assert not upper.contains_point((1.1, 2.1))


def test_lines_and_logarithmic_axes_are_those_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    plot = throughput_plot(by_hand.scaling_study())
    axes = drawn(monkeypatch, plot)
    for trace, line in zip(plot.data, axes.get_lines(), strict=True):
        assert (list(line.get_xdata()), list(line.get_ydata())) == (trace["x"], trace["y"])
        assert line.get_label() == trace["name"]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert np.log10(axes.get_ylim()) == pytest.approx(plot.layout["yaxis"]["range"])
    assert [label.get_text() for label in axes.get_xticklabels()] == plot.layout["xaxis"]["ticktext"]
    assert axes.get_ylabel() == plot.layout["yaxis"]["title"]["text"]


def test_heat_maps_write_what_cells_say(monkeypatch: pytest.MonkeyPatch) -> None:
    (shown,) = telling_maps(documents_by_hand.found(), 1)
    plot = heat_plot(shown)
    axes = drawn(monkeypatch, plot)
    assert sorted(text.get_text() for text in axes.texts) == sorted(
        text for trace in plot.data for text in trace["text"]
    )
    assert len(boxes(axes)) == len(axes.texts)
