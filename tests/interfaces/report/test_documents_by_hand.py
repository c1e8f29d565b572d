"""Pages of studies, runs and searches: their parts, the words of their figures, and the curves of their plots."""

from __future__ import annotations

from types import SimpleNamespace as Hand

import pytest

from forerun.interfaces.report import documents_of_runs as runs
from forerun.interfaces.report import documents_of_searches as searches
from forerun.interfaces.report import documents_of_studies as studies
from forerun.interfaces.report import plots, plots_of_studies
from forerun.interfaces.report.page import Text
from forerun.interfaces.report.series import Bar, iteration_bars, time_unit

# -- studies -----------------------------------------------------------------------------------------------------------


def point(nodes, efficiency, error="", fits=True, cost=1234.5, note=""):
    step_s = 1.0 / nodes
    parts = {"compute": 0.75 * step_s, "communication": 0.25 * step_s}
    bill = Hand(dollars_per_million_samples=cost)
    figures = {"step_time_s": step_s, "samples_per_s": 100.0 * nodes * efficiency, "peak_reserved_gib": 60.25}
    more = {"breakdown_s": parts, "bill": bill, "error": error, "fits": fits, "note": note}
    return Hand(num_nodes=nodes, n_gpus=8 * nodes, efficiency=efficiency, **figures, **more)


def scaled(**changes):
    request = Hand(sample="image", thresholds=Hand(efficiency=0.8))
    points = (point(1, 1.0), point(200, 0.9, fits=False, note="cut"), point(400, 0.5), point(800, 0, "no split"))
    usual = {
        "request": request, "points": points, "best_by_time": 400, "best_by_efficiency": 1, "best_by_cost": None,
        "break_down": 400, "cause": "exposed communication", "strong": True,
    }  # fmt: skip
    return Hand(**{**usual, **changes})


def test_the_best_scales_and_the_verdict():
    assert studies._best_scales(scaled()).entries == (
        ("fastest that fits", "400 nodes", "3,200 GPUs, 20,000 images/s, $1,234.50 per million images"),
        ("largest efficient number of nodes", "1 node", "8 GPUs, 100 images/s, $1,234.50 per million images"),
        ("cheapest", "none", ""),
        ("breaks down", "400 nodes", "below 80% efficiency"),
    )
    unpriced = scaled(points=(point(1, 1.0, cost=None),), best_by_time=1, break_down=None)
    assert studies._best_scales(unpriced).entries[0][2] == "8 GPUs, 100 images/s"
    assert studies._best_scales(unpriced).entries[3][1] == "nowhere"
    broken = studies._verdict(scaled())
    assert broken == Text(
        "From 400 nodes on the efficiency is below 80%. What grew most: exposed communication.", "warning"
    )
    assert studies._verdict(unpriced).kind == "good"


def test_scales_and_variants_as_rows():
    rows = studies._scales(scaled()).rows
    assert rows == (
        ("1", "8", "1.00 s", "100", "100.0%", "25.0%", "60.2", "$1,234.50", ""),
        ("200", "1,600", "5.00 ms", "18,000", "90.0%", "25.0%", "60.2", "$1,234.50", "cut; does not fit in memory"),
        ("400", "3,200", "2.50 ms", "20,000", "50.0%", "25.0%", "60.2", "$1,234.50", ""),
        ("800", "6,400", "", "", "", "", "", "", "no split"),
    )
    prediction = Hand(step_time_s=9.0, peak_reserved_gib=60.25, fits=False)
    variant = Hand(label="a", axis="device", prediction=prediction, samples_per_s=150.0, error="",
                   breakdown_s={"compute": 1.5, "communication": 0.5}, bill=None)  # fmt: skip
    assert studies._variant(variant, 100.0) == (
        "a", "device", "2.00 s", "150", "x 1.50", "25.0%", "60.2", "", "does not fit in memory",
    )  # fmt: skip
    assert studies._variant(variant, 0.0)[4] == ""
    failed = Hand(label="b", axis="topology", prediction=None, error="no square", samples_per_s=0.0)
    assert studies._variant(failed, 100.0) == ("b", "topology", *[""] * 6, "no square")
    assert studies._variant_words(Hand(sample="image"), variant) == "150 images/s, does not fit"


