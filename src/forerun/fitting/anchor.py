"""What a user's own measured steps tell about a cluster and a framework: a Bayesian update of rates.

A measured step moves each rate that its own time depends on, in proportion to how uncertain the rate is, so that a
plan with other shares of computation and communication is corrected differently. The corrected rates are part of the
Cluster: predictions and the bounds of a search use them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.analysis.predict import predict_setup
from forerun.analysis.setup import Setup
from forerun.cluster.types import Cluster, KernelRates
from forerun.fitting.constants import What, load_registry
from forerun.fitting.solve import Priors, solve
from forerun.program.types import F64

_STEP = 0.02


@dataclass(frozen=True, slots=True)
class Anchor:
    """A step of the user's own and the seconds that it took."""

    setup: Setup
    measured_s: float


def anchored_rates(anchors: Sequence[Anchor]) -> KernelRates:
    """Rates over those of the anchors' clusters, most probable after all `anchors`.

    Raises:
        ImpossiblePlan, ForerunError: as `predict` of an anchor.
    """
    registry = load_registry()
    whats = list(registry.anchor.sigma)
    unsure = [registry.uncertainty(anchor.setup) for anchor in anchors]
    sigma = np.array([max(one[what] for one in unsure) for what in whats])
    measured = np.log([anchor.measured_s for anchor in anchors])

    def errors(x: F64) -> F64:
        rates = rates_of(whats, x)
        seconds = [predict_setup(_with_rates(anchor.setup, rates)).step_time_s for anchor in anchors]
        out: F64 = np.log(seconds) - measured
        return out

    start = np.zeros(len(whats))
    first = errors(start)
    slopes = np.column_stack([(errors(_STEP * unit) - first) / _STEP for unit in np.eye(len(whats))])
    known = Priors(np.eye(len(whats)), start, sigma)
    weights = np.ones(len(anchors))
    found = solve(errors, slopes, known, weights, registry.anchor.noise, start, first)
    return rates_of(whats, found.x)


def anchored(cluster: Cluster, rates: KernelRates) -> Cluster:
    """`cluster` with `rates` over its own."""
    return replace(cluster, rates=cluster.rates.times(rates))


def rates_of(whats: Sequence[What], x: F64) -> KernelRates:
    """Rates of the logarithms `x` of `whats`; a device's clock sets products and attention."""
    factor = dict(zip(whats, np.exp(x).tolist(), strict=True))
    clock = factor.get("sustained", 1.0)
    return KernelRates(
        gemm=clock,
        attention=clock * factor.get("attention_forward", 1.0),
        attention_backward=factor.get("attention_backward", 1.0),
        memory=factor.get("memory_rate", 1.0),
        network=factor.get("network_rate", 1.0),
    )


def _with_rates(setup: Setup, rates: KernelRates) -> Setup:
    return replace(setup, cluster=anchored(setup.cluster, rates))
