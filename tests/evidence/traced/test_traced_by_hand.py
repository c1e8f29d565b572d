"""Jobs of rows, reports of few rows, and what a checkout is made of, with known answers."""

from __future__ import annotations

import math
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from saved_programs import H100, plan_of, program_of

from forerun.answers.analysis.predict_program import predict_program
from forerun.answers.analysis.uncertainty import widening
from forerun.common.errors import ForerunError
from forerun.core.program.storage import save
from forerun.evidence.traced import checkout, report, run
from forerun.evidence.traced.programs import Programs, Repository, Run
from forerun.evidence.traced.report import Judged, Sum, build_traced_report
from forerun.evidence.traced.run import Folders, TracedResult
from forerun.evidence.traced.tables import _cells, markdown, print_traced
from forerun.evidence.validation.rows import Measurement
from forerun.evidence.validation.run import RowResult

PREDICTION = predict_program(program_of(plan_of(dp_shard=8)), H100).prediction
RUN = Run("tiny", "abc", {"row": ("--width", 4)}, "train.py")
TINY = Repository("https://example.org/tiny", ("*.py",), ())


def _row(**fields: Any) -> Measurement:
    unknown: dict[str, Any] = {
        name: "" if one.type == "str" else None for name, one in Measurement.__dataclass_fields__.items()
    }
    own = {"id": "row", "outcome": "ok", "tier": "A", "n_gpus": 16, "gpu": "H100-SXM", "gpus_per_node": 8}
    return Measurement(**{**unknown, **own, **fields})


def _job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: Run, **row: Any) -> Any:
    monkeypatch.setattr(run, "checkout", lambda *_: Path("/files"))
    known = Programs({"tiny": TINY}, (one,))
    return run._configuration(_row(**row), one, known, H100, Folders(tmp_path, tmp_path)).job


def test_a_row_runs_its_script_as_its_author_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--data={checkout}/data", 4)
    one = replace(RUN, rows={"row": given}, variables={"HOME": "{checkout}/home"}, dynamo="2.4")
    job = _job(tmp_path, monkeypatch, one)
    assert (job.target, job.arguments) == ("/files/train.py", ("--data=/files/data", "4"))
    assert (job.variables, job.dynamo) == ({"HOME": "/files/home"}, "2.4")
    assert (job.world_size, job.gpus_per_node, job.device) == (16, 8, "h100-sxm-80gb")
    assert (job.working_folder, job.allow_fallback, job.title) == ("", False, "tiny/train.py")
    assert _job(tmp_path, monkeypatch, RUN, n_gpus=None).world_size == 1


def test_a_script_that_reads_tokens_runs_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = _job(tmp_path, monkeypatch, replace(RUN, tokens={"x.bin": 5}, allow_fallback=True, logged=True))
    assert (job.working_folder, job.allow_fallback, job.target) == ("/files", True, "/files/train.py.py")
    titan = _job(tmp_path, monkeypatch, Run("tiny", "abc", {"row": ("llama3_8b",)}, torchtitan="llama3"))
    assert titan.is_module
    assert titan.arguments == ("llama3", "llama3_8b")


def _predicted(tmp_path: Path, **row: Any) -> TracedResult:
    save(program_of(plan_of(dp_shard=8)), tmp_path / "row.program")
    return run._predicted(RowResult(_row(**row)), RUN, H100, {}, Folders(tmp_path, tmp_path))


def test_a_row_that_states_its_batch_has_its_own_tokens(tmp_path: Path) -> None:
    found = [
        _predicted(tmp_path, global_batch_seqs=batch, seq_len=seq_len).traced
        for batch, seq_len in ((32, 4096), (64, 4096), (None, 4096), (32, None))
    ]
    rates = [one.tokens_per_s_per_gpu for one in found if one is not None]
    assert rates[0] == pytest.approx(32 * 4096 / PREDICTION.step_time_s / PREDICTION.n_gpus)
    assert rates[1] == pytest.approx(2 * rates[0])
    assert rates[2] == rates[3] == pytest.approx(PREDICTION.tokens_per_s_per_gpu)


