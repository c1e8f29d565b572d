"""Where the measured kernels lie; tests that need them skip where they are absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3].parent / "shared" / "calibration"
NAMES = ("gemm.parquet", "attention_forward.parquet", "nccl.parquet")

needs_calibration = pytest.mark.skipif(
    not all((FOLDER / name).exists() for name in NAMES), reason="the measured kernels are not beside this checkout"
)
DEVICES = {
    "a100": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "gb200": "gb200",
    "l40s": "l40s",
}
"""device preset and cost profile -> device of the measurements"""


def measured(name: str) -> Any:
    """One table as a DataFrame."""
    return pytest.importorskip("pandas").read_parquet(FOLDER / f"{name}.parquet")
