"""What the periodic work of a training loop costs its host, beside checkpoints (`cost.checkpoint`)."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.common.shipped import shipped
from forerun.common.units import GIGA

_US = 1e-6


@dataclass(frozen=True, slots=True)
class CheckpointConstants:
    """Host time of torch.distributed.checkpoint."""

    save_us_per_tensor: float
    load_us_per_tensor: float
    stage_us_per_tensor: float
    """of the part of an asynchronous save that the training loop waits for"""
    new_memory_gb_s: float
    """copy into host memory that is not there yet"""
    source: str

    @property
    def new_memory_bytes_per_s(self) -> float:
        return self.new_memory_gb_s * GIGA


@dataclass(frozen=True, slots=True)
class GcConstants:
    """Python's garbage collector."""

    call_us: float
    objects_per_checkpointed_region: float
    us_per_object: float
    source: str

    def collection_s(self, regions: float) -> float:
        """Host seconds of one collection after so many checkpointed regions ran."""
        return (self.call_us + regions * self.objects_per_checkpointed_region * self.us_per_object) * _US


@dataclass(frozen=True, slots=True)
class ProfileConstants:
    """torch.profiler."""

    us_per_launch: float
    events_per_launch: float
    export_us_per_event: float
    source: str

    def recording_s(self, launches: float) -> float:
        """Host seconds by which recording slows so many launches."""
        return launches * self.us_per_launch * _US

    def export_s(self, launches: float) -> float:
        """Host seconds in which a trace of so many launches becomes a file."""
        return launches * self.events_per_launch * self.export_us_per_event * _US


@dataclass(frozen=True, slots=True)
class SnapshotConstants:
    """The history of the caching allocator."""

    us_per_event: float
    dump_us_per_entry: float
    most_entries: int
    source: str

    def recording_s(self, events: float) -> float:
        """Host seconds by which recording slows so many allocations and frees."""
        return events * self.us_per_event * _US

    def dump_s(self, events: float) -> float:
        """Host seconds in which the history of so many events becomes a file."""
        return min(events, self.most_entries) * self.dump_us_per_entry * _US


@dataclass(frozen=True, slots=True)
class MetricsConstants:
    """Reading and logging the loss."""

    reductions: int
    """over all data-parallel ranks"""
    reads: int
    """of a number on the device, each after everything before it"""
    us_per_read: float
    log_us: float
    source: str

    def log_s(self, reduction_s: float) -> float:
        """Seconds of one log on an idle device, where one reduction takes `reduction_s`."""
        return self.reductions * reduction_s + (self.reads * self.us_per_read + self.log_us) * _US


@dataclass(frozen=True, slots=True)
class PeriodicConstants:
    """All constants of periodic.yaml."""

    checkpoint: CheckpointConstants
    gc: GcConstants
    profile: ProfileConstants
    memory_snapshot: SnapshotConstants
    metrics: MetricsConstants


def periodic_constants() -> PeriodicConstants:
    """The shipped constants."""
    return shipped(PeriodicConstants, "forerun.core.cost", "periodic.yaml")
