"""Results whose every figure is written by hand, for tests of what is printed of them."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from types import SimpleNamespace as Hand

import numpy as np

from forerun.answers.analysis.compression import CompressionEffect
from forerun.answers.goodput.outcome import Spent
from forerun.answers.jobs.job import Job, Scheduled
from forerun.answers.jobs.outcome import PolicyOutcome
from forerun.astrasim.astra.statistics import RankStatistics
from forerun.astrasim.dse.evaluate import Figures
from forerun.astrasim.dse.limits import MemoryLimit
from forerun.astrasim.dse.result import Explored, PairResult, Row
from forerun.astrasim.dse.space import Point
from forerun.astrasim.dse.terms import Communication, Terms
from forerun.astrasim.dse.workload import Strategy
from forerun.core.program.builder import BlockBuilder, OpTableBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import Direction
from forerun.core.program.types import N_CATEGORIES, Category, Collective, Program, RankClass, Stream
from forerun.evidence.measure.calibrate import Change, ErrorRow

GIB = 2**30


def point(strategy, time_us, gib, fits=None, communication=(), compute_us=10, operations=100_000, held=0.25, busy=51.0):
    """A simulated point of an exploration; `communication` are (kind, axis, calls, GiB, exposed us)."""
    of_time = tuple(
        Communication(axis, kind, n, int(size * GIB), us * 1000) for kind, axis, n, size, us in communication
    )
    exposed = sum(one.exposed_ns for one in of_time)
    idle = (time_us - compute_us) * 1000 - exposed
    terms = Terms(operations, compute_us * 1000, of_time, idle, int(held * GIB), int((gib - held) * GIB))
    of_rank = RankStatistics(0, 0, 0, 0, 0, None, None, None, None, None)
    ns, memory = time_us * 1000, int(gib * GIB)
    found = Figures(ns, exposed + idle, compute_us * 1000, 2 * exposed, 1.0, busy, 2.0, 3.0, memory, terms, of_rank)
    return Row(Point("gpt", "torus", strategy), found, "", gib, fits)


def failed(strategy, error):
    return Row(Point("gpt", "torus", strategy), None, error, None, None)


def explored(limit_gib=3.0):
    near, far = Strategy(dp=4), Strategy(dp=2, tp=2)
    again = Strategy(dp=2, tp=2, activation_recompute=True)
    summed = ("all-reduce", "dp", 2, 8.0, 4)
    rows = (
        point(near, 100, 4.0, limit_gib >= 4, (("all-gather", "tp", 8, 2, 60), summed)),
        point(far, 150, 2.0, limit_gib >= 2, (("all-gather", "tp", 16, 4, 100), summed), operations=100_040, held=0.5),
        point(again, 200, 1.0, limit_gib >= 1, (("all-gather", "tp", 16, 4, 105),), 40, 150_000, busy=73.0),
        point(Strategy(tp=4), 1200, 12.5, False, (("all-to-all", "ep", 3, 1, 1000), ("send", "pp", 9, 0.5, 30)), 90),
        *(failed(Strategy(pp=1 + n), f"stage {n} is empty") for n in range(4)),
    )
    pair = PairResult("gpt", "torus", 4, MemoryLimit(limit_gib), rows)
    lost = PairResult("gpt", "mesh", 8, None, (failed(Strategy(dp=8), "no layers"),))
    return Explored((pair, lost), 6, 3, 0.25)


def scheduled():
    jobs = (
        Scheduled(Job("small", 2, 0, 3600, "lab"), 0, 3600, 0, ((0, 3600),)),
        Scheduled(Job("large", 4, 600, 7200, "team"), 1800, 14_400, 2, ((1800, 5400), (7200, 14_400)), failures=1),
    )
    later = (
        Scheduled(Job("small", 2, 0, 3600, "lab"), 0, 3600, 0, ((0, 3600),)),
        Scheduled(Job("large", 4, 600, 7200, "team"), 3600, 10_800, 0, ((3600, 10_800),)),
    )
    request = Hand(
        name="lab", jobs=jobs, policies=("srtf", "fifo"), notes=("3 rows are left out.",), gpus=8,
        cluster_words="8 GPUs in 1 nodes", placement="packed",
    )  # fmt: skip
    return request, [PolicyOutcome("srtf", jobs, 8), PolicyOutcome("fifo", later, 8)]


def spread(p5, p50, p95, mean):
    return Hand(p5=p5, p50=p50, p95=p95, mean=mean)


def study(**changes):
    """A study of a whole run."""
    request = Hand(
        name="70b", by_the_clock=False, steps=120_000, gpus=2048, nodes=256, save_every_s=1800.0, ideal_s=700_000.0,
        phases=(Hand(step_s=5.84),), notes=("Spares are not priced.",),
    )  # fmt: skip
    found = Hand(
        request=request, outcomes=[None] * 50, seed=7, mttf_s=9000.0, finished=0.98,
        goodput=spread(0.81, 0.853, 0.89, 0.85), ettr=spread(0.8, 0.84, 0.88, 0.842),
        wall_s=spread(780_000, 820_000, 900_000, 825_000), tokens=spread(1e12, 2.5e12, 9e11, 6.1e9),
        interruptions=spread(60, 77, 90, 76.4),
        badput={Spent.WASTED: 0.071, Spent.SAVE: 0.0304}, failures={"gpu": 61.25, "switch": 4.0},
        intervals=[Hand(name="best of those tried", save_every_s=1200.0, goodput=0.861),
                   Hand(name="Daly", save_every_s=1500.0, goodput=0.4)],
        gains=[Hand(change="half the failures", goodput=0.9, saved_s=40_000.0),
               Hand(change="slower saves", goodput=0.8, saved_s=-150.0)],
        dollars=1_234_567.8, energy_mwh=12.3456,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(request if hasattr(request, name) else found, name, value)
    return found


def traced():
    """A Program of two roles: a matmul, two gathers and a message."""
    ops = OpTableBuilder()
    work = ops.memory("work", 1e9, 1e9, flops=3e12)
    gather = ops.collective("gather", Collective.ALL_GATHER, 0, 2 * GIB)
    total = ops.collective("sum", Collective.ALL_REDUCE, 1, GIB / 2)
    sent = ops.p2p("send", 1, 8, direction=Direction.OUT)
    one, other = BlockBuilder(), BlockBuilder()
    one.node(gather, Stream.GATHER)
    one.node(work)
    one.alloc(3 * GIB, Category.ACTIVATION, 1)
    other.node(total, Stream.TP)
    other.node(work)
    other.node(work)
    other.node(sent, Stream.PP_SEND)
    steps = np.array([0, 0, 1], np.int32)
    nothing = np.zeros(3, np.int32)
    resident = np.zeros(N_CATEGORIES, np.int64)
    resident[Category.PARAMETER] = GIB
    first = RankClass("first", 1024, steps, nothing, nothing - 1, resident)
    last = RankClass("last", 2, steps[:1], nothing[:1], nothing[:1] - 1, resident)
    meta = {
        "name": "mine", "world_size": 1026, "fallbacks": ["graph break"], "notes": [f"guess {n}" for n in range(10)],
    }  # fmt: skip
    groups = (CommGroup("dp", 8, 1, 8), CommGroup("tp", 2, 1, 2))
    return Program(ops.build(), (one.build("one"), other.build("other")), (first, last), groups, (), ("m",), meta)


def costs(**changes):
    """What stragglers cost a recorded job."""
    recorded = Hand(
        name="job", steps=[3, 4], stages=2, replicas=3, step_s=np.array([1.0, 1.5]), notes=("One step is cut.",)
    )
    usual = {
        "recorded": recorded, "replayed_s": np.array([0.9, 1.3]), "alike_s": 1.0, "slowdown": 1.1, "delayed": 1.05,
        "wasted_share": 0.0909, "by_operation": {f"op {n}": 1.2 - n / 100 for n in range(12)},
        "by_stage": {1: 1.08, 0: 1.01}, "by_replica": dict.fromkeys(range(12), 1.05), "by_rank": {"1-2": 1.0404},
        "last_stage_share": 0.456, "slowest_ranks": [5], "slowest_ranks_share": 0.25,
    }  # fmt: skip
    return Hand(**{**usual, **changes})


def costs_of_nothing():
    return costs(last_stage_share=nan, slowest_ranks=[5, 4], slowest_ranks_share=nan)


def compressed(**changes):
    usual = {
        "method": "PowerSGD of rank 4", "plain_step_s": 1.2, "step_s": 1.0, "wire_share": 0.03125,
        "residual_gib": 1.234, "break_even_bytes_per_s": 12.5e9, "caveat": "errors are fed back", "source": "a paper",
    }  # fmt: skip
    return CompressionEffect(**{**usual, **changes})


def outer(**changes):
    steps = Hand(method="diloco", delay=1, fragments=4, every=100, link_gb_s=None)
    usual = {
        "steps": steps, "replicas": 8, "gpus_of_replica": 64, "exchange_s": 2.5, "exposed_s": 0.5, "kernels_s": 0.0125,
        "mean_step_s": 0.8, "plain_step_s": 1.0, "tokens_per_s": 1.5e6, "sent_gib": 3.456, "gpu_gib": 2.0,
        "host_gib": 7.125, "fits": True, "needed_gb_s": 1.25, "caveat": "loss may differ", "source": "DiLoCo",
    }  # fmt: skip
    return Hand(**{**usual, **changes})


def calibrated():
    changes = [
        Change("gemm.efficiency", 0.8, 0.9),
        Change("launch_us", None, 2.5),
        Change("zero", 0.0, 1.0),
    ]
    errors = [
        ErrorRow("gemm", "bf16", 1200, 12.345, 3.21, 4.0, True),
        ErrorRow("attention", "flash", 3, 9.0, 9.5, None, False),
    ]
    return Hand(profile=Hand(name="h100-sxm-80gb"), changes=changes, errors=errors, notes=["Few rows."])


@dataclass
class Predicted:
    """The figures of a prediction that tables of searches show."""

    step_time_s: float
    peak_reserved_gib: float
    tokens_per_s_per_gpu: float
    mfu: float
    dollars_per_billion_tokens: float | None
    world: int = 8


def swept():
    """Three points of a range of searches, the second the best and on the front with the first."""
    first = Predicted(0.5, 70.25, 5000.0, 0.4, 12.345)
    second = Predicted(0.25, 60.0, 6000.0, 0.45, None)
    points = [
        Hand(n_gpus=8, global_batch=64, best=first, tokens_per_s=40_000.0, reason="", uncertain=""),
        Hand(n_gpus=1024, global_batch=128, best=second, tokens_per_s=6.1e6, reason="", uncertain="cut short"),
        Hand(n_gpus=2, global_batch=64, best=None, tokens_per_s=None, reason="does not fit", uncertain=""),
    ]
    return Hand(
        points=points, best=points[1], front=[(points[0], first), (points[1], second)], objective="time",
        wishes="more tokens/s for less money", efficiency=lambda at: {8: 1.0, 1024: 0.925}[at.n_gpus],
    )  # fmt: skip
