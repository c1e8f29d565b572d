"""All tables of a set of profiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.answers.profile import breakdown, waiting
from forerun.answers.profile.critical_path import CriticalPath, annotated, critical_path, path_summary
from forerun.answers.profile.tables import Table
from forerun.answers.profile.window import Window, windows
from forerun.common.errors import ForerunError
from forerun.sources.profile.profile import STEP, Profile


@dataclass(frozen=True)
class Analysis:
    """Tables of a set of profiles under HTA's names, one rank after the other."""

    windows: tuple[Window, ...]
    tables: tuple[Table, ...]
    paths: tuple[CriticalPath, ...]
    notes: tuple[str, ...]
    """a sentence for each thing that a reader has to know"""

    def table(self, name: str) -> Table:
        """Returns the table of this name."""
        return next(table for table in self.tables if table.name == name)


def analyze(
    profiles: Sequence[Profile], annotation: str = STEP, instance: int = 0, most_kernels: int = breakdown.NAMED_KERNELS
) -> Analysis:
    """Returns the analysis of one profile of each rank.

    The critical path is that of the `instance`-th event whose name contains `annotation`; if no file has one, there is
    no critical path, and a note says so. `most_kernels` names of a type are listed in the table that HTA sums up.

    Raises ForerunError if the annotation exists and the instance does not.
    """
    views = windows(profiles)
    notes = _notes(views)
    paths: list[CriticalPath] = []
    for one in views:
        if len(annotated(one, annotation)) == 0:
            notes.append(f"rank {one.rank}: no event is named {annotation}, so it has no critical path")
            continue
        try:
            paths.append(critical_path(one, annotation, instance))
        except ForerunError as error:
            if not 0 <= instance < len(annotated(one, annotation)):
                raise
            notes.append(str(error))
    tables = (
        breakdown.temporal_breakdown(views),
        breakdown.overlap(views),
        breakdown.communication(views),
        breakdown.by_type(views),
        breakdown.by_kernel(views, most_kernels),
        breakdown.kernels(views),
        breakdown.annotation_times(views),
        *waiting.idle_times(views),
        waiting.queue_summary(views),
        waiting.bandwidth_summary(views),
        *(waiting.launch_stats(one) for one in views),
        path_summary(paths),
        *(path.edge_table() for path in paths),
    )
    return Analysis(tuple(views), tables, tuple(paths), tuple(notes))


def _notes(views: Sequence[Window]) -> list[str]:
    notes = []
    if any(one.last_step_dropped for one in views):
        notes.append("the last profiler step of each rank is left out, as in HTA: its work is often cut off")
    for one in views:
        if not one.on_stream.any():
            notes.append(f"rank {one.rank}: no work of a device, so only the host's figures exist")
        if any(row[3] < 0 for row in breakdown.temporal_breakdown([one]).rows):  # type: ignore[operator]
            notes.append(
                f"rank {one.rank}: times in whole microseconds make non-compute time negative; HTA fails there"
            )
    return notes
