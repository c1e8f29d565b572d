"""Decides where Inductor pads matrix products, which it finds by timing them on the device.

This module imports Inductor, so only `backend.py` imports it.
"""

from __future__ import annotations

import importlib
from typing import Any

_pad_mm: Any = importlib.import_module("torch._inductor.fx_passes.pad_mm")


def install() -> None:
    """Leaves products as the program wrote them: the cost of a compiled product includes the gain of padding
    (`core/cost/gemm.py`).
    """
    _pad_mm.get_cached_should_pad = lambda _key: False
