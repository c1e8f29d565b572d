"""Corrects the rates of a cluster by a user's own measured steps, in a Bayesian update.

A measured step moves each rate on which its time depends, in proportion to the rate's uncertainty. A plan with other
shares of computation and communication therefore gets a different correction. The corrected rates are part of the
Cluster, so that predictions and the bounds of a search use them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.answers.analysis.predict import is_worth_folding
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import prepare, simulate_setup
from forerun.core.program.types import F64
from forerun.describe.cluster.types import Cluster, KernelRates
from forerun.evidence.fitting.constants import What, changed, load_registry
from forerun.evidence.fitting.posterior import load_posterior
from forerun.evidence.fitting.update import most_probable, most_telling

_STEP = 0.02
_FAR = 3.0
"""times that a measured step may differ from the predicted one before the units are in doubt"""


@dataclass(frozen=True, slots=True)
class Anchor:
    """A user's own training step and the seconds that it took."""

    setup: Setup
    measured_s: float


def anchored_rates(anchors: Sequence[Anchor]) -> KernelRates:
    """Returns the most probable factors on the rates of the anchors' clusters after all `anchors`.

    Raises:
        ImpossiblePlan, ForerunError: As `predict` raises them for an anchor.
    """
    registry, known = load_registry(), load_posterior()
    whats = list(registry.anchor.sigma)
    # The anchors may have several stacks, but the cluster has one set of rates: their covariance is the mean.
    covariance = np.mean([known.of_rates(registry, anchor.setup) for anchor in anchors], axis=0)
    measured = np.log([anchor.measured_s for anchor in anchors])

    times = [_log_times(anchor.setup, whats) for anchor in anchors]

    def errors(x: F64) -> F64:
        out: F64 = np.array([log_time(x) for log_time in times]) - measured
        return out

    slopes = np.array([_slopes(log_time, len(whats)) for log_time in times])
    first = errors(np.zeros(len(whats)))
    return rates_of(whats, most_probable(errors, first, slopes, covariance, registry.anchor.noise))


def far_off(anchor: Anchor, place: str) -> tuple[str, ...]:
    """Returns a line, naming `place`, if the measured time is far from the predicted one; else nothing.

    Raises ForerunError as `predict` does.
    """
    predicted_s = simulate_setup(anchor.setup).prediction.step_time_s
    if max(predicted_s, anchor.measured_s) < _FAR * min(predicted_s, anchor.measured_s):
        return ()
    times = f"measured {anchor.measured_s:.4g} s, predicted {predicted_s:.4g} s"
    return (f"{place}: {times}; are the unit, the plan and the batch those of the run?",)


def best_anchor(setups: Sequence[Setup]) -> int:
    """Returns the number of the setup whose measurement, given as an anchor, would tell most about the others.

    Raises:
        ImpossiblePlan, ForerunError: As `predict` raises them for one of the setups.
    """
    registry, known = load_registry(), load_posterior()
    whats = list(registry.anchor.sigma)
    slopes = np.array([_slopes(_log_times(setup, whats), len(whats)) for setup in setups])
    return most_telling(slopes, [known.of_rates(registry, setup) for setup in setups], registry.anchor.noise)


def _log_times(setup: Setup, whats: Sequence[What]) -> Callable[[F64], float]:
    """Returns a function from logarithms of rates to the logarithm of the step's time; all calls share one Program."""
    prepared = prepare(setup)

    def log_time(x: F64) -> float:
        stack = changed(setup.stack, dict(zip(whats, np.exp(x).tolist(), strict=True)))
        run = prepared.under(stack).run(is_worth_folding(setup.plan))
        return float(np.log(run.prediction.step_time_s))

    return log_time


def _slopes(log_time: Callable[[F64], float], n_rates: int) -> F64:
    """Returns d log(time) / d log(rate), (n_rates,)."""
    first = log_time(np.zeros(n_rates))
    return np.array([log_time(_STEP * unit) - first for unit in np.eye(n_rates)]) / _STEP


def anchored(cluster: Cluster, rates: KernelRates) -> Cluster:
    """Returns `cluster` with its rates multiplied by `rates`."""
    return replace(cluster, rates=cluster.rates.times(rates))


def rates_of(whats: Sequence[What], x: F64) -> KernelRates:
    """Returns the rates whose logarithms are `x`, by `whats`; the clock applies to products and attention."""
    factor = dict(zip(whats, np.exp(x).tolist(), strict=True))
    clock = factor.get("sustained", 1.0)
    return KernelRates(
        gemm=clock,
        attention=clock * factor.get("attention_forward", 1.0),
        attention_backward=factor.get("attention_backward", 1.0),
        memory=factor.get("memory_rate", 1.0),
        network=factor.get("network_rate", 1.0),
    )
