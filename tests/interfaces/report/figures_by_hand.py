"""Results whose every figure is written by hand, for tests of what is printed of them."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from types import SimpleNamespace as Hand

import numpy as np

from forerun.answers.analysis.compression import CompressionEffect
from forerun.answers.analysis.reading import TIGHT
from forerun.answers.diff.changes import StepDiff, TensorChange, Work, WorkChange
from forerun.answers.goodput.outcome import Spent
from forerun.answers.jobs.job import Job, Scheduled
from forerun.answers.jobs.outcome import PolicyOutcome
from forerun.answers.search.front import Front
from forerun.astrasim.astra.collective_sweep import Point, Setting
from forerun.astrasim.astra.hot_links import HotLink
from forerun.astrasim.astra.statistics import RankStatistics
from forerun.astrasim.astra.system import System
from forerun.astrasim.dse.evaluate import Figures
from forerun.astrasim.dse.limits import MemoryLimit
from forerun.astrasim.dse.result import Explored, PairResult, Row
from forerun.astrasim.dse.space import Point as Place
from forerun.astrasim.dse.terms import Communication, Terms
from forerun.astrasim.dse.workload import Strategy
from forerun.core.cost.nccl_choice import NcclChoice
from forerun.core.network.network_file import parse_topology
from forerun.core.program.builder import BlockBuilder, OpTableBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import Direction
from forerun.core.program.types import N_CATEGORIES, Category, Collective, Program, RankClass, Stream
from forerun.describe.plan.plan import Plan
from forerun.evidence.measure.calibrate import Change, ErrorRow
from forerun.interfaces.report.histogram import Bin

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
    return Row(Place("gpt", "torus", strategy), found, "", gib, fits)


def failed(strategy, error):
    return Row(Place("gpt", "torus", strategy), None, error, None, None)


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
        lost_tokens=spread(1e10, 2e10, 4e10, 2.4e10), interruptions=spread(60, 77, 90, 76.4),
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


def predicted(**changes):
    """The figures of a prediction, with a network and measurements that lack something."""
    axes = [Hand(axis="tp", busiest_link="0 -> 1", busy_s=0.25, utilisation=0.5)]
    usual = {
        "model": "gpt", "n_gpus": 1024, "cluster": "h100", "plan": None, "sample": None,
        "step_time_s": 2.0, "step_time_low_s": 1.8, "step_time_high_s": 2.4, "tokens_per_s_per_gpu": 9000.0,
        "samples_per_s_per_gpu": 12.0, "mfu": 0.4321, "hfu": 0.5, "mfu_peak": "989 TFLOP/s", "utilization": 0.61,
        "peak_allocated_gib": 60.0, "peak_reserved_gib": 66.6, "peak_reserved_low_gib": 64.0,
        "peak_reserved_high_gib": 70.0, "memory_limit_gib": 79.2, "memory_recorded": True, "fits": True,
        "fit_in_doubt": False, "device_gib": 68.5, "exposed_comm_s": 0.3, "bubble_s": 0.1,
        "bottleneck": "compute_bound", "dollars_per_billion_tokens": 1234.5, "warnings": ("slow link",),
        "breakdown": {"gemm_forward": 1.5, "host": 0.3, "tiny": 0.001, "attention": 0.1},
        "peak_rank_class": "stage 0", "peak_owner": "layer 3", "network": Hand(topology="ring", axes=axes),
        "memory_by_category_gib": {"activation": 40.0, "parameter": 19.99, "other": 0.01},
        "missing": [f"gemm {n}" for n in range(12)], "rate_band": lambda per_s: (per_s * 0.8, per_s * 1.1),
    }  # fmt: skip
    return Hand(**{**usual, **changes})


def looped():
    """Periodic work of a training loop."""
    stalls = [
        Hand(name="checkpoint", every_steps=1000, stall_s=3.0, beside_s=20.0, mean_s=0.003),
        Hand(name="garbage collection", every_steps=50, stall_s=0.05, beside_s=0.0, mean_s=0.001),
    ]
    saved = Hand(rank_gib=1.234, total_gib=160.5, save_s=23.0, load_s=41.0, storage="nfs", mode="async")
    return Hand(stalls=stalls, step_time_s=1.0, mean_step_time_s=1.004, tokens_per_s_per_gpu=8000.4, checkpoint=saved)


def collectives(serial=True):
    network = parse_topology("ring:4@50GBps/500,switch:2@25/1000")
    setting = Setting(network, System.model_validate({"local-mem-bw": 16}), serial=serial)
    links = (HotLink(0, 1, 0.5, 3000), HotLink(9, 3, 0.25, 1000))
    points = [
        Point("ring", 1 << 20, 2500, 419.43, 734.0, unqueued_ns=2000, beyond_links=True),
        Point("direct", 1 << 20, 1500, 699.05, 61.0, hottest=links),
        Point("tree", 1 << 20, error="needs a power of two"),
        Point("tree", 3 << 10, error="needs a power of two"),
    ]
    return setting, points


def grouped():
    network = parse_topology("mesh2d:2x2@50/500")
    groups = ((0, 1), (2, 3))
    return Setting(network, System.model_validate({}), groups, aware=True, fitting=True), [Point("ring", 5, 1500, 1, 2)]


def nccl():
    sizes = ((1 << 30, "ring", "Simple", 0.01), (1000, "tree", "LL", 1e-5))
    return [NcclChoice(size, *which, 100.0, 175.0) for size, *which in sizes]


def after_training():
    stages = [Hand(name="generation", time_s=3.0, device_gib=None), Hand(name="update", time_s=1.0, device_gib=70.0)]
    usual = {"stages": stages, "step_time_s": 4.0, "device_gib": 70.0, "fits": False, "memory_limit_gib": 64.0}
    return Hand(**usual, generated_tokens=10_000)


def allocated(**changes):
    last = Hand(
        reserved_bytes=60 * GIB, allocated_bytes=50 * GIB, out_of_memory=False, fragmentation=0.125, mallocs=99,
        retries=2, segments=7,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(last, name, value)
    return Hand(last=last, steps=[last] * 3, available_bytes=79 * GIB, rank_class="stage 1", still_growing=True)


def binned():
    return [Bin(0.5, 1.0, 3, 10), Bin(1.0, 2.0, 0, 1), Bin(2.0, 4.0, 1, 0)]


def gains():
    return [Hand(label="kernels 10 % faster", change=0.083, step_time_s=0.92, how="all of them"),
            Hand(label="no host", change=-0.001, step_time_s=1.001, how="none")]  # fmt: skip


def planned(step_s, gib, **fields):
    """A prediction of a plan, as rows of a search need it."""
    plan = Plan(2048, **fields)
    many = {"step_time_s": step_s, "peak_reserved_gib": gib, "warnings": (), "exposed_comm_s": step_s / 8}
    many |= {"samples_per_s_per_gpu": None}
    return predicted(own_plan=lambda: plan, hbm_gib=80.0, tokens_per_s=8 * 9000.0, **many)


def searched(**changes):
    """A search of which three plans fit, the first two on the front, with one choice that is worth something."""
    fast, second = planned(0.5, 70.0, dp_shard=8, compile=True), planned(0.75, 30.0, tp=8, stack="megatron-core")
    third = planned(1.5, 75.0, pp=8, n_microbatches=8)
    third.warnings = (TIGHT, "slow link")
    choice = Hand(field="compile", value="off", best=planned(0.6, 71.0, dp_shard=8), instead=fast, caution="")
    counts = {
        "considered": 12_345, "impossible": 10_000, "same": 40, "renamed": 5, "ok": 3, "out_of_memory": 297,
        "skipped": 2000,
    }  # fmt: skip
    usual = {
        "model": "gpt", "n_gpus": 8, "cluster": "h100", "seq_len": 2048, "global_batch": 64, "objective": "time",
        "ranked": [fast, second, third], "top": lambda n: [fast, second, third][:n], "best": fast,
        "stacks": ("torchtitan", "megatron-core"), "choices": [choice], "counts": counts, "memory_limit_gib": 72.5,
        "too_large": [Hand(plan=Plan(2048, dp_shard=4, micro_batch=2), reason="81.0 GiB of 72.5 GiB")],
        "out_of_memory": {"activations": 290, "parameters": 7}, "impossible": {"heads": 9000, "batch": 1000},
        "bounds_of_skipped": [2.0, 3.0], "proof": "proven best of all", "front": Front((fast, second), 0.6, 1234),
    }  # fmt: skip
    return Hand(**{**usual, **changes})


def swept_with_memory():
    """A range of searches whose front has memory too."""
    found = swept()
    first, second = planned(0.5, 70.0, dp_shard=8), planned(0.25, 60.0, tp=8, stack="megatron-core")
    for point, best in zip(found.points, (first, second), strict=False):
        point.best = best
    found.front = [(found.points[0], first), (found.points[1], second)]
    return Hand(model="gpt", cluster="h100", seq_len=2048, with_memory=True, **vars(found))


def differing(same=False):
    """Two steps, the second slower, with work that came, went, grew and shrank."""
    before, after = predicted(), predicted(step_time_s=2.5, peak_reserved_gib=80.0, fits=False, mfu=None)
    changes = [
        ("kernel", "gemm", "layers.*.mlp", "backward", Work(10, 1.0), Work(10, 1.5)),
        ("collective", "all_gather", "", "forward", Work(), Work(2000, 0.3)),
        ("copy", "to host", "head", "forward", Work(4, 2e-3), Work(3, 1e-3)),
        ("kernel", "norm", "layers.*.norm", "forward", Work(5, 0.2), Work()),
    ]
    tensors = (
        TensorChange("activation", "gemm", "layers.*.mlp", 10, 20, 2**30, 3 * 2**30),
        TensorChange("other", "norm", "", 3, 0, 2**20, 0),
        TensorChange("gradient", "gemm", "head", 1, 1, 2**29, 2**28),
    )
    causes = {"exposed_comm": (0.0, 0.3), "gemm_backward": (1.0, 1.5), "host": (0.3, 0.3 + 1e-7), "norm": (0.2, 0.0)}
    work = tuple(WorkChange(*each) for each in changes)
    return StepDiff(before, after, causes, () if same else work, () if same else tensors)
