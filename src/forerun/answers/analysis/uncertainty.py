"""Bands around predictions that contain the stated share of measured runs, from the residuals of published runs.

The method is split conformal prediction with normalised residuals, separately for each group:

* The residual of a run is r = ln(measured / predicted), its score r / w with the widening w of the run (below).
* Step times: each run is predicted with its source left out of the fit. The quantiles of a group are those of its
  scores at a / 2 and 1 - a / 2, for a share of 1 - a, where all sources weigh the same: a new user is a new source.
* Memory and traced programs: the ceil((n + 1) (1 - a / 2))-th smallest and largest of n scores.
* The two sides differ because residuals are not symmetric: effects that are not modelled make a step longer.
* The band of a new run is predicted * exp(w * quantile).

Papadopoulos, Gammerman and Vovk, "Normalized nonconformity measures for regression conformal prediction" (2008); Vovk,
Gammerman and Shafer, "Algorithmic Learning in a Random World" (2005), 4.5 (groups); Romano, Patterson and Candes,
"Conformalized quantile regression" (2019), theorem 2 (two sides apart). Published rows are not exchangeable with a new
user's run, so `forerun validate` prints how many rows the bands contain.

Groups are runs on few and on many GPUs, traced programs, and runs for which measured steps were given. A framework
without published steps has the widest band of all groups. A device whose clock under load is unknown adds a variance.
Each doubling of GPUs beyond the largest measured run adds one too. `uncertainty.yaml` has the numbers;
`evidence/validation/bands.py` and `evidence/traced/report.py` find them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from forerun.common.shipped import shipped_data
from forerun.core.cost.clock import is_known
from forerun.describe.cluster.types import Cluster, KernelRates
from forerun.describe.stacks.stack import Stack

TRACED = "traced"
"""the group of traced programs, whatever stack they are read with"""
_WIDE_BITS = 16
_BITS = {"fp8": 8, "mxfp8": 8, "nvfp4": 4}
"""bits of a product's operands, by precision; of others all that are wider count as 16"""
_FITTED = re.compile(r"fitted on (?:whole|(\d+)) published")
"""start of a stack's `fitted` (with its number of steps) and of a device's `source` where measured steps inform them"""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of ln(measured / predicted), over the widening for times, at both ends of the band."""

    low: float
    high: float
    rows: int
    """number of published runs behind the quantiles"""
    sources: int = 0
    """number of sources that published them, where each counts once"""


@dataclass(frozen=True, slots=True)
class Residuals:
    """The contents of uncertainty.yaml."""

    share: float
    """share of measured runs inside the band"""
    few: Quantiles
    many: Quantiles
    few_gpus: int
    """largest number of GPUs to which `few` applies; `many` applies to others"""
    measured: tuple[tuple[str, str, int, str], ...]
    """family of stacks, architecture of the device, bits of products, and `dense` or `experts`, of published steps"""
    traced: Quantiles
    anchored: Quantiles
    device: Quantiles
    uncalibrated: float
    """widening where no kernel time is in calibrated shapes"""
    exposed: float
    """widening where the whole step is exposed communication"""
    scale: float
    """standard error of each doubling of GPUs beyond `gpus_seen`"""
    gpus_seen: int
    uncompiled: float
    """how many times as long a step can take as the same step compiled"""
    least_rows: int
    """least number of measured steps of a fitted stack"""
    allocated: Mapping[str, Quantiles]
    """group (`fitted`, `unfitted`, `traced`) -> quantiles of allocated memory"""
    reserved: Mapping[str, Quantiles]


@dataclass(frozen=True, slots=True)
class Band:
    """Factors on a predicted figure, low <= 1 <= high."""

    low: float
    high: float

    def of(self, figure: float) -> tuple[float, float]:
        """Returns the lower and the upper end of the band around `figure`."""
        return self.low * figure, self.high * figure

    def uncompiled(self) -> Band:
        """Widens the band of a step if the tracer recorded code uncompiled that should be compiled."""
        return Band(self.low / residuals().uncompiled, self.high)


@cache
def residuals() -> Residuals:
    """Returns the shipped residuals."""
    data = {**shipped_data("forerun.answers.analysis", "uncertainty.yaml")}
    time, allocated, reserved = (
        {name: Quantiles(**entry) for name, entry in data.pop(figure).items()}
        for figure in ("time", "allocated", "reserved")
    )
    data["measured"] = tuple(tuple(entry) for entry in data["measured"])
    del data["source"]
    return Residuals(**(data | time), allocated=allocated, reserved=reserved)


@dataclass(frozen=True, slots=True)
class Work:
    """Holds the facts of a step that its bands depend on, beside its stack and its device."""

    precision: str
    experts: bool

    def words(self) -> str:
        """Says it in words."""
        return f"{_BITS.get(self.precision, _WIDE_BITS)}-bit products{' of experts' if self.experts else ''}"


def is_measured(stack: Stack, cluster: Cluster, work: Work) -> bool:
    """Returns whether a published step has the stack's family, the device's architecture and the work together."""
    kind, bits = "experts" if work.experts else "dense", _BITS.get(work.precision, _WIDE_BITS)
    return (stack.family, cluster.device.architecture, bits, kind) in residuals().measured


def is_known_family(stack: Stack) -> bool:
    """Returns whether published steps of the stack's family say how far predictions are off."""
    return stack.family in _known_families()


