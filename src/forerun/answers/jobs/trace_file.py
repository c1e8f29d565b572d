"""Reads traces of jobs: the CSV files of Tiresias, Philly (as Sia stores it), Helios, Acme and Alibaba's openb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from math import isfinite
from pathlib import Path

from forerun.answers.jobs.job import Job
from forerun.common.admission import read_rows, refuse_repeated
from forerun.common.errors import ForerunError

_COLUMNS = {
    "name": ("job_id", "jobid", "name", "id"),
    "gpus": ("num_gpu", "num_gpus", "gpu_num", "gpus"),
    "submit": ("submit_time", "submitted_time", "timestamp", "creation_time", "submit_s", "time"),
    "duration": ("duration", "duration_s", "runtime"),
    "group": ("vc", "cluster", "user", "queue"),
    "priority": ("priority",),
    "milli": ("gpu_milli",),
}
"""names of a column, by its meaning; the first name that the file has counts"""
_FROM_TO = (("scheduled_time", "deletion_time"), ("start_time", "end_time"))
"""columns whose difference is the duration where no column says it"""
_WHOLE_MILLI = 1000
"""of a whole GPU in openb's gpu_milli"""


@dataclass(frozen=True, slots=True)
class JobTrace:
    """The jobs of a file."""

    jobs: tuple[Job, ...]
    left_out: int
    """rows without a GPU or a duration"""
    shares: int = 0
    """jobs that ask for a share of a GPU, and count with a whole one"""


def read_jobs(path: str | Path) -> JobTrace:
    """Returns the jobs of a CSV file in the order of their submission, the first at 0 s.

    Raises ForerunError, which names the file and the line, for a file that can't be read, lacks a column, or has a row
    that makes no sense.
    """
    rows = read_rows(path)
    _, names = next(rows, (0, []))
    refuse_repeated(names, str(path))
    columns = {what: next((name for name in known if name in names), None) for what, known in _COLUMNS.items()}
    from_to = next((pair for pair in _FROM_TO if set(pair) <= set(names)), None)
    for what in ("gpus", "submit"):
        if columns[what] is None:
            raise ForerunError(f"{path}: no column for {what}; expected one of {', '.join(_COLUMNS[what])}")
    if columns["duration"] is None and from_to is None:
        raise ForerunError(f"{path}: no column for the duration; expected one of {', '.join(_COLUMNS['duration'])}")
    jobs: list[Job] = []
    left_out = shares = 0
    for number, cells in rows:
        row = dict(zip(names, cells, strict=False))  # cells that a row lacks are empty
        place = f"{path}, line {number}"
        job = _job(row, columns, from_to, place, len(jobs))
        if job is None:
            left_out += 1
        else:
            jobs.append(job)
            milli = columns["milli"]
            shares += milli is not None and 0 < _number(row.get(milli) or "0", place, milli) < _WHOLE_MILLI
    if not jobs:
        raise ForerunError(f"{path}: no job has a GPU and a duration")
    first_s = min(job.submit_s for job in jobs)
    moved = (Job(job.name, job.gpus, job.submit_s - first_s, job.duration_s, job.group, job.priority) for job in jobs)
    return JobTrace(tuple(sorted(moved, key=lambda job: job.submit_s)), left_out, shares)


def _job(
    row: Mapping[str, str],
    columns: Mapping[str, str | None],
    from_to: Sequence[str] | None,
    place: str,
    number: int,
) -> Job | None:
    def text(what: str) -> str:
        name = columns[what]
        return "" if name is None else (row.get(name) or "").strip()

    gpus = _number(text("gpus") or "0", place, str(columns["gpus"]))
    if columns["duration"] is not None:
        duration_s = _number(text("duration") or "0", place, str(columns["duration"]))
    else:
        begin, end = ((row.get(name) or "").strip() for name in from_to or ())
        duration_s = _time_s(end, place) - _time_s(begin, place) if begin and end else 0.0
    if gpus < 1 or duration_s <= 0:
        return None
    submit_s = _time_s(text("submit"), place)
    priority = int(_number(text("priority") or "0", place, "priority"))
    return Job(text("name") or f"job {number}", int(gpus), submit_s, duration_s, text("group"), priority)


def _number(text: str, place: str, column: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or abs(value) > 1e15:
        raise ForerunError(f"{place}: {column}: expected a number, got {text[:40]!r}")
    return value


def _time_s(text: str, place: str) -> float:
    """Returns a time as seconds: a number, or a date and time in ISO 8601 (UTC where it names no zone)."""
    try:
        return _number(text, place, "time")
    except ForerunError:
        pass
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ForerunError(f"{place}: expected seconds or a date and time, got {text[:40]!r}") from None
    return (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()
