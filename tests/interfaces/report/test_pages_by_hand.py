"""Pages of job schedules and stragglers, records of searches, plots of ranges and of explorations, by known answers."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from types import SimpleNamespace as Hand

import figures_by_hand as by_hand
import numpy as np
import pytest

from forerun.answers.jobs.job import Job, Scheduled
from forerun.answers.jobs.outcome import PolicyOutcome
from forerun.describe.plan.plan import Plan
from forerun.interfaces.report import (
    heat_cells,
    job_schedules,
    page_sections,
    pareto_plot,
    pictures_of_results,
    plots_of_searches,
    records,
    records_of_searches,
    straggler_costs,
    sweep_document,
)
from forerun.interfaces.report.page import Document, Figures, Heading, Listing, Table, Text, write_page

HOUR_S = 3600.0


def headings(parts):
    return [part.text for part in parts if isinstance(part, Heading)]


# -- jobs --------------------------------------------------------------------------------------------------------------


def test_the_page_of_schedules():
    request, outcomes = by_hand.scheduled()
    page = job_schedules.schedules_document(request, outcomes, "forerun cluster x")
    assert headings(page.parts) == [
        "Policies side by side", "Fairness, fragmentation and stops", "GPUs in use", "Completion times",
        "When jobs run", "Configuration",
    ]  # fmt: skip
    policies, fairness, groups, *more = (part for part in page.parts if isinstance(part, Table))
    assert fairness.numeric == set(range(1, len(job_schedules.FAIRNESS_COLUMNS)))
    assert [each.columns[0] for each in more] == [
        "mean wait of group",
        "goodput of group",
        "mean finish ratio of group",
    ]
    assert policies.numeric == set(range(1, len(job_schedules.COLUMNS)))
    assert groups.columns == ("mean JCT of group", "srtf", "fifo")
    assert groups.numeric == {1, 2}
    assert [part.text for part in page.parts if type(part).__name__ == "Text"][1:3] == ["srtf", "fifo"]
    assert [part.lines for part in page.parts if isinstance(part, Listing)] == [request.notes]
    alone = Hand(**{**vars(request), "notes": ()})
    ungrouped = [PolicyOutcome("fifo", (Scheduled(Job("a", 2, 0, 3600), 0, 3600, 0, ((0, 3600),)),), 8)]
    plain = job_schedules.schedules_document(alone, ungrouped)
    assert len([part for part in plain.parts if isinstance(part, Table)]) == 2
    assert not any(isinstance(part, Listing) for part in plain.parts)


def many(number):
    """Jobs of which a later one has more GPUs."""
    jobs = [Job(f"job {n}", n + 1, 10.0 * n, HOUR_S) for n in range(number)]
    ran = [
        Scheduled(job, job.submit_s, job.submit_s + HOUR_S, 0, ((job.submit_s, job.submit_s + HOUR_S),)) for job in jobs
    ]
    return PolicyOutcome("fifo", tuple(ran), 1 << 20)


def test_of_many_jobs_those_with_the_most_gpu_time_have_lanes():
    lanes = job_schedules._LANES
    plot = job_schedules.gantt(many(lanes + 2))
    first = plot.layout["yaxis"]["categoryarray"][0]
    assert (len(plot.layout["yaxis"]["categoryarray"]), first) == (lanes, "job 2 (3)")
    assert job_schedules._of_which(many(lanes + 2)) == f": the {lanes} jobs with the most GPU time of {lanes + 2:,}"
    assert job_schedules._of_which(many(lanes)) == ""
    assert plot.height_px == lanes * job_schedules._LANE_PX + job_schedules._AXIS_PX
    waits, runs = plot.data
    assert (runs["x"][0], runs["base"][0], waits["base"][0]) == (
        1.0,
        pytest.approx(20 / 3600, rel=1e-5),
        runs["base"][0],
    )


def test_jobs_of_one_name_have_lanes_of_their_own():
    two = tuple(Scheduled(Job("a", 2, 0, 60), 0, 60, 0, ((0, 60),)) for _ in range(2))
    lanes = job_schedules.gantt(PolicyOutcome("fifo", two, 8)).layout["yaxis"]["categoryarray"]
    assert lanes == ["a (2)<br>#1", "a (2)<br>#2"]


def test_lanes_show_the_kind_of_gpu_that_a_job_runs_on():
    jobs = (
        Scheduled(Job("a", 2, 0, 60), 0, 90, 0, ((0, 30), (30, 60), (60, 90)), kinds=(1, 0, 1)),
        Scheduled(Job("b", 2, 0, 60), 30, 90, 0, ((30, 90),), kinds=(0,)),
    )
    outcome = PolicyOutcome("fifo-perf", jobs, 8, ("v100", "<i>k80"))
    bars = {each["name"]: [round(hours * 3600) for hours in each["base"]] for each in job_schedules.gantt(outcome).data}
    assert bars == {"waits": [0, 0], "runs on v100": [30, 30], "runs on &lt;i&gt;k80": [0, 60]}
    assert [row["gpu_kinds"] for row in job_schedules.job_rows([outcome])] == ["<i>k80 v100", "v100"]


def test_pictures_of_schedules_have_the_names_of_policies(monkeypatch):
    monkeypatch.setattr(job_schedules, "picture", lambda title, plot, note: title)
    assert job_schedules.schedules_pictures(*by_hand.scheduled()) == {
        "gpus-in-use": "GPUs in use", "completion-times": "Completion times",
        "jobs-srtf": "When jobs run under srtf", "jobs-fifo": "When jobs run under fifo",
    }  # fmt: skip


def test_completion_times_are_cumulated():
    _, plot = job_schedules.schedules_plots(*by_hand.scheduled())
    srtf = plot.data[0]
    assert (srtf["x"], srtf["y"]) == ([1.0, pytest.approx(13_800 / 3600, rel=1e-5)], [50.0, 100.0])
    some = len(job_schedules._COLOURS)
    colours = job_schedules._colours([None] * (some + 1))
    assert (colours[0], len(set(colours))) == (colours[some], some)


# -- stragglers --------------------------------------------------------------------------------------------------------


def costs():
    found = by_hand.costs(
        by_rank={3: 1.25, 0: 1.0, 1: 1.0, 2: 1.125, 4: 1.0, 5: 1.0}, by_operation={"gemm": 1.05, "all": 1}
    )
    found.recorded.ranks = np.array([[0, 1, 2], [3, 4, 5]])
    return found


def test_the_page_of_stragglers():
    page = straggler_costs.costs_document(costs(), "forerun stragglers x")
    figures = page.parts[0]
    assert isinstance(figures, Figures)
    assert figures.entries == (
        ("slowdown", "1.100", "step time over that without stragglers"),
        ("GPU time lost", "9.1%", "to stragglers"),
        ("recorded", "1.25 s", ""),
        ("replayed", "1.10 s", "each operation starts as soon as it can"),
        ("all alike", "1.00 s", "mean of computations, median of communications"),
    )
    assert headings(page.parts) == ["Operations", "Stages and replicas", "Steps", "Configuration"]
    captions = [part.caption for part in page.parts if isinstance(part, Table)]
    assert captions == ["The slowest, by stage", "The slowest, by replica", "The slowest, by rank"]
    assert [part.numeric for part in page.parts if isinstance(part, Table)] == [{1}] * 3
    assert ("One step is cut.",) in [part.lines for part in page.parts if isinstance(part, Listing)]


def test_slowdowns_of_operations_and_ranks():
    bars = straggler_costs._operations(costs())
    assert (bars.data[0]["x"], bars.about) == (
        [5.0, 0.0], "Slowdown by kind of operation: gemm: +5.0%; all: +0.0%",
    )  # fmt: skip
    ranks = straggler_costs._ranks(costs())
    (cells,) = ranks.data
    assert (cells["x"], cells["base"]) == ([0, 1, 2, 0, 1, 2], [1, 1, 1, 0, 0, 0])
    assert cells["text"] == ["1.00", "1.00", "1.12", "1.25", "1.00", "1.00"]
    assert cells["customdata"][3] == "rank 3, stage 1, replica 0: 1.250"
    colours = cells["marker"]["color"]
    assert colours[0] == colours[1] == colours[4] == colours[5] != colours[2] != colours[3]
    assert ranks.about == "Slowdown by stage and replica; the largest is 1.250 of rank 3"
    steps = straggler_costs._steps(costs())
    assert [one["y"] for one in steps.data] == [[1.0, 1.5], [0.9, 1.3], [1.0, 1.0]]
    assert (
        steps.about == "Times of 2 steps: recorded, 1.50 s at most; replayed, 1.30 s at most; all alike, 1.00 s at most"
    )


# -- searches ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch):
    """A plan and a prediction as one word."""
    monkeypatch.setattr(records_of_searches, "prediction_record", lambda prediction: f"of {prediction}")
    monkeypatch.setattr(records_of_searches, "plan_record", lambda plan: f"plan {plan}")


def result(**changes):
    places = ["first", "second", "third"]
    usual = {
        "model": "gpt", "cluster": "h100", "n_gpus": 8, "seq_len": 1024, "global_batch": 64, "objective": "time",
        "memory_limit_gib": 79.2, "counts": {"ok": 3}, "impossible": {"tp": 5}, "impossible_examples": {"tp": "tp=3"},
        "out_of_memory": {"activation": 2}, "too_large": [Hand(reason="90 GiB")], "choices": [], "simulated": 7,
        "proof": "all", "front": None, "top": lambda top: places[:top],
    }  # fmt: skip
    return Hand(**{**usual, **changes})


def test_a_search_as_a_record(short, monkeypatch):
    bins = [Hand(low_s=0.5, high_s=1.0, simulated=3, bounded=10)]
    monkeypatch.setattr(records_of_searches, "runtime_histogram", lambda found: bins)
    record = records_of_searches.search_record(result(), 2)
    assert (record["best"], record["top"], record["nearest_miss"]) == ("of first", ["of first", "of second"], "90 GiB")
    assert record["runtime_histogram"] == [{"from_s": 0.5, "to_s": 1.0, "simulated": 3, "bounded": 10}]
    assert ("front" in record, record["choices"], record["counts"]) == (False, [], {"ok": 3})
    choice = Hand(field="compile", value="off", caution="", best="b", instead="c")
    front = Hand(is_exact=False, exact_below_s=2.5, simulated=4, places=["p"])
    more = records_of_searches.search_record(result(too_large=[], top=lambda _: [], choices=[choice], front=front), 2)
    assert (more["best"], more["top"], more["nearest_miss"]) == (None, [], None)
    assert more["choices"] == [{"field": "compile", "value": "off", "caution": "", "best": "of b", "instead": "of c"}]
    assert more["front"] == {"exact_below_s": 2.5, "simulated": 4, "places": ["of p"]}
    front.is_exact = True
    assert records_of_searches.front_record(front)["exact_below_s"] is None


def test_verdicts_and_standings_as_records(short):
    assert records_of_searches.verdict_record(Hand(text="no", plan=None)) == {"text": "no", "plan": None}
    assert records_of_searches.verdict_record(Hand(text="no", plan="x"))["plan"] == "plan x"
    stands = Hand(prediction=Hand(own_plan=lambda: "x", fits=True), step_time_s=2.0, rank=3, behind=0.1)
    assert records_of_searches.standing_record(stands) == {
        "plan": "plan x", "step_time_s": 2.0, "fits": True, "rank": 3, "behind": 0.1,
    }  # fmt: skip


def test_a_range_of_searches_as_a_record(short):
    sweep = by_hand.swept()
    sweep.model, sweep.cluster, sweep.seq_len = "gpt", "h100", 1024
    for point in sweep.points:
        point.counts = {"ok": 1}
    sweep.front = []
    sweep.efficiency = lambda point: {8: 1.0, 1024: 0.925}.get(point.n_gpus)
    record = records_of_searches.sweep_record(sweep)
    assert record["best"] == {"n_gpus": 1024, "global_batch": 128}
    assert [point["reason"] for point in record["points"]] == [None, None, "does not fit"]
    assert [point["best"] is None for point in record["points"]] == [False, False, True]
    assert [point["efficiency"] for point in record["points"]] == [1.0, 0.925, None]
    assert record["points"][0]["tokens_per_s"] == 40_000.0
    sweep.best = None
    assert records_of_searches.sweep_record(sweep)["best"] is None
    sweep.front = [(sweep.points[0], Hand(tokens_per_s_per_gpu=10.0, n_gpus=8))]
    (place,) = records_of_searches.sweep_record(sweep)["front"]
    assert (place["n_gpus"], place["tokens_per_s"]) == (8, 80.0)


def test_every_plan_of_a_search_as_a_row(tmp_path):
    chunks = [
        {"rank": [1, 2], "compile": [True, False], "modules": [("mlp", "norm"), ()], "s": [0.5, 0.25]},
        {"rank": [3], "compile": [True], "modules": [()], "s": [1.0]},
    ]
    records_of_searches.write_csv(tmp_path / "plans.csv", Hand(row_chunks=lambda: iter(chunks)))
    with (tmp_path / "plans.csv").open() as file:
        assert list(csv.reader(file)) == [
            ["rank", "compile", "modules", "s"], ["1", "yes", "mlp norm", "0.5"], ["2", "no", "", "0.25"],
            ["3", "yes", "", "1.0"],
        ]  # fmt: skip


@dataclass
class Inner:
    x: int = 1


@dataclass
class Predicted:
    """Some fields of a prediction."""

    explain: tuple = ("a",)
    network: object = None
    init: tuple = ()
    loop: object = None
    missing: object = None
    sample: object = None
    samples_per_s_per_gpu: object = None
    plan: object = None


def test_a_prediction_as_a_record_has_what_was_given():
    assert records.prediction_record(Predicted()) == {"explain": ["a"], "plan": None}
    loop = Hand(mean_step_time_s=1.0, tokens_per_s_per_gpu=None, stalls=(), checkpoint=None, step_time_s=1.0)
    stage = Hand(way="meta", name="model", allocated_bytes=2**30, peak_bytes=2**31)
    full = Predicted(
        network=Inner(), init=(stage,), loop=loop, missing=("gemm",), sample="image", samples_per_s_per_gpu=3.0,
        plan=Plan(1024),
    )  # fmt: skip
    record = records.prediction_record(full)
    assert record["network"] == {"x": 1}
    assert record["init"] == [{"way": "meta", "stage": "model", "allocated_gib": 1.0, "peak_gib": 2.0}]
    assert (record["loop"]["mean_step_time_s"], record["missing"]) == (1.0, ["gemm"])
    assert (record["sample"], record["samples_per_s_per_gpu"], record["plan"]["seq_len"]) == ("image", 3.0, 1024)
    assert records.prediction_record(Predicted(missing=()))["missing"] == []


# -- plots and parts of pages ------------------------------------------------------------------------------------------


def point(n_gpus, batch, tokens_per_s=100.0, dollars=2.0, **best):
    found = Hand(dollars_per_billion_tokens=dollars, step_time_s=0.5, own_plan=lambda: Plan(1024), **best)
    return Hand(n_gpus=n_gpus, global_batch=batch, tokens_per_s=tokens_per_s, best=found, reason="")


def test_lines_of_a_range_go_over_gpus_or_over_batches():
    nothing = Hand(n_gpus=16, global_batch=64, best=None, reason="90 GiB", tokens_per_s=None)
    sweep = Hand(points=[point(8, 128), point(8, 64), point(1024, 1280), nothing, point(32, 64)])
    assert plots_of_searches.x_name(sweep) == "GPUs, number"
    assert [(line.label, line.x) for line in plots_of_searches.lines(sweep)] == [
        ("batch 64", [8, 32]), ("batch 128", [8]), ("batch 1,280", [1024]),
    ]  # fmt: skip
    one = Hand(points=[point(1024, 64), point(1024, 128)])
    assert plots_of_searches.x_name(one) == "global batch, sequences"
    assert [(line.label, line.x) for line in plots_of_searches.lines(one)] == [("1,024 GPUs", [64, 128])]
    assert plots_of_searches.lines(Hand(points=[nothing])) == []
    assert plots_of_searches.hover(nothing) == "16 GPUs, batch 64: 90 GiB"
    assert plots_of_searches.hover(point(1024, 64)).startswith("1,024 GPUs, batch 64: 500 ms, 100 tokens/s, ")


def test_a_range_is_drawn_by_its_price_where_it_has_one():
    tokens, price = plots_of_searches.figures_of(Hand(points=[point(8, 64), point(16, 64, dollars=3.0)]))
    assert (tokens.value(point(8, 64)), price.value(point(8, 64))) == (100.0, 2.0)
    assert price.title.startswith("price of tokens")
    _, each = plots_of_searches.figures_of(Hand(points=[point(8, 64), point(16, 64, dollars=None)]))
    assert (each.title, each.value(point(8, 64))) == ("throughput of a GPU, tokens/s", 12.5)


def test_of_many_plans_the_first_third_and_some_of_the_others_are_drawn():
    most = plots_of_searches._MOST_POINTS
    assert plots_of_searches._some(range(most)) == range(most)
    drawn = plots_of_searches._some(range(4 * most))
    first = most // 3
    assert list(drawn[:first]) == list(range(first))
    step = drawn[first + 1] - drawn[first]
    assert (drawn[first], len(set(np.diff(drawn[first:]))), len(drawn) <= most) == (first, 1, True)
    assert step == -(-(4 * most - first) // (most - first))


def test_axes_fit_their_values():
    room = plots_of_searches._ROOM
    assert plots_of_searches._closely("x", [10.0, 20.0], log=False)["range"] == [10 - 10 * room, 20 + 10 * room]
    assert plots_of_searches._closely("x", [10.0, 10.0])["range"] == [10 - 10 * room, 10 + 10 * room]
    assert plots_of_searches._closely("x", [0.0, 0.0], log=False)["range"] == [0.0, 1.0]
    assert plots_of_searches._closely("x", [1.0, 1000.0])["type"] == "log"
    assert "type" not in plots_of_searches._closely("x", [1.0, 1000.0], log=False)


def test_the_head_of_a_page_of_a_range():
    assert (sweep_document._span(8, 8), sweep_document._span(8, 1024)) == ("8", "8 to 1,024")
    sweep = Hand(points=[point(8, 64), point(1024, 64)])
    assert sweep_document._range(sweep) == "8 to 1,024 GPUs, global batch 64"
    nothing = Hand(best=None)
    assert sweep_document._figures(Hand(), nothing) == ("",) * 7
    best = Hand(best=None, objective="time")
    best.best = nothing
    assert (sweep_document._mark(best, nothing), sweep_document._mark(best, Hand())) == (" (best by time)", "")


def test_what_a_heat_map_leaves_out():
    shown = Hand(x="micro_batch", x_left_out=1200, y="tp", y_left_out=0)
    assert heat_cells.heat_words(shown) == "1,200 more values of micro batch, worse than these, are left out"
    both = heat_cells.heat_words(Hand(x="pp", x_left_out=1, y="tp", y_left_out=2))
    assert (
        both
        == "1 more values of pp, worse than these, are left out; 2 more values of tp, worse than these, are left out"
    )
    assert heat_cells.label_lines("a-b") == ["a-b"]
    assert heat_cells.label_lines("tp-cp-dp_shard-dp_replicate-pp") == ["tp-cp-dp_shard-", "dp_replicate-pp"]
    assert heat_cells.label_lines("x" * 40) == ["x" * 40]
    assert (heat_cells._word("memory"), heat_cells._word("time")) == ("Least memory", "Least step time")


def test_the_work_of_a_loop_on_a_page():
    assert page_sections.loop_section(Hand(loop=None)) == []
    loop = by_hand.looped()
    heading, table, mean, saved = page_sections.loop_section(Hand(loop=loop))
    assert (isinstance(heading, Heading), table.numeric) == (True, {1, 2, 3, 4})
    assert (mean.text, saved.text[:21]) == ("Mean step 1.00 s (+0.40%), 8,000 tokens/s/GPU.", "A checkpoint: 1.23 Gi")
    loop.checkpoint = None
    assert len(page_sections.loop_section(Hand(loop=loop))) == 3


def test_what_measurements_lack_on_a_page():
    some = page_sections.explain_section(Hand(explain=("a",), missing=None))
    assert (len(some), some[1].lines) == (2, ("a",))
    lacks = page_sections.explain_section(Hand(explain=("a",), missing=tuple(f"gemm {n}" for n in range(99))))
    assert isinstance(lacks[2], Text)
    assert len(lacks[3].lines) == page_sections._CONTRIBUTORS
    assert (page_sections.dollars(None), page_sections.dollars(1234.5)) == ("", "$1,234.50")


def test_pictures_of_a_search_in_which_nothing_fits(monkeypatch):
    monkeypatch.setattr(pictures_of_results, "picture", lambda title, *plots, note="": (title, len(plots), note))
    monkeypatch.setattr(pictures_of_results, "plans_plot", lambda found: "plot")
    monkeypatch.setattr(pictures_of_results, "heat_picture", lambda shown: "heat")
    found = result(best=None, n_gpus=1024)
    assert pictures_of_results.search_pictures(found, [Hand(x="tp", y="pp")]) == {"heat-tp-pp": "heat"}
    found.best = "x"
    assert pictures_of_results.search_pictures(found, []) == {"plans": ("gpt on 1,024 x h100, global batch 64", 1, "")}
    assert pictures_of_results.sweep_pictures(Hand(best=None)) == {}
    monkeypatch.setattr(pictures_of_results, "figures_of", lambda sweep: [1, 2])
    monkeypatch.setattr(pictures_of_results, "sweep_plot", lambda sweep, panel: panel)
    sweep = Hand(best=1, model="gpt", cluster="h100", objective="time")
    assert pictures_of_results.sweep_pictures(sweep) == {"range": ("gpt on h100, best by time", 2, "")}


def test_a_page_is_written_whole(tmp_path):
    write_page(tmp_path / "page.html", Document("A title", "below", (Text("said"),)))
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "<title>A title</title>" in text
    assert "said" in text


class Axes:
    """What is drawn in a panel."""

    def __init__(self):
        self.visible = True

    def set_visible(self, visible):
        self.visible = visible


@pytest.mark.parametrize(("pairs", "columns", "rows"), [(0, 1, 1), (1, 1, 1), (2, 2, 1), (3, 2, 2), (5, 2, 3)])
def test_a_panel_for_each_pair_of_which_a_point_could_be_simulated(pairs, columns, rows, monkeypatch, tmp_path):
    axes = [Axes() for _ in range(columns * rows)]
    asked, drawn = [], []
    monkeypatch.setattr(pareto_plot, "panels", lambda *size: asked.append(size) or ("figure", axes))
    monkeypatch.setattr(pareto_plot, "_panel", lambda where, pair: drawn.append((axes.index(where), pair)))
    monkeypatch.setattr(pareto_plot, "png", lambda figure: b"a picture")
    ranked = [Hand(ranked=[1]) for _ in range(pairs)]
    pareto_plot.write_pareto_plot(tmp_path / "p.png", Hand(pairs=[Hand(ranked=[]), *ranked]))
    assert asked == [(8.0 * columns, 5.0 * rows, columns, rows)]
    assert drawn == list(enumerate(ranked))
    assert [each.visible for each in axes] == [n < pairs for n in range(len(axes))]
    assert (tmp_path / "p.png").read_bytes() == b"a picture"
