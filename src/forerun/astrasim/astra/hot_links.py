"""The busiest links of a congestion-aware run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.astrasim.astra.run import SlotRun
from forerun.core.network.network_file import Network


@dataclass(frozen=True)
class HotLink:
    """A busy link."""

    source: int
    target: int
    """the devices at its ends; NPUs have the first numbers, then switches"""
    busy: float
    """share of the time in which it transmits"""
    size_bytes: int


def hottest_links(network: Network, run: SlotRun, time_ns: int, n: int) -> tuple[HotLink, ...]:
    """Returns at most `n` links of a congestion-aware run that took `time_ns`, busiest first."""
    links = network.topology().links()
    order = np.argsort(-run.link_busy_ns, kind="stable")[:n]
    return tuple(
        HotLink(int(links.src[k]), int(links.dst[k]), float(run.link_busy_ns[k] / time_ns), int(run.link_bytes[k]))
        for k in order
        if run.link_bytes[k]
    )
