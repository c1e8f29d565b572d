"""Bands of predictions: they hold the prediction, and widen with what is not known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from saved_programs import plan_of, program_of

from forerun.answers.analysis.coverage import coverage
from forerun.answers.analysis.predict import predict, predict_setup, simulate
from forerun.answers.analysis.predict_program import predict_program
from forerun.answers.analysis.prediction import Prediction
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.uncertainty import (
    TRACED,
    Quantiles,
    Work,
    band_words,
    is_fitted,
    is_measured,
    memory_band,
    residuals,
    time_band,
    widening,
)
from forerun.core.cost.clock import is_known
from forerun.core.program.counts import op_counts
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import KernelRates
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack, stack_names

CLUSTER = load_cluster("h100-sxm")
KNOWN, NEW = load_stack("composer"), load_stack("deepspeed")
SHARE = st.floats(0, 1)


def ask(**fields: object) -> Prediction:
    plan = Plan(**{"seq_len": 1024, **fields})  # type: ignore[arg-type]
    return predict(load_model("gpt2-small"), plan, CLUSTER)


@given(SHARE, SHARE, SHARE, SHARE)
def test_less_calibrated_and_more_exposed_is_never_narrower(a: float, b: float, c: float, d: float) -> None:
    less, more = time_band(KNOWN, CLUSTER, 8, max(a, b), min(c, d)), time_band(KNOWN, CLUSTER, 8, min(a, b), max(c, d))
    assert more.low <= less.low <= 1 <= less.high <= more.high
    assert widening(min(a, b), max(c, d)) >= widening(max(a, b), min(c, d)) >= 1


def test_the_widening_is_strict_where_nothing_is_calibrated() -> None:
    whole, none = time_band(KNOWN, CLUSTER, 8, 1.0, 0.0), time_band(KNOWN, CLUSTER, 8, 0.0, 0.0)
    assert none.low < whole.low < 1 < whole.high < none.high
    assert math.log(none.high) / math.log(whole.high) == pytest.approx(widening(0.0, 0.0))


def test_memory_of_a_stack_on_which_nothing_was_fitted_has_a_wider_band_above() -> None:
    assert is_fitted(KNOWN)
    assert not is_fitted(NEW)
    assert memory_band(NEW, "allocated").high > memory_band(KNOWN, "allocated").high


def test_a_framework_of_which_nothing_is_published_has_the_widest_band() -> None:
    unknown = replace(KNOWN, family="a trainer of one's own")
    few, many = residuals().few_gpus, residuals().few_gpus + 1
    for n_gpus in (few, many):
        wide, own = time_band(unknown, CLUSTER, n_gpus, 1, 0), time_band(KNOWN, CLUSTER, n_gpus, 1, 0)
        assert wide.low <= own.low <= own.high <= wide.high
    assert time_band(unknown, CLUSTER, few, 1, 0) == time_band(unknown, CLUSTER, many, 1, 0)
    assert "no published step uses a trainer of one's own" in band_words(unknown, CLUSTER, 8, 1, 0)


def test_what_was_never_measured_together_is_said() -> None:
    said = "were never measured together"
    for precision, experts, met in (("bf16", False, True), ("nvfp4", False, False), ("bf16", True, False)):
        words = band_words(KNOWN, CLUSTER, 8, 1, 0, work=Work(precision, experts))
        assert is_measured(KNOWN, CLUSTER, Work(precision, experts)) is met
        assert (said in words) is not met
    assert "Composer, hopper GPUs and 4-bit products were never measured together" in band_words(
        KNOWN, CLUSTER, 8, 1, 0, work=Work("nvfp4", False)
    )
    assert any(said in line for line in ask(dp_shard=16, stack="internevo").explain)


def test_large_runs_have_a_band_of_their_own() -> None:
    few = residuals().few_gpus
    at, beyond = (time_band(KNOWN, CLUSTER, n, 1, 0) for n in (few, few + 1))
    assert at != beyond
    assert f"up to {few} GPUs" in band_words(KNOWN, CLUSTER, few, 1, 0)
    assert f"more than {few} GPUs" in band_words(KNOWN, CLUSTER, few + 1, 1, 0)


def test_a_stack_that_few_steps_inform_is_not_a_fitted_one() -> None:
    least = residuals().least_rows
    for rows, fitted in ((least - 1, False), (least, True)):
        stack = replace(
            KNOWN, fitted={"memory_rate": f"fitted on {rows} published steps", "network_rate": "not fitted"}
        )
        assert is_fitted(stack) is fitted
    assert not is_fitted(replace(KNOWN, fitted={"memory_rate": "another's, fitted on 90 published steps"}))


def test_a_device_of_unknown_clock_widens_both_sides() -> None:
    other = load_cluster("l40s")
    assert is_known(CLUSTER.device)
    assert not is_known(other.device)
    known, unknown = time_band(KNOWN, CLUSTER, 8, 1, 0), time_band(KNOWN, other, 8, 1, 0)
    assert unknown.low < known.low
    assert known.high < unknown.high


def test_more_gpus_than_any_measured_run_widen_the_band() -> None:
    seen = residuals().gpus_seen
    at, beyond, far = (time_band(KNOWN, CLUSTER, n, 1, 0) for n in (seen, 2 * seen, 16 * seen))
    assert at == time_band(KNOWN, CLUSTER, residuals().few_gpus + 1, 1, 0)
    assert far.low < beyond.low < at.low
    assert at.high < beyond.high < far.high


def test_measured_steps_of_the_user_narrow_the_band_of_a_new_stack() -> None:
    anchored = replace(CLUSTER, rates=KernelRates(gemm=0.9))
    assert time_band(NEW, anchored, 8, 1, 0).high < time_band(NEW, CLUSTER, 8, 1, 0).high
    known, with_anchor = time_band(KNOWN, CLUSTER, 8, 1, 0), time_band(KNOWN, anchored, 8, 1, 0)
    assert known.low <= with_anchor.low
    assert with_anchor.high <= known.high


def test_shipped_residuals_are_in_order() -> None:
    known = residuals()
    groups = (known.few, known.many, known.anchored, known.device)
    for group in (*groups, *known.allocated.values(), *known.reserved.values()):
        assert isinstance(group, Quantiles)
        assert group.low < group.high
        assert group.rows > 0
    assert 0 < known.share < 1


@pytest.mark.parametrize("stack", stack_names())
def test_the_band_holds_the_prediction(stack: str) -> None:
    found = ask(dp_shard=16, stack=stack)
    assert found.step_time_low_s <= found.step_time_s <= found.step_time_high_s
    assert found.peak_reserved_low_gib <= found.peak_reserved_gib <= found.peak_reserved_high_gib
    assert found.peak_reserved_high_gib <= found.memory_limit_gib
    slow, fast = found.rate_band(found.mfu or 0.0)
    assert slow <= (found.mfu or 0.0) <= fast
    assert slow == pytest.approx((found.mfu or 0.0) * found.step_time_s / found.step_time_high_s)


def test_a_limit_within_the_error_of_memory_is_said() -> None:
    """What a step needs at least, as it is estimated, against limits below, at, and far above it."""
    plan = Plan(seq_len=1024, micro_batch=16, dp_shard=16, stack="megatron-core")

    def at(gib: float) -> Prediction:
        device = replace(CLUSTER.device, memory_bytes=round(gib * 2**30))
        return predict_setup(Setup(load_model("gpt2-small"), plan, replace(CLUSTER, device=device)))

    limits = [at(gib / 10) for gib in range(20, 200)]
    doubtful = [each for each in limits if each.fit_in_doubt]
    assert any(each.fits for each in doubtful)
    assert any(not each.fits for each in doubtful)
    assert not limits[0].fits
    assert not limits[0].fit_in_doubt
    assert limits[-1].fits
    assert not limits[-1].fit_in_doubt


def test_explain_tells_what_is_calibrated_and_what_is_not() -> None:
    lines = ask(dp_shard=16, tp=2).explain
    (inside,) = [line for line in lines if line.startswith("calibrated shapes: ")]
    for kind in ("matrix products", "attention", "memory-bound kernels", "collectives"):
        assert kind in inside
    (outside,) = [line for line in lines if line.startswith("outside the calibrated shapes")]
    assert "ranks" in outside
    assert any(line.startswith("step_time_low_s, step_time_high_s: errors of ") for line in lines)


@pytest.mark.parametrize("fields", [{}, {"dp_shard": 16}, {"pp": 2, "n_microbatches": 8, "zero_stage": 1}], ids=str)
def test_kinds_sum_to_the_whole(fields: dict[str, object]) -> None:
    run = simulate(load_model("gpt2-small"), Plan(**{"seq_len": 1024, **fields}), CLUSTER)  # type: ignore[arg-type]
    found = coverage(run.program, op_counts(run.program), run.costs)
    assert sum(kind.share for kind in found.by_kind.values()) == pytest.approx(1)
    assert sum(kind.share * kind.inside for kind in found.by_kind.values()) == pytest.approx(found.share)
    assert run.prediction.coverage == found.share
    shares = [share for _, share in found.outside]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) <= 1 - found.share + 1e-12


@pytest.mark.parametrize("axis", ["tp", "dp_shard"])
def test_a_collective_outside_calibrated_shapes_is_named_by_its_ranks(axis: str) -> None:
    run = simulate(load_model("gpt2-small"), Plan(seq_len=1024, **{axis: 4}), CLUSTER)  # type: ignore[arg-type]
    only_kernels = np.where(run.program.ops.is_communication, 0.0, 1.0)
    outside = coverage(run.program, op_counts(run.program), replace(run.costs, calibrated=only_kernels)).outside
    assert outside
    assert all(name.endswith(" over 1 x 4 ranks") for name, _ in outside)


# -- by the formula ----------------------------------------------------------------------------------------------------


def test_the_widening_is_the_hypotenuse_of_one_and_what_is_not_known() -> None:
    known = residuals()
    assert widening(1.0, 0.0) == 1.0
    assert widening(0.25, 0.0) == pytest.approx(math.sqrt(1 + (0.75 * known.uncalibrated) ** 2))
    assert widening(1.0, 0.5) == pytest.approx(math.sqrt(1 + (0.5 * known.exposed) ** 2))
    both = math.sqrt(1 + (0.5 * known.uncalibrated) ** 2 + (0.2 * known.exposed) ** 2)
    assert widening(0.5, 0.2) == pytest.approx(both)


def test_a_time_band_adds_the_squares_of_what_widens_it() -> None:
    """The group's quantiles, those of a device of unknown clock, and each doubling beyond the GPUs seen."""
    known = residuals()
    assert is_known(CLUSTER.device)
    unseen = replace(CLUSTER, device=replace(CLUSTER.device, architecture="unknown"))
    for stack in (KNOWN, NEW):
        for cluster, device in ((CLUSTER, Quantiles(0.0, 0.0, 0)), (unseen, known.device)):
            group = known.many
            for doublings in (0, 1, 3):
                band = time_band(stack, cluster, known.gpus_seen * 2**doublings, 0.5, 0.1)
                wide, beyond = widening(0.5, 0.1), known.scale * doublings
                low = math.hypot(wide * max(0.0, -group.low), max(0.0, -device.low), beyond)
                high = math.hypot(wide * max(0.0, group.high), max(0.0, device.high), beyond)
                assert (band.low, band.high) == pytest.approx((math.exp(-low), math.exp(high)))
    fewer = time_band(KNOWN, CLUSTER, known.gpus_seen // 2, 1.0, 0.0)
    assert fewer == time_band(KNOWN, CLUSTER, known.gpus_seen, 1.0, 0.0)
    assert fewer.of(10.0) == (fewer.low * 10.0, fewer.high * 10.0)


def test_measured_steps_narrow_each_side_by_itself() -> None:
    known = residuals()
    anchored = time_band(NEW, replace(CLUSTER, rates=KernelRates(memory=1.1)), 8, 1.0, 0.0)
    own = known.few
    low, high = min(-own.low, -known.anchored.low), min(own.high, known.anchored.high)
    assert (anchored.low, anchored.high) == pytest.approx((math.exp(-max(0.0, low)), math.exp(max(0.0, high))))


@pytest.mark.parametrize("figure", ["allocated", "reserved"])
def test_a_memory_band_is_its_groups_quantiles(figure: str) -> None:
    for stack, name in ((KNOWN, "fitted"), (NEW, "unfitted")):
        group = getattr(residuals(), figure)[name]
        band = memory_band(stack, figure)
        expected = (math.exp(min(0.0, group.low)), math.exp(max(0.0, group.high)))
        assert (band.low, band.high) == pytest.approx(expected)


def test_the_words_of_a_band_name_what_widens_it() -> None:
    known = residuals()
    plain = band_words(KNOWN, CLUSTER, 8, 1.0, 0.0)
    assert plain == (
        f"errors of {known.few.rows} published steps of {known.few.sources} sources, each left out of the fit, on "
        f"up to {known.few_gpus} GPUs, 1.00 times as wide, for uncalibrated kernels and for communication"
    )
    unseen = replace(CLUSTER, device=replace(CLUSTER.device, architecture="unknown"), rates=KernelRates(memory=1.1))
    wider = band_words(NEW, unseen, 8, 0.0, 0.0)
    assert "narrowed by your measured steps" in wider
    assert f"{widening(0.0, 0.0):.2f} times as wide" in wider
    assert f"no measurement shows the clock of {CLUSTER.device.name} under load" in wider


def test_a_traced_program_has_the_band_of_traced_programs() -> None:
    program = program_of(plan_of(dp_shard=8))
    found = predict_program(program, CLUSTER).prediction
    other = predict_program(replace(program, meta={**program.meta, "source": ""}), CLUSTER).prediction
    band = time_band(
        load_stack("pytorch"), CLUSTER, 8, found.coverage, found.exposed_comm_s / found.step_time_s, TRACED
    )
    assert (found.step_time_low_s, found.step_time_high_s) == pytest.approx(band.of(found.step_time_s))
    assert other.step_time_s == found.step_time_s
    assert (other.step_time_low_s, other.step_time_high_s) != (found.step_time_low_s, found.step_time_high_s)
    assert any("published steps of traced programs" in line for line in found.explain)
    assert not any("published steps of traced programs" in line for line in other.explain)
