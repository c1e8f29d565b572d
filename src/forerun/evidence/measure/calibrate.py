"""Refits a device's cost profile to measurements, and reports its errors on them and on shapes left out of the fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.common.errors import ForerunError
from forerun.common.units import GIGA, US
from forerun.common.yaml_files import parse_yaml
from forerun.core.cost.profile import Profile, load_profile, parse_profile
from forerun.core.cost.profile_text import profile_text, written_over
from forerun.core.program.types import F64
from forerun.describe.cluster.types import Cluster
from forerun.evidence.measure.fit import mape
from forerun.evidence.measure.new_profile import LINKS, NewPart, at_device, fitted_on, with_parts, with_roles
from forerun.evidence.measure.parts import ALL, FOLDS, Fitted, Part, backward_rates, parts_of, role_rates, rows_of
from forerun.evidence.measure.samples import Samples


@dataclass(frozen=True)
class ErrorRow:
    """The mean absolute errors of one class of a part's rows, in percent of the measured time."""

    section: str
    rows_class: str
    rows: int
    before: float
    after: float
    left_out: float | None
    """error on rows that the fit didn't see, over several fits (see Part.folds); None for too few rows"""
    kept: bool
    """whether these constants go into the profile"""


@dataclass(frozen=True)
class Change:
    """The change of one constant of the profile."""

    path: str
    old: float | None
    new: float


@dataclass(frozen=True)
class Calibration:
    """A refitted profile."""

    profile: Profile
    old: Profile
    """the old profile, stated at the peaks of the device"""
    changes: tuple[Change, ...]
    errors: tuple[ErrorRow, ...]
    notes: tuple[str, ...]

    def text(self, old: str = "") -> str:
        """Returns the file's new text; its text `old` is a profile, or a device with its kernels."""
        return written_over(old, self.profile, self.profile.name)


def calibrate(cluster: Cluster, samples: Samples) -> Calibration:
    """Returns the profile of the device of `cluster`, with new constants where `samples` measure them.

    It fits collectives where NVLink joins the GPUs of a node. Constants without measurements stay the same fractions of
    the device's peaks.

    Raises:
        ForerunError: The samples measure no part of a profile.
    """
    device = cluster.device
    old = at_device(load_profile(device.cost_profile), cluster)
    link_gb_s = cluster.links[0].bytes_per_s / GIGA if cluster.links[0].kind in LINKS else 0.0
    notes = list(samples.notes)
    if samples.collectives and not link_gb_s:
        notes.append(f"collectives left out: profiles hold those over NVLink, and {cluster.name} has none")
    found, errors = [], []
    for part in parts_of(samples, old, device, link_gb_s, cluster.host_bytes_per_s / GIGA):
        if len(part) < part.least:
            notes.append(f"{part.section} left out: {len(part)} measurements, at least {part.least} are needed")
            continue
        fitted = part.fit(part.table)
        of_part = list(_errors(part, fitted))
        errors += of_part
        if part.kept:
            whole = next(row for row in of_part if row.rows_class == ALL)
            found.append(NewPart(part.section, fitted.entry, len(part), whole.after, whole.left_out))
        else:
            notes.append(f"{part.section} not taken over: an operand is quantised inside the timing")
    if not found:
        why = "; ".join(notes) or "no products, attention, memory-bound kernels, host copies or collectives in them"
        raise ForerunError(f"measurements: nothing to fit: {why}")
    profile = _with_role_rates(with_parts(old, found, samples, cluster), samples, cluster)
    for label, rows, rate, shipped in backward_rates(samples, profile, device):
        notes.append(
            f"attention backward of {label}: {rate:.2f} of the forward rate on {rows} measurements; "
            f"describe/kernels/attention.yaml has {shipped:.2f}"
        )
    data = parse_yaml(profile_text(profile, ()), "calibrated profile")
    parse_profile({"name": profile.name, **data}, f"calibrated profile of {device.name}")
    return Calibration(profile, old, tuple(_changes(old, profile)), tuple(errors), tuple(notes))


def _with_role_rates(profile: Profile, samples: Samples, cluster: Cluster) -> Profile:
    found = list(role_rates(samples, profile.gemm["bf16"], cluster.device))
    words = "; ".join(
        f"{role.name}: {role.rows} rows, mean error {role.error_percent:.1f} % in sample" for role in found
    )
    rates = {role.name: role.rate for role in found}
    return with_roles(profile, rates, fitted_on(samples.of_kernels, words))


def _changes(old: Profile, new: Profile) -> Iterator[Change]:
    """Returns the constants that differ between the profiles, in the order of the file."""
    before = dict(_constants(asdict(old)))
    for path, value in _constants(asdict(new)):
        if before.get(path) != value:
            yield Change(path, before.get(path), value)


def _constants(values: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            yield from _constants(value, here)
        elif isinstance(value, float):
            yield here, value


# -- errors ------------------------------------------------------------------------------------------------------


def _errors(part: Part, fitted: Fitted) -> Iterator[ErrorRow]:
    measured = part.table["latency_us"] * US
    before, after = part.before(fitted, part.table), fitted.time_s(part.table)
    left_out = _left_out(part)
    for name, mask in part.classes.items():
        if not mask.any():
            continue
        unseen = None if left_out is None else mape(left_out[mask], measured[mask])
        yield ErrorRow(
            part.section,
            name,
            int(mask.sum()),
            mape(before[mask], measured[mask]),
            mape(after[mask], measured[mask]),
            unseen,
            part.kept,
        )


def _left_out(part: Part) -> F64 | None:
    """Returns the seconds of every row under constants that were fitted without it and its neighbours."""
    fold = folds(part.together, part.folds)
    numbers = np.unique(fold).tolist()
    if any((fold != number).sum() < part.least for number in numbers) or len(numbers) < FOLDS:
        return None
    time_s = np.empty(len(part))
    for number in numbers:
        without = part.fit(rows_of(part.table, fold != number))
        time_s[fold == number] = without.time_s(rows_of(part.table, fold == number))
    return time_s


def folds(together: F64, count: int) -> npt.NDArray[np.int64]:
    """Returns each row's fold, (rows,), at most `count` in all: rows that agree in all of `together` share one."""
    _, group = np.unique(together, axis=0, return_inverse=True)
    order = np.random.default_rng(0).permutation(int(group.max()) + 1) % count
    found: npt.NDArray[np.int64] = order[group.ravel()].astype(np.int64)
    return found
