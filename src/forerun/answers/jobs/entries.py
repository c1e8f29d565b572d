"""Defines what the keys of several job files share: bounds of numbers, and a job given as a plan."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from forerun.common.yaml_files import Entry

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class PlanEntry(Entry):
    """A job given as a plan: its step is predicted on the job's GPUs, of whatever kind they are."""

    model: str
    steps: Count
    global_batch: Count | None = None
    fields: dict[str, Any] = Field(default_factory=dict)
