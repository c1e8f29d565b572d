"""Communication patterns: how data-parallel ranks exchange gradients, in place of what NCCL would choose."""

from __future__ import annotations

from abc import ABC, abstractmethod

from forerun.network.lines import Lines
from forerun.program.groups import CommGroup


class CommunicationPattern(ABC):
    """One way to sum gradients over a group."""

    name: str

    @abstractmethod
    def lines(self, group: CommGroup) -> Lines:
        """Latency and seconds per byte of the gradients' buffer."""
