"""Failures of nodes under jobs: when they come, and what they cost a job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from forerun.common.errors import ForerunError
from forerun.common.units import DAY_S

MOST_FAILURES = 2_000_000
"""of one schedule; more take minutes"""


@dataclass(frozen=True, slots=True)
class NodeFailures:
    """Nodes fail independently of each other, at a constant rate.

    A job on a failed node stops everywhere, and goes on from its last checkpoint when it next starts. The node is away
    until it is repaired.
    """

    per_1000_node_days: float
    repair_s: float
    checkpoint_s: float
    """seconds between two checkpoints of a job, of its running time"""
    seed: int = 0

    def draw(self, nodes: int) -> Iterator[tuple[float, int]]:
        """Yields (time, node) of failures of a cluster of so many nodes.

        Raises ForerunError after MOST_FAILURES of them.
        """
        random = np.random.default_rng(self.seed)
        gap_s = 1000.0 * DAY_S / (self.per_1000_node_days * nodes)
        now_s = 0.0
        for _ in range(MOST_FAILURES):
            now_s += float(random.exponential(gap_s))
            yield now_s, int(random.integers(nodes))
        raise ForerunError(
            f"more than {MOST_FAILURES:,} failures of nodes come before the last job ends; lower per_1000_node_days,"
            " or schedule fewer nodes or shorter jobs"
        )

    def kept_s(self, done_s: float) -> float:
        """Returns how much of a job's running time survives a failure."""
        return max(0.0, done_s // self.checkpoint_s * self.checkpoint_s)
