"""Results of experiments written by hand, on simulated steps, for tests of what shows them."""

from __future__ import annotations

import random
from functools import lru_cache

from forerun.answers.analysis.reading import Simulation
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.experiment.request import Request
from forerun.answers.experiment.result import (
    Bill,
    Comparison,
    Iteration,
    RunResult,
    ScalePoint,
    ScalingStudy,
    StragglerStudy,
    Variant,
)
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan

NASTY = "</script><img src=x onerror=document.title='owned'>"
PLAN = Plan(1024, micro_batch=2, n_microbatches=2, dp_shard=8, tp=2, pp=2, activation_checkpointing="full")
BILL = Bill(0.5, 12.5, 71.9, 320.0, 41.0, 3.2, 0.4)


def request(name: str = "gpt2 study", plan: Plan = PLAN) -> Request:
    setup = Setup(load_model("gpt2-small"), plan, load_cluster("h100-sxm"))
    config = {"name": name, "model": {"model_type": "gpt2"}, "training": {"num_nodes": 4, "batch_size_per_gpu": 2}}
    echo = ("network_bandwidth_gbps 400: gigabits per second of a GPU and direction, 50 GB/s",)
    return Request(name, setup, num_iterations=400, config=config, echo=echo)


@lru_cache(maxsize=4)
def simulated(plan: Plan = PLAN) -> Simulation:
    return simulate_setup(request(plan=plan).setup)


def split(step_s: float, waiting_s: float = 0.0) -> dict[str, float]:
    """A breakdown that sums to step_s + waiting_s."""
    parts = {"compute": 0.6, "communication": 0.25, "bubble": 0.1, "host": 0.05}
    return {name: share * step_s for name, share in parts.items()} | {"waiting": waiting_s}


def run_result(name: str = "gpt2 study", differing: bool = True) -> RunResult:
    simulation, asked, chance = simulated(), request(name), random.Random(1)
    step_s = simulation.prediction.step_time_s
    iterations: list[Iteration] = []
    now = 0.0
    for first in range(0, 400, 1 if differing else 200):
        slow = 0.4 * step_s * chance.random() ** 4 if differing else 0.0
        warm = step_s * max(0.0, 1 - first / 10)
        breakdown = split(step_s + warm, slow)
        note = "warm-up" if warm else "straggler" if slow > 0.2 * step_s else ""
        time_s, repeats = sum(breakdown.values()), 1 if differing else 200
        iterations.append(Iteration(first, repeats, now, time_s, 128, 1024, breakdown, 3 if slow else -1, note))
        now += repeats * time_s
    samples = 400 * 128
    rate = samples / now
    return RunResult(
        asked, simulation, tuple(iterations), now, now / 400, step_s, 1.5 * step_s, rate, rate * 1024, BILL
    )


def scaling_study(name: str = "gpt2 study", strong: bool = True) -> ScalingStudy:
    points = []
    for i, efficiency in enumerate((1.0, 0.97, 0.91, 0.83, 0.62, 0.0)):
        nodes, step_s = 2**i, 0.5 / 2**i / (efficiency or 1)
        if not efficiency:
            points.append(
                ScalePoint(nodes, 8 * nodes, 0, 0, 0, 0, {}, 0, False, BILL, "global batch 64 does not split")
            )
            continue
        comm = 0.5 / 2**i * (1 / efficiency - 1)
        parts = {"compute": step_s - comm, "communication": comm, "bubble": 0.0, "host": 0.0, "waiting": 0.0}
        points.append(ScalePoint(nodes, 8 * nodes, step_s, 64, 64 / step_s, efficiency, parts, 60, i > 0, BILL))
    return ScalingStudy(request(name), strong, tuple(points), 16, "exposed communication", 16, 2, 4)


def comparison(name: str = "gpt2 study") -> Comparison:
    prediction = simulated().prediction
    rows = [
        Variant(name, "base", prediction, 900.0, split(0.1), BILL),
        Variant("tree_allreduce", "pattern", prediction, 840.0, split(0.1, 0.01), BILL),
        Variant("a100-sxm-80gb", "device", prediction, 400.0, split(0.2), None),
        Variant("torus_2d", "topology", None, 0.0, {}, None, "torus_2d needs a square number of nodes, not 2"),
    ]
    return Comparison(request(name), tuple(rows))


def straggler_study(name: str = "gpt2 study") -> StragglerStudy:
    chance = random.Random(2)
    steps = [0.1 * (1 + abs(chance.gauss(0, 0.03)) + (0.5 if chance.random() < 0.06 else 0)) for _ in range(1000)]
    ordered = sorted(steps)
    mean = sum(steps) / len(steps)
    blame = ((17, 40), (3, 38), (5, 9))
    return StragglerStudy(
        request(name), 0.1, mean, ordered[500], ordered[990], tuple(steps), 1 - 0.1 / mean, 4.2, blame
    )