def test_the_fastest_variant():
    summary = {"fastest": "ring", "fastest_speed_up": 1.256, "fastest_samples_per_s": 125.6}
    base = Hand(samples_per_s=100.0, label="mine")
    found = Hand(summary=lambda: summary, variants=[base], request=Hand(sample="image"))
    (figures,) = studies._fastest(found)
    assert figures.entries == (
        ("fastest that fits", "ring", "1.26 times the experiment as it is"),
        ("its throughput", "126 images/s", ""),
        ("the experiment as it is", "100 images/s", "mine"),
    )
    summary["fastest_speed_up"] = None
    assert studies._fastest(found)[0].entries[0][2] == ""
    summary["fastest"] = None
    assert studies._fastest(found) == [Text("No variant fits in memory.", "warning")]


def disturbed(**changes):
    usual = {
        "undisturbed_s": 1.0, "mean_s": 1.25, "p50_s": 1.1, "p99_s": 2.0, "lost_share": 0.2, "lost_dollars": 1234.5,
        "steps_s": (1.0, 1.0, 1.5, 3.0), "blame": ((1700, 3), (5, 1)), "sweep": (),
    }  # fmt: skip
    return Hand(**{**usual, **changes})


def test_what_stragglers_cost_on_a_page():
    assert studies._straggler_figures(disturbed()).entries == (
        ("undisturbed step", "1.00 s", ""), ("mean step", "1.25 s", "+25.0%"), ("p50", "1.10 s", "+10.0%"),
        ("p99", "2.00 s", "+100.0%"), ("lost to waiting", "20.0%", "$1,234.50 of the run"),
    )  # fmt: skip
    assert studies._straggler_figures(disturbed(lost_dollars=None)).entries[-1] == ("lost to waiting", "20.0%", "")
    _, table = studies._blame(disturbed())
    assert table.rows == (("1,700", "3", "75.0%"), ("5", "1", "25.0%"))
    assert table.caption == "The 2 most frequent of 2 ranks"
    assert studies._blame(disturbed(blame=()))[1].text.startswith("No rank: ")
    many = studies._blame(disturbed(blame=tuple((n, 1) for n in range(1000))))[1]
    assert (len(many.rows), many.caption) == (
        studies._BLAMED, f"The {studies._BLAMED} most frequent of 1,000 ranks",
    )  # fmt: skip
    assert studies._sweep(disturbed()) == []
    row = Hand(probability=0.01, slowdown=1.5, mean_s=1.2, p99_s=2.5, lost_share=0.1, lost_dollars=None)
    _, swept = studies._sweep(disturbed(sweep=(row,)))
    assert swept.rows == (("0.01", "1.5", "1.20 s", "2.50 s", "10.0%", ""),)
    assert swept.numeric == {0, 1, 2, 3, 4, 5}


def test_curves_of_a_scaling_study():
    efficiency = plots_of_studies.efficiency_plot(scaled())
    ideal, threshold, curve, broken, small = efficiency.data
    assert (ideal["x"], ideal["y"], threshold["y"], threshold["name"]) == (
        [8, 3200],
        [100, 100],
        [80, 80],
        "threshold, 80 %",
    )
    assert (curve["x"], curve["y"]) == ([8, 1600, 3200], [100.0, 90.0, 50.0])
    assert (broken["name"], broken["x"], broken["y"]) == ("breaks down", [3200], [50.0])
    assert (small["name"], small["x"], small["y"]) == ("does not fit in memory", [1600], [90.0])
    assert efficiency.about == "Strong scaling: efficiency 100 % at 8 GPUs; 90 % at 1600 GPUs; 50 % at 3200 GPUs"
    assert efficiency.layout["yaxis"]["range"] == [0, pytest.approx(112.0)]
    rates = plots_of_studies.throughput_plot(scaled(strong=False))
    ideal, curve, *_ = rates.data
    assert (ideal["y"], curve["y"]) == ([100.0, 20_000.0, 40_000.0], [100.0, 18_000.0, 20_000.0])
    assert rates.about.startswith("Weak scaling: images/s 100 at 8 GPUs; 18,000 at 1600 GPUs; ")
    nothing = scaled(points=(point(1, 0, "no"),), break_down=None)
    assert [one["x"] for one in plots_of_studies.throughput_plot(nothing).data] == [[], []]


