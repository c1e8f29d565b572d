"""The shipped constants stand where they say, and a registry that is wrong says what is."""

from dataclasses import replace
from math import log

import numpy as np
import pytest

from forerun.answers.analysis.predict import predict_setup
from forerun.answers.analysis.setup import Setup
from forerun.common.errors import ForerunError
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.evidence.fitting.constants import changed, load_registry, parse_registry, shipped_value
from forerun.evidence.fitting.fit import priors_of

HEAD = "scale: 0.03\nsource: here\nanchor: {sigma: {sustained: 0.1}, noise: 0.05, source: here}\n"
KINDS = "kinds:\n  warm: {what: sustained, prior: 0.9, sigma: 0.1, spread: 0.05, source: here}\n"
SETUP = Setup(load_model("llama-3.1-8b"), Plan(seq_len=4096, dp_shard=8), load_cluster("h100-sxm"))


def registry(constants: str, kinds: str = KINDS):
    return parse_registry(f"{HEAD}{kinds}constants: [{constants}]\n", "file")


def test_shipped_constants_say_where_they_come_from():
    shipped = load_registry()
    for constant in shipped.constants:
        assert constant.shipped > 0
        assert constant.source or shipped.kinds[constant.kind].source, constant.name


def test_a_run_knows_its_constants():
    found = load_registry().constants_of(SETUP)
    assert {what: place for what, (_, place) in found.items()} == {
        "memory_rate": "torchtitan",
        "network_rate": "torchtitan",
    }


def test_priors_of_kinds_go_down_to_their_constants():
    kinds = KINDS + "  hot: {what: sustained, kind: warm, factor: 0.5, sigma: 0.1, spread: 0.2, source: here}\n"
    found = registry("{what: sustained, of: [b200], kind: hot, factor: 1.1, sigma: 0.3}", kinds)
    priors = priors_of(found)
    assert np.exp(priors.mean) == pytest.approx([0.9, 0.45, 0.495])
    assert priors.sigma.tolist() == [0.1, 0.1, 0.3]


@pytest.mark.parametrize(
    ("constant", "said"),
    [
        ("{what: sustained, of: [h100-sxm], kind: cold}", "no kind 'cold'"),
        ("{what: sustained, of: [h100-sxm]}", "one of prior and kind"),
        ("{what: sustained, of: [h100-sxm], prior: 0.9}", "sigma beside prior"),
        ("{what: sustained, of: [h1000], kind: warm}", "h1000"),
        ("{what: memory_rate, of: [torchtitan, megatron-core], kind: warm}", "different values"),
        ("{what: attention_forward, of: [flash2.z80], kind: warm}", "flash2.z80"),
        ("{what: speed, of: [h100-sxm], kind: warm}", "what"),
        ("{what: sustained, of: [h200], kind: warm}, {what: sustained, of: [h200], kind: warm}", "two constants"),
    ],
)
def test_a_wrong_constant_is_named(constant, said):
    with pytest.raises(ForerunError, match=said):
        registry(constant)


def test_a_kernel_that_does_not_exist_is_named():
    with pytest.raises(ForerunError, match=r"flash9\.hopper"):
        shipped_value("attention_forward", "flash9.hopper")


def test_factors_of_a_clock_act_as_the_clock_does():
    slower = replace(
        SETUP.cluster, device=replace(SETUP.cluster.device, sustained=0.8 * SETUP.cluster.device.sustained)
    )
    by_device = predict_setup(replace(SETUP, cluster=slower)).step_time_s
    by_stack = predict_setup(replace(SETUP, changed_stack=changed(SETUP.stack, {"sustained": 0.8}))).step_time_s
    assert by_stack == pytest.approx(by_device, rel=1e-9)


def test_every_factor_slows_what_it_says():
    stack = changed(load_stack("internevo"), {"memory_rate": 0.5, "owner_broadcast_us": 2.0, "attention_backward": 0.5})
    known = load_stack("internevo")
    assert log(stack.memory_rate / known.memory_rate) == pytest.approx(log(0.5))
    assert stack.owner_broadcast_us == 2 * known.owner_broadcast_us
    assert (stack.attention_rate, stack.attention_backward_rate) == (known.attention_rate, 0.5)


def test_a_clock_and_a_kernel_are_factors_of_attention_and_only_the_clock_of_products():
    known = load_stack("torchtitan")
    stack = changed(known, {"sustained": 0.5, "attention_forward": 0.25})
    assert (stack.attention_rate, stack.gemm_rate) == (0.125 * known.attention_rate, 0.5 * known.gemm_rate)
