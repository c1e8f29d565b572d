"""Builds of ASTRA-sim: the order in which they issue nodes, and the lines that they print."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from forerun.astrasim.astra.lower import IssueOrder
from forerun.common.errors import UnknownName
from forerun.common.yaml_files import Entry, check, read_yaml

_FILE = Path(__file__).with_name("releases.yaml")
DEFAULT_RELEASE = "2025-04"


class TimeStamp(Entry):
    """The form in which a build prints the time of a line."""

    separator: str
    precision: Literal["seconds", "milliseconds"]
    offset: bool
    """whether the offset to UTC follows"""

    def text(self, now: datetime) -> str:
        local = now.astimezone()
        return (local if self.offset else local.replace(tzinfo=None)).isoformat(self.separator, self.precision)


class Release(Entry):
    """One build. `releases.yaml` explains the keys."""

    source: str
    issue_order: Literal["ascending", "march-2025"]
    time: TimeStamp
    line: str
    rank: list[list[str]]
    """logger and text of each line that a rank prints"""
    kinds_as_run: bool = False
    group_algorithm: Literal["ring", "own"] = "ring"
    world: list[str] = Field(default_factory=list)
    last: str = ""
    node_0_ring: list[str] | None = None
    group_ring: list[str] | None = None

    def order(self, asked: IssueOrder | None = None) -> IssueOrder:
        """Returns the issue order that is asked for, or the build's own."""
        return asked or self.issue_order


@cache
def releases() -> dict[str, Release]:
    """Returns all known builds by name."""
    return {name: check(Release, data, f"{_FILE}: {name}") for name, data in read_yaml(_FILE).items()}


def release_named(name: str = DEFAULT_RELEASE) -> Release:
    """Returns the build called `name`. Raises UnknownName if there is none; the message lists the known ones."""
    if name not in releases():
        raise UnknownName("release of ASTRA-sim", name, [*releases()])
    return releases()[name]
