"""A comparison that is written by hand, as tables, as a record, as a page, and as files that correct a prediction."""

from __future__ import annotations

from types import SimpleNamespace as Hand

import pytest
import yaml
from printed_lines import crowded, joined, words

from forerun.answers.comparison.corrections import Corrections
from forerun.answers.comparison.matching import pairs_of
from forerun.answers.comparison.ran_step import Line, RanStep
from forerun.answers.comparison.ranks import PartDifference, RankDifference
from forerun.describe.cluster.types import KernelRates
from forerun.describe.plan.plan import Plan
from forerun.interfaces.report import comparison
from forerun.interfaces.report.page import Table as PageTable
from forerun.interfaces.report.page import Text

GIB, MIB = 2**30, 2**20


def line(part, name, time_s, shape=(), module="mlp", count=1, waiting_s=0.0, moved_bytes=0.0):
    amounts = {"late_s": 0.0, "held_s": 0.0, "flops": 0.0}
    return Line(
        part, "w", name, shape, module, "forward", (0,), count, time_s, waiting_s, moved_bytes=moved_bytes, **amounts
    )


def compared(**changes):
    talks = [
        line("gathers", "nccl", 0.2, (2, 8, 1000), count=4, waiting_s=0.05, moved_bytes=6e9),
        line("gathers", "gather", 0.1, (2, 8, 4000), count=4, moved_bytes=6e9),
    ]
    measured = RanStep("a", 1.25, {"waiting": 0.25}, (), 0.15, 0.2, launches=1200)
    predicted = RanStep("b", 1.0, {}, (), 0.0, 0.0, launches=1100)
    parts = (
        PartDifference("product", "matrix products", 0.9, 0.6, 0.9, 0.6),
        PartDifference("waiting", "waiting for others", 0.25, 0.0, 0.0, 0.0),
        PartDifference("host", "host", 0.1, 0.4, 0.0, 0.0),
    )
    rank = Hand(rank=3, run_class=0, rank_class=0, stage="stage 1", measured=measured, predicted=predicted, parts=parts)
    rank.work_s = RankDifference.work_s.fget(rank)
    prediction = Hand(peak_allocated_gib=60.123, memory_recorded=True, model="gpt", cluster="h100")
    usual = {
        "measured": measured, "predicted": predicted, "measured_s": 1.25, "predicted_s": 1.0, "slowdown": 0.25,
        "measured_peak_gib": 61.0, "parts": parts, "rank": rank, "ranks": (rank,), "notes": ("one rank",),
        "pairs": pairs_of(talks[:1], talks[1:]),
        "modules": [Hand(module="mlp", measured_s=0.9, predicted_s=1.0, lost_s=-0.1)],
        "graph_breaks": [Hand(function="forward", place="a.py:3", module="", calls=1200, idle_s=0.05)],
        "simulation": Hand(prediction=prediction, program=Hand(rank_classes=[0, 1])),
    }  # fmt: skip
    return Hand(**{**usual, **changes})


@pytest.fixture
def said(monkeypatch):
    monkeypatch.setattr(comparison, "verdict", lambda found: "slower")


