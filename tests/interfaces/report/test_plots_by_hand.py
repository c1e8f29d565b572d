"""Plots of a step and sections of pages, of figures that are written by hand."""

from __future__ import annotations

from types import SimpleNamespace as Hand

import pytest

from forerun.interfaces.report import page_sections as sections
from forerun.interfaces.report import plots
from forerun.interfaces.report.page import Heading, Listing, Plot, Table, Text, plot_text
from forerun.interfaces.report.style import BLUE, CAUSE_LOOKS, MEMORY_LOOKS, VERMILLION, WORK_LOOKS, Look

FIRST, SECOND, THIRD = list(WORK_LOOKS)[:3]
LABELS = [WORK_LOOKS[name].label for name in (FIRST, SECOND, THIRD)]
S_PS = 10**12


def test_bars_with_their_values():
    plot = plots.labelled_bars([("a", "1 s", 50.0), ("b", "2 s", -25.0)], "change, %", "about")
    (bars,) = plot.data
    assert (bars["y"], bars["x"], bars["marker"]["color"]) == (["a<br>1 s", "b<br>2 s"], [50.0, -25.0], [BLUE, BLUE])
    assert (bars["customdata"], plot.height_px, plot.layout["showlegend"]) == (["", ""], 80 + 2 * 44, False)
    x, y = plot.layout["xaxis"], plot.layout["yaxis"]
    assert (x["zeroline"], x["fixedrange"], y["fixedrange"], y["autorange"]) == (True, True, True, "reversed")
    three = [("a", "1 s", 50.0), ("b", "2 s", -25.0), ("c", "0 s", 0.0)]
    hovered = plots.labelled_bars(three, "x", "y", ["p", "q", "r"])
    assert hovered.data[0]["marker"]["color"] == [VERMILLION, BLUE, VERMILLION]
    assert hovered.data[0]["customdata"] == ["p", "q", "r"]
    assert plots.labelled_bars([], "x", "y").height_px == 80 + 44


def test_names_in_plots_are_no_html():
    assert plot_text("a \"b\" <c> & 'd'") == "a \"b\" &lt;c&gt; &amp; 'd'"


def test_the_step_by_cause():
    breakdown = {FIRST: 0.5, SECOND: 1.4, THIRD: 0.0019}
    plot = plots.step_plot(Hand(step_time_s=2.0, breakdown=breakdown))
    (bars,) = plot.data
    assert bars["y"] == [f"{LABELS[1]}<br>70.0%, 1.40 s", f"{LABELS[0]}<br>25.0%, 500 ms", "other<br>5.0%, 100 ms"]
    assert bars["x"] == [70.0, 25.0, 5.0]
    assert plot.about == f"The step of 2.00 s by cause: {LABELS[1]} 70.0%; {LABELS[0]} 25.0%; other 5.0%"
    whole = plots.step_plot(Hand(step_time_s=2.0, breakdown={FIRST: 1.998, SECOND: 0.002}))
    assert whole.data[0]["x"] == [99.9, 0.1]


def use(name, value, threshold, over, **more):
    return Hand(name=name, value=value, threshold=threshold, is_bottleneck=over, text=f"about {name}", **more)


def test_the_use_of_resources():
    plot = plots.use_plot([use("network", 1.2, 0.8, True), use("memory", 0.5, 0.9, False)])
    bars, marks = plot.data
    assert (bars["x"], marks["x"]) == ([120.0, 50.0], [80.0, 90.0])
    assert bars["y"] == marks["y"] == ["network, 120.0%<br>a bottleneck", "memory, 50.0%"]
    assert (bars["marker"]["color"], bars["marker"]["pattern"]["shape"]) == ([VERMILLION, BLUE], ["/", ""])
    assert plot.layout["xaxis"]["range"] == [0, pytest.approx(126.0)]
    assert plots.use_plot([use("memory", 0.5, 0.9, False)]).layout["xaxis"]["range"] == [0, 105.0]
    assert (plot.height_px, plot.about) == (150 + 2 * 46, "Use of resources: network 120.0%; memory 50.0%")


def piece(work, start_s, end_s, busy_s=None, text="kernel"):
    busy_ps = int((end_s - start_s if busy_s is None else busy_s) * S_PS)
    return Hand(work=work, start_ps=int(start_s * S_PS), end_ps=int(end_s * S_PS), busy_ps=busy_ps, text=text)


