"""The uncertainty that a fit to whole steps leaves: covariances of the logarithms of its constants.

Steps determine sums better than parts (a slower clock with a higher bandwidth predicts most steps alike), so that the
errors of constants are correlated. The update by a user's own measured step needs these correlations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from statistics import median

import numpy as np

from forerun.answers.analysis.setup import Setup
from forerun.common.shipped import shipped_text
from forerun.common.yaml_files import parse_yaml
from forerun.core.program.types import F64
from forerun.evidence.fitting.constants import OF_STACKS, Registry, What

FILE = "evidence/fitting/posterior.yaml"
_HEAD = """\
# What the fit of whole steps leaves unsure of its constants (written by forerun fit --write).
#   sigma   standard deviation of a constant's logarithm
#   with    correlations of that error, in %, with those of the constants above it, in their order
"""


@dataclass(frozen=True)
class Posterior:
    """The covariance of the logarithms of the named constants, (n, n)."""

    names: tuple[str, ...]
    covariance: F64

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    def of_rates(self, registry: Registry, setup: Setup) -> F64:
        """Returns the covariance of the logarithms of the rates that a step of `setup` may change, (n_rates, n_rates).

        It is the sum of the fit's uncertainty and of the scatter of clusters with the same device and stack. A constant
        that the fit did not know has its prior's uncertainty. A stack's rate without a constant has that of a typical
        constant of its quantity. Of clocks and kernels, which benchmarks measure, only the scatter counts.
        """
        whats = list(registry.anchor.sigma)
        out = np.diag([registry.anchor.sigma[what] ** 2 for what in whats])
        constants = registry.constants_of(setup)
        known: list[tuple[int, int]] = []
        for row, what in enumerate(whats):
            if what not in constants:
                out[row, row] += _typical_spread(registry, what) ** 2
                continue
            constant = registry.constants[constants[what][0]]
            place = self._places.get(constant.name)
            if place is None:
                out[row, row] += registry.spread_of(constant) ** 2
            else:
                known.append((row, place))
        rows, places = [row for row, _ in known], [place for _, place in known]
        out[np.ix_(rows, rows)] += self.covariance[np.ix_(places, places)]
        return out

    def as_text(self) -> str:
        """Returns the text of the file."""
        sigma = np.sqrt(np.diag(self.covariance))
        percent = np.rint(100 * self.covariance / np.outer(sigma, sigma)).astype(int)
        lines = [
            f"{name}: {{sigma: {sigma[i]:.3g}, with: {percent[i, :i].tolist()}}}" for i, name in enumerate(self.names)
        ]
        return _HEAD + "\n".join(lines) + "\n"


def _typical_spread(registry: Registry, what: What) -> float:
    """Returns the spread of a typical constant of a stack. Constants that benchmarks measure on each device or kernel
    have none.
    """
    if what not in OF_STACKS:
        return 0.0
    return median(registry.spread_of(one) for one in registry.constants if one.what == what)


def parse_posterior(text: str) -> Posterior:
    """Returns the Posterior of a text that `Posterior.as_text` wrote."""
    entries = parse_yaml(text, FILE)
    sigma = np.array([entry["sigma"] for entry in entries.values()])
    correlation = np.eye(len(sigma))
    for i, entry in enumerate(entries.values()):
        correlation[i, :i] = correlation[:i, i] = np.array(entry["with"]) / 100
    return Posterior(tuple(entries), correlation * np.outer(sigma, sigma))


@cache
def load_posterior() -> Posterior:
    """Returns the Posterior of the shipped constants."""
    return parse_posterior(shipped_text("forerun", FILE))
