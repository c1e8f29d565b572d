"""Errors and oddities of traces, as a list of findings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong (error) or suspicious (warning)."""

    severity: Severity
    kind: str
    """node, dependency, cycle, message, group or collective"""
    rank: int | None
    node: int | None
    """id of the node that it is about"""
    name: str
    message: str

    def __str__(self) -> str:
        where = [] if self.rank is None else [f"rank {self.rank}"]
        if self.node is not None:
            where.append(f"node {self.node} ({self.name})" if self.name else f"node {self.node}")
        return f"{self.severity}: {', '.join(where) + ': ' if where else ''}{self.message}"


class Findings:
    """Collects the first `limit` findings of each severity and kind, and counts the others."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._found: list[Finding] = []
        self._counts: Counter[tuple[Severity, str]] = Counter()

    def add(
        self,
        kind: str,
        message: str,
        rank: int | None = None,
        node: int | None = None,
        name: str = "",
        severity: Severity = "error",
    ) -> None:
        self._counts[severity, kind] += 1
        if self._counts[severity, kind] <= self._limit:
            self._found.append(Finding(severity, kind, rank, node, name, message))

    def left(self, kind: str) -> int:
        """Returns the number of errors of this kind that may still be listed."""
        return max(self._limit - self._counts["error", kind], 0)

    def all(self) -> list[Finding]:
        """The findings in the order of discovery, then how many more there are of each kind."""
        more = [
            Finding(severity, kind, None, None, "", f"{count - self._limit} more of kind {kind}")
            for (severity, kind), count in self._counts.items()
            if count > self._limit
        ]
        return [*self._found, *more]
