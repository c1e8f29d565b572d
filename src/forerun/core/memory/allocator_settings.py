"""The settings that PYTORCH_CUDA_ALLOC_CONF gives to the caching allocator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np

from forerun.common.errors import ForerunError
from forerun.common.units import MIB
from forerun.core.memory import heap
from forerun.core.program.types import I64

_ADDRESSES = 1 << 46
"""bytes of addresses that an expandable segment has where the device's memory is not limited"""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """The options of PyTorch 2.13's allocator that change which memory it holds, by their own names."""

    expandable_segments: bool = False
    max_split_size_mb: int | None = None
    max_non_split_rounding_mb: int = 20
    roundup_power2_divisions: int = 0
    garbage_collection_threshold: float = 0.0
    """takes effect together with per_process_memory_fraction"""
    per_process_memory_fraction: float | None = None

    @staticmethod
    def parse(text: str) -> AllocatorSettings:
        """Returns settings as in PYTORCH_CUDA_ALLOC_CONF: `expandable_segments:True,max_split_size_mb:512`.

        Raises:
            ForerunError: an option that is not known, twice there, or has a value that PyTorch refuses.
        """
        known = {field.name for field in fields(AllocatorSettings)}
        values: dict[str, bool | int | float] = {}
        for part in filter(None, text.replace(" ", "").split(",")):
            name, _, value = part.partition(":")
            if name not in known:
                raise ForerunError(f"allocator settings: no option {name!r}; known: {', '.join(sorted(known))}")
            if name in values:
                raise ForerunError(f"allocator settings: {name} is given twice")
            values[name] = _value(name, value)
        return AllocatorSettings(**values)  # type: ignore[arg-type]

    def on(self, vendor: str) -> AllocatorSettings:
        """Returns these settings on a device of `vendor`: builds of PyTorch for AMD have no expandable segments and say
        so in a warning (c10/cuda/CUDACachingAllocator.cpp without PYTORCH_C10_DRIVER_API_SUPPORTED, to 2.9)."""
        return self if vendor.lower() == "nvidia" else replace(self, expandable_segments=False)

    def rules(self, available_bytes: int | None) -> I64:
        """Returns the settings as the kernels read them, for a device that can give `available_bytes`. A negative
        number, which means that memory outside the allocator exceeds the device, counts as 0.
        """
        rules = np.zeros(heap.N_RULES, np.int64)
        unlimited = heap.UNLIMITED
        available = unlimited if available_bytes is None else max(0, available_bytes)
        allowed = unlimited
        if self.per_process_memory_fraction is not None and available_bytes is not None:
            allowed = int(self.per_process_memory_fraction * available_bytes)
            rules[heap.GARBAGE] = int(self.garbage_collection_threshold * allowed)
        rules[heap.EXPANDABLE] = self.expandable_segments
        rules[heap.MAX_SPLIT] = unlimited if self.max_split_size_mb is None else self.max_split_size_mb * MIB
        rules[heap.NON_SPLIT_ROUNDING] = self.max_non_split_rounding_mb * MIB
        rules[heap.DIVISIONS] = self.roundup_power2_divisions
        rules[heap.AVAILABLE], rules[heap.ALLOWED] = available, allowed
        rules[heap.ADDRESS_SPACE] = _ADDRESSES if available_bytes is None else max(1, available + available // 8)
        return rules


def _value(name: str, text: str) -> bool | int | float:
    """Returns the value of an option. The limits are those of c10/core/AllocatorConfig.cpp."""
    if name == "expandable_segments":
        if text not in ("True", "False"):
            raise ForerunError(f"allocator settings: expandable_segments is True or False, not {text!r}")
        return text == "True"
    kind: Callable[[str], int | float] = int if name.endswith(("_mb", "_divisions")) else float
    try:
        value = kind(text)
    except ValueError:
        raise ForerunError(f"allocator settings: {name} is one number, not {text!r}") from None
    good, wanted = {
        "max_split_size_mb": (value > 20, "more than 20"),
        "max_non_split_rounding_mb": (value > 20, "more than 20"),
        "roundup_power2_divisions": (value >= 0 and (value == 0 or math.log2(value).is_integer()), "a power of two"),
        "garbage_collection_threshold": (0 < value < 1, "between 0 and 1"),
        "per_process_memory_fraction": (0 <= value <= 1, "0 to 1"),
    }[name]
    if not good:
        raise ForerunError(f"allocator settings: {name} is {wanted}, not {text}")
    return value
