"""Storage: the file system that holds checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from forerun.common.errors import ForerunError
from forerun.common.shipped import shipped_data
from forerun.common.units import GIGA


@dataclass(frozen=True, slots=True)
class Storage:
    """The bandwidths of a file system while all ranks use it, equal for reads and writes."""

    bytes_per_s_per_rank: float
    """largest bandwidth of one rank"""
    bytes_per_s_total: float = math.inf
    """largest bandwidth of all ranks together"""
    source: str = field(default="", compare=False)
    """source of assumed bandwidths; empty if the user stated them"""

    def transfer_s(self, bytes_per_rank: float, total_bytes: float) -> float:
        """Returns the seconds until every rank has written or read its bytes; all ranks together have `total_bytes`."""
        return max(bytes_per_rank / self.bytes_per_s_per_rank, total_bytes / self.bytes_per_s_total)

    @staticmethod
    def of_text(text: str) -> Storage:
        """Returns the storage of a text in GB/s: `2` for each rank, or `2,100` for each rank and for all together.

        Raises ForerunError if the text is not one or two numbers above 0.
        """
        parts = text.split(",")
        try:
            rates = [float(part) * GIGA for part in parts]
        except ValueError:
            rates = []
        if len(rates) not in (1, 2) or not all(0 < rate < math.inf for rate in rates):
            raise ForerunError(
                f"expected GB/s of a rank, or of a rank and of all ranks together, as in 2 or 2,100; got {text!r}"
            )
        return Storage(rates[0], rates[1] if len(rates) == 2 else math.inf)


def usual_storage() -> Storage:
    """Returns the storage that Forerun assumes if the user states none."""
    data = shipped_data(__package__, "presets/storage.yaml")
    return Storage(data["gb_s_per_rank"] * GIGA, source=data["source"])