@cache
def _known_families() -> frozenset[str]:
    return frozenset(family for family, *_ in residuals().measured)


def scale_of(n_gpus: int) -> str:
    """Returns the group of residuals of a run of `n_gpus`: `few` or `many`."""
    return "few" if n_gpus <= residuals().few_gpus else "many"


def _time_quantiles(stack: Stack, n_gpus: int, group: str | None) -> Quantiles:
    """Returns the quantiles of a run. A stack without measured steps has the widest ones."""
    known = residuals()
    if group == TRACED:
        return known.traced
    own: Quantiles = getattr(known, scale_of(n_gpus))
    if is_known_family(stack):
        return own
    return replace(own, low=min(known.few.low, known.many.low), high=max(known.few.high, known.many.high))


def is_fitted(stack: Stack) -> bool:
    """Returns whether enough measured steps inform the rates of a stack."""
    found = (_FITTED.match(how) for how in stack.fitted.values())
    return max((int(one[1] or 0) for one in found if one), default=0) >= residuals().least_rows


def group_of(stack: Stack) -> str:
    """Returns the group of residuals that apply to a stack, `fitted` or `unfitted`."""
    return "fitted" if is_fitted(stack) else "unfitted"


def widening(coverage: float, exposed: float) -> float:
    """Returns the factor (>= 1) on the width of a band whose step has uncalibrated kernels or exposed communication.

    `coverage` is the share of kernel time in calibrated shapes, `exposed` the share of exposed communication in the
    step, both 0 to 1.
    """
    known = residuals()
    return math.hypot(1.0, known.uncalibrated * (1.0 - coverage), known.exposed * exposed)


def time_band(
    stack: Stack, cluster: Cluster, n_gpus: int, coverage: float, exposed: float, group: str | None = None
) -> Band:
    """Returns the band of a step's time. `coverage` and `exposed` are those of `widening`; `group` is TRACED for a
    traced program."""
    known, wider = residuals(), widening(coverage, exposed)
    sides = _sides(_time_quantiles(stack, n_gpus, group))
    if cluster.rates != KernelRates():
        sides = tuple(map(min, sides, _sides(known.anchored)))
    device = (0.0, 0.0) if is_known(cluster.device) else _sides(known.device)
    beyond = known.scale * max(0.0, math.log2(n_gpus / known.gpus_seen))
    low, high = (math.hypot(wider * own, other, beyond) for own, other in zip(sides, device, strict=True))
    return Band(math.exp(-low), math.exp(high))


def band_words(
    stack: Stack,
    cluster: Cluster,
    n_gpus: int,
    coverage: float,
    exposed: float,
    group: str | None = None,
    fell_back: bool = False,
    work: Work | None = None,
) -> str:
    """Says in words where `time_band` comes from, and whether anything like the step was ever measured."""
    known, found = residuals(), _time_quantiles(stack, n_gpus, group)
    of = f" of {found.sources} sources, each left out of the fit," if found.sources else ""
    scale = f"{'up to' if scale_of(n_gpus) == 'few' else 'more than'} {known.few_gpus} GPUs"
    parts = [f"errors of {found.rows} published steps{of} {'of traced programs' if group == TRACED else 'on ' + scale}"]
    if group != TRACED and not is_known_family(stack):
        parts.append(f"the widest band, because no published step uses {stack.family}")
    elif work is not None and not is_measured(stack, cluster, work):
        together = f"{stack.family}, {cluster.device.architecture} GPUs and {work.words()}"
        parts.append(f"though {together} were never measured together")
    if cluster.rates != KernelRates():
        parts.append("narrowed by your measured steps")
    parts.append(f"{widening(coverage, exposed):.2f} times as wide, for uncalibrated kernels and for communication")
    if not is_known(cluster.device):
        parts.append(f"wider because no measurement shows the clock of {cluster.device.name} under load")
    if fell_back:
        parts.append(
            f"its lower end {known.uncompiled:g} times lower because torch.compile failed on a part of the step"
        )
    return ", ".join(parts)


def memory_band(stack: Stack, figure: str, group: str | None = None) -> Band:
    """Returns the band of peak memory; `figure` is `allocated` or `reserved`; `group` overrides the stack's."""
    by_group: Mapping[str, Quantiles] = getattr(residuals(), figure)
    low, high = _sides(by_group[group or group_of(stack)])
    return Band(math.exp(-low), math.exp(high))


def _sides(group: Quantiles) -> tuple[float, ...]:
    """Returns both ends of a band, widened to include the prediction where all residuals lie on one side of it."""
    return max(0.0, -group.low), max(0.0, group.high)