def test_a_comparison_in_tables(said):
    found = compared()
    found.ranks = (found.rank, found.rank)
    assert words(comparison.print_comparison, found, 5) == joined([
        ["slower"],
        ["step, measured", "1.25 s"], ["step, predicted", "1.00 s"], ["launches", "1,200, predicted 1,100"],
        ["communication beside kernels", "75.0% of 200 ms, predicted none"],
        ["graph breaks", "1,200 at 1 places, GPU idle for 50.0 ms after them"],
        ["peak allocated", "61.00 GiB, predicted 60.12 GiB"],
        ["Where the step lost and won time"], ["part of the step", "measured", "predicted", "lost", "of the step"],
        ["matrix products", "900 ms", "600 ms", "+300 ms", "+30.0%"],
        ["waiting for others", "250 ms", "0 s", "+250 ms", "+25.0%"],
        ["host", "100 ms", "400 ms", "-300 ms", "-30.0%"],
        ["all", "1.25 s", "1.00 s", "+250 ms", "+25.0%"],
        ["Each rank beside its stage"],
        ["rank", "work, measured", "predicted", "lost", "waiting, measured", "predicted", "most lost in"],
        *[["rank 3 (stage 1)", "1.00 s", "1.00 s", "0 s", "250 ms", "0 s", "matrix products (+300 ms)"]] * 2,
        ["Collectives"], ["part", "count", "bytes", "measured GB/s", "predicted GB/s", "waiting", "lost"],
        ["gathers", "4", "1,000 to 4,000", "30.0", "60.0", "50.0 ms", "+100 ms"],
        ["Work by lost time (1 of 1)"], list(comparison._PAIR),
        ["gather", "nccl", "mlp", "4", "200 ms", "100 ms", "+100 ms"],
        ["Graph breaks"], ["function", "place", "module", "calls", "GPU idle after it"],
        ["forward", "a.py:3", "-", "1,200", "50.0 ms"],
        ["Modules by lost time (1 of 1)"], ["module", "measured", "predicted", "lost"],
        ["mlp", "900 ms", "1.00 s", "-100 ms"],
        ["note: one rank"],
    ])  # fmt: skip
    assert crowded(comparison.print_comparison, found, 5) == []
    plain = compared(graph_breaks=[], measured_peak_gib=None, pairs=(), notes=(), measured=compared().predicted)
    lines = words(comparison.print_comparison, plain, 5)
    assert not {"Each rank beside its stage", "Collectives", "Graph breaks"} & set(lines)
    assert not any(line.startswith(("graph breaks", "communication beside kernels", "note")) for line in lines)
    assert dict(comparison._figures(plain))["peak allocated"] == "not recorded, predicted 60.12 GiB"
    plain.simulation.prediction.memory_recorded = False
    assert dict(comparison._figures(plain))["peak allocated"] == "not recorded"


def test_a_part_in_which_a_rank_loses_little_is_not_named(said):
    found = compared()
    assert comparison._rank_row(found.rank, found)[-1] == "matrix products (+300 ms)"
    found.rank.parts = (PartDifference("product", "matrix products", 0.609, 0.6, 0.6, 0.6), found.parts[1])
    assert comparison._rank_row(found.rank, found)[-1] == "-"
    equal = line("gathers", "nccl", 0.0, (2, 8, 1000))
    (pair,) = pairs_of([equal], [])
    assert comparison._collective_rows(compared(pairs=[pair])) == [
        ("gathers", "1 / 0", "1,000", "-", "-", "0 s", "0 s"),
    ]


def test_a_comparison_as_a_record(said):
    found = compared(graph_breaks=[], modules=[], parts=compared().parts[:1])
    found.measured.idle_before["mlp"] = 0.5
    record = comparison.comparison_record(found)
    assert (record["verdict"], record["slowest_rank"], record["slowdown"]) == ("slower", 3, 0.25)
    assert record["parts"] == [
        {"part": "product", "label": "matrix products", "measured_s": 0.9, "predicted_s": 0.6, "measured_busy_s": 0.9,
         "predicted_busy_s": 0.6, "lost_s": pytest.approx(0.3)}
    ]  # fmt: skip
    (rank,) = record["ranks"]
    assert (rank["measured_work_s"], rank["predicted_work_s"]) == (1.0, 1.0)
    assert (rank["measured_waiting_s"], rank["predicted_waiting_s"], len(rank["parts"])) == (0.25, 0.0, 3)
    (work,) = record["work"]
    assert (work["measured_bytes_per_s"], work["predicted_bytes_per_s"]) == (pytest.approx(3e10), pytest.approx(6e10))
    assert (work["waiting_s"], work["lost_s"], work["shape"]) == (0.05, pytest.approx(0.1), [])
    assert (work["measured_count"], work["predicted_count"], work["modules"]) == (4, 4, ["mlp"])
    assert record["overlap"]["measured"] == {"communicating_s": 0.2, "hidden_s": 0.15}
    assert record["launches"] == {"measured": 1200, "predicted": 1100}
    assert record["memory"] == {"measured_peak_allocated_gib": 61.0, "predicted_peak_allocated_gib": 60.123}
    assert record["idle_before_s"] == {"mlp": 0.5}
    assert record["notes"] == ["one rank"]


