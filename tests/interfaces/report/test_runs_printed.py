"""What is printed of a run, a comparison, a model and a prediction, by known answers."""

from __future__ import annotations

from types import SimpleNamespace as Hand

import figures_by_hand as by_hand
import pytest
from printed_lines import crowded, joined, words

from forerun.interfaces.report import console, experiment_console, layer_table
from forerun.interfaces.report.allocation import allocation_record
from forerun.interfaces.report.calibration_table import print_calibration
from forerun.interfaces.report.outer_steps import print_outer_steps

GIB = 2**30


@pytest.fixture
def plain(monkeypatch):
    """Without the words of plans and bands, which other tests hold."""
    monkeypatch.setattr(experiment_console, "plan_words", lambda plan: "FSDP=8")
    said = {name: lambda prediction, name=name: name for name in ("step_time", "mfu", "reserved", "fits")}
    monkeypatch.setattr(experiment_console, "bands", Hand(**said))
    monkeypatch.setattr(console, "plan_words", lambda plan: "FSDP=8")


def bill(**changes):
    usual = {
        "gpu_hours": 1234.5, "energy_kwh": 2345.67, "dollars": 9876.5, "dollars_per_hour": 20.0,
        "dollars_per_billion_tokens": 1.5, "dollars_per_million_samples": None,
    }  # fmt: skip
    return Hand(**{**usual, **changes})


def ran(**changes):
    request = Hand(name="mine", num_iterations=4000, sample="image", echo=("bandwidth: 50 GB/s",))
    request.setup = Hand(plan=Hand(stack="torchtitan"), samples_per_step=2048, pattern=None)
    prediction = Hand(
        model="gpt", n_gpus=1024, cluster="h100", hfu=0.5, peak_allocated_gib=60.0, memory_limit_gib=79.2,
        warnings=("slow link",),
    )  # fmt: skip
    usual = {
        "request": request, "prediction": prediction, "total_s": 8000.0, "mean_s": 2.0, "p50_s": 1.9, "p99_s": 2.5,
        "samples_per_s": 1024.0, "tokens_per_s": None, "bill": bill(),
        "breakdown_s": {"compute": 1.5, "host": 0.0, "waiting": 0.5},
    }  # fmt: skip
    return Hand(**{**usual, **changes})


FIGURES = [
    "mine: gpt on 1,024 x h100",
    "FSDP=8, 2,048 images a step, stack torchtitan",
    "bandwidth: 50 GB/s",
    "iterations 4,000 in 8,000 s",
    "step time 2.00 s (p50 1.90 s, p99 2.50 s)",
    "images/s 1,024",
    "undisturbed step step_time",
    "MFU, HFU mfu, 50.0%",
    "peak memory 60.0 GiB allocated, reserved of 79.2: fits",
    "GPU hours 1,234.50, 2,345.7 kWh",
    "cost 9,876.50 dollars (20.00 an hour), 1.50 a billion tokens",
    "warning: slow link",
    "Where the time goes (slowest rank)",
    "compute 1.50 s 75.0% " + "#" * 30,
    "waiting 500 ms 25.0% " + "#" * 10,
]


def answers(advice=8):
    usages = [
        Hand(is_bottleneck=True, name="network", value=0.9, threshold=0.8, text="is full"),
        Hand(is_bottleneck=False, name="memory", value=0.5, threshold=0.9, text="has room"),
    ]
    gains = [Hand(change=0.125 - n / 100, label=f"gain {n}") for n in range(8)]
    tips = [Hand(gain=0.2 - n / 10, text=f"tip {n}") for n in range(advice)]
    return Hand(bottlenecks=Hand(usages=usages), sensitivities=gains, advice=tips)


def test_a_run_is_printed(plain):
    assert words(experiment_console.print_run, ran(), None) == FIGURES
    other = ran(tokens_per_s=2e6, bill=bill(dollars=None))
    other.request.setup.pattern = Hand(name="ring")
    other.prediction.warnings = ()
    lines = words(experiment_console.print_run, other, None)
    assert lines[1] == "FSDP=8, 2,048 images a step, stack torchtitan, ring"
    assert lines[6] == "tokens/s 2,000,000"
    assert not any(line.startswith(("cost", "warning")) for line in lines)


