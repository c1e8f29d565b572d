"""What a fit leaves unsure: of constants that it knew, of ones that came after it, of rates that none is of."""

from dataclasses import replace

import numpy as np
import pytest

from forerun.answers.analysis.setup import Setup
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.evidence.fitting.constants import load_registry
from forerun.evidence.fitting.posterior import Posterior, load_posterior, parse_posterior

REGISTRY = load_registry()
WHATS = list(REGISTRY.anchor.sigma)
SETUP = Setup(load_model("llama-3.1-8b"), Plan(seq_len=8192, dp_shard=8), load_cluster("a100-sxm"))
CLOCK, MEMORY, NETWORK = (WHATS.index(what) for what in ("sustained", "memory_rate", "network_rate"))


def test_errors_of_constants_go_together():
    known = Posterior(
        ("memory_rate of torchtitan", "network_rate of torchtitan"), np.array([[0.01, -0.002], [-0.002, 0.0025]])
    )
    found = known.of_rates(REGISTRY, SETUP)
    assert found[MEMORY, NETWORK] == found[NETWORK, MEMORY] == pytest.approx(-0.002)
    assert found[MEMORY, MEMORY] == pytest.approx(0.01 + REGISTRY.anchor.sigma["memory_rate"] ** 2)


def test_what_the_fit_did_not_know_is_as_unsure_as_its_prior():
    found = Posterior((), np.zeros((0, 0))).of_rates(REGISTRY, SETUP)
    spread = REGISTRY.kinds["eager-memory"].spread
    assert found[MEMORY, MEMORY] == pytest.approx(spread**2 + REGISTRY.anchor.sigma["memory_rate"] ** 2)
    assert np.count_nonzero(found - np.diag(np.diag(found))) == 0


def test_what_is_no_constant_is_as_unsure_as_others_of_its_sort():
    own = replace(load_stack("torchtitan"), name="mine")
    found = load_posterior().of_rates(REGISTRY, replace(SETUP, changed_stack=own))
    assert np.sqrt(found[MEMORY, MEMORY]) > 0.1 > np.sqrt(load_posterior().of_rates(REGISTRY, SETUP)[MEMORY, MEMORY])


def test_the_shipped_file_leaves_little_unsure_of_what_many_steps_inform():
    many, few = (
        load_posterior().of_rates(REGISTRY, replace(SETUP, changed_stack=load_stack(name)))[MEMORY, MEMORY]
        for name in ("composer", "deepspeed")
    )
    assert many < 0.2 * few
    for name in ("a100-sxm", "h100-sxm", "b200", "mi300x"):
        np.linalg.cholesky(load_posterior().of_rates(REGISTRY, replace(SETUP, cluster=load_cluster(name))))


def test_clocks_scatter_from_host_to_host_and_are_no_constants():
    found = load_posterior().of_rates(REGISTRY, SETUP)
    assert found[CLOCK, CLOCK] == pytest.approx(REGISTRY.anchor.sigma["sustained"] ** 2)
    assert np.count_nonzero(found[CLOCK]) == 1


def test_a_file_holds_it_to_a_percent():
    shipped = load_posterior()
    again = parse_posterior(shipped.as_text())
    assert again.names == shipped.names
    assert again.covariance == pytest.approx(shipped.covariance)