def test_lanes_over_the_step():
    lanes = [
        Hand(label="compute", slices=[piece(SECOND, 0.0, 0.002), piece(FIRST, 0.002, 0.003, 0.0005, "a < b")]),
        Hand(label="gather", slices=[piece(FIRST, 0.001, 0.0010001)]),
    ]
    plot = plots.lanes_plot(lanes, int(0.004 * S_PS), "about")
    first, second = plot.data
    assert (first["name"], second["name"]) == (LABELS[0], LABELS[1])
    assert (first["y"], first["base"], first["x"]) == (["compute", "gather"], [2.0, 1.0], [1.0, 0.0001])
    assert first["customdata"] == [["a &lt; b", "2.00 ms", "500 us"], ["kernel", "1.00 ms", "0.10 us"]]
    hatch = WORK_LOOKS[FIRST].hatch
    assert first["marker"]["pattern"]["shape"] == [hatch, ""]  # what is too narrow has no hatch
    assert plot.layout["xaxis"]["range"] == [0.0, 4.0]
    assert plot.layout["yaxis"]["categoryarray"] == ["gather", "compute"]
    assert plot.height_px == 210 + 2 * 40
    least = plots.lanes_plot([Hand(label="x", slices=[piece(SECOND, 0, 0.004), piece(SECOND, 0, 0.003999)])], S_PS, "")
    assert least.data[0]["marker"]["pattern"]["shape"] == [WORK_LOOKS[SECOND].hatch, ""]


def curve(peak=1, **changes):
    look = next(iter(MEMORY_LOOKS.values()))
    usual = {"rank_class": "stage 0", "time_s": [0.0, 0.5, 1.0], "parts_gib": [(look, [1.0, 4.0, 2.0])],
             "total_gib": [1.0, 4.0, 2.0], "peak": peak, "end_s": 1.5}  # fmt: skip
    return Hand(**{**usual, **changes})


def test_memory_over_the_step(monkeypatch):
    monkeypatch.setattr(plots, "memory_curve", lambda simulation: curve())
    plot = plots.memory_plot(Hand(prediction=Hand(memory_limit_gib=10.0)))
    area, limit = plot.data
    assert (area["x"], area["y"]) == ([0.0, 0.5, 1.0, 1.5], [1.0, 4.0, 2.0, 2.0])
    assert (limit["x"], limit["y"], limit["name"]) == ([0.0, 1.5], [10.0, 10.0], "limit of the device, 10.0 GiB")
    assert plot.layout["yaxis"]["range"] == [0.0, pytest.approx(10.8)]
    (note,) = plot.layout["annotations"]
    assert (note["x"], note["y"], note["text"], note["ax"]) == (0.5, 4.0, "peak 4.00 GiB", 50)
    far = plots.memory_plot(Hand(prediction=Hand(memory_limit_gib=10.001)))
    assert (len(far.data), far.layout["yaxis"]["range"]) == (1, [0.0, pytest.approx(4.48)])
    over = plots.memory_plot(Hand(prediction=Hand(memory_limit_gib=3.0)))
    assert over.layout["yaxis"]["range"] == [0.0, pytest.approx(4.32)]
    monkeypatch.setattr(plots, "memory_curve", lambda simulation: curve(2, time_s=[0.0, 0.5, 0.91]))
    (late,) = plots.memory_plot(Hand(prediction=Hand(memory_limit_gib=10.0))).layout["annotations"]
    assert late["ax"] == -50
    assert plots._peak_note(curve(2, time_s=[0.0, 0.5, 1.2], end_s=2.0), 4.0, 1.0)["ax"] == 50


def iteration(first, repeats, compute_s, waiting_s, note=""):
    return Hand(first=first, repeats=repeats, breakdown_s={"compute": compute_s, "waiting": waiting_s}, note=note)


