"""Closed-form formulas for checkpoints and failures, which tests compare with simulations."""

from __future__ import annotations

from math import exp, expm1, inf, sqrt


def young_interval_s(save_s: float, mttf_s: float) -> float:
    """Returns Young's interval of work between two saves: sqrt(2 w M) (J. W. Young, 1974)."""
    return sqrt(2.0 * save_s * mttf_s)


def daly_interval_s(save_s: float, mttf_s: float) -> float:
    """Returns Daly's interval of work between two saves (J. T. Daly, 2006, higher-order estimate)."""
    if save_s >= 2.0 * mttf_s:
        return mttf_s
    ratio = save_s / (2.0 * mttf_s)
    return sqrt(2.0 * save_s * mttf_s) * (1.0 + sqrt(ratio) / 3.0 + ratio / 9.0) - save_s


def poisson_efficiency(interval_s: float, save_s: float, restart_s: float, mttf_s: float) -> float:
    """Returns work over expected time where failures are a Poisson process and hit restarts and saves too.

    A segment of `interval_s` of work and `save_s` takes M e^(R/M) (e^((dt + w)/M) - 1) on average.
    """
    if mttf_s == inf:
        return interval_s / (interval_s + save_s)
    return interval_s / (mttf_s * exp(restart_s / mttf_s) * expm1((interval_s + save_s) / mttf_s))


def first_order_ettr(interval_s: float, save_s: float, restart_s: float, mttf_s: float) -> float:
    """Returns the effective training time ratio to first order (Kokolis et al., arXiv 2410.21680, appendix).

    It is good to 1 % where a failure every two hours or less is met, and can be negative beyond that.
    """
    return (1.0 - (restart_s + interval_s / 2.0) / mttf_s) / (1.0 + save_s / interval_s)
