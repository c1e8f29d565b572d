"""Defines entries that several kinds of job files share: bounds of numbers, a job given as a plan, failures of
nodes.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from forerun.answers.jobs.failures import NodeFailures
from forerun.answers.jobs.job import MOST_S
from forerun.common.yaml_files import Entry

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Moment = Annotated[float, Field(ge=0, le=MOST_S)]
"""seconds since the first moment of a simulation"""


class PlanEntry(Entry):
    """A job given as a plan: its step is predicted on the job's GPUs, of whatever kind they are."""

    model: str
    steps: Count
    global_batch: Count | None = None
    fields: dict[str, Any] = Field(default_factory=dict)


class FailuresEntry(Entry):
    """Failures of nodes, and the loss of a job by a failure."""

    per_1000_node_days: Positive
    repair_hours: Positive = 24.0
    checkpoint_minutes: Positive = 60.0
    seed: int = 0

    @property
    def of_nodes(self) -> NodeFailures:
        """Returns them in seconds."""
        return NodeFailures(
            self.per_1000_node_days, 3_600.0 * self.repair_hours, 60.0 * self.checkpoint_minutes, self.seed
        )