def names_alone(page):
    """Checks that all columns of tables are numbers but those of names."""
    names = {"part of the step", "work", "kernel", "module", "shape", "part", "function", "place", "rank"}
    for table in (part for part in page.parts if isinstance(part, PageTable)):
        others = [table.columns[i] for i in range(len(table.columns)) if i not in table.numeric]
        assert set(others) <= names | {"most lost in"}
        assert all(name in others for name in table.columns if name in names)
        assert all(0 <= i < len(table.columns) for i in table.numeric)
        assert ("most lost in" in table.columns) == ("most lost in" in others)


def test_the_page_of_a_comparison(said, monkeypatch):
    monkeypatch.setattr(comparison, "_both_timelines", lambda found: "timelines")
    one = compared(imported=Hand(name="ProfilerStep#3"))
    page = comparison.comparison_document(one, "forerun profile compare")
    assert (page.title, page.subtitle) == ("ProfilerStep#3 beside the prediction of gpt", "h100")
    assert page.parts[0] == Text("The measured step is slower.", "warning")
    headings = [part.text for part in page.parts if type(part).__name__ == "Heading"]
    assert headings == [
        "Where the step lost and won time", "Both timelines", "Work by lost time", "Collectives", "Graph breaks",
        "Modules", "Notes",
    ]  # fmt: skip
    names_alone(page)
    many = compared(imported=Hand(name="s"), slowdown=-0.1, notes=(), graph_breaks=[], pairs=())
    many.ranks = (many.rank, many.rank)
    other = comparison.comparison_document(many, "x")
    assert other.parts[0].kind == "good"
    assert [part.text for part in other.parts if type(part).__name__ == "Heading"][1] == "Each rank beside its stage"
    names_alone(other)
    assert any("those of rank 3 (stage 1), which waits least" in getattr(part, "text", "") for part in other.parts)


def test_files_that_correct_a_prediction(tmp_path):
    kernels = tuple(range(19))
    found = Corrections((kernels,), (("all_gather", 8, 1, 1000.0, "9", ""),), KernelRates())
    comparison.write_corrections(found, tmp_path / "kernels.csv", None)
    assert [path.name for path in tmp_path.iterdir()] == ["kernels.csv"]
    comparison.write_corrections(found, None, tmp_path / "network.csv")
    assert (tmp_path / "kernels.csv").read_text().splitlines()[1] == ",".join(map(str, kernels))
    assert (tmp_path / "network.csv").read_text() == (
        "collective,ranks,stride,bytes,time_us,algbw_gb_per_s\nall_gather,8,1,1000.0,9,\n"
    )
    of: object = Hand(measured_s=0.5, simulation=Hand(subject=Hand(plan=Plan(1024, tp=2))))
    comparison.write_anchor(tmp_path / "anchor.yaml", of, KernelRates(gemm=1 / 3), "h100")
    written = yaml.safe_load((tmp_path / "anchor.yaml").read_text())
    assert written["rates"] == {
        "gemm": 0.333333, "attention": 1.0, "attention_backward": 1.0, "memory": 1.0, "network": 1.0, "host": 1.0,
    }  # fmt: skip
    assert (written["cluster"], written["step_time_s"], written["tp"]) == ("h100", 0.5, 2)
    assert None not in written.values()