def test_few_iterations_are_bars_with_names():
    plot = plots.iterations_plot([iteration(0, 1, 0.75, 0.25, "warm"), iteration(1, 99, 0.96, 0.04)])
    compute, waiting = plot.data
    assert (compute["name"], waiting["name"]) == (CAUSE_LOOKS["compute"].label, CAUSE_LOOKS["waiting"].label)
    assert (compute["x"], compute["y"], waiting["y"]) == (["0<br>warm", "1 to 99"], [0.75, 0.96], [0.25, 0.04])
    assert (compute["text"], waiting["text"]) == (["75%", "96%"], ["25%", ""])
    assert plot.layout["barmode"] == "stack"
    six = plots.iterations_plot([iteration(0, 1, 0.94, 0.06)])
    assert six.data[1]["text"] == ["6%"]


def test_many_iterations_are_areas():
    every = [iteration(n, 1, 0.002, 0.001) for n in range(plots.FEW + 1)]
    plot = plots.iterations_plot(every)
    compute, waiting = plot.data
    assert (compute["x"][0], compute["x"][-1], len(compute["x"])) == (0.0, plots.FEW + 1, plots.FEW + 2)
    assert (set(compute["y"]), set(waiting["y"])) == ({2.0}, {1.0})
    assert plot.layout["xaxis"]["range"] == [0.0, plots.FEW + 1]
    assert plot.layout["yaxis"]["title"]["text"] == "time of an iteration, ms"
    assert len(plots.iterations_plot(every[:-1]).data[0]["x"]) == plots.FEW


def test_axes_are_logarithmic_where_values_are_far_apart():
    assert "type" not in plots.far_apart("x", [1.0, 3.99])
    wide = plots.far_apart("x", [1.0, 100.0])
    room = 0.08 * 2 + 0.05
    assert (wide["type"], wide["range"]) == ("log", [pytest.approx(-room), pytest.approx(2 + room)])
    assert wide["title"]["text"] == "x (logarithmic)"
    assert wide["tickvals"] == [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500][: len(wide["tickvals"])]
    assert wide["ticktext"][3:6] == ["1", "2", "5"]
    assert plots.far_apart("x", [1.0, 4.0])["type"] == "log"
    assert plots.far_apart("x", [])["rangemode"] == "tozero"


def test_layouts_leave_room_for_a_legend_where_there_is_one():
    assert plots.layout({}, {})["margin"]["t"] == 66
    assert plots.layout({}, {}, showlegend=True)["margin"]["t"] == 66
    assert plots.layout({}, {}, showlegend=False)["margin"]["t"] == 30
    assert plots.layout({}, {}, bargap=0.5)["bargap"] == 0.5
    assert plots.rounded([1.23456789, 1234567.89]) == [1.23457, 1234570.0]
    assert plots.axis("x", zeroline=True)["zeroline"] is True
    assert plots.axis("x")["zeroline"] is False
    look = Look("compute", BLUE, "/")
    assert plots.marker(look)["pattern"]["shape"] == "/"
    (area,) = plots.stacked_areas([0, 1], [(look, [2, 3])], "GiB")
    assert (area["name"], area["x"], area["y"], area["line"]["shape"]) == ("compute", [0, 1], [2, 3], "hv")


# -- sections ----------------------------------------------------------------------------------------------------------


def predicted(**changes):
    usual = {
        "step_time_s": 2.0, "step_time_low_s": 1.8, "step_time_high_s": 2.4, "plan": Hand(pp=1), "n_gpus": 1024,
        "tokens_per_s_per_gpu": 2000.0, "sample": "image", "samples_per_s_per_gpu": None, "mfu": 0.4, "hfu": 0.5,
        "memory_limit_gib": 80.0, "peak_reserved_gib": 66.25, "peak_allocated_gib": 60.0, "exposed_comm_s": 0.5,
        "bubble_s": 0.1, "bottleneck": FIRST, "dollars_per_billion_tokens": None, "fits": True, "fit_in_doubt": False,
        "memory_recorded": True, "warnings": (), "device_gib": 70.0, "peak_rank_class": "stage 0",
        "peak_owner": "layer 3", "network": None,
    }  # fmt: skip
    return Hand(**{**usual, **changes})


