"""What a store costs a search, and what it saves the next one. Run: python benchmarks/store.py.

The same space is searched without a store, with a new one and with one that knows everything, in one process and in
turns; the ratios are of the medians.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from forerun.answers.search.result import SearchResult
from forerun.answers.search.search import search
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model

TURNS = 5


def main() -> None:
    model, cluster = load_model("llama-3.1-8b"), load_cluster("h100-sxm")

    def timed(store: Path | None) -> tuple[float, SearchResult]:
        start = time.perf_counter()
        result = search(model, cluster, 64, 8192, 256, workers=1, store=store)
        return time.perf_counter() - start, result

    _, expected = timed(None)  # compiles
    without: list[float] = []
    new: list[float] = []
    known: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(TURNS):
            store = Path(folder) / f"{turn}.sqlite"
            for seconds, place in ((without, None), (new, store), (known, store)):
                taken, result = timed(place)
                assert result == expected
                seconds.append(taken)
        size = store.stat().st_size
    simulated = len(expected.ranked) + sum(each.prediction is not None for each in expected.too_large)
    base = statistics.median(without)
    print(f"{simulated} plans simulated in {base:.2f} s without a store ({base / simulated * 1e3:.2f} ms each)")
    print(f"with a new store: {statistics.median(new) / base:.3f} of that; {size / simulated / 1024:.1f} KiB a plan")
    print(f"with a store that knows all: {statistics.median(known) / base:.3f} of that")


if __name__ == "__main__":
    main()
