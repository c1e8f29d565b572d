"""Evaluates the replay of profiled steps, and the error of extrapolations to another machine with a measured step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from forerun.answers.analysis.predict_program import predict_program
from forerun.answers.profile.imported import Imported, import_step
from forerun.common.errors import ForerunError
from forerun.common.shipped import shipped
from forerun.describe.cluster.catalog import load_cluster
from forerun.sources.profile.read import read_profiles
from forerun.sources.profile.step import steps_of

_NUMBER_MARK = "#"


@dataclass(frozen=True)
class Listed:
    """A public profile: a file for each rank that it has, as paths below the folder of checkouts."""

    what: str
    files: tuple[str, ...]
    trains: bool = True
    """whether it is of a training step; the others are for extrapolations alone"""


@dataclass(frozen=True)
class Pair:
    """The same step profiled on two machines."""

    profile: str
    measured: str
    cluster: str
    """the machine of `measured`"""
    gpus: int = 1


@dataclass(frozen=True)
class PublicProfiles:
    """The contents of profiles.yaml."""

    profiles: Mapping[str, Listed]
    extrapolations: tuple[Pair, ...]


@dataclass(frozen=True)
class Replayed:
    """All steps of a profile, each replayed with its recorded times."""

    what: str
    device: str
    steps: int
    measured_s: float
    """of the step of the median time"""
    replayed_s: float
    worst: float
    """the largest error of a step without sign: replayed over measured time, less 1"""


@dataclass(frozen=True)
class Extrapolated:
    """A step on another machine, predicted from its profile, beside the one measured there."""

    what: str
    device: str
    profiled_s: float
    cluster: str
    gpus: int
    predicted_s: float
    band_s: tuple[float, float]
    """the 80 % band"""
    measured_s: float

    @property
    def error(self) -> float:
        """Returns the predicted over the measured time, less 1."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True)
class Judged:
    """The tables, and the profiles that are in neither table, each with the reason."""

    replays: tuple[Replayed, ...]
    extrapolations: tuple[Extrapolated, ...]
    left_out: Mapping[str, str]


def public_profiles() -> PublicProfiles:
    """Returns the shipped list. Raises ForerunError if an extrapolation names a profile that it lacks."""
    found = shipped(PublicProfiles, "forerun.evidence.public_profiles", "profiles.yaml")
    for pair in found.extrapolations:
        for name in (pair.profile, pair.measured):
            if name not in found.profiles:
                raise ForerunError(f"profiles.yaml: extrapolations: {name}: no such profile; add it to `profiles`")
    return found


def judge(listed: PublicProfiles, folder: Path) -> Judged:
    """Replays and extrapolates the profiles whose files are in `folder`.

    Raises ForerunError if it has none of them.
    """
    if not folder.is_dir():
        raise ForerunError(f"{folder}: not a folder; make one with a checkout of each repository, named owner+name")
    missing = {name: [f for f in one.files if not (folder / f).is_file()] for name, one in listed.profiles.items()}
    left_out = {listed.profiles[name].what: f"{files[0]} is not there" for name, files in missing.items() if files}
    if all(missing.values()):
        raise ForerunError(
            f"{folder}: has none of the files that profiles.yaml lists, such as {missing.popitem()[1][0]}"
        )

    @cache
    def imported(name: str, number: int | None = None) -> Imported:
        return import_step(read_profiles([folder / path for path in listed.profiles[name].files]), number)

    replays, extrapolations = [], []
    for name, one in listed.profiles.items():
        if one.trains and not missing[name]:
            numbers = _numbers([folder / path for path in one.files])
            replays.append(_replayed(one.what, imported(name), [imported(name, number) for number in numbers]))
    for pair in listed.extrapolations:
        if not missing[pair.profile] and not missing[pair.measured]:
            extrapolations.append(_extrapolated(listed.profiles[pair.profile].what, pair, imported))
    return Judged(tuple(replays), tuple(extrapolations), left_out)


def _numbers(paths: Sequence[Path]) -> list[int]:
    """Returns the numbers of the profiler's steps that all ranks have; none where the file is one step."""
    of_ranks = [{step.name for step in steps_of(one)} for one in read_profiles(paths)]
    names = [name for name in set.intersection(*of_ranks) if _NUMBER_MARK in name]
    return sorted(int(name.split(_NUMBER_MARK)[1]) for name in names)


def _replayed(what: str, typical: Imported, steps: Sequence[Imported]) -> Replayed:
    worst = max(abs(step.error) for step in (typical, *steps))
    return Replayed(what, typical.device, max(1, len(steps)), typical.measured_s, typical.replayed_s, worst)


def _extrapolated(what: str, pair: Pair, imported: Callable[[str], Imported]) -> Extrapolated:
    here, there = imported(pair.profile), imported(pair.measured)
    n_gpus = pair.gpus if pair.gpus > 1 else None
    found = predict_program(here.program, load_cluster(pair.cluster), n_gpus=n_gpus).prediction
    band = found.step_time_low_s, found.step_time_high_s
    return Extrapolated(
        what, here.device, here.measured_s, pair.cluster, pair.gpus, found.step_time_s, band, there.measured_s
    )
