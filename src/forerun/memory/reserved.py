"""Reserved memory: what the caching allocator holds for a given peak of allocated bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import yaml

from forerun.units import GIB, MIB


@dataclass(frozen=True, slots=True)
class ReserveModel:
    """Constants of reserved.yaml."""

    activation_slack: float
    """share of the varying part of the peak (everything that is not resident) that is held but not allocated"""
    segment_bytes: int
    context_bytes: int
    """CUDA context and kernels, outside the allocator"""
    nccl_bytes_per_group: int


@lru_cache(maxsize=1)
def reserve_model() -> ReserveModel:
    """The shipped constants."""
    text = (resources.files("forerun.memory") / "reserved.yaml").read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    return ReserveModel(
        activation_slack=data["activation_slack"],
        segment_bytes=int(data["segment_mib"] * MIB),
        context_bytes=int(data["context_gib"] * GIB),
        nccl_bytes_per_group=int(data["nccl_mib_per_group"] * MIB),
    )


def reserved_bytes(peak_bytes: int, resident_bytes: int) -> int:
    """Peak of torch.cuda.max_memory_reserved, estimated: resident tensors are packed, the rest leaves gaps."""
    model = reserve_model()
    held = peak_bytes + model.activation_slack * max(0, peak_bytes - resident_bytes)
    return int(-(-held // model.segment_bytes)) * model.segment_bytes


def outside_allocator_bytes(n_groups: int) -> int:
    """Device memory that the allocator does not see: context and NCCL buffers of `n_groups` communicators."""
    model = reserve_model()
    return model.context_bytes + n_groups * model.nccl_bytes_per_group
