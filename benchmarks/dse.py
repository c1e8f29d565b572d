"""112 points of a design space, generated and simulated on one core, against what STAGE and ASTRA-sim take for them.

Run: python benchmarks/dse.py. The inputs are in examples/dse-llama-gpt.yaml: 56 strategies of Llama-70B at 80 layers on
system 1 and of GPT-175B at 96 layers on system 2, 64 NPUs each. Where the reference's results of one point of each lie
beside the repository, these are compared to the nanosecond and the byte, and its own run times are taken for the ratio.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun.astrasim.dse.definition import read_exploration
from forerun.astrasim.dse.evaluate import Failed
from forerun.astrasim.dse.explore import evaluator_of
from forerun.astrasim.dse.space import Point
from forerun.astrasim.dse.workload import Strategy

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT.parent / "shared" / "golden" / "dse"
FULL_SIZE = {
    "llama-70b": (Strategy(dp=8, tp=1, sp=8, activation_recompute=True), "llama70b_system_1_L80/dp8_tp1_sp8_ar1"),
    "gpt-175b": (Strategy(dp=4, tp=8, sp=2, activation_recompute=True), "gpt175b_system_2_L96/dp4_tp8_sp2_ar1"),
}
"""workload -> the strategy whose reference result is known, and where"""


def main() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    exploration = read_exploration(ROOT / "examples" / "dse-llama-gpt.yaml")
    points = exploration.points
    start = time.perf_counter()
    evaluator_of(exploration).outcome(points[0])
    print(f"first call (compiles, or loads what was compiled): {time.perf_counter() - start:.2f} s")

    evaluator = evaluator_of(exploration)  # knows nothing of any collective
    start, start_cpu = time.perf_counter(), time.process_time()
    outcomes = [evaluator.outcome(point) for point in points]
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    print(
        f"{len(points)} points generated and simulated on one core: {seconds:.2f} s ({cpu_s:.2f} s of CPU), "
        f"{seconds / len(points) * 1e3:.1f} ms a point, {len(points) / seconds:.0f} points/s, {len(failed)} failed"
    )
    reference_s = 0.0
    for (workload, system), of_pair in _by_pair(points).items():
        strategy, folder = FULL_SIZE[workload]
        point = Point(workload, system, strategy)
        start = time.perf_counter()
        statistics = evaluator.replay(point).statistics
        again_s = time.perf_counter() - start
        print(
            f"{workload} on {system}: {again_s * 1e3:.1f} ms for dp{strategy.dp} tp{strategy.tp} sp{strategy.sp} again"
        )
        if not (REFERENCE / folder).is_dir():
            print("  no reference results here")
            continue
        differing = _differing(REFERENCE / folder, [asdict(rank) for rank in statistics])
        print(f"  {'exact on all ranks' if not differing else f'DIFFERS: {differing}'}")
        stage, astra = (_seconds(REFERENCE / folder / name) for name in ("stage_time.json", "astrasim_time.json"))
        print(f"  reference: {stage:.1f} s of STAGE + {astra:.1f} s of ASTRA-sim (user time)")
        reference_s += (stage + astra) * of_pair
    if reference_s:
        print(
            f"reference, at the time of these two points: {reference_s:,.0f} s for all {len(points)}; "
            f"ratio {reference_s / seconds:,.0f}"
        )


def _by_pair(points: tuple[Point, ...]) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for point in points:
        pair = (point.workload, point.system)
        counts[pair] = counts.get(pair, 0) + 1
    return counts


def _differing(folder: Path, statistics: list[dict[str, Any]]) -> list[str]:
    """What differs from the reference, as `rank 3 wall_time`."""
    (system,) = json.loads((folder / "metrics.json").read_text())["systems"].values()
    return [
        f"rank {rank} {name}"
        for rank, figures in system["per_rank"].items()
        for name, value in figures.items()
        if statistics[int(rank)][name] != value
    ]


def _seconds(path: Path) -> float:
    return float(json.loads(path.read_text())["user_s"])


if __name__ == "__main__":
    main()
