"""Jobs on clusters of unlike GPUs: how many training steps a second each job makes on each kind."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isfinite
from pathlib import Path

import numpy as np

from forerun.answers.jobs.interior_point import Vector
from forerun.answers.jobs.job import Job, Scaling, Traffic, check_duration
from forerun.common.admission import read_json, read_text
from forerun.common.errors import ForerunError

Rates = Mapping[str, Mapping[tuple[str, int], float]]
"""GPU kind -> (job type, GPUs) -> steps a second"""
Beside = Mapping[tuple[str, str, int], Vector]
"""(job type, job type, GPUs) -> steps a second of [member, kind] of two jobs on the same GPUs, the one that came first
first; types that can't share GPUs are not in it"""
_TRACE_COLUMNS = 10
_TYPE, _STEPS, _GPUS, _WEIGHT, _ARRIVAL = 0, 5, 6, 7, 9


@dataclass(frozen=True, slots=True)
class SteppedJob:
    """A job of so many training steps, which runs on one kind of GPU at a time."""

    name: str
    gpus: int
    submit_s: float
    steps: int
    rates: tuple[float, ...]
    """steps a second on each kind of GPU, 0 if it can't run"""
    weight: float = 1.0
    """how much more it should get than a job of weight 1"""
    group: str = ""
    type: str = ""
    """jobs of a type on as many GPUs are equally fast, alone and beside others"""
    traffic: tuple[Traffic | None, ...] = ()
    """its step on each kind of GPU, where other jobs on the same links slow it; empty: it sends nothing"""
    scalings: tuple[Scaling | None, ...] = ()
    """of each kind: the numbers of GPUs on which an elastic job can run, with steps a second; empty: `gpus` on all"""

    def __post_init__(self) -> None:
        for rate in self.rates:
            if rate:
                check_duration(self.name, self.steps / rate)

    @property
    def at_its_fastest(self) -> Job:
        """Returns it with the seconds that it takes on its own number of GPUs of the fastest kind."""
        return Job(self.name, self.gpus, self.submit_s, self.steps / max(self.rates), self.group)

    @property
    def elastic(self) -> Job:
        """Returns it as a job that may run on any of its kinds and numbers of GPUs."""
        options: list[tuple[int, int, float, Traffic | None]] = []
        for kind, rate in enumerate(self.rates):
            own = self.scalings[kind] if self.scalings else None
            if own is not None:
                steps = own.steps or (None,) * len(own.sizes)
                options += [(kind, *option) for option in zip(own.sizes, own.speeds, steps, strict=True)]
            elif rate:
                options.append((kind, self.gpus, rate, self.traffic[kind] if self.traffic else None))
        kinds, sizes, rates, traffic = zip(*options, strict=True)
        best = max(self.rates)
        speeds = tuple(rate / best for rate in rates)
        scaling = Scaling(sizes, speeds, traffic if any(traffic) else (), kinds)
        return replace(self.at_its_fastest, scaling=scaling, weight=self.weight)


def read_stepped_jobs(path: str | Path, kinds: Sequence[str], rates: Rates) -> tuple[SteppedJob, ...]:
    """Returns the jobs of a trace in Gavel's format: ten columns between tabs, without a header.

    Raises ForerunError, which names the file and the line.
    """
    jobs: list[SteppedJob] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        place, cells = f"{path}, line {number}", line.split("\t")
        if not line.strip():
            continue
        if len(cells) != _TRACE_COLUMNS:
            raise ForerunError(f"{place}: expected {_TRACE_COLUMNS} columns between tabs, got {len(cells)}")
        try:
            steps, gpus = int(cells[_STEPS]), int(cells[_GPUS])
            weight, submit_s = float(cells[_WEIGHT]), float(cells[_ARRIVAL])
        except ValueError:
            raise ForerunError(f"{place}: steps, GPUs, weight and arrival should be numbers") from None
        if steps < 1 or gpus < 1 or not weight > 0 or not 0 <= submit_s < float("inf"):
            raise ForerunError(f"{place}: steps, GPUs and weight should be positive, and the arrival at least 0")
        key = (cells[_TYPE], gpus)
        known = [kind for kind in kinds if rates[kind].get(key, 0.0) > 0.0]
        if not known:
            raise ForerunError(f"{place}: no throughput of {key[0]} on {gpus} GPUs of any kind of the cluster")
        own = tuple(rates[kind].get(key, 0.0) for kind in kinds)
        jobs.append(SteppedJob(str(len(jobs)), gpus, submit_s, steps, own, weight, cells[_TYPE], cells[_TYPE]))
    if not jobs:
        raise ForerunError(f"{path}: the trace has no jobs")
    return tuple(sorted(jobs, key=lambda job: job.submit_s))


def read_rates(path: str | Path, kinds: Sequence[str]) -> tuple[dict[str, dict[tuple[str, int], float]], Beside]:
    """Returns the rates of jobs alone, and of two jobs on the same GPUs, of a table in Gavel's format.

    It is JSON of GPU kind -> "('job type', GPUs)" -> null -> steps/s, and "('other type', GPUs)" -> [steps/s of each].

    Raises ForerunError, which names the file and the error.
    """
    table = read_json(path)
    found: dict[str, dict[tuple[str, int], float]] = {}
    beside: dict[tuple[str, str, int], Vector] = {}
    job_type = lru_cache(maxsize=None)(_job_type)
    for number, kind in enumerate(kinds):
        rows = table.get(kind) if isinstance(table, dict) else None
        if not isinstance(rows, dict):
            raise ForerunError(f"{path}: no throughputs of GPU kind {kind}")
        found[kind] = {}
        for key, row in rows.items():
            name, gpus = job_type(key, f"{path}: {kind}")
            place = f"{path}: {kind}: {key}"
            found[kind][name, gpus] = _alone(row, place)
            for other, rates in _others(row, gpus, job_type, place):
                both = beside.setdefault((name, other, gpus), np.zeros((2, len(kinds))))
                both[:, number] = rates
    return found, {types: rates for types, rates in beside.items() if rates.any()}


def _job_type(text: str, place: str) -> tuple[str, int]:
    try:
        key = literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        key = None
    if not (isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str) and isinstance(key[1], int)):
        raise ForerunError(f"{place}: expected ('job type', GPUs), got {text[:60]!r}")
    return key


def _alone(row: object, place: str) -> float:
    """Returns the rate of a job that shares its GPUs with no other."""
    rate = row.get("null") if isinstance(row, dict) else None
    if not _is_rate(rate):
        raise ForerunError(f"{place}: null should be the steps a second of the job alone")
    return float(rate)  # type: ignore[arg-type]


def _others(
    row: object, gpus: int, job_type: Callable[[str, str], tuple[str, int]], place: str
) -> list[tuple[str, list[float]]]:
    """Returns the types beside which a job can run on its GPUs, and the rates of both."""
    found = []
    for key, rates in row.items() if isinstance(row, dict) else ():
        if key == "null":
            continue
        other, others_gpus = job_type(key, place)
        if not (isinstance(rates, list) and len(rates) == 2 and all(_is_rate(rate) for rate in rates)):
            raise ForerunError(f"{place}: {key}: give the steps a second of both jobs as two numbers")
        if others_gpus == gpus:
            found.append((other, rates))
    return found


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and isfinite(value) and value >= 0
