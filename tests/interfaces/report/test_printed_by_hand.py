"""What the console prints of results that are written by hand is what `printed/` holds, which people have read.

Where the printing changes on purpose, `python tests/interfaces/report/test_printed_by_hand.py` writes the files anew:
read the difference before you commit it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import figures_by_hand as by_hand
import pytest
import results_by_hand
from printed_lines import printed

from forerun.answers.comparison.matching import Pair
from forerun.answers.comparison.ran_step import Line
from forerun.answers.search.standing import Standing
from forerun.interfaces.report import comparison, console, pareto_plot, search_console
from forerun.interfaces.report.allocation import print_allocation
from forerun.interfaces.report.calibration_table import calibration_record, print_calibration
from forerun.interfaces.report.collective_table import (
    collectives_record,
    nccl_record,
    print_collectives,
    print_nccl,
)
from forerun.interfaces.report.compression import print_compression
from forerun.interfaces.report.console import print_figures, print_histogram, print_loop, print_missing
from forerun.interfaces.report.drawing import panels
from forerun.interfaces.report.experiment_console import print_scaling, print_stragglers
from forerun.interfaces.report.exploration import exploration_record, print_exploration
from forerun.interfaces.report.figures import dollars, percent, rate, seconds
from forerun.interfaces.report.histogram import bar
from forerun.interfaces.report.job_schedules import gantt, job_rows, print_schedules, schedules_plots, schedules_record
from forerun.interfaces.report.outer_steps import print_outer_steps
from forerun.interfaces.report.plots_of_studies import (
    cumulated_plot,
    efficiency_plot,
    sensitivities_plot,
    spread_plot,
    throughput_plot,
)
from forerun.interfaces.report.post_training import post_training_record, print_post_training
from forerun.interfaces.report.step_diff import diff_record, print_diff
from forerun.interfaces.report.straggler_costs import costs_record, print_costs, step_rows
from forerun.interfaces.report.trace_summary import print_trace
from forerun.interfaces.report.whole_run import duration, print_study, study_record, tokens_words

PRINTED = {
    "exploration": lambda: (print_exploration, by_hand.explored(), 3),
    "exploration-in-vain": lambda: (print_exploration, by_hand.explored(0.5), 1),
    "schedules": lambda: (print_schedules, *by_hand.scheduled()),
    "run": lambda: (print_study, by_hand.study(), [by_hand.study(), by_hand.study(finished=0, dollars=None)]),
    "run-by-the-clock": lambda: (
        print_study,
        by_hand.study(by_the_clock=True, finished=1.0, mttf_s=float("inf"), save_every_s=float("inf"), energy_mwh=None),
    ),
    "trace": lambda: (print_trace, by_hand.traced(), Path("mine.program"), 12.34),
    "stragglers": lambda: (print_costs, by_hand.costs()),
    "stragglers-cost-nothing": lambda: (print_costs, by_hand.costs_of_nothing()),
    "compression": lambda: (print_compression, by_hand.compressed()),
    "compression-without-a-bandwidth": lambda: (print_compression, by_hand.compressed(break_even_bytes_per_s=None)),
    "outer-steps": lambda: (print_outer_steps, by_hand.outer()),
    "figures": lambda: (print_figures, by_hand.predicted()),
    "figures-of-images": lambda: (
        print_figures,
        by_hand.predicted(sample="image", network=None, fits=False, mfu=None, dollars_per_billion_tokens=None),
    ),
    "figures-without-memory": lambda: (print_figures, by_hand.predicted(memory_recorded=False, fit_in_doubt=True)),
    "missing": lambda: (print_missing, by_hand.predicted()),
    "missing-nothing": lambda: (print_missing, by_hand.predicted(missing=[])),
    "loop": lambda: (print_loop, by_hand.looped()),
    "collectives": lambda: (print_collectives, by_hand.collectives()[0], "all_reduce", by_hand.collectives()[1]),
    "collectives-both": lambda: (
        print_collectives,
        by_hand.collectives(False)[0],
        "all_reduce",
        by_hand.collectives()[1],
        True,
    ),
    "collectives-of-groups": lambda: (print_collectives, by_hand.grouped()[0], "all_gather", by_hand.grouped()[1]),
    "nccl": lambda: (print_nccl, SimpleNamespace(name="h100"), 1024, "all_reduce", by_hand.nccl()),
    "after-training": lambda: (print_post_training, by_hand.after_training()),
    "allocator": lambda: (print_allocation, by_hand.allocated()),
    "allocator-out-of-memory": lambda: (print_allocation, by_hand.allocated(out_of_memory=True)),
    "histogram": lambda: (print_histogram, by_hand.binned()),
    "scaling": lambda: (print_scaling, results_by_hand.scaling_study()),
    "scaling-weak": lambda: (
        print_scaling,
        replace(results_by_hand.scaling_study(strong=False), break_down=None, best_by_cost=None),
    ),
    "stragglers-of-a-run": lambda: (print_stragglers, results_by_hand.straggler_study()),
    "search": lambda: (search_console.print_search, by_hand.searched(), 2, 6e9, "forerun predict"),
    "search-by-memory": lambda: (
        search_console.print_search,
        by_hand.searched(objective="memory", front=None, choices=[], stacks=("torchtitan",), too_large=[]),
        3,
        6e9,
        "forerun predict",
    ),
    "search-in-vain": lambda: (
        search_console.print_search,
        by_hand.searched(ranked=[], best=None),
        2,
        6e9,
        "forerun predict",
    ),
    "range": lambda: (search_console.print_sweep, by_hand.swept_with_memory(), 6e9, "forerun predict"),
    "range-in-vain": lambda: (
        search_console.print_sweep,
        SimpleNamespace(**{**vars(by_hand.swept_with_memory()), "best": None, "front": [], "with_memory": False}),
        6e9,
        "forerun predict",
    ),
    "difference": lambda: (print_diff, by_hand.differing(), 3),
    "difference-of-nothing": lambda: (print_diff, by_hand.differing(same=True), 3),
    "calibration": lambda: (print_calibration, by_hand.calibrated(), Path("new.yaml")),
    "calibration-not-written": lambda: (print_calibration, by_hand.calibrated(), None),
}

RECORDS = {
    "difference": lambda: diff_record(by_hand.differing()),
    "exploration": lambda: exploration_record(by_hand.explored(), 3),
    "schedules": lambda: schedules_record(*by_hand.scheduled()),
    "jobs": lambda: job_rows(by_hand.scheduled()[1]),
    "run": lambda: study_record(by_hand.study(), [by_hand.study(save_every_s=float("inf"), mttf_s=float("inf"))]),
    "run-without-failures": lambda: study_record(by_hand.study(save_every_s=float("inf"), mttf_s=float("inf"))),
    "stragglers": lambda: costs_record(by_hand.costs()),
    "stragglers-cost-nothing": lambda: costs_record(by_hand.costs_of_nothing()),
    "steps": lambda: step_rows(by_hand.costs()),
    "collectives": lambda: collectives_record(by_hand.collectives()[0], "all_reduce", by_hand.collectives()[1]),
    "nccl": lambda: nccl_record(SimpleNamespace(name="h100"), 1024, "all_reduce", by_hand.nccl()),
    "after-training": lambda: post_training_record(by_hand.after_training()),
    "calibration": lambda: calibration_record(by_hand.calibrated()),
}
PLOTS = {
    "gpus-in-use": lambda: schedules_plots(*by_hand.scheduled())[0],
    "completion-times": lambda: schedules_plots(*by_hand.scheduled())[1],
    "efficiency": lambda: efficiency_plot(results_by_hand.scaling_study()),
    "throughput": lambda: throughput_plot(results_by_hand.scaling_study(strong=False)),
    "sensitivities": lambda: sensitivities_plot(by_hand.gains()),
    "spread": lambda: spread_plot(replace(results_by_hand.straggler_study(), steps_s=(0.1, 0.11, 0.11, 0.14))),
    "cumulated": lambda: cumulated_plot(replace(results_by_hand.straggler_study(), steps_s=(0.1, 0.11, 0.11, 0.14))),
    "when-jobs-run": lambda: gantt(by_hand.scheduled()[1][0]),
}
FOLDER = Path(__file__).parent / "printed"


def drawn(plot):
    """What a plot says, without its looks."""
    return {"data": plot.data, "about": plot.about, "height_px": plot.height_px}


def write():
    """Writes what is printed now, so that the difference can be read."""
    for name, one in PRINTED.items():
        (FOLDER / f"{name}.txt").write_text("".join(f"{line}\n" for line in printed(*one())))
    plots = {f"plot-{name}": lambda one=one: drawn(one()) for name, one in PLOTS.items()}
    for name, one in {**RECORDS, **plots}.items():
        (FOLDER / f"{name}.json").write_text(f"{json.dumps(one(), indent=1)}\n")


@pytest.mark.parametrize("name", PRINTED)
def test_it_is_what_was_read(name):
    assert printed(*PRINTED[name]()) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", RECORDS)
def test_the_same_as_plain_data(name):
    assert json.loads(json.dumps(RECORDS[name]())) == json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PLOTS)
def test_the_same_as_a_plot(name):
    assert json.loads(json.dumps(drawn(PLOTS[name]()))) == json.loads((FOLDER / f"plot-{name}.json").read_text())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0 s"),
        (1e-7, "0.10 us"),
        (9.99e-4, "999 us"),
        (1e-3, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (0.9994, "999 ms"),
        (1, "1.00 s"),
        (9.99, "9.99 s"),
        (10, "10.0 s"),
        (1234.5, "1,234 s"),
    ],
)
def test_times_have_three_digits(value, words):
    assert seconds(value) == words


@pytest.mark.parametrize(
    ("value", "words"), [(None, "unknown"), (0, "0"), (9.994, "9.99"), (10, "10.0"), (99.94, "99.9"), (1234.6, "1,235")]
)
def test_rates_are_whole_numbers_or_have_three_digits(value, words):
    assert rate(value) == words


def test_shares_and_amounts_may_be_unknown():
    assert (percent(None), percent(0.1234), dollars(None), dollars(1234.567)) == (
        "unknown",
        "12.3%",
        "unknown",
        "1,234.57",
    )


@pytest.mark.parametrize(
    ("time_s", "words"),
    [
        (0, "0.0 s"),
        (119.9, "119.9 s"),
        (120, "2.0 min"),
        (7199, "120.0 min"),
        (7200, "2.0 h"),
        (172_799, "48.0 h"),
        (172_800, "2.0 days"),
        (float("inf"), "never"),
    ],
)
def test_a_duration_has_at_least_two_of_its_unit(time_s, words):
    assert duration(time_s) == words


def test_tokens_are_billions_or_trillions():
    assert (tokens_words(9.994e11), tokens_words(1e12), tokens_words(15.6e12)) == ("999.4B", "1.00T", "15.60T")


def test_a_bar_shows_every_plan():
    assert bar(10, 0, 10, 40) == "#" * 40
    assert bar(1, 1, 1000, 40) == "#."
    assert bar(5, 2, 10, 20) == "#" * 10 + "." * 4
    assert bar(0, 0, 10, 20) == ""


def test_points_of_a_range_are_marked():
    sweep = by_hand.swept()
    lines = printed(lambda out: out.print(search_console._points(sweep, {id(point) for point, _ in sweep.front})))
    assert [line.split() for line in lines[-3:]] == [
        ["P", "8", "64", "500", "ms", "40,000", "5,000", "40.0%", "100.0%", "12.35", "70.2"],
        ["*P", "1,024", "128", "250", "ms", "6,100,000", "6,000", "45.0%", "92.5%", "unknown", "60.0"],
        ["2", "64"],
    ]


def test_the_place_of_a_recipe_is_one_line(monkeypatch):
    monkeypatch.setattr(search_console, "plan_words", lambda plan: plan)

    def line(step_s, rank, fits=True):
        prediction = SimpleNamespace(own_plan=lambda: "FSDP=8", fits=fits, step_time_s=step_s)
        return printed(search_console.print_standing, Standing(prediction, rank, 2.0), 10)

    assert line(2.5, 10) == [
        "The recipe's own plan (FSDP=8): 2.5 s a step, place 10, 25.0% slower than the best plan that fits"
    ]
    assert line(1.0, 11, False) == [
        "The recipe's own plan (FSDP=8): 1 s a step, behind place 10, 50.0% faster than the best plan that fits; "
        "it does not fit"
    ]
    assert line(2.0, 1)[0].endswith("place 1, 0.0% slower than the best plan that fits")
    verdict = SimpleNamespace(text="it is slower", plan="TP=2")
    assert printed(search_console.print_verdict, "tp 2", verdict) == ["tp 2: it is slower (TP=2)"]
    assert printed(search_console.print_verdict, "tp 3", SimpleNamespace(text="no", plan=None)) == ["tp 3: no"]


@pytest.mark.parametrize("points", [1, 8, 9, 30])
def test_of_a_long_front_every_so_manieth_point_has_a_number(points):
    rows = tuple(by_hand.point(by_hand.Strategy(dp=4), 100 + n, 40.0 - n) for n in range(points))
    _, (axes,) = panels(8, 6, 1, 1)
    pareto_plot._panel(axes, replace(by_hand.explored().pairs[0], rows=rows))
    numbers = [int(text.get_text()) for text in axes.texts if text.get_text().isdigit()]
    step = -(-points // pareto_plot._MOST_LABELLED)
    assert numbers == list(range(1, points + 1, step))
    assert len(numbers) <= pareto_plot._MOST_LABELLED


if __name__ == "__main__":
    write()


def test_the_rows_of_a_comparison():
    def side(kernel, module, time_s, count=2, shape=(1, 2, 3, 4)):
        what = {"part": "product", "work": "w", "name": kernel, "shape": shape, "module": module, "phase": "forward"}
        amounts = {"waiting_s": 0, "late_s": 0, "held_s": 0, "flops": 0, "moved_bytes": 0}
        return (Line(**what, **amounts, ops=(0,), count=count, time_s=time_s),)

    long = "n" * 45
    rows = [
        comparison._pair_row(pair)
        for pair in (
            Pair(side("k" * 44, "a", 0.2), side("n" * 44, "a", 0.1)),
            Pair(side("k", "a", 0.1, count=1000), (*side(long, "a", 0.2, 900), *side(long, "b", 0.1, 900))),
            Pair(side("k", "", 1e-3, shape=(1, 2, 3)), ()),
            Pair((), side("n", "c", 1e-3)),
        )
    ]
    assert rows == [
        ("n" * 44, "k" * 44, "a", "1 x 2 x 3 x 4", "2", "200 ms", "100 ms", "+100 ms"),
        ("n" * 41 + "...", "k", "a +1", "1 x 2 x 3 x 4", "1,000 / 1,800", "100 ms", "300 ms", "-200 ms"),
        ("(not predicted)", "k", "-", "", "2 / 0", "1.00 ms", "0 s", "+1.00 ms"),
        ("n", "(not measured)", "c", "1 x 2 x 3 x 4", "0 / 2", "0 s", "1.00 ms", "-1.00 ms"),
    ]
    assert comparison._signed(0.0) == "0 s"
    assert comparison._ends(range(6), 6) == list(range(6))
    assert comparison._ends(range(7), 6) == [0, 1, 2, 3, 5, 6]
    assert comparison._ends(range(9), 4) == [0, 1, 2, 8]


def test_the_head_of_a_prediction_counts_tokens_or_samples(monkeypatch):
    monkeypatch.setattr(console, "plan_words", lambda plan: "DP 8")
    plan = SimpleNamespace(seq_len=2048, global_batch=64, stack="s")
    usual = {"model": "m", "n_gpus": 8, "cluster": "c", "plan": plan, "sample": None}

    def head(**changes):
        return printed(console.print_heading, SimpleNamespace(**usual | changes))

    assert head() == ["m on 8 x c", "DP 8, seq 2048, global batch 64, stack s"]
    assert head(sample="image") == ["m on 8 x c", "DP 8, global batch 64 images, stack s"]
    assert head(plan=None) == ["m on 8 x c", "a saved program"]
