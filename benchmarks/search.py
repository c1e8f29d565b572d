"""Configurations screened per second on a core, the 2^14-GPU space of Llama-3.1-405B, a search against exhaustion.

Run: python benchmarks/search.py [--stack NAME] [--batch N]. CPU seconds are of this process alone: one core; those of
other processes, which simulate, are not in them. What a machine with other work on it takes, the wall clock shows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from forerun.answers.search.screening import Screening
from forerun.answers.search.search import search
from forerun.answers.search.space import Tally, make_space
from forerun.answers.search.unit_runs import UnitRuns
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.interfaces.report.wording import plan_words

CLUSTER = load_cluster("h100-sxm")
BIG = load_model("llama-3.1-405b")
N_GPUS, SEQ_LEN = 2**14, 8192


@dataclass
class Clock:
    """Seconds that a block took."""

    wall_s: float = 0.0
    cpu_s: float = 0.0


@contextmanager
def timed() -> Iterator[Clock]:
    clock = Clock()
    wall, cpu = time.perf_counter(), time.process_time()
    yield clock
    clock.wall_s, clock.cpu_s = time.perf_counter() - wall, time.process_time() - cpu


def screening(stack: str, batch: int) -> None:
    """Enumeration, rules and bounds of every plan; what plans share is found in a first run, and reported apart."""
    space = make_space(BIG, CLUSTER, N_GPUS, SEQ_LEN, batch, {"stack": stack}, None, "whole")
    bounds = Screening(UnitRuns(BIG, CLUSTER), stack)
    with timed() as first:
        bounds.run(space.table(Tally()))
    tally = Tally()
    with timed() as meshes:
        table = space.table(tally)
    with timed() as bounding:
        screened = bounds.run(table)
    different = tally.considered - tally.same
    seconds = meshes.cpu_s + bounding.cpu_s
    print(
        f"screening, {stack}: {different / seconds:,.0f} configurations/s of a core ({different:,} in {seconds:.1f} s:"
        f" enumeration and rules {meshes.cpu_s:.1f} s, bounds of the {len(table):,} possible ones"
        f" {bounding.cpu_s:.1f} s); with {tally.same:,} in an order of mesh axes that changes nothing"
        f" {tally.considered / seconds:,.0f}/s"
    )
    apart = max(0.0, first.cpu_s - seconds)
    left = int(np.count_nonzero(~screened.too_large))
    print(f"  once, before that: {apart:.1f} s to build and run units; {left:,} plans may fit")


def whole_space(stack: str, batch: int) -> None:
    """The whole space to a proved optimum, from nothing, on two cores."""
    with timed() as clock:
        result = search(BIG, CLUSTER, N_GPUS, SEQ_LEN, batch, fixed={"stack": stack}, space="whole", keep=1, workers=2)
    counts = ", ".join(f"{name} {count:,}" for name, count in result.counts.items())
    print(f"405B on {N_GPUS:,} GPUs, {stack}, whole space: {clock.wall_s:.1f} s (CPU here {clock.cpu_s:.1f} s)")
    print(f"  {result.proof}; {counts}")
    best = result.best
    if best is not None:
        print(f"  {best.step_time_s:.3f} s, MFU {best.mfu or 0:.1%}: {plan_words(best.own_plan())}")


def against_exhaustion() -> None:
    """A space of about 10,000 configurations, once with bounds and once all that may fit."""
    model = replace(load_model("llama-3.1-8b"), n_layers=8, name="8 layers of llama-3.1-8b")
    question = (model, CLUSTER, 16, 4096, 64)
    fixed = {"stack": "megatron-core", "offload": "none", "activation_checkpointing": ["none", "full"]}
    results = []
    for exhaustive in (False, True):
        with timed() as clock:
            result = search(*question, fixed=fixed, space="whole", keep=1, workers=2, exhaustive=exhaustive)
        results.append(result)
        different = result.considered - result.same
        print(
            f"{'exhaustive' if exhaustive else 'bounded'}: {different:,} configurations, {result.proof},"
            f" {clock.wall_s:.1f} s"
        )
    plans = [result.best.own_plan() for result in results if result.best is not None]
    times = [result.best.step_time_s for result in results if result.best is not None]
    same = len(plans) == 2 and plans[0] == plans[1] and times[0] == times[1]
    print(f"  {'the same winner' if same else 'ANOTHER WINNER'}: {plan_words(plans[0])}, {times[0] * 1e3:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stack", default="megatron-core", help="software stack whose whole space is searched")
    parser.add_argument("--batch", type=int, default=2048, help="sequences of a step")
    options = parser.parse_args()
    against_exhaustion()  # compiles what is compiled once
    whole_space(options.stack, options.batch)
    screening(options.stack, options.batch)


if __name__ == "__main__":
    main()