def test_the_figures_of_a_step_on_a_page():
    assert sections.figures(predicted()).entries == (
        ("step time", "2.00 s", "(80 %: 1.80 s to 2.40 s) on 1,024 GPUs"),
        ("tokens/s of a GPU", "2,000", "2,048,000 of all"), ("MFU", "40.0%", "HFU 50.0%"),
        ("peak memory, reserved", "66.2 GiB", "of 80.0 GiB: fits"), ("exposed communication", "25.0%", "500 ms"),
        ("largest cause", LABELS[0], "of the step's time"),
    )  # fmt: skip
    images = {"tokens_per_s_per_gpu": None, "samples_per_s_per_gpu": 3.0, "mfu": None}
    other = sections.figures(predicted(**images, plan=Hand(pp=2), dollars_per_billion_tokens=1234.5)).entries
    assert (other[1], other[4], other[6]) == (
        ("images/s of a GPU", "3.00", "3,072 of all"), ("waiting for other stages", "5.0%", "100 ms"),
        ("cost", "$1,234.50", "per billion tokens, list price"),
    )  # fmt: skip
    assert "waiting for other stages" in [name for name, _, _ in sections.figures(predicted(plan=None)).entries]
    warned = sections.warnings(predicted(fits=False, warnings=("slow link",)))
    assert [(part.text[:22], part.kind) for part in warned] == [
        ("This plan does not fit", "warning"), ("slow link", "warning"),
    ]  # fmt: skip
    assert sections.warnings(predicted()) == []