def test_step_times_in_forty_bars():
    """From 1 to 3 s a bar is 0.05 s wide: 1.5 s is in the eleventh, and the longest in the last one."""
    plot = plots_of_studies.spread_plot(disturbed())
    bars, *marks = plot.data
    assert (len(bars["x"]), bars["width"], bars["x"][0], bars["x"][-1]) == (40, 0.05, 1.025, 2.975)
    assert {i: count for i, count in enumerate(bars["y"]) if count} == {0: 2, 10: 1, 39: 1}
    assert [mark["x"] for mark in marks] == [[1.0, 1.0], [1.25, 1.25], [1.1, 1.1], [2.0, 2.0]]
    assert {tuple(mark["y"]) for mark in marks} == {(0, 2)}
    assert plot.layout["yaxis"]["range"] == [0, 2.1]
    assert plot.about == "Step times: undisturbed 1.00 s; mean 1.25 s; p50 1.10 s; p99 2.00 s"
    alike = plots_of_studies.spread_plot(disturbed(steps_s=(2.0, 2.0))).data[0]
    assert (alike["width"], alike["y"][0]) == (0.02, 2)
    curve, *_ = plots_of_studies.cumulated_plot(disturbed()).data
    assert (curve["x"], curve["y"]) == ([1.0, 1.5, 3.0], [50.0, 75.0, 100.0])
    most = plots_of_studies._MOST_POINTS
    long = plots_of_studies.cumulated_plot(disturbed(steps_s=tuple(1 + n / 1e4 for n in range(2 * most + 1)))).data[0]
    assert (long["x"][-1], len(long["x"]) <= most + 1) == (pytest.approx(1 + 2 * most / 1e4), True)


def test_causes_side_by_side():
    rows = [("a", {"compute": 0.002, "communication": 0.001}, "fast"), ("b", {"compute": 0.004}, "slow")]
    plot = plots.causes_plot(rows, "about")
    assert [(one["x"], one["y"]) for one in plot.data] == [
        ([2.0, 4.0], ["a<br>fast", "b<br>slow"]), ([1.0, 0.0], ["a<br>fast", "b<br>slow"]),
    ]  # fmt: skip
    assert (plot.layout["xaxis"]["range"], plot.height_px) == ([0.0, 4.2], 150 + 2 * 46)
    assert plot.layout["xaxis"]["title"]["text"] == "time of a step, ms"
    assert plots.causes_plot([], "about").layout["xaxis"]["range"] == [0.0, 1.05]
    assert [time_unit(longest) for longest in (1.0, 0.999, 1e-3, 9e-4)] == [
        ("s", 1.0), ("ms", 1e-3), ("ms", 1e-3), ("us", 1e-6),
    ]  # fmt: skip


# -- runs --------------------------------------------------------------------------------------------------------------


def iteration(first, repeats=1, time_s=1.0, rank=-1, note=""):
    breakdown = {"compute": 0.75 * time_s, "waiting": 0.25 * time_s}
    return Hand(first=first, repeats=repeats, step_time_s=time_s, samples=2048, slowest_rank=rank, note=note,
                breakdown_s=breakdown)  # fmt: skip


