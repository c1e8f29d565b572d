"""Lists the contents of a profile and the parts that it lacks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.answers.profile.intervals import union
from forerun.answers.profile.kernel_types import KernelType, kernel_type
from forerun.sources.profile.event_keys import Key
from forerun.sources.profile.profile import Mask, Profile

_WAITS = frozenset(("cudaStreamWaitEvent", "hipStreamWaitEvent"))


@dataclass(frozen=True)
class ProfileFacts:
    """Figures of one file. Times are in seconds."""

    path: str
    rank: int
    world_size: int | None
    devices: tuple[str, ...]
    """names of the devices that the host sees, each once"""
    events: int
    """entries of the file"""
    operators: int
    calls: int
    """calls of the host to the device's runtime"""
    kernels: int
    copies: int
    """copies and fills"""
    streams: tuple[int, ...]
    collectives: int
    """kernels of NCCL or RCCL"""
    described_collectives: int
    """those of them that state their bytes"""
    step_times_s: tuple[float, ...]
    device_span_s: float
    """from the first to the last work of the device"""
    device_busy_s: float
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    missing: tuple[str, ...]
    """a sentence for each thing that the file lacks"""

    @property
    def mean_step_s(self) -> float | None:
        return float(np.mean(self.step_times_s)) if self.step_times_s else None


def facts_of(profile: Profile) -> ProfileFacts:
    """Returns the figures of a profile."""
    rows = profile.rows
    work = profile.is_gpu_work
    copies = work & profile.text_mask(lambda text: kernel_type(text) is KernelType.MEMORY)[rows.name]
    communicates = work & profile.text_mask(lambda text: kernel_type(text) is KernelType.COMMUNICATION)[rows.name]
    described = communicates & (profile.values(Key.COLLECTIVE, -1) >= 0)
    start = rows.ts_ns[work].astype(np.float64)
    busy = union(start, start + rows.dur_ns[work])
    return ProfileFacts(
        path=profile.path,
        rank=profile.rank,
        world_size=profile.world_size,
        devices=tuple(dict.fromkeys(profile.device_names)),
        events=profile.n_events,
        operators=int(profile.is_operator.sum()),
        calls=int(profile.is_call.sum()),
        kernels=int((work & ~copies).sum()),
        copies=int(copies.sum()),
        streams=tuple(np.unique(rows.stream[work]).tolist()),
        collectives=int(communicates.sum()),
        described_collectives=int(described.sum()),
        step_times_s=tuple((rows.dur_ns[profile.steps] / 1e9).tolist()),
        device_span_s=float(busy.end[-1] - busy.start[0]) / 1e9 if len(busy.start) else 0.0,
        device_busy_s=busy.total() / 1e9,
        peak_allocated_bytes=profile.device_peak_bytes(Key.TOTAL_ALLOCATED),
        peak_reserved_bytes=profile.device_peak_bytes(Key.TOTAL_RESERVED),
        missing=_missing(profile, work, communicates, described),
    )


def _missing(profile: Profile, work: Mask, communicates: Mask, described: Mask) -> tuple[str, ...]:
    rows = profile.rows
    found = []
    if not work.any():
        found.append("no work of a device: a profile of the host alone, or of a run without a GPU")
    if len(profile.steps) == 0:
        found.append("no profiler steps (ProfilerStep#N): call the profiler's step() once a step")
    if not profile.is_operator.any():
        found.append("no operators of the host")
    unlinked = int((work & ~np.isin(rows.correlation, rows.correlation[profile.is_call])).sum())
    if work.any() and unlinked:
        found.append(f"no launch of {unlinked:,} of {int(work.sum()):,} kernels and copies")
    undescribed = int((communicates & ~described).sum())
    if undescribed:
        found.append(f"no sizes and groups of {undescribed:,} of {int(communicates.sum()):,} collectives")
    waits = profile.is_call & profile.text_mask(_WAITS.__contains__)[rows.name]
    if waits.any() and not profile.in_categories(frozenset(("cuda_sync",))).any():
        found.append("no synchronisation events (enable_cuda_sync_events): the waits between streams are unknown")
    if not (profile.values(Key.TOTAL_ALLOCATED, -1) >= 0).any():
        found.append("no memory events (profile_memory=True)")
    if profile.without_duration:
        found.append(f"no duration of {profile.without_duration:,} events, which are left out")
    return tuple(found)
