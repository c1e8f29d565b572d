"""Steps that were made with known constants give them back; a family that is left out does not inform itself."""

from dataclasses import replace

import numpy as np
import pytest

from forerun.answers.analysis.predict import predict_setup
from forerun.answers.analysis.setup import Setup
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.evidence.fitting.constants import changed, parse_registry
from forerun.evidence.fitting.fit import StepFit, row_weights
from forerun.evidence.fitting.left_out import fitted_errors, left_out_errors, mean_errors
from forerun.evidence.fitting.steps import Step, StepTimes
from forerun.interfaces.report.step_fit_table import Anchored, step_fit_csv, step_fit_record

REGISTRY = parse_registry(
    """
scale: 0.03
source: here
kinds:
  clock: {what: sustained, prior: 0.9, sigma: 0.1, spread: 0.05, source: here}
  bandwidth: {what: memory_rate, prior: 0.8, sigma: 0.3, spread: 0.3, source: here}
constants:
  - {what: sustained, of: [h100-sxm-80gb], kind: clock}
  - {what: memory_rate, of: [torchtitan, torchtitan-2024], kind: bandwidth}
  - {what: memory_rate, of: [megatron-core], kind: bandwidth}
  - {what: memory_rate, of: [nemo], kind: bandwidth}
anchor: {sigma: {sustained: 0.05, memory_rate: 0.1}, noise: 0.03, source: here}
""",
    "file",
)
TRUE = {"sustained": 0.8, "torchtitan": 0.6, "megatron-core": 0.9}
MODEL, CLUSTER = load_model("llama-3.1-8b"), load_cluster("h100-sxm")
PLANS = [
    Plan(seq_len=seq_len, dp_shard=8, micro_batch=size, stack=stack, activation_checkpointing=mode)
    for stack in ("torchtitan", "megatron-core")
    for seq_len, size, mode in ((2048, 1, "none"), (2048, 2, "full"), (8192, 1, "full"))
]


def made(plan: Plan) -> Step:
    """A step as it would be with TRUE constants."""
    stack = load_stack(plan.stack)
    factors = {
        "sustained": TRUE["sustained"] / CLUSTER.device.sustained,
        "memory_rate": TRUE[stack.name] / stack.memory_rate,
    }
    setup = Setup(MODEL, plan, CLUSTER)
    time_s = predict_setup(replace(setup, changed_stack=changed(stack, factors))).step_time_s
    return Step(plan.describe(), stack.name, stack.family, setup, time_s)


@pytest.fixture(scope="module")
def times() -> StepTimes:
    return StepTimes([made(plan) for plan in PLANS], REGISTRY)


@pytest.fixture(scope="module")
def fitted(times: StepTimes) -> StepFit:
    return StepFit(times)


def values(fitted: StepFit) -> dict[str, float]:
    return {found.constant.name: found.value for found in fitted.fit.constants}


def test_constants_come_back(fitted):
    found = values(fitted)
    assert found["sustained of h100-sxm-80gb"] == pytest.approx(TRUE["sustained"], rel=0.03)
    assert found["memory_rate of torchtitan"] == pytest.approx(TRUE["torchtitan"], rel=0.05)
    assert found["memory_rate of megatron-core"] == pytest.approx(TRUE["megatron-core"], rel=0.1)
    measured = np.array([step.measured_s for step in fitted.fit.steps])
    assert np.abs(fitted.fit.fitted_s / measured - 1).max() < 0.02
    assert np.abs(fitted.fit.shipped_s / measured - 1).max() > 0.05


def test_times_are_those_of_predictions(times):
    values = times.shipped + np.log([0.9, 0.8, 0.7, 1.0])
    setup = times.steps[4].setup
    stack = changed(setup.stack, {"sustained": 0.9, "memory_rate": 0.7})
    assert times.seconds(values)[4] == pytest.approx(
        predict_setup(replace(setup, changed_stack=stack)).step_time_s, rel=1e-9
    )


def test_what_no_step_informs_takes_the_value_of_its_kind(fitted):
    (kind,) = (one for one in fitted.fit.kinds if one.name == "bandwidth")
    nemo = fitted.fit.constants[-1]
    assert (nemo.rows, nemo.constant.name) == (0, "memory_rate of nemo")
    assert nemo.value == pytest.approx(kind.value, rel=0.01)
    assert fitted.fit.constants[1].rows_of == {"torchtitan": 3, "torchtitan-2024": 0}
    assert fitted.fit.constants[1].sigma < nemo.sigma


def test_a_family_that_is_left_out_is_predicted_by_the_others(times, fitted):
    found = fitted.leave_out("torchtitan and torchao")
    assert found.numbers == (0, 1, 2)
    _, titan, mega, nemo = np.exp(found.values)
    assert mega == pytest.approx(TRUE["megatron-core"], rel=0.1)
    assert titan == pytest.approx(nemo)
    measured = times.log_measured[list(found.numbers)]
    assert np.abs(np.log(found.seconds) - measured).max() > 0.02


def test_an_anchor_brings_a_left_out_family_nearer(times, fitted):
    found = left_out_errors(fitted, times)
    before = np.abs(np.exp(found.errors) - 1)
    after = mean_errors(found.same_cluster)
    assert after.mean() < 0.6 * before.mean()
    assert [len(each) for each in found.same_cluster] == [2] * 6
    assert all(map(np.array_equal, found.same_run, found.same_cluster))


def test_the_step_that_tells_most_is_the_anchor_of_the_others(times, fitted):
    found = left_out_errors(fitted, times)
    assert sorted(len(each) for each in found.best) == [0] * 2 + [1] * 4
    assert all(each[0] in others for each, others in zip(found.best, found.same_run, strict=True) if len(each))


def test_an_anchor_of_a_fitted_stack_changes_less_than_one_of_a_stack_that_is_left_out(times, fitted):
    fitted_rates, left_out_rates = (
        found(fitted, times).same_cluster[0][0] - found(fitted, times).errors[0]
        for found in (fitted_errors, left_out_errors)
    )
    assert abs(fitted_rates) < 0.2 * abs(left_out_rates)


def test_a_source_of_many_rows_weighs_less_a_row(times):
    assert row_weights(times.steps, np.array([True] * 4 + [False] * 2)).tolist() == [3**-0.25] * 3 + [1.0] * 3


def test_the_result_as_data_and_as_csv(times, fitted):
    anchored = Anchored(fitted_errors(fitted, times), left_out_errors(fitted, times))
    record = step_fit_record(fitted.fit, anchored)
    assert record["fitted"]["MAPE"] < 0.01 < record["shipped"]["MAPE"]
    assert list(record["left_out"]) == ["torchtitan and torchao", "Megatron", "all"]
    rows = {name: each["left_out"]["all"]["rows"] for name, each in record["anchored"].items()}
    assert rows == {"same_cluster": 6, "same_run": 6, "best": 4}
    lines = step_fit_csv(fitted.fit, anchored).splitlines()
    assert lines[0].startswith("id,source,family,stack,device,measured_s,shipped_s,fitted_s,left_out_s")
    assert len(lines) == 7
    assert step_fit_csv(fitted.fit, None).splitlines()[1].endswith(",,")
