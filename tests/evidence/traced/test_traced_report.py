"""Errors, sums and bands of traced rows, against known answers."""

import math
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from saved_programs import H100, plan_of, program_of

from forerun.answers.analysis.predict_program import predict_program
from forerun.answers.analysis.uncertainty import TRACED, memory_band
from forerun.core.program.storage import save
from forerun.describe.stacks.catalog import load_stack
from forerun.evidence.traced.programs import Programs, Repository, Run
from forerun.evidence.traced.report import build_traced_report, judge, quantiles, sums
from forerun.evidence.traced.run import Folders, TracedResult, trace_rows
from forerun.evidence.traced.tables import markdown, print_traced
from forerun.evidence.validation.rows import Measurement
from forerun.evidence.validation.run import RowResult
from forerun.sources.trace.launch import Limits

PREDICTION = predict_program(program_of(plan_of(dp_shard=8)), H100).prediction
RUN = Run("tiny", "abc", {"row": ()}, "train.py")


def row_of(time_s=None, memory_gib=None, kind="allocated", **fields):
    unknown = dict.fromkeys(Measurement.__dataclass_fields__)
    plain = {name: "" for name, one in Measurement.__dataclass_fields__.items() if one.type == "str"}
    own = {"id": "row", "outcome": "ok", "tier": "A", "n_gpus": 8, "gpu": "H100-SXM", "gpus_per_node": 8}
    return Measurement(
        **{
            **unknown,
            **plain,
            **own,
            "step_time_s": time_s,
            "peak_mem_gib": memory_gib,
            "peak_mem_kind": kind,
            **fields,
        }
    )


def result_of(traced=PREDICTION, symbolic=None, reason="", **fields):
    row = row_of(**fields)
    return TracedResult(row, RUN, traced, reason, RowResult(row, prediction=symbolic), H100)


def test_errors_are_predicted_over_measured():
    time_s, memory_gib = PREDICTION.step_time_s / 1.02, PREDICTION.peak_allocated_gib / 0.9
    modelled = replace(PREDICTION, step_time_s=2 * time_s, peak_allocated_gib=memory_gib)
    found = judge(result_of(symbolic=modelled, time_s=time_s, memory_gib=memory_gib))
    assert found.time_error == pytest.approx(0.02)
    assert found.memory_error == pytest.approx(-0.1)
    assert found.symbolic_time_error == pytest.approx(1.0)
    assert found.symbolic_memory_error == pytest.approx(0.0)
    assert found.time_held


def test_a_row_out_of_its_band_says_so():
    assert judge(result_of(time_s=PREDICTION.step_time_high_s * 1.01)).time_held is False
    assert judge(result_of(memory_gib=PREDICTION.peak_reserved_high_gib * 1.01, kind="reserved")).memory_held is False


def test_allocated_memory_has_the_band_of_traced_programs():
    band = memory_band(load_stack("pytorch"), "allocated", TRACED)
    inside, outside = (PREDICTION.peak_allocated_gib * band.high * factor for factor in (0.999, 1.001))
    assert judge(result_of(memory_gib=inside)).memory_held is True
    assert judge(result_of(memory_gib=outside)).memory_held is False
    assert judge(result_of(memory_gib=inside, kind="nvidia-smi")).memory_held is None


def test_sums_are_over_rows_with_both_figures():
    time_s = PREDICTION.step_time_s
    rows = [
        judge(result_of(time_s=time_s / 1.04)),
        judge(result_of(time_s=time_s / 0.98)),
        judge(result_of(memory_gib=PREDICTION.peak_allocated_gib)),
        judge(result_of(traced=None, reason="it failed", time_s=time_s)),
    ]
    found = sums(rows, "time")["all"]
    assert (found.rows, found.mean, found.worst) == (2, pytest.approx(0.03), pytest.approx(0.04))
    assert sums(rows, "memory")["tiny"].rows == 1
    assert math.isnan(sums(rows[:2], "memory")["all"].mean)


def test_bands_hold_the_share_of_the_rows_they_come_from():
    time_s = PREDICTION.step_time_s
    results = [result_of(time_s=time_s * math.exp(0.01 * number)) for number in range(-10, 11)]
    found = quantiles(results)["time"]
    assert found.rows == 21
    assert found.low == pytest.approx(-found.high)
    assert sum(judge(one).time_error is not None for one in results) == 21


def test_tables_show_every_row_or_its_reason():
    results = [
        result_of(time_s=PREDICTION.step_time_s, source_label="depth 4"),
        result_of(traced=None, reason="it failed", time_s=1.0),
        result_of(outcome="oom", source_label="depth 64"),
    ]
    out = Console(width=200, record=True, file=StringIO())
    print_traced(results, out)
    text = out.export_text()
    assert "depth 4" in text
    assert "not predicted: row: it failed" in text
    assert "not foreseen" in text
    assert "| tiny | depth 4 | 8 H100-SXM |" in markdown(results)
    assert build_traced_report(results)["rows"][1]["reason"] == "it failed"


def test_kept_programs_are_predicted_and_failures_named(tmp_path, monkeypatch):
    """Rows whose Program is there are read; a row on an unknown device, and a row without a clone, have the reason."""
    known = Programs(
        {"tiny": Repository("https://example.org/tiny", ("*.py",), ())},
        (Run("tiny", "abc", dict.fromkeys(("good", "lost", "strange"), ()), "train.py"),),
    )
    rows = [row_of(id="good"), row_of(id="lost"), row_of(id="strange", gpu="abacus")]
    traces = tmp_path / "traces"

    def trace_all(jobs, folder, *_):
        folder.mkdir(exist_ok=True)
        save(program_of(plan_of(dp_shard=8)), folder / "good.program")
        assert [job.name for job in jobs] == ["good", "lost"]
        assert jobs[0].job.world_size == 8
        return [("lost", "it aborted")]

    monkeypatch.setattr("forerun.evidence.traced.run.trace_all", trace_all)
    monkeypatch.setattr("forerun.evidence.traced.run.checkout", lambda *_: Path("checked-out"))
    found = trace_rows([RowResult(row) for row in rows], known, {}, Folders(tmp_path, traces), Limits())
    assert found[0].traced.step_time_s > 0
    assert found[1].reason == "it aborted"
    assert "abacus" in found[2].reason
