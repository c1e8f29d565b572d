"""Host time of the periodic work of a training loop; `cost.checkpoint` has the times of a checkpoint's copies and
writes."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.common.shipped import shipped
from forerun.common.units import GIGA, US


@dataclass(frozen=True, slots=True)
class CheckpointConstants:
    """Constants of torch.distributed.checkpoint's host time."""

    save_us_per_tensor: float
    load_us_per_tensor: float
    stage_us_per_tensor: float
    """microseconds a tensor of the part of an asynchronous save that the training loop waits for"""
    new_memory_gb_s: float
    """rate of copies into newly allocated host memory"""
    source: str

    @property
    def new_memory_bytes_per_s(self) -> float:
        return self.new_memory_gb_s * GIGA


@dataclass(frozen=True, slots=True)
class GcConstants:
    """Constants of Python's garbage collector."""

    call_us: float
    objects_per_checkpointed_region: float
    us_per_object: float
    source: str

    def collection_s(self, regions: float) -> float:
        """Returns the host seconds of one collection after `regions` checkpointed regions ran."""
        return (self.call_us + regions * self.objects_per_checkpointed_region * self.us_per_object) * US


@dataclass(frozen=True, slots=True)
class ProfileConstants:
    """Constants of torch.profiler."""

    us_per_launch: float
    events_per_launch: float
    export_us_per_event: float
    source: str

    def recording_s(self, launches: float) -> float:
        """Returns the host seconds that recording adds to `launches` launches."""
        return launches * self.us_per_launch * US

    def export_s(self, launches: float) -> float:
        """Returns the host seconds to write the trace of `launches` launches to a file."""
        return launches * self.events_per_launch * self.export_us_per_event * US


@dataclass(frozen=True, slots=True)
class SnapshotConstants:
    """Constants of the caching allocator's recorded history."""

    us_per_event: float
    dump_us_per_entry: float
    most_entries: int
    source: str

    def recording_s(self, events: float) -> float:
        """Returns the host seconds that recording adds to `events` allocations and frees."""
        return events * self.us_per_event * US

    def dump_s(self, events: float) -> float:
        """Returns the host seconds to write the history of `events` events to a file."""
        return min(events, self.most_entries) * self.dump_us_per_entry * US


@dataclass(frozen=True, slots=True)
class MetricsConstants:
    """Constants of reading and logging the loss."""

    reductions: int
    """all-reduces over all data-parallel ranks"""
    reads: int
    """reads of a number on the device, each of which waits for all earlier kernels"""
    us_per_read: float
    log_us: float
    source: str

    def log_s(self, reduction_s: float) -> float:
        """Returns the seconds of one log on an idle device, where one reduction takes `reduction_s`."""
        return self.reductions * reduction_s + (self.reads * self.us_per_read + self.log_us) * US


@dataclass(frozen=True, slots=True)
class PeriodicConstants:
    """All constants of periodic.yaml."""

    checkpoint: CheckpointConstants
    gc: GcConstants
    profile: ProfileConstants
    memory_snapshot: SnapshotConstants
    metrics: MetricsConstants


def periodic_constants() -> PeriodicConstants:
    """Returns the shipped constants."""
    return shipped(PeriodicConstants, "forerun.core.cost", "periodic.yaml")