def test_a_row_without_a_program_has_the_reason(tmp_path: Path) -> None:
    folders, result = Folders(tmp_path, tmp_path), RowResult(_row())
    lost = run._predicted(result, RUN, H100, {}, folders)
    assert lost.traced is None
    assert "row.program" in lost.reason
    nowhere = run._predicted(result, RUN, "no such device", {"row": "no such device"}, folders)
    assert (nowhere.reason, nowhere.cluster) == ("no such device", None)
    failed = run._predicted(result, RUN, H100, {"row": "it aborted"}, folders)
    assert (failed.reason, failed.cluster) == ("it aborted", H100)


def _result(traced: Any = PREDICTION, cluster: Any = H100, **row: Any) -> TracedResult:
    return TracedResult(_row(**row), RUN, traced, "", RowResult(_row(**row)), cluster)


@pytest.mark.parametrize(("end", "outside"), [("step_time_low_s", 0.999999), ("step_time_high_s", 1.000001)])
def test_the_ends_of_a_band_are_in_it(end: str, outside: float) -> None:
    edge = getattr(PREDICTION, end)
    assert report._time_held(PREDICTION, edge) is True
    assert report._time_held(PREDICTION, edge * outside) is False
    assert report._time_held(PREDICTION, None) is report._time_held(None, edge) is None


def test_memory_is_compared_in_its_own_figure() -> None:
    for kind, figure in (("allocated", "peak_allocated_gib"), ("reserved", "peak_reserved_gib")):
        predicted = getattr(PREDICTION, figure)
        found = report.judge(_result(peak_mem_gib=predicted / 1.25, peak_mem_kind=kind))
        assert found.memory_error == pytest.approx(0.25), kind
    unknown = report.judge(_result(peak_mem_gib=1.0, peak_mem_kind="a guess"))
    assert (unknown.memory_error, unknown.measured_gib) == (None, None)
    edges = (PREDICTION.peak_reserved_low_gib, PREDICTION.peak_reserved_high_gib)
    assert all(report._memory_held(PREDICTION, edge, "reserved") for edge in edges)
    assert report._memory_held(PREDICTION, edges[0] * 0.999, "reserved") is False


def _judged(repository: str, error: float | None, modelled: float | None = None, held: bool | None = None) -> Judged:
    plain: dict[str, Any] = dict.fromkeys(Judged.__dataclass_fields__)
    own = {"repository": repository, "time_error": error, "symbolic_time_error": modelled, "time_held": held}
    return Judged(**{**plain, **own})


def test_sums_take_sizes_of_errors_and_leave_out_what_is_not_known() -> None:
    rows = [_judged("b", 0.1, -0.3, True), _judged("a", -0.5, None, False), _judged("b", None, 0.9, True)]
    found = report.sums(rows, "time")
    assert list(found) == ["a", "b", "all"]
    assert found["all"] == Sum(2, pytest.approx(0.3), 0.5, pytest.approx(0.3), 0.5)
    assert found["b"] == Sum(1, 0.1, 0.1, 0.3, 1.0)
    assert math.isnan(found["a"].symbolic_mean)
    plain = build_traced_report([])
    nothing = {"rows": 0, "mean": None, "worst": None, "symbolic_mean": None, "held": None}
    assert plain == {"rows": [], "step_time": {"all": nothing}, "memory": {"all": nothing}, "quantiles": {}}


def test_bands_come_from_rows_whose_clock_is_known() -> None:
    wide = widening(PREDICTION.coverage, PREDICTION.exposed_comm_s / PREDICTION.step_time_s)
    time_s = PREDICTION.step_time_s * math.exp(0.2)
    assert list(report._time_scores([_result(step_time_s=time_s)])) == [pytest.approx(0.2 / wide)]
    unknown = replace(H100, device=replace(H100.device, name="mine", cost_profile="mine", architecture="mine"))
    for other in (
        _result(),
        _result(None, step_time_s=time_s),
        _result(cluster=None, step_time_s=time_s),
        _result(cluster=unknown, step_time_s=time_s),
    ):
        assert list(report._time_scores([other])) == []
    memory = _result(peak_mem_gib=PREDICTION.peak_allocated_gib * math.exp(-0.1), peak_mem_kind="allocated")
    assert list(report._memory_scores([memory], "allocated")) == [pytest.approx(-0.1)]
    assert list(report._memory_scores([memory], "reserved")) == []
    assert report.quantiles([memory])["allocated"].rows == 1


