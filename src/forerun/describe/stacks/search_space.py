"""SearchSpace: the plans of a framework that a search tries."""

from __future__ import annotations

from dataclasses import dataclass

import pydantic

from forerun.describe.stacks.words import Schedule


@dataclass(frozen=True)
class SearchSpace:
    """The values that a search tries for the fields of a plan; a user's own values go over them.

    The whole space also has `more_schedules` and `offload`.
    """

    source: str
    """page or file of the framework that states what it offers"""
    axes: tuple[str, ...]
    """mesh axes beside data parallelism whose degree may exceed 1"""
    zero_stages: tuple[int, ...]
    schedules: tuple[tuple[Schedule, int], ...] = (("1F1B", 1),)
    """pipeline schedules, each with its virtual stages"""
    reshard: tuple[str, ...] = ("default",)
    """reshard policies of FSDP"""
    sequence_parallel: bool = True
    """whether tensor-parallel ranks split the sequence too; the whole space tries both"""
    more_schedules: tuple[tuple[Schedule, int], ...] = ()
    offload: tuple[str, ...] = ("none",)
    """tensors that host memory holds between uses"""

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")

    @property
    def all_schedules(self) -> tuple[tuple[Schedule, int], ...]:
        """All pipeline schedules of the framework, each with its virtual stages."""
        return self.schedules + self.more_schedules
