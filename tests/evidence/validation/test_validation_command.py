"""`forerun validate` from the outside, with a stand-in for the predictor."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import typer
from measured_rows import prediction, write_rows
from typer.testing import CliRunner, Result

from forerun.answers.analysis.prediction import Prediction
from forerun.common.errors import ForerunError
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.interfaces.cli import validate as command

MODELS = """
Small-Llama: {n_layers: 16, hidden: 2048, n_heads: 16, n_kv_heads: 8, head_dim: 128, ffn_hidden: 5632, vocab: 32000,
  mlp: swiglu, norm: rmsnorm, bias: false, tied_embeddings: false, pos_emb: rope}
"""


def two_seconds(model: ModelSpec, plan: Plan, cluster: Cluster) -> Prediction:
    """Trips over micro batches of 2."""
    if plan.micro_batch == 2:
        raise KeyError("micro")
    return prediction(2.0, 44.0, 50.0, fits=True)


def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str, micro_batch: str = "1") -> Result:
    monkeypatch.setattr(command, "predict", two_seconds)
    change = {"micro_batch": micro_batch, "n_microbatches": "2", "global_batch_seqs": str(32 * int(micro_batch))}
    write_rows(tmp_path / "rows.csv", change)
    (tmp_path / "models.yaml").write_text(MODELS)
    (tmp_path / "hardware.yaml").write_text("clusters: {}\n")
    app = typer.Typer()
    app.command()(command.validate)
    files = ["--models", str(tmp_path / "models.yaml"), "--hardware", str(tmp_path / "hardware.yaml")]
    return CliRunner().invoke(app, [str(tmp_path / "rows.csv"), *files, *options])


def test_prints_tables_and_writes_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(tmp_path, monkeypatch, "--out", str(tmp_path / "predictions.csv"))
    assert result.exit_code == 0
    assert "tier A step time MAPE 33.33%" in result.stdout
    with (tmp_path / "predictions.csv").open() as file:
        assert [line["step_time_s"] for line in csv.DictReader(file)] == ["2"]


def test_every_figure_of_one_row_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 s are predicted where 1.5 s are measured, and 44 GiB where 40 are."""
    printed = invoke(tmp_path, monkeypatch, "--worst", "3", "--verbose").stdout
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    time, memory = "33.33% 33.33% 33.33% +33.33% 0.00%", "10.00% 10.00% 10.00% +10.00% 0.00%"
    for expected in (
        "1 rows (1 ok, 0 out of memory), 1 with a measured time; predicted 1, tier A 1 of 1, tier B 0 of 0, "
        "tier C 0 of 0",
        f"tier A 1/1 {time}",
        f"all tiers 1/1 {time}",
        f"FSDP/ZeRO-3 only 1/1 {time}",
        f"H100-SXM 1/1 {time}",
        f"9-64 GPUs 1/1 {time}",
        f"< 1 B 1/1 {time}",
        f"torchtitan 1/1 {time}",
        f"allocated, tier A 1/1 {memory}",
        f"allocated, lab 1/1 {memory}",
        "foreseen: 0 of 0 judged (0 such rows in all)",
        "wrongly refused: 0 of 1 judged (1 ok rows in all)",
        "same workload: 0 of 0 groups, mean -, worst -, among covered rows -, median Spearman -",
        "tier A 1 0.00% 100.00% 0.00% 33.33%",
        "time, tier A, fitted stacks: -0.288 to -0.288 (1 rows)",
        "allocated, tier A, fitted stacks: -0.095 to -0.095 (1 rows)",
        "+33.33% 1.5 2 row-1 FSDP=16",
        "Not predicted: 0 rows",
        "Assumptions: 0 kinds",
    ):
        assert expected in lines, expected
    assert lines[-1] == (
        "summary: tier A step time MAPE 33.33%, mean signed +33.33%, covered 1/1; allocated memory MAPE 10.00%; "
        "regret -; 80 % band holds 0.00% of rows"
    )
    assert "Largest step time errors" not in invoke(tmp_path, monkeypatch).stdout
    assert "(--verbose lists them)" in invoke(tmp_path, monkeypatch).stdout


def test_draws_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(tmp_path, monkeypatch, "--plots", str(tmp_path / "pictures"))
    assert result.exit_code == 0
    drawn = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert drawn == {
        "step_time.png",
        "memory.png",
        *(f"residuals_by_{what}.png" for what in ("class", "device", "gpus")),
    }


def test_json_is_one_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = json.loads(invoke(tmp_path, monkeypatch, "--json").stdout)
    assert report["step_time"]["tier A"]["signed"] == pytest.approx(1 / 3)


def test_a_fault_ends_with_status_1_after_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(tmp_path, monkeypatch, micro_batch="2")
    assert result.exit_code == 1
    assert "fault: KeyError" in result.stdout


def test_an_empty_split_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(tmp_path, monkeypatch, "--split", "closed")
    assert isinstance(result.exception, ForerunError)
    assert "has no row of this split" in str(result.exception)
