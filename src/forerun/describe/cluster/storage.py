"""Storage: what checkpoints are written to and read from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources

import yaml

from forerun.common.errors import ForerunError
from forerun.common.units import GIGA


@dataclass(frozen=True, slots=True)
class Storage:
    """Bandwidths of a file system in either direction, all ranks at work."""

    bytes_per_s_per_rank: float
    """what one rank reaches"""
    bytes_per_s_total: float = math.inf
    """what all ranks together reach"""
    source: str = field(default="", compare=False)
    """where the bandwidths of an assumed storage are from; empty for one that somebody named"""

    def transfer_s(self, bytes_per_rank: float, total_bytes: float) -> float:
        """Seconds until every rank has written or read its bytes, `total_bytes` over all ranks."""
        return max(bytes_per_rank / self.bytes_per_s_per_rank, total_bytes / self.bytes_per_s_total)

    @staticmethod
    def of_text(text: str) -> Storage:
        """The storage that a person wrote as GB/s: `2` for each rank, or `2,100` for each rank and in all.

        Raises:
            ForerunError: the text is not one or two numbers above 0.
        """
        parts = text.split(",")
        try:
            rates = [float(part) * GIGA for part in parts]
        except ValueError:
            rates = []
        if len(rates) not in (1, 2) or not all(0 < rate < math.inf for rate in rates):
            raise ForerunError(
                f"--storage {text}: expected GB/s of a rank, or of a rank and of all ranks together, as in 2 or 2,100"
            )
        return Storage(rates[0], rates[1] if len(rates) == 2 else math.inf)


@lru_cache(maxsize=1)
def usual_storage() -> Storage:
    """The storage that stands in where nobody says which there is."""
    text = (resources.files("forerun.describe.cluster") / "presets" / "storage.yaml").read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    return Storage(data["gb_s_per_rank"] * GIGA, source=data["source"])
