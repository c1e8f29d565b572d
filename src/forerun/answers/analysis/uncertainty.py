"""How sure a prediction is: bands that hold the stated share of measured runs, from the residuals of published ones.

The method is split conformal prediction with normalised residuals, one group after the other:

* residual r = ln(measured / predicted), score r / w with the widening w of the run (below);
* quantiles of the scores of each group, the ceil((n + 1) (1 - a / 2))-th smallest and largest of n for a share of
  1 - a, lower and upper apart, as residuals are not symmetric: what is not modelled makes a step longer;
* the band of a new run is predicted * exp(w * quantile).

Papadopoulos, Gammerman and Vovk, "Normalized nonconformity measures for regression conformal prediction" (2008); Vovk,
Gammerman and Shafer, "Algorithmic Learning in a Random World" (2005), 4.5 (groups); Romano, Patterson and Candes,
"Conformalized quantile regression" (2019), theorem 2 (two sides apart). Published rows are not exchangeable with a new
user's run, so `forerun validate` prints how many rows the bands hold.

Groups: a software stack with fitted rates; one without; a run of which measured steps were given. A device whose clock
under load was not fitted adds a variance of its own, and so does each doubling beyond the largest measured run.
`uncertainty.yaml` has the numbers; `validation/bands.py` finds them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from forerun.describe.cluster.types import Cluster, Device, KernelRates
from forerun.describe.stacks.stack import Stack

_GROUPS = {"fitted": "with fitted rates", "unfitted": "to which few steps or none were fitted"}
_FITTED = re.compile(r"fitted on (?:whole|(\d+)) published")
"""how the `fitted` of a stack (with its number of steps) and the `source` of a device begin where steps inform them"""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of ln(measured / predicted), at both ends of the band."""

    low: float
    high: float
    rows: int
    """that inform them"""


@dataclass(frozen=True, slots=True)
class Residuals:
    """What uncertainty.yaml holds."""

    share: float
    """of measured runs that lie in the band"""
    fitted: Quantiles
    unfitted: Quantiles
    anchored: Quantiles
    device: Quantiles
    uncalibrated: float
    """widening where no kernel time lies in calibrated shapes"""
    exposed: float
    """widening where all of the step is exposed communication"""
    scale: float
    """standard error of each doubling of GPUs beyond `gpus_seen`"""
    gpus_seen: int
    least_rows: int
    """measured steps that make a stack a fitted one"""
    allocated: Mapping[str, Quantiles]
    """by `fitted` and `unfitted`"""
    reserved: Mapping[str, Quantiles]


@dataclass(frozen=True, slots=True)
class Band:
    """Factors on a predicted figure, low <= 1 <= high."""

    low: float
    high: float

    def of(self, figure: float) -> tuple[float, float]:
        """The band around `figure`, which it holds."""
        return self.low * figure, self.high * figure


@cache
def residuals() -> Residuals:
    """The shipped residuals."""
    text = (resources.files("forerun.answers.analysis") / "uncertainty.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text)
    time, allocated, reserved = (
        {name: Quantiles(**entry) for name, entry in data.pop(figure).items()}
        for figure in ("time", "allocated", "reserved")
    )
    del data["source"]
    return Residuals(**(data | time), allocated=allocated, reserved=reserved)


def is_fitted(what: Stack | Device) -> bool:
    """Whether measured steps inform the rates of a stack (enough of them), or the clock of a device under load."""
    if isinstance(what, Device):
        return _FITTED.match(what.source.get("sustained", "")) is not None
    found = (_FITTED.match(how) for how in what.fitted.values())
    return max((int(one[1] or 0) for one in found if one), default=0) >= residuals().least_rows


def group_of(stack: Stack) -> str:
    """Whose residuals a run's are like: those of `fitted` or `unfitted` stacks."""
    return "fitted" if is_fitted(stack) else "unfitted"


def widening(coverage: float, exposed: float) -> float:
    """How much wider than where all is calibrated and nothing exposed a band is; at least 1, grows with both.

    `coverage` is the share of kernel time in calibrated shapes, `exposed` that of exposed communication in the step.
    """
    known = residuals()
    return math.hypot(1.0, known.uncalibrated * (1.0 - coverage), known.exposed * exposed)


def time_band(stack: Stack, cluster: Cluster, n_gpus: int, coverage: float, exposed: float) -> Band:
    """The band of a step's time. `coverage` and `exposed` as for `widening`."""
    known, wider = residuals(), widening(coverage, exposed)
    sides = _sides(getattr(known, group_of(stack)))
    if cluster.rates != KernelRates():
        sides = tuple(map(min, sides, _sides(known.anchored)))
    device = (0.0, 0.0) if is_fitted(cluster.device) else _sides(known.device)
    beyond = known.scale * max(0.0, math.log2(n_gpus / known.gpus_seen))
    low, high = (math.hypot(wider * own, other, beyond) for own, other in zip(sides, device, strict=True))
    return Band(math.exp(-low), math.exp(high))


def band_words(stack: Stack, cluster: Cluster, coverage: float, exposed: float) -> str:
    """Where `time_band` comes from, for people."""
    known = residuals()
    group: Quantiles = getattr(known, group_of(stack))
    parts = [f"residuals of {group.rows} published steps of stacks {_GROUPS[group_of(stack)]}"]
    if cluster.rates != KernelRates():
        parts.append("narrowed by the measured steps that were given")
    parts.append(f"{widening(coverage, exposed):.2f} times as wide, for what is not calibrated or is communication")
    if not is_fitted(cluster.device):
        parts.append(f"wider as no measured step informs the clock of {cluster.device.name}")
    return ", ".join(parts)


def memory_band(stack: Stack, figure: str) -> Band:
    """The band of peak memory; `figure` is `allocated` or `reserved`."""
    by_group: Mapping[str, Quantiles] = getattr(residuals(), figure)
    low, high = _sides(by_group[group_of(stack)])
    return Band(math.exp(-low), math.exp(high))


def _sides(group: Quantiles) -> tuple[float, ...]:
    """How far a band goes down and up: at least to the prediction, where all residuals lie on one side of it."""
    return max(0.0, -group.low), max(0.0, group.high)
