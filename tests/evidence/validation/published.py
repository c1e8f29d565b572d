"""Where the published measurements lie; tests that need them skip where they are absent."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3].parent / "shared" / "validation"
MEASUREMENTS = FOLDER / "measurements.csv"
MODELS = FOLDER / "models.yaml"
HARDWARE = FOLDER / "hardware.yaml"
SCORE = FOLDER / "score.py"

needs_measurements = pytest.mark.skipif(
    not all(path.exists() for path in (MEASUREMENTS, MODELS, HARDWARE, SCORE)),
    reason="the published measurements are not beside this checkout",
)
