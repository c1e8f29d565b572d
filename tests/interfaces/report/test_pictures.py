"""Pictures are whole PNG files, the same for the same result, whatever a result holds."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace

import pytest
import results_by_hand as by_hand

from forerun.answers.analysis.bottlenecks import Usage
from forerun.answers.analysis.timeline_lanes import WORK
from forerun.answers.experiment.result import CAUSES
from forerun.core.program.types import Category
from forerun.interfaces.report import pictures, pictures_of_studies
from forerun.interfaces.report.series import cumulated, iteration_bars, memory_curve
from forerun.interfaces.report.style import CAUSE_LOOKS, MEMORY_LOOKS, WORK_LOOKS

USES = [Usage("compute", 0.9, 0.8, ""), Usage("memory", 1.2, 0.7, ""), Usage("network", 0.0, 0.3, "")]
ODD = r"a $\frac{ <b> \n"
DRAWN = {
    "iterations that differ": lambda name: pictures.iteration_breakdown(by_hand.run_result(name)),
    "iterations that don't": lambda name: pictures.iteration_breakdown(by_hand.run_result(name, differing=False)),
    "use": lambda name: pictures.resource_utilization(name, USES),
    "memory": lambda name: pictures.memory_over_time(by_hand.simulated()),
    "timeline": lambda name: pictures.timeline(by_hand.simulated()),
    "strong": lambda name: pictures_of_studies.scaling_efficiency(by_hand.scaling_study(name)),
    "weak": lambda name: pictures_of_studies.scaling_efficiency(by_hand.scaling_study(name, strong=False)),
    "comparison": lambda name: pictures_of_studies.comparison_bars(by_hand.comparison(name)),
    "stragglers": lambda name: pictures_of_studies.straggler_distribution(by_hand.straggler_study(name)),
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
    chunks(pictures_of_studies.scaling_efficiency(replace(study, points=failed, break_down=None)))


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
