"""Run as a script: a search of a small model with a store, which says what it simulates and may pause after each."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun.answers.search.result import SearchResult
from forerun.answers.search.search import search
from forerun.answers.search.store import AnswerStore
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.interfaces.report.records_of_searches import search_record, write_csv
from forerun.interfaces.report.written import to_json

TINY = replace(load_model("gpt2-small"), n_layers=4, vocab=1024, name="tiny")
CLUSTER = load_cluster("h100-sxm")
QUESTION: dict[str, Any] = {"n_gpus": 8, "seq_len": 512, "global_batch": 32, "keep": 30, "memory_limit_gib": 1.9625}
FIXED = {
    "pp": [1, 2, 4],
    "cp": 1,
    "activation_checkpointing": ["none", "full"],
    "reshard_after_forward": "always",
    "compile": False,
}


def small_search(store: Path | None, **more: Any) -> SearchResult:
    """The search that tests break off: some plans fit, some don't, some are skipped."""
    return search(TINY, CLUSTER, **{**QUESTION, "fixed": FIXED, "workers": 1, "store": store, **more})


def write_results(store: Path, out: Path, workers: int = 1) -> None:
    """Search, and write what was found beside `out`, as CSV and JSON."""
    result = small_search(store, workers=workers)
    write_csv(out.with_suffix(".csv"), result)
    out.with_suffix(".json").write_text(to_json(search_record(result, 5)))


def main(store: Path, out: Path, workers: int, pause_s: float) -> None:
    keep = AnswerStore.keep

    def said(self: AnswerStore, plan: Any, answer: Any) -> None:
        keep(self, plan, answer)
        print("simulated", flush=True)
        time.sleep(pause_s)

    AnswerStore.keep = said  # type: ignore[method-assign]
    write_results(store, out, workers)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
