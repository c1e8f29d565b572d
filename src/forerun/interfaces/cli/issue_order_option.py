"""`--issue-order`: the order in which a rank issues its ready nodes."""

from __future__ import annotations

from enum import Enum

from forerun.astrasim.astra.lower import IssueOrder


class Order(str, Enum):
    ASCENDING = "ascending"
    MARCH_2025 = "march-2025"

    @property
    def policy(self) -> IssueOrder:
        return "ascending" if self is Order.ASCENDING else "march-2025"