def test_a_run_is_printed_with_what_would_help(plain):
    lines = words(experiment_console.print_run, ran(), answers())[len(FIGURES) :]
    assert lines == joined([
        ["Bottlenecks"], ["!", "network", "90.0%", "of 80%", "is full"], ["memory", "50.0%", "of 90%", "has room"],
        ["Simulated again with"], *[[f"+{12.5 - n:.1f}%", f"gain {n}"] for n in range(6)],
        ["Recommended (each simulated)"], ["+20.0%", "tip 0"], ["+10.0%", "tip 1"], ["+0.0%", "tip 2"],
        *[[f"-{10 * n}.0%", f"tip {2 + n}"] for n in range(1, 4)],
    ])  # fmt: skip
    assert crowded(experiment_console.print_run, ran(), answers()) == []
    nothing = words(experiment_console.print_run, ran(), answers(0))
    assert nothing[-2:] == ["Recommended (each simulated)", "none of the simulated changes is better"]


def test_the_bill_of_a_run():
    assert experiment_console.bill_facts(bill(dollars_per_million_samples=3.25), "image")["cost"] == (
        "9,876.50 dollars (20.00 an hour), 1.50 a billion tokens, 3.25 a million images"
    )
    assert list(experiment_console.bill_facts(bill(dollars_per_hour=None), "image")) == ["GPU hours"]


def variant(step_s, samples_per_s, fits=True):
    prediction = Hand(step_time_s=9.0, peak_reserved_gib=60.25, mfu=0.4, fits=fits)
    breakdown = {"compute": 0.75 * step_s, "communication": 0.25 * step_s}
    price = Hand(dollars_per_million_samples=1234.5)
    of = {"samples_per_s": samples_per_s, "breakdown_s": breakdown, "bill": price, "error": ""}
    return Hand(label=f"at {samples_per_s}", prediction=prediction, **of)


def test_variants_are_compared_with_the_first():
    failed = Hand(label="mesh", prediction=None, error="needs a square", samples_per_s=0.0)
    found = Hand(
        request=Hand(name="mine", sample="image"), variants=[variant(2.0, 100), variant(1.0, 150, False), failed]
    )
    assert words(experiment_console.print_comparison, found) == joined([
        ["mine: side by side"], ["step", "images/s", "MFU", "GiB", "comm", "$/M images"],
        ["at 100", "2.00 s", "100", "+0.0%", "40.0%", "60.2", "25.0%", "1,234.50"],
        ["at 150", "1.00 s", "150", "+50.0%", "40.0%", "60.2!", "25.0%", "1,234.50"],
        ["mesh", "needs a square"],
    ])  # fmt: skip
    assert experiment_console._variant_row(variant(2.0, 100), 0.0)[2] == ""


def test_a_prediction_is_printed_with_its_origins(plain, monkeypatch):
    monkeypatch.setattr(console, "log_line", lambda prediction, flops: f"log {flops}")
    stage = Hand(way="meta", name="model", allocated_bytes=3 * 2**20, peak_bytes=4 * 2**20)
    found = by_hand.predicted(explain=("from here", "from there"), init=(stage,), loop=by_hand.looped(), missing=None)
    plain_lines = words(lambda out: console.print_prediction(out, found, 6e9, explain=False))
    assert plain_lines[:2] == ["gpt on 1024 x h100", "a saved program"]
    assert "log 6000000000.0" in plain_lines
    assert "from here" not in plain_lines
    assert any(line.startswith("With the periodic work") for line in plain_lines)
    lines = words(lambda out: console.print_prediction(out, found, 6e9, explain=True))
    assert lines[: len(plain_lines)] == plain_lines
    assert lines[len(plain_lines) :] == joined([
        ["Memory before the first step, MiB"], ["model made", "after", "allocated", "most so far"],
        ["on meta", "model", "3", "4"], ["Where the figures come from"], ["from here"], ["from there"],
    ])  # fmt: skip
    assert crowded(lambda out: console.print_prediction(out, found, 6e9, explain=True)) == []
    found.loop, found.init = None, ()
    assert not any(
        "Memory before" in line for line in words(lambda out: console.print_prediction(out, found, 1, explain=True))
    )


