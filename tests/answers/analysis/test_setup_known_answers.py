"""Iterations whose time is known in closed form, to the picosecond."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from forerun.answers.analysis.setup import RankKind, Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.analysis.stepper import Stepper
from forerun.core.network.patterns import NoNetwork, TimedBy
from forerun.core.program.types import Phase, Stream
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_any
from forerun.describe.model.layered import Kernel, Layer, LayeredModel, Traffic
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack

pytestmark = pytest.mark.usefixtures("equal_clocks")

CLUSTER = load_cluster("a100-80gb-sxm")
STACK = load_stack("pytorch-vision")
QUIET = replace(STACK, issue_us=0.0, kernel_gap_us=0.0, step_us=0.0, overlap_slowdown=0.0, network_rate=1.0)
"""a host that takes no time, and collectives that slow no kernel"""
LAYERS, WIDTH = 8, 2**20


class Equal(Layer):
    """A layer whose backward pass takes as long in the first layer, which makes no gradient of the sample."""

    def backward(self, samples: int) -> Sequence[Kernel]:
        return []

    def weight_backward(self, samples: int) -> Sequence[Kernel]:
        return [Traffic(samples * 2 * WIDTH, samples * WIDTH)]


UNIFORM = LayeredModel(
    "uniform",
    tuple(Equal(f"layer {i}", "custom", (WIDTH,), (WIDTH,), parameters=(WIDTH,)) for i in range(LAYERS)),
    classes_loss=False,
)
A_LAYER_MIB = WIDTH * 4 / 2**20


def plan_of(n_gpus: int, **fields: object) -> Plan:
    """DDP of 4 samples a GPU whose buckets are the gradients of one layer. fp32: nothing is cast."""
    changes = {"micro_batch": 4, "ddp_bucket_mib": A_LAYER_MIB, "precision": "fp32"} | fields
    return Plan(seq_len=1, dp_replicate=n_gpus, zero_stage=0, stack=STACK.name, **changes)  # type: ignore[arg-type]


def setup_of(n_gpus: int, **fields: object) -> Setup:
    return Setup(UNIFORM, plan_of(n_gpus, **fields), CLUSTER, changed_stack=QUIET)


def step_ps(setup: Setup) -> int:
    return simulate_setup(setup).timeline.end_of_step_ps


def parts_ps() -> tuple[int, int, int]:
    """Forward pass, backward pass of one layer, and optimizer on one GPU."""
    found = simulate_setup(setup_of(1))
    compute = found.flat.stream == Stream.COMPUTE
    ends = [int(found.timeline.end_ps[compute & (found.flat.phase == phase)].max()) for phase in (0, 1)]
    backward = compute & (found.flat.phase == Phase.BACKWARD) & (found.costs.duration_ps[found.flat.op] > 0)
    spent = np.unique(found.costs.duration_ps[found.flat.op[backward]])
    assert len(spent) == 1
    assert ends[1] - ends[0] == LAYERS * spent[0]
    return ends[0], int(spent[0]), found.timeline.end_of_step_ps - ends[1]


@pytest.mark.parametrize("share", [0.0, 0.25, 0.999, 1.0, 1.001, 3.0])
def test_bucketed_overlap_is_the_closed_form(share: float) -> None:
    # Layer i of the backward pass ends at F + i b, and its bucket of r follows the one before: the last ends at
    # F + max over i of (i b + (L - i + 1) r), which is linear in i: F + b + max((L - 1) b + r, L r).
    forward, backward, optimizer = parts_ps()
    reduction = round(share * backward)
    setup = replace(setup_of(8), pattern=TimedBy(lambda size, ranks: reduction * 1e-12))
    overlapped = max((LAYERS - 1) * backward + reduction, LAYERS * reduction)
    assert step_ps(setup) == forward + backward + overlapped + optimizer


def test_without_overlap_reductions_follow_the_backward_pass() -> None:
    forward, backward, optimizer = parts_ps()
    setup = setup_of(8, overlap_grad_reduce=False)
    setup = replace(setup, pattern=TimedBy(lambda size, ranks: size * 1e-12))
    gradients = LAYERS * WIDTH * 4
    assert step_ps(setup) == forward + LAYERS * backward + gradients + optimizer


@pytest.mark.parametrize("n_gpus", [2, 4, 16, 64])
def test_strong_scaling_on_an_ideal_network_is_amdahls(n_gpus: int) -> None:
    # 64 micro batches shared by n GPUs. The optimizer, and the host between steps, are the part that stays.
    stack = replace(QUIET, step_us=500.0, fused_accumulation=True)

    def at(n: int) -> Setup:
        return replace(setup_of(n, n_microbatches=64 // n), changed_stack=stack, pattern=NoNetwork())

    one = simulate_setup(at(1)).prediction
    serial = (one.breakdown["optimizer"] + one.breakdown["host"]) / one.step_time_s
    speedup = one.step_time_s / simulate_setup(at(n_gpus)).prediction.step_time_s
    assert 0.005 < serial < 0.5
    assert speedup == pytest.approx(1 / (serial + (1 - serial) / n_gpus), rel=1e-9)
    assert speedup < 1 / serial


@pytest.mark.parametrize("name", ["uniform", "resnet50", "gpt2-small"])
def test_weak_scaling_on_an_ideal_network_is_one(name: str) -> None:
    model = UNIFORM if name == "uniform" else load_any(name)
    seq_len = 512 if name == "gpt2-small" else 1

    def at(n: int) -> Setup:
        plan = replace(plan_of(n, micro_batch=4, ddp_bucket_mib=25.0), seq_len=seq_len)
        return Setup(model, plan, CLUSTER, changed_stack=QUIET, pattern=NoNetwork())

    assert {step_ps(at(n)) for n in (2, 8, 64, 1024)} == {step_ps(at(1))}


def test_a_gpu_that_is_a_tenth_slower_makes_a_synchronous_step_a_tenth_longer() -> None:
    # Nothing but kernels takes time here, so that the step is exactly the slow GPU's own.
    setup = replace(setup_of(8), pattern=NoNetwork())
    slow = replace(setup, kinds=(RankKind("slow", 1, slowdown=1.1),))
    alone = replace(setup, plan=plan_of(1), kinds=(RankKind("slow", 1, slowdown=1.1),))
    assert step_ps(slow) == step_ps(alone)
    assert step_ps(slow) == pytest.approx(1.1 * step_ps(setup), rel=1e-7)
    assert Stepper(setup).step([1.1]).time_s == step_ps(slow) / 1e12


def test_a_slow_gpu_does_not_lengthen_what_the_network_takes() -> None:
    # Reductions take twice a layer's backward pass, so that all but the first layer's hide: F, b and O stretch only.
    forward, backward, optimizer = parts_ps()
    reduction = 2 * backward
    setup = replace(setup_of(8), pattern=TimedBy(lambda size, ranks: reduction * 1e-12))
    slow = replace(setup, kinds=(RankKind("slow", 1, slowdown=1.1),))
    expected = 1.1 * (forward + backward + optimizer) + LAYERS * reduction
    assert step_ps(slow) == pytest.approx(expected, rel=1e-7)


def test_an_uneven_batch_takes_as_long_as_its_largest_part() -> None:
    setup = replace(setup_of(4), pattern=NoNetwork())
    uneven = replace(setup, kinds=(RankKind("more", 1, micro_batch=6),))
    assert step_ps(uneven) == step_ps(replace(setup, plan=replace(setup.plan, micro_batch=6)))
    assert uneven.samples_per_step == 3 * 4 + 6
