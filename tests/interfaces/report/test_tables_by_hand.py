"""Tables and records of results that are written by hand: each cell is what its figure comes to in words."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace as Hand

import pytest
from printed_lines import blocks, crowded, joined, printed, words

from forerun.answers.analysis.tables import KernelTime, ModuleTime, StreamTime
from forerun.answers.profile.facts import ProfileFacts
from forerun.answers.profile.tables import Table
from forerun.answers.search.programs import Fitting, NotFitting, ProgramRanking, Refused
from forerun.core.program.types import Phase
from forerun.evidence.measure.step import Figure, MeasuredStep
from forerun.interfaces.report import measured_step, memory_snapshot, profile_tables, programs
from forerun.interfaces.report import timeline as timelines
from forerun.interfaces.report.around_step import checkpoint_words, init_rows, loop_rows, mean_step
from forerun.sources.profile.memory_snapshot import Block, MemorySnapshot, Moment

GIB, MIB = 2**30, 2**20

# -- profiles ----------------------------------------------------------------------------------------------------------

FACTS = ProfileFacts(
    "a.json", 3, 8, ("H100", "A100"), 12_345, 1_000, 2_000, 900, 30, (7, 20), 40, 39, (0.1, 0.3), 2.0, 1.5, 3 * GIB,
    4 * GIB, ("no modules",),
)  # fmt: skip


def test_what_a_profile_holds():
    lone = replace(
        FACTS, path="b.json", world_size=None, devices=(), streams=(), step_times_s=(), device_span_s=0.0,
        peak_reserved_bytes=None, missing=(),
    )  # fmt: skip
    nothing = replace(lone, path="c.json", peak_allocated_bytes=None)
    found = words(profile_tables.print_facts, [FACTS, lone, nothing])
    assert found[:9] == joined(
        [
            ["a.json: rank 3 of 8"],
            ["devices", "H100, A100"],
            ["events", "12,345 (1,000 operators, 2,000 calls of the runtime)"],
            ["work", "900 kernels, 30 copies and fills on streams 7, 20"],
            ["collectives", "40, 39 of them with sizes and groups"],
            ["steps", "2 of 200 ms in the mean (100 ms to 300 ms)"],
            ["device", "busy 75.0% of 2.00 s"],
            ["memory", "3.00 GiB allocated, 4.00 GiB reserved at most"],
            ["lacks: no modules"],
        ]
    )
    assert found[9:15] == joined(
        [
            ["b.json: rank 3"],
            ["devices", "none"],
            ["events", "12,345 (1,000 operators, 2,000 calls of the runtime)"],
            ["work", "900 kernels, 30 copies and fills on streams none"],
            ["collectives", "40, 39 of them with sizes and groups"],
            ["memory", "3.00 GiB allocated, 0.00 GiB reserved at most"],
        ]
    )
    assert len(found) == 20
    assert printed(profile_tables.print_facts, [FACTS, lone]).count("") == 1
    assert crowded(profile_tables.print_facts, [FACTS, lone]) == []
    (record,) = profile_tables.facts_record([FACTS])["profiles"]
    assert (record["path"], record["mean_step_s"], record["streams"]) == ("a.json", 0.2, (7, 20))


def analysis(**changes):
    tables = {
        "temporal_breakdown": Table("temporal_breakdown", ("rank", "busy (us)"), [(0, 1234.5), (1, 0.123456)]),
        "kernels": Table("kernels", ("name", "sum (us)"), [("a", 1.0), ("b", 3.0), ("c" * 61, 2.0), ("d" * 60, 0.5)]),
        "comm_comp_overlap": Table("comm_comp_overlap", ("rank", "share"), [(0, math.nan)]),
    }
    path = Hand(
        window=Hand(rank=2), annotation="ProfilerStep", instance=5, length_us=2_000.0, edges=Hand(source=[0] * 1500),
        n_edges=3000, bounds=lambda: {"kernel": 1_500.0, "": 300.0, "host": 200.0},
    )  # fmt: skip
    usual = {"tables": tuple(tables.values()), "paths": [path], "notes": ["one rank is cut"]}
    empty = Table("", (), [])
    return Hand(table=lambda name: tables.get(name, empty), **{**usual, **changes})


def test_what_an_analysis_says(tmp_path):
    assert words(profile_tables.print_analysis, analysis(), 2) == joined([
        ["Time of the devices"], ["rank", "busy (us)"], ["0", "1,234"], ["1", "0.1235"],
        ["Communication beside computation, as HTA sees it"], ["rank", "share"], ["0", "-"],
        ["Kernels"], ["name", "sum (us)"], ["b", "3"], ["c" * 57 + "...", "2"],
        ["Critical path of rank 2, ProfilerStep 5: 2.00 ms, 1,500 of 3,000 edges"],
        ["kernel", "1,500 us", "75.0%"], ["host", "200 us", "10.0%"],
        ["note: one rank is cut"],
    ])  # fmt: skip
    assert crowded(profile_tables.print_analysis, analysis(), 2) == []
    whole = words(profile_tables.print_analysis, analysis(), 4)
    assert whole[9:13] == joined([["a", "1"], ["b", "3"], ["c" * 57 + "...", "2"], ["d" * 60, "0.5"]])
    record = profile_tables.analysis_record(analysis())
    assert record["temporal_breakdown"] == [{"rank": 0, "busy (us)": 1234.5}, {"rank": 1, "busy (us)": 0.123456}]
    assert record["comm_comp_overlap"] == [{"rank": 0, "share": None}]
    assert record["notes"] == ["one rank is cut"]
    profile_tables.write_analysis(tmp_path / "new", analysis())
    assert (tmp_path / "new/comm_comp_overlap.csv").read_text() == "rank,share\n0,\n"
    assert len(list((tmp_path / "new").iterdir())) == 3


def test_figures_of_a_profile_have_four_digits_or_are_whole_from_a_thousand_on():
    assert [profile_tables._cell(value) for value in (999.96, 1000.4, -2000.6, 12.0, 3, "x")] == [
        "1000", "1,000", "-2,001", "12", "3", "x",
    ]  # fmt: skip


def test_what_was_imported(tmp_path):
    found = Hand(
        program=Hand(rank_classes=(Hand(n_ranks=3), Hand(n_ranks=5))), name="ProfilerStep#4", device="", notes=("cut",),
        measured_s=0.2, replayed_s=0.199, error=-0.005, step_times_s=(0.1, 0.3),
    )  # fmt: skip
    assert words(profile_tables.print_import, found, tmp_path / "p") == joined(
        [
            [f"{tmp_path / 'p'}: ProfilerStep#4, 2 of 8 ranks"],
            ["device", "not known to Forerun; name it with --device to predict other GPUs"],
            ["measured", "200 ms"],
            ["replayed", "199 ms (-0.50%)"],
            ["all steps", "2 of 200 ms in the mean (100 ms to 300 ms)"],
            ["note: cut"],
        ]
    )
    found.device, found.step_times_s = "h100", (0.1,)
    assert words(profile_tables.print_import, found, tmp_path / "p")[1:4] == joined([
        ["device", "h100"], ["measured", "200 ms"], ["replayed", "199 ms (-0.50%)"],
    ])  # fmt: skip
    record = profile_tables.import_record(found, tmp_path / "p")
    assert (record["ranks"], record["profiled_ranks"], record["replay_error"]) == (8, 2, -0.005)
    assert profile_tables.import_record(Hand(**{**vars(found), "device": ""}), tmp_path)["device"] is None


# -- memory snapshots --------------------------------------------------------------------------------------------------

SNAPSHOT = MemorySnapshot(
    "s.pickle", 1, (Moment(0, 0, 0), Moment(1, 3 * GIB, 4 * GIB)),
    (Block(2 * GIB, "weights", "model.py:3"), Block(GIB, "other", ""), Block(MIB, "weights", "model.py:9")),
    Moment(1, 3 * GIB, 4 * GIB), 5 * GIB, GIB, GIB // 2, 0,
)  # fmt: skip


def test_a_snapshot_with_and_without_a_prediction():
    assert words(memory_snapshot.print_snapshot, SNAPSHOT, None, 2) == joined([
        ["s.pickle: device 1, 1 events"],
        ["peak allocated", "3.000 GiB"], ["peak reserved", "5.000 GiB"],
        ["reserved but not allocated at the peak", "25.0%"],
        ["inactive at the end", "1.000 GiB, largest piece 0.500 GiB"],
        ["Memory at the peak by category (GiB)"], ["category", "measured", "predicted"],
        ["weights", "2.001", "-"], ["other", "1.000", "-"],
        ["By place (2 of 3, MiB)"], ["allocated at", "size"],
        ["model.py:3", "2,048.0"], ["(no frame recorded)", "1,024.0"],
        ["Largest tensors at the peak (2 of 3, MiB)"], ["size", "category", "allocated at"],
        ["2,048.0", "weights", "model.py:3"], ["1,024.0", "other", "(no frame recorded)"],
    ])  # fmt: skip
    assert crowded(memory_snapshot.print_snapshot, SNAPSHOT, None, 2) == []
    predicted = Hand(
        peak_allocated_gib=2.5, peak_reserved_gib=2.75, memory_by_category_gib={"other": 1.5, "activation": 0.25}
    )
    found = words(memory_snapshot.print_snapshot, replace(SNAPSHOT, retries=1200), predicted, 9)
    assert found[1:3] == joined(
        [
            ["peak allocated", "3.000 GiB", "predicted 2.500 GiB"],
            ["peak reserved", "5.000 GiB", "predicted 2.750 GiB"],
        ]
    )
    assert found[5] == "out of memory 1,200 times"
    assert found[8:11] == joined(
        [["weights", "2.001", "-"], ["other", "1.000", "1.500"], ["activation", "0.000", "0.250"]]
    )
    record = memory_snapshot.snapshot_record(SNAPSHOT, predicted, 1)
    assert (record["events"], record["fragmentation"], record["out_of_memory_events"]) == (1, 0.25, 0)
    assert (record["peak_allocated_gib"], record["peak_reserved_gib"], record["reserved_at_peak_gib"]) == (3, 5, 4)
    assert (record["inactive_gib"], record["largest_inactive_gib"]) == (1.0, 0.5)
    assert record["by_category_gib"] == {"weights": 2 + MIB / GIB, "other": 1.0}
    assert record["by_place_gib"] == {"model.py:3": 2.0}
    assert record["largest"] == [{"size": 2 * GIB, "category": "weights", "where": "model.py:3"}]
    assert record["timeline"] == [[0, 0, 0], [1, 3 * GIB, 4 * GIB]]
    assert record["predicted"] == {
        "peak_allocated_gib": 2.5, "peak_reserved_gib": 2.75, "by_category_gib": {"other": 1.5, "activation": 0.25},
    }  # fmt: skip
    nothing = replace(SNAPSHOT, peak=Moment(0, 0, 0), at_peak=())
    empty = memory_snapshot.snapshot_record(nothing, None, 1)
    assert (empty["fragmentation"], "predicted" in empty, empty["largest"]) == (0.0, False, [])


# -- saved programs ----------------------------------------------------------------------------------------------------


@dataclass
class Predicted:
    """The figures of a prediction that the ranking of programs shows."""

    step_time_s: float = 0.5
    n_gpus: int = 2048
    tokens_per_s_per_gpu: float | None = 1234.4
    mfu: float | None = 0.4
    hfu: float | None = None
    peak_reserved_gib: float = 60.25
    dollars_per_billion_tokens: float | None = 12.345
    missing: tuple[str, ...] | None = None


def ranking(objective="time", tokens=(100, 100), **changes):
    fast = Fitting("a.program", Predicted(), tokens[0], {"dp": 8, "tp": 2048})
    slow = Fitting("b.program", Predicted(1.5, 8), tokens[1], {})
    usual = {
        "folder": "here", "cluster": "h100", "memory_limit_gib": 79.25, "objective": objective, "because": "it is so",
        "ranked": (fast, slow), "unranked": (),
        "too_large": (NotFitting("c", 90.0, "weights", "needs 90 GiB"), NotFitting("d", 95.0, "weights", "95"),
                      NotFitting("e", 99.0, "gradients", "needs 99 GiB")),
        "refused": (Refused("f", "no program"),),
    }  # fmt: skip
    return ProgramRanking(**{**usual, **changes})


@pytest.fixture
def bare(monkeypatch):
    """Without the parts of a ranking that other tests show."""
    monkeypatch.setattr(programs, "print_figures", lambda out, prediction: out.print("figures"))
    monkeypatch.setattr(programs, "print_histogram", lambda out, bins: out.print(f"{len(bins)} bins"))
    monkeypatch.setattr(programs, "print_missing", lambda out, prediction: out.print("missing"))
    monkeypatch.setattr(programs, "histogram", lambda times: times)
    monkeypatch.setattr(programs, "prediction_record", lambda prediction: {"step_time_s": prediction.step_time_s})
    monkeypatch.setattr(programs, "bin_record", lambda one: one)


def test_a_ranking_of_programs(bare):
    found = words(programs.print_programs, ranking(), 1)
    assert found == joined([
        ["6 programs of here on h100"],
        ["Ranked by step time: it is so."],
        ["step", "tok/s", "peak"],
        ["#", "program", "GPUs", "time", "/GPU", "MFU", "HFU", "GiB"],
        ["1", "a.program", "2,048", "500 ms", "1,234", "40.0%", "unknown", "60.2"],
        ["2 bins"],
        ["3 run out of 79.2 GiB (weights is the largest part of 2, gradients is the largest part of 1)"],
        ["c: needs 90 GiB"], ["d: 95"], ["e: needs 99 GiB"],
        ["1 could not be predicted"], ["f: no program"],
        ["Best by time: a.program (dp 8, tp 2,048), 500 ms"],
        ["figures"], ["missing"],
    ])  # fmt: skip
    assert crowded(programs.print_programs, ranking(), 1) == []
    assert [" ".join(line.split()[:3]) for line in blocks(programs.print_programs, ranking(), 1)] == [
        "6 programs of", "step tok/s peak", "2 bins", "3 run out", "1 could not", "Best by time:", "figures",
    ]  # fmt: skip
    record = programs.programs_record(ranking(), 1)
    assert record["counts"] == {"considered": 6, "refused": 1, "out_of_memory": 3, "ok": 2}
    assert record["runtime_histogram"] == [0.5, 1.5]
    assert record["best"] == record["top"][0]
    assert record["top"] == [
        {"file": "a.program", "tokens_per_step": 100, "groups": {"dp": 8, "tp": 2048}, "step_time_s": 0.5}
    ]
    assert (record["out_of_memory"][0]["needs_gib"], record["refused"]) == (
        90.0,
        [{"file": "f", "reason": "no program"}],
    )
    assert "unranked" not in record
    assert (record["folder"], record["cluster"], record["memory_limit_gib"]) == ("here", "h100", 79.25)


@pytest.mark.parametrize(
    ("objective", "tokens", "headline", "warning"),
    [
        (
            "time",
            (None, None),
            "500 ms",
            "! the order holds if all steps train on the same tokens;",
        ),
        ("time", (1, 2), "500 ms", "! their steps train on different numbers of tokens: tok/s/GPU compares them"),
        ("time", (1, 1), "500 ms", ""),
        ("tokens", (1, 2), "1,234 tok/s/GPU, 500 ms", ""),
        ("cost", (1, 2), "12.35 $ per 10^9 tokens, 500 ms", ""),
        ("memory", (None, None), "60.2 GiB, 500 ms", ""),
    ],
)
def test_what_a_ranking_says_of_its_objective(bare, objective, tokens, headline, warning):
    lines = printed(programs.print_programs, ranking(objective, tokens), 2)
    assert f"Best by {objective}: a.program (dp 8, tp 2,048), {headline}" in lines
    warned = [line for line in lines if line.startswith("!")]
    assert len(warned) == bool(warning)
    assert all(line.startswith(warning) for line in warned)
    assert any("$ per 10^9" in line and "#" not in line for line in lines[:6]) == (objective == "cost")


def test_programs_that_can_not_be_ranked(bare):
    fast = Fitting("a.program", Predicted(), None, {})
    found = ranking(ranked=(), unranked=(fast,), too_large=(), refused=())
    assert printed(programs.print_programs, found, 3) == [
        "1 programs of here on h100",
        "Ranked by step time: it is so.",
        "",
        "1 fit and are not ranked: the tokens of their step are unknown (--tokens-per-step N says them)",
        "  a.program: 500 ms on 2,048 GPUs, 60.2 GiB",
        "",
        "1 bins",
        "",
    ]
    assert programs.programs_record(found, 3)["unranked"][0]["file"] == "a.program"
    nothing = printed(programs.print_programs, ranking(ranked=()), 3)
    assert nothing[-1] == "Nothing fits. The nearest miss is the first of those that don't."
    assert not any(line.startswith("Ranked by") for line in nothing)
    assert programs.programs_record(ranking(ranked=()), 3)["best"] is None


# -- measured steps ----------------------------------------------------------------------------------------------------


def test_a_measured_step_beside_its_prediction(monkeypatch):
    monkeypatch.setattr(measured_step, "print_heading", lambda out, prediction: out.print("heading"))
    monkeypatch.setattr(measured_step, "prediction_record", lambda prediction: "record")
    figures = [Figure("step", "ms", 1234.56, 1000.0), Figure("peak", "GiB", None, 2.0), Figure("MFU", "%", 40.0, None)]
    measured = MeasuredStep(1.0, 5, 7, 0.98765, 1.5, "H100", (("model", 3),))
    assert words(measured_step.print_step, None, measured, figures) == joined(
        [
            ["heading"],
            ["predicted", "measured", "error"],
            ["step", "ms", "1,234.6", "1,000.0", "+23.5%"],
            ["peak", "GiB", "-", "2.0", "-"],
            ["MFU", "%", "40.0", "-", "-"],
            ["measured on H100: median of 7 steps of 987.6 to 1500 ms"],
        ]
    )
    assert words(measured_step.print_step, None, None, figures) == joined([
        ["heading"], ["predicted"], ["step", "ms", "1,234.6"], ["peak", "GiB", "-"], ["MFU", "%", "40.0"],
        ["This machine has no GPU, so nothing was measured."],
    ])  # fmt: skip
    record = measured_step.step_record(None, measured, figures[:2])
    assert [one["error"] for one in record["figures"]] == [pytest.approx(0.23456), None]
    assert (record["measured"]["device"], record["prediction"]) == ("H100", "record")
    assert measured_step.step_record(None, None, [])["measured"] is None


def test_what_surrounds_a_step():
    stalls = [
        Hand(name="checkpoint", every_steps=1000, stall_s=3.0, beside_s=20.0, mean_s=0.003),
        Hand(name="garbage", every_steps=50, stall_s=0.05, beside_s=0.0, mean_s=0.001),
    ]
    loop = Hand(stalls=stalls, step_time_s=2.0, mean_step_time_s=2.004, tokens_per_s_per_gpu=8000.4)
    assert loop_rows(loop) == [
        ("checkpoint", "1,000 steps", "3.00 s", "20.0 s", "0.15%"),
        ("garbage", "50 steps", "50.0 ms", "", "0.05%"),
    ]
    assert mean_step(loop) == "mean step 2.00 s (+0.20%), 8,000 tokens/s/GPU"
    loop.tokens_per_s_per_gpu = None
    assert mean_step(loop) == "mean step 2.00 s (+0.20%)"
    saved = Hand(rank_gib=1.234, total_gib=160.55, save_s=23.0, load_s=41.0, storage="nfs")
    assert checkpoint_words(saved) == (
        "a checkpoint: 1.23 GiB a rank, 160.6 GiB in all; complete after 23.0 s, loaded in 41.0 s; storage: nfs"
    )
    stages = [Hand(way=way, name="model", allocated_bytes=1500 * MIB, peak_bytes=MIB) for way in ("meta", "direct")]
    assert init_rows(stages) == [("on meta", "model", "1,500", "1"), ("on the device", "model", "1,500", "1")]


# -- timelines ---------------------------------------------------------------------------------------------------------


def test_a_timeline_in_tables(monkeypatch):
    kernels = [
        KernelTime("gemm", "product", 1200, 1.5, 0.75, ("/src/model.py:3", "/src/model.py:9")),
        KernelTime("norm", "memory", 3, 0.25, 0.125, ()),
    ]
    by_phase = dict.fromkeys(Phase, 0.0) | {Phase.BACKWARD: 0.5}
    modules = [ModuleTime("layers.*", 10, 0.5, 0.25, {phase.name.lower(): time for phase, time in by_phase.items()})]
    monkeypatch.setattr(timelines, "kernel_times", lambda *_: kernels)
    monkeypatch.setattr(timelines, "stream_times", lambda *_: [StreamTime("compute", 1203, 1.75, 0.875)])
    monkeypatch.setattr(timelines, "module_times", lambda *_: modules * 2)
    monkeypatch.setattr(timelines, "print_heading", lambda out, prediction: out.print("heading"))
    monkeypatch.setattr(timelines, "prediction_record", lambda prediction: "record")
    classes = [Hand(name="stage 0", n_ranks=4), Hand(name="stage 1", n_ranks=8)]
    prediction = Hand(step_time_s=2.0, missing=None)
    simulation = Hand(program=Hand(rank_classes=classes), prediction=prediction)
    assert words(timelines.print_timeline, simulation, 1, 1, 2) == joined([
        ["heading"], ["step time 2.00 s; shown: stage 1 (8 ranks)"],
        ["Kernels by time (1 of 2)"], ["kernel", "kind", "count", "total", "of step", "launched at"],
        ["gemm", "product", "1,200", "1.50 s", "75.0%", "model.py:3 +1"],
        ["Streams"], ["stream", "nodes", "busy", "of step"], ["compute", "1,203", "1.75 s", "87.5%"],
        ["Modules by device time (1 of 2, 2 deep)"],
        ["module", "nodes", "total", "share", *(phase.name.lower() for phase in Phase)],
        ["layers.*", "10", "500 ms", "25.0%", "500 ms"],
    ])  # fmt: skip
    assert crowded(timelines.print_timeline, simulation, 1, 1, 2) == []
    kernels[0] = replace(kernels[0], lines=("/src/model.py:3",))
    assert words(timelines.print_timeline, simulation, 0, 5, 2)[4].endswith("75.0% model.py:3")
    kernels[0] = replace(kernels[0], lines=())
    found = words(timelines.print_timeline, simulation, 0, 5, 2)
    assert found[1:4] == joined([
        ["step time 2.00 s; shown: stage 0 (4 ranks)"], ["Kernels by time (2 of 2)"],
        ["kernel", "kind", "count", "total", "of step"],
    ])  # fmt: skip
    record = timelines.timeline_record(simulation, 1, 2)
    assert (record["rank_class"], record["n_ranks"], record["prediction"]) == ("stage 1", 8, "record")
    assert [one["name"] for one in record["kernels"] + record["streams"]] == ["gemm", "norm", "compute"]
    assert len(record["modules"]) == 2
