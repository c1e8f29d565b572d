"""The rank of a measured plan among the plans that a search finds for the same question."""

from __future__ import annotations

from pathlib import Path

import pytest
from measured_rows import write_rows
from rich.console import Console

from forerun.answers.analysis.predict import predict
from forerun.evidence.validation.rank_table import print_ranks, ranks_record
from forerun.evidence.validation.ranks import PLACES, Rank, published_ranks
from forerun.evidence.validation.rows import TIERS, read_measurements

QUICK = {"micro_batch": "2", "n_microbatches": "1", "grad_accum": "1"}
SLOW = {"tp": "8", "dp_shard": "1", "pp": "2", "n_microbatches": "32", "grad_accum": "32", "step_time_s": "9"}


def ranks_of(tmp_path: Path, *changes: dict[str, str]) -> list[Rank]:
    return published_ranks(read_measurements(write_rows(tmp_path / "rows.csv", *changes)), {}, {}, predict)


def test_a_good_plan_is_near_the_best_and_a_slow_one_is_not(tmp_path: Path) -> None:
    good, slow = ranks_of(
        tmp_path, QUICK, {**SLOW, "global_batch_seqs": "32", "software": "torchtitan, later", "gpu": "H800-SXM"}
    )
    assert good.is_near
    assert good.standing.best_s * (1 + good.standing.behind) == pytest.approx(good.standing.step_time_s)
    assert not slow.is_near
    assert slow.standing.rank == PLACES + 1
    assert slow.standing.behind > good.standing.behind


def test_a_plan_that_a_search_finds_best_has_rank_1(tmp_path: Path) -> None:
    (first,) = ranks_of(tmp_path, {})
    best = first.best
    cells = {name: str(getattr(best, name)) for name in ("tp", "pp", "cp", "dp_replicate", "dp_shard", "zero_stage")}
    cells |= {"micro_batch": str(best.micro_batch), "n_microbatches": str(best.n_microbatches)}
    assert best.activation_checkpointing == "none"
    (again,) = ranks_of(tmp_path, {**cells, "grad_accum": str(best.n_microbatches)})
    assert again.standing.rank <= 2  # the reshard policy of a row is the framework's default
    assert again.standing.behind < 0.03


def test_of_several_plans_for_one_question_the_fastest_measured_is_ranked(tmp_path: Path) -> None:
    (only,) = ranks_of(tmp_path, SLOW, {"id": "quick"}, {"tier": "C", "seq_len": "8192"})
    assert only.row.id == "quick"


def test_rows_of_tier_c_are_ranked_where_they_are_asked_for(tmp_path: Path) -> None:
    rows = read_measurements(write_rows(tmp_path / "rows.csv", {**QUICK, "tier": "C"}))
    assert published_ranks(rows, {}, {}, predict) == []
    (rank,) = published_ranks(rows, {}, {}, predict, tiers=TIERS)
    assert rank.row.tier == "C"


def test_the_table_counts_the_plans_that_are_near(tmp_path: Path) -> None:
    ranks = ranks_of(tmp_path, QUICK)
    out = Console(record=True, width=160)
    print_ranks(ranks, out)
    assert "1 of 1 plans are among the first 5 or within 3 % of the best" in out.export_text()
    (record,) = ranks_record(ranks)["ranks"]
    assert (record["rank"], record["n_gpus"], record["stack"]) == (ranks[0].standing.rank, 16, "torchtitan")