def test_cells_of_a_row() -> None:
    found = report.judge(
        _result(
            step_time_s=PREDICTION.step_time_s / 1.1,
            peak_mem_gib=PREDICTION.peak_reserved_gib,
            peak_mem_kind="reserved",
            source_label="depth 4",
        )
    )
    plain = replace(found, time_held=False, symbolic_time_error=-0.0312, memory_held=None)
    assert _cells(plain) == (
        *("tiny", "depth 4", "16 H100-SXM", f"{PREDICTION.step_time_s / 1.1:.3f}", "+10.0 %", "-3.1 %", "no"),
        *(f"{PREDICTION.peak_reserved_gib:.2f} r", "+0.0 %", "-", "-"),
    )
    bare = replace(plain, measured_s=None, time_error=None, measured_gib=None, memory_error=None, outcome="oom")
    assert _cells(replace(bare, fits=False))[3:9] == ("-", "-", "-3.1 %", "no", "out of memory", "foreseen")
    assert _cells(replace(bare, fits=None))[8] == "not foreseen"
    assert _cells(replace(bare, outcome="ok"))[7:9] == ("-", "-")
    lines = markdown([_result(step_time_s=PREDICTION.step_time_s)]).splitlines()
    assert lines[:3] == [
        "| program | figure | rows | traced, mean | largest | modelled, mean | in band |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        "| tiny | step time | 1 | 0.0 % | 0.0 % | - | 100.0 % |",
    ]
    assert not any("memory" in line for line in lines)


def test_what_changes_a_checkout_changes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.setattr(
        checkout, "_extract", lambda clone, commit, paths, target: (target / "train.py").write_text("=" * 100 + "\n")
    )
    monkeypatch.setattr(checkout, "_code_of_log", lambda log: "code")
    kinds = [
        RUN,
        replace(RUN, commit="abd"),
        replace(RUN, tokens={"x.bin": 5}),
        replace(RUN, tokens={"x.bin": 6}),
        replace(RUN, logged=True),
        replace(RUN, changes={"train.py": {"=" * 100: "x"}}),
    ]
    found = [checkout.checkout(one, TINY, tmp_path, tmp_path / "out") for one in kinds]
    assert len(set(found)) == len(kinds)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(path.name for path in found)
    assert checkout.checkout(replace(RUN, rows={}), TINY, tmp_path, tmp_path / "out") == found[0]
    one, other = {"x.bin": 5}, {"y.bin": 6}
    both = [
        checkout.checkout(replace(RUN, tokens=tokens), TINY, tmp_path, tmp_path / "out")
        for tokens in (one | other, other | one)
    ]
    assert both[0] == both[1]
    with pytest.raises(ForerunError, match="'=' is there 100 times, not once"):
        checkout.checkout(replace(RUN, changes={"train.py": {"=": "x"}}), TINY, tmp_path, tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) == len(kinds) + 1


def test_a_console_shows_rows_then_sums_then_what_is_missing_and_the_bands() -> None:
    out = Console(width=200, record=True, file=StringIO())
    failed = replace(_result(None), reason="it failed")
    print_traced([_result(step_time_s=PREDICTION.step_time_s, source_label="depth 4"), failed], out)
    rows, figures, rest = out.export_text().split("\n\n")
    assert [line.split()[:2] for line in rows.splitlines()] == [["program", "row"], ["tiny", "depth"]]
    assert figures.splitlines()[0].split("  ")[0] == "program"
    sums = [["tiny", "step", "time", "1"], ["all", "step", "time", "1"]]
    assert [line.split()[:4] for line in figures.splitlines()[1:]] == sums
    assert rest.splitlines() == [
        "not predicted: row: it failed",
        "80 % band of traced programs that these rows give, ln(measured / predicted):",
        "  time: +0.000 to +0.000 (1 rows)",
    ]