def test_lists_of_presets():
    models = [
        Hand(name="dense", parameters=1_000, active_parameters=1_000, layers=12, hidden=768),
        Hand(name="experts", parameters=9_000, active_parameters=2_000, layers=3, hidden=None),
    ]
    assert words(console.print_models, models) == joined([
        ["model", "parameters", "active", "layers", "hidden"], ["dense", "1,000", "12", "768"],
        ["experts", "9,000", "2,000", "3"],
    ])  # fmt: skip
    own = {"memory_gib": 79.6, "bf16_tflops": 989.4, "gpus_per_node": 8, "intra_node": "nvlink"}
    big = Hand(name="big", **own, intra_node_gb_s=450.0, inter_node="ib", inter_node_gbit_s=400.0)
    own = {"memory_gib": 16.0, "bf16_tflops": None, "gpus_per_node": None, "intra_node": "pcie"}
    clusters = [big, Hand(name="old", **own, intra_node_gb_s=32.0, inter_node=None, inter_node_gbit_s=None)]
    assert words(console.print_clusters, clusters)[-2:] == joined([
        ["big", "80", "989", "8", "nvlink 450", "ib 400"], ["old", "16", "pcie 32"],
    ])  # fmt: skip
    assert words(console.print_stacks, [Hand(name="s", description="what")]) == ["stack what it is", "s what"]


def test_bars_are_as_long_as_their_share():
    rows = {"a": ("1 s", 0.5), "b": ("2 s", 1.5), "c": ("0 s", -0.5)}
    assert words(console.bars, rows) == ["a 1 s 50.0% " + "#" * 20, "b 2 s 150.0% " + "#" * 40, "c 0 s -50.0%"]


def test_columns_that_do_not_break():
    table = console.make_table("lr", ("a", "b"), [], whole="r")
    assert [(column.justify, column.no_wrap) for column in table.columns] == [("left", False), ("right", True)]
    assert (table.show_header, console.make_table("l", (), []).show_header) == (True, False)


def test_a_layered_model_is_printed(monkeypatch):
    row = layer_table.LayerRow("conv1", "conv", (64, 112, 112), 9_408, 2.36e8, 4.72e8, 3.211)
    empty = layer_table.LayerRow("relu", "relu", (64,), 0, 0.0, 0.0, 0.0)
    monkeypatch.setattr(layer_table, "layer_rows", lambda model: [row, empty])
    model = Hand(
        name="net", sample="image", parameter_count=25_557_032, forward_flops=8.2e9, backward_flops=16.4e9,
        activation_bytes=lambda element: 1e6 * element, notes=("a note",),
    )  # fmt: skip
    lines = words(layer_table.print_model, model)
    kept = layer_table._KEPT_BYTES
    assert lines[0] == f"net, of one image: 25,557,032 parameters, forward 8.20 GFLOPs, kept {kept:.1f} MB"
    assert lines[3:] == ["conv1 conv 64x112x112 9,408 0.236 0.472 3.21", "relu relu 64 0.000 0.000 0.00", "a note"]
    record = layer_table.model_record(model)
    assert (record["activation_memory_mb"], record["parameters"], record["notes"]) == (kept, 25_557_032, ["a note"])
    assert [one["layer_id"] for one in record["layers"]] == ["conv1", "relu"]


def test_an_allocation_as_a_record():
    found = by_hand.allocated()
    found.settings = type("Settings", (), {"__dataclass_fields__": {}})()
    record = allocation_record(found)
    assert (record["available_gib"], record["reserved_gib"], record["allocated_gib"]) == (79.0, 60.0, 50.0)
    assert (record["segments"], record["mallocs"], record["retries"], record["out_of_memory"]) == (7, 99, 2, False)
    assert (record["steps_reserved_gib"], record["fragmentation"]) == ([60.0] * 3, 0.125)


def test_a_calibration_in_which_nothing_changed():
    found = by_hand.calibrated()
    found.changes = []
    assert words(print_calibration, found, None)[:2] == ["Cost profile of h100-sxm-80gb", "No constant changed."]


def test_outer_steps_that_no_bandwidth_hides():
    lines = words(print_outer_steps, by_hand.outer(needed_gb_s=None))
    assert "Outer steps take more than 5 % of the time at any bandwidth." in lines
    assert not any("at most 5 %" in line for line in lines)