def test_iterations_on_a_page(monkeypatch):
    monkeypatch.setattr(runs, "iterations_plot", lambda every: f"plot of {len(every)}")
    every = [iteration(n, time_s=1.0 + (n % 5), rank=1700 if n == 3 else -1) for n in range(20)]
    every.append(iteration(20, 1980, 9.0, note="warm-up"))
    heading, text, plot, table = runs._iterations(Hand(iterations=every, request=Hand(num_iterations=2000)))
    assert (heading.text, plot) == ("Iterations", "plot of 21")
    assert text.text == "2,000 iterations by cause. 21 of them, or runs of equal ones, differ."
    assert len(table.rows) == runs._SLOWEST
    assert table.rows[0] == ("20 to 1,999", "9.00 s", "2,048", "", "warm-up")
    assert [row[0] for row in table.rows[1:5]] == ["4", "9", "14", "19"]
    assert table.caption == f"The {runs._SLOWEST} slowest"
    assert runs._iteration(every[3]) == ("3", "4.00 s", "2,048", "1,700", "")
    alike = runs._iterations(Hand(iterations=[iteration(0, 2000)], request=Hand(num_iterations=2000)))
    assert (len(alike), alike[1].text) == (3, "2,000 iterations by cause. They are all alike.")
    assert runs._undisturbed(Hand(iterations=[1])) == []
    least, most = Hand(peak_reserved_gib=60.0), Hand(peak_reserved_gib=61.25)
    assert len(runs._undisturbed(Hand(iterations=[1, 2], fullest=least, prediction=least))) == 1
    assert runs._undisturbed(Hand(iterations=[1, 2], fullest=most, prediction=least))[1] == (
        "The iteration with the highest peak needs 61.2 GiB."
    )


def test_the_figures_of_a_run():
    bill = Hand(gpu_hours=1234.5, energy_kwh=2345.678, dollars=98.7, dollars_per_hour=20.0)
    prediction = Hand(n_gpus=1024, tokens_per_s_per_gpu=2000.0, mfu=0.4, hfu=0.5, memory_limit_gib=79.2)
    run = Hand(
        request=Hand(sample="image", num_iterations=4000), prediction=prediction, bill=bill, mean_s=2.0, p50_s=1.9,
        p99_s=2.5, samples_per_s=1024.0, tokens_per_s=2e6, fits=False, peak_reserved_gib=90.25, total_s=8000.0,
    )  # fmt: skip
    assert runs._run_figures(run).entries == (
        ("mean iteration", "2.00 s", "p50 1.90 s, p99 2.50 s"), ("images/s", "1,024", "on 1,024 GPUs"),
        ("tokens/s", "2,000,000", "2,000 of a GPU"), ("MFU", "40.0%", "HFU 50.0%, undisturbed"),
        ("peak memory, reserved", "90.2 GiB", "of 79.2: does not fit"), ("whole run", "8,000 s", "4,000 iterations"),
        ("GPU hours", "1,234.50", "2,345.68 kWh"), ("cost of the run", "$98.70", "$20.00 per hour"),
    )  # fmt: skip
    run.tokens_per_s, prediction.mfu, bill.dollars, run.fits = None, None, None, True
    assert [name for name, _, _ in runs._run_figures(run).entries] == [
        "mean iteration", "images/s", "peak memory, reserved", "whole run", "GPU hours",
    ]  # fmt: skip


def test_advice_on_a_page():
    sides = [Hand(samples_per_s=rate, peak_reserved_gib=gib) for rate, gib in ((100.0, 60.0), (125.0, 70.25))]
    each = Hand(title="larger batch", aim="time", gain=0.25, before=sides[0], after=sides[1], caveat="convergence")
    heading, how, table = runs._advice([each], "image")
    assert (heading.text, how.kind) == ("What would help", "note")
    assert table.rows == (("larger batch", "time", "+25.0%", "100 to 125", "60.0 to 70.2", "convergence"),)
    assert runs._advice([], "image")[1].text.startswith("None of the simulated changes")


def test_many_iterations_are_averaged():
    every = [iteration(n, 2 if n == 0 else 1, 1.0 + n % 2, note="odd" if n == 3 else "") for n in (0, *range(2, 9))]
    assert [bar.label for bar in iteration_bars(every, 8)] == ["0 to 1", *map(str, range(2, 9))]
    bars = iteration_bars(every, 3)
    assert [(bar.first, bar.count) for bar in bars] == [(0, 3), (3, 3), (6, 3)]
    # steps 0, 1 and 2 take 1 s; 3, 4 and 5 take 2, 1 and 2 s
    assert [bar.breakdown_s["compute"] for bar in bars] == [0.75, 0.75 * 5 / 3, 0.75 * 4 / 3]
    assert [bar.note for bar in bars] == ["", "odd", ""]
    assert (Bar(4, 1, {}, "").label, Bar(4, 96, {}, "").label) == ("4", "4 to 99")
    noted = iteration_bars([iteration(n, note=f"note {n}") for n in range(4)], 1)
    assert noted[0].note == "note 0; note 1 ..."


