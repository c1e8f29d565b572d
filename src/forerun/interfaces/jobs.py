"""Simulates many jobs under several scheduling policies, from Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.answers.jobs.comparison import compare
from forerun.answers.jobs.description import JobsRequest, check_names, read_cluster
from forerun.answers.jobs.outcome import PolicyOutcome
from forerun.answers.jobs.unlike_description import UnlikeRequest, check_policies
from forerun.common.shown import Picture, Shown
from forerun.interfaces.report.in_notebook import document_html, shown_picture
from forerun.interfaces.report.job_schedules import (
    heading,
    job_rows,
    schedules_document,
    schedules_plots,
    schedules_record,
)
from forerun.interfaces.report.page import write_page


class Jobs:
    """Many jobs on one cluster, from the file that `forerun cluster` takes (docs/jobs.md).

    Raises ForerunError if the file can't be read or the description is wrong.
    """

    def __init__(self, path: str | Path) -> None:
        self.request: JobsRequest | UnlikeRequest = read_cluster(Path(path))

    def schedule(self, policies: Sequence[str] = ()) -> Schedules:
        """Simulates the jobs under each of the policies; by default under those of the file. Raises UnknownName for a
        policy."""
        request, chosen = self.request, tuple(dict.fromkeys(policies))
        if chosen and isinstance(request, JobsRequest):
            check_names(chosen, request.placement)
        elif chosen:
            check_policies(chosen)
        if chosen:
            request = replace(request, policies=chosen)
        return Schedules(request, tuple(compare(request)))


@dataclass(frozen=True)
class Schedules(Shown):
    """The schedules of the jobs under each policy."""

    request: JobsRequest | UnlikeRequest
    outcomes: tuple[PolicyOutcome, ...]

    def summary(self) -> dict[str, Any]:
        """Returns the figures of the policies; units are in the keys."""
        return schedules_record(self.request, self.outcomes)

    def to_rows(self) -> list[dict[str, Any]]:
        """Returns a flat dict for each job under each policy."""
        return [dict(row) for row in job_rows(self.outcomes)]

    def plot(self) -> Picture:
        """Returns the GPUs in use over time beside the completion times. Needs matplotlib."""
        return shown_picture(heading(self.request), *schedules_plots(self.request, self.outcomes))

    def report(self, path: str | Path) -> None:
        """Writes a page with figures and plots. Raises ForerunError if it can't be written."""
        write_page(path, schedules_document(self.request, self.outcomes))

    def _repr_html_(self) -> str:
        """Returns the policies for a notebook."""
        return document_html(schedules_document(self.request, self.outcomes))
