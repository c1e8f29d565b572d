"""Reserved memory: the bytes that the caching allocator holds at a given peak of allocated bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forerun.common.shipped import shipped
from forerun.common.units import MIB


@dataclass(frozen=True, slots=True)
class ReserveModel:
    """Constants of reserved.yaml."""

    slack: float
    """share of the varying part of the peak (everything that is not resident) that is held but not allocated, when
    memory is plenty"""
    least_slack: float
    """the same when memory is short: cached blocks are given back, only fragmentation is left"""
    segment_mib: int
    source: str


def reserve_model() -> ReserveModel:
    """Returns the shipped constants."""
    return shipped(ReserveModel, "forerun.core.memory", "reserved.yaml")


@dataclass(frozen=True, slots=True)
class Reserved:
    """The memory that the allocator holds."""

    peak_bytes: int
    """estimate of torch.cuda.max_memory_reserved"""
    least_bytes: int
    """bytes that are needed after cached blocks were returned"""
    fits: bool
    tight: bool
    """it fits only because the allocator gives cached blocks back and asks again, which costs time"""


def reserved(peak_bytes: int, resident_bytes: int, available_bytes: int) -> Reserved:
    """Returns reserved memory at a peak of `peak_bytes` allocated. Of these, `resident_bytes` live through the whole
    step.

    Resident tensors are packed; other tensors leave gaps. `available_bytes` are the bytes that the device leaves to the
    allocator.
    """
    model = reserve_model()
    varying = max(0, peak_bytes - resident_bytes)
    segment = model.segment_mib * MIB
    wanted = -int(-(peak_bytes + model.slack * varying) // segment) * segment
    least = math.ceil(peak_bytes + model.least_slack * varying)
    fits = least <= available_bytes
    tight = fits and wanted > available_bytes
    return Reserved(available_bytes if tight else wanted, least, fits, tight)