# -- searches ----------------------------------------------------------------------------------------------------------


def test_what_became_of_the_other_plans(monkeypatch):
    monkeypatch.setattr(searches, "plan_words", lambda plan: f"plan {plan}")
    counts = {"ok": 1200, "out_of_memory": 30, "skipped": 4000, "impossible": 9}
    found = Hand(
        counts=counts, memory_limit_gib=79.25, objective="time", out_of_memory={"weights": 1000, "other": 2},
        impossible={f"rule {n}": 1000 + n for n in range(20)}, impossible_examples={"rule 0": "tp=3"},
        proof="all of it", too_large=[Hand(plan=n, reason=f"needs {n}") for n in range(20)],
    )  # fmt: skip
    heading, table, proof, near, rules = searches._left_out(found)
    assert (heading.text, proof.text) == ("Why the others were left out", "All of it.")
    assert table.rows == (
        ("fit, and were simulated", "1,200", ""),
        ("run out of 79.2 GiB", "30", "weights is the largest part of 1,000, other is the largest part of 2"),
        ("not simulated: a lower bound proves that they are slower", "4,000", ""),
        ("impossible", "9", ""),
    )
    most = searches._REASONS
    assert (near.rows[0], len(near.rows), near.caption) == (("plan 0", "needs 0"), most, f"The {most} nearest misses")
    assert (rules.rows[:2], len(rules.rows)) == ((("rule 0", "1,000", "tp=3"), ("rule 1", "1,001", "")), most)
    assert rules.caption == f"The {most} most frequent of 20 rules that plans break"
    counts |= {"same": 7, "renamed": 8}
    found.objective, found.impossible, found.too_large = "memory", {}, []
    _, table, _ = searches._left_out(found)
    assert [row[1] for row in table.rows] == ["1,200", "30", "4,000", "7", "8", "9"]
    assert table.rows[2][0].endswith("larger")


def test_the_best_plans_on_a_page(monkeypatch):
    monkeypatch.setattr(searches, "plan_words", lambda plan: "plan")
    monkeypatch.setattr(searches, "mark", lambda each: "!")
    monkeypatch.setattr(searches, "notes_on", lambda places: ["a note"])
    place = Hand(step_time_s=2.0, tokens_per_s_per_gpu=1234.0, mfu=0.4, peak_reserved_gib=60.25, exposed_comm_s=0.5,
                 bubble_s=0.25, own_plan=lambda: None)  # fmt: skip
    found = Hand(ranked=[place] * 1200, top=lambda top: [place] * top)
    heading, table, note = searches.ranking_parts(found, 2)
    assert (heading.text, note) == ("The best plans", Text("a note", "note"))
    assert table.rows[1] == ("2", "plan!", "2.00 s", "1,234", "40.0%", "60.2", "25.0%", "12.5%")
    assert table.caption == "The best 2 of 1,200 plans that fit and were simulated"
    assert searches.ranking_parts(Hand(ranked=[]), 2) == []
    front = searches._front(Hand(places=[place], certainty="exact"))
    assert front.rows == (("2.00 s", "1,234", "60.2", "plan"),)
    assert front.numeric == {0, 1, 2}


def test_heat_maps_of_a_page_say_what_they_leave_out(monkeypatch):
    monkeypatch.setattr(searches, "heat_title", lambda shown: f"title {shown}")
    monkeypatch.setattr(searches, "heat_plot", lambda shown: f"plot {shown}")
    monkeypatch.setattr(searches, "heat_words", lambda shown: "left out" if shown == "b" else "")
    parts = searches._maps(["a", "b"])
    assert [getattr(part, "text", part) for part in parts[2:]] == ["title a", "plot a", "title b", "plot b", "left out"]
    assert searches._maps([]) == []