def test_where_the_time_goes(monkeypatch):
    for name in ("step_plot", "timeline_plot"):
        monkeypatch.setattr(sections, name, lambda *_, name=name: name)
    kernels = [Hand(name=f"k{n}", kind="product", count=1200, total_s=0.5, share=0.25) for n in range(20)]
    monkeypatch.setattr(sections, "kernel_times", lambda simulation, rank: kernels)
    pieces = [Hand(name=f"p{n}", cause=SECOND, count=1200, time_ps=S_PS // 2, share=0.25) for n in range(12)]
    path = Hand(step_ps=2 * S_PS, by_cause_ps={FIRST: S_PS}, contributors=pieces)
    classes = [Hand(name="stage 0"), Hand(name="stage 1")]
    simulation = Hand(prediction=predicted(), slowest=1, program=Hand(rank_classes=classes))
    parts = sections.time_sections(simulation, path)
    texts = [part.text for part in parts if isinstance(part, (Heading, Text))]
    assert texts[:3] == ["Where the time goes", "The step of 2.00 s on stage 1, which sets the pace.", "Critical path"]
    causes, chain, work = (part for part in parts if isinstance(part, Table))
    assert (causes.rows, causes.numeric) == (((LABELS[0], "1.00 s", "50.0%"),), {1, 2})
    assert (chain.rows[0], len(chain.rows)) == (("p0", LABELS[1], "1,200", "500 ms", "25.0%"), sections._CONTRIBUTORS)
    assert (chain.caption, chain.numeric) == ("The 10 largest of 12 pieces", {2, 3, 4})
    assert (work.rows[0], len(work.rows)) == (("k0", "product", "1,200", "500 ms", "25.0%"), sections._KERNELS)
    assert work.caption.startswith("The 15 of 20 kernels")
    assert work.numeric == {2, 3, 4}
    simulation.program.rank_classes, simulation.slowest = classes[:1], 0
    assert sections.time_sections(simulation, path)[1].text == "The step of 2.00 s."


def test_what_collectives_are_made_of():
    row = Hand(name="gather", count=1200, total_s=1.0, wire_s=0.5, latency_s=-0.1, protocol_s=0.2, sharing_s=0.0,
               waiting_s=0.3, way="ring")  # fmt: skip
    _, _, table = sections.communication_section([row])
    assert table.rows == (("gather", "1,200", "1.00 s", "500 ms", "0 s", "200 ms", "0 s", "300 ms", "ring"),)
    assert table.numeric == {1, 2, 3, 4, 5, 6, 7}
    assert sections.communication_section([]) == []


def test_busy_links_on_a_page():
    assert sections.network_section(predicted()) == []
    axes = [Hand(axis="tp", busiest_link="0 -> 1", busy_s=0.25, utilisation=0.5)]
    _, text, plot = sections.network_section(predicted(network=Hand(topology="ring", axes=axes)))
    assert text.text.startswith("The busiest link of ring ")
    assert plot.data[0]["x"] == [50.0]
    assert plot.about == "Use of the busiest links: tp: 0 -> 1 50.0%"


@pytest.mark.parametrize(("limit", "far"), [(80.0, False), (150.0, False), (150.001, True)])
def test_memory_on_a_page(limit, far, monkeypatch):
    monkeypatch.setattr(sections, "memory_plot", lambda simulation: "plot")
    one, two = list(MEMORY_LOOKS)[:2]
    found = predicted(memory_by_category_gib={one: 20.0, two: 40.0}, memory_limit_gib=limit)
    _, text, plot, table = sections.memory_sections(Hand(prediction=found, memory=[1, 2]))
    assert plot == "plot"
    assert text.text.startswith("Allocated memory of stage 0, which is the fullest. The peak stands at layer 3.")
    assert text.text.endswith("lies far above the plot.") == far
    assert table.numeric == {1, 2, 3}
    assert [row[0] for row in table.rows[:2]] == [MEMORY_LOOKS[two].label, MEMORY_LOOKS[one].label]
    if limit == 80.0:
        assert [row[1:] for row in table.rows] == [
            ("40.00", "66.7%", "50.0%"), ("20.00", "33.3%", "25.0%"), ("60.00", "100.0%", "75.0%"),
            ("66.25", "", "82.8%"), ("70.00", "", "87.5%"),
        ]  # fmt: skip
    alone = sections.memory_sections(Hand(prediction=found, memory=[1]))[1]
    assert "fullest" not in alone.text
    nothing = predicted(memory_by_category_gib={}, peak_allocated_gib=0.0)
    assert sections.memory_sections(Hand(prediction=nothing, memory=[1]))[3].rows[0][1] == "1.00"


def test_bottlenecks_on_a_page():
    parts = [Hand(name="gather", value=0.5, share=0.25), Hand(name="tiny", value=0.1, share=0.0009)]
    category = next(iter(MEMORY_LOOKS))
    held = [Hand(name=category, value=12.345, share=0.001)]
    network = use("network", 0.9, 0.8, True, contributors=parts)
    memory = use("memory", 0.5, 0.9, False, contributors=held)
    _, verdict, plot, listing, table = sections.bottleneck_sections(Hand(found=[network], usages=[network, memory]))
    assert verdict == Text("Above the threshold: network.", "warning")
    assert isinstance(plot, Plot)
    assert listing == Listing(("network: about network", "memory: about memory"))
    assert table.rows == (
        ("network", "gather", "500 ms", "25.0%"), ("memory", MEMORY_LOOKS[category].label, "12.35 GiB", "0.1%"),
    )  # fmt: skip
    assert table.numeric == {2, 3}
    assert sections.bottleneck_sections(Hand(found=[], usages=[memory]))[1].kind == "good"
    network.contributors = parts[:1] * 99
    assert len(sections._contributors(network)) == sections._CONTRIBUTORS


def test_gains_of_a_better_machine_and_the_bill():
    row = Hand(label="links twice as fast", step_time_s=1.5, change=-0.25, how="all of them")
    _, _, plot, table = sections.sensitivity_sections([row])
    assert plot.data[0]["x"] == [-25.0]
    assert (table.rows, table.numeric) == ((("links twice as fast", "1.50 s", "-25.0%", "all of them"),), {1, 2})
    bill = Hand(gpu_hours=1234.5, dollars=10.0, dollars_per_hour=2.0, dollars_per_billion_tokens=None, energy_kwh=7.5,
                dollars_per_million_samples=3.0, energy_dollars=None)  # fmt: skip
    heading, table = sections.bill_section(bill, "images")
    assert (heading.text, table.numeric) == ("Cost", {1})
    assert table.rows == (
        ("GPU hours", "1,234.50"), ("dollars of the run", "$10.00"), ("dollars per hour", "$2.00"),
        ("dollars per million images", "$3.00"), ("energy, kWh", "7.50"),
    )  # fmt: skip
    bill.dollars = None
    assert sections.bill_section(bill, "images")[2].kind == "note"


def test_what_reproduces_a_page():
    assert [type(part).__name__ for part in sections.reproduce_section("", {}, "", ())] == ["Heading", "Text"]
    parts = sections.reproduce_section("forerun x", {"b": 1, "a": 2}, "The plan", ("50 GB/s",))
    assert [type(part).__name__ for part in parts] == ["Heading", "Text", "Code", "Text", "Listing", "Code"]
    assert parts[-1].text == "b: 1\na: 2\n"
