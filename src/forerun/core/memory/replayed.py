"""The reserved memory of a rank class, from a replay of its steps on the caching allocator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forerun.core.memory.allocator_settings import AllocatorSettings
from forerun.core.memory.program_events import follow_steps, step_events
from forerun.core.memory.reserved import Reserved
from forerun.core.program.types import Category, Program


def replayed(
    program: Program,
    rank_class: int,
    settings: AllocatorSettings,
    available_bytes: int,
    estimate: Reserved,
    pooled: Sequence[Category] = (),
) -> Reserved:
    """Returns `estimate`, corrected by a replay of the allocator. Tensors of the categories `pooled` come from a pool
    of CUDA graphs.

    If a class needs more than `available_bytes`, the result has the peak that it would need. A class fits if both
    replay and estimate say so: the replay knows the order of the tensors, and the estimate knows the further losses of
    measured runs. So a plan that a search refuses never appears as fitting.
    """
    events = step_events(program, rank_class, pooled)
    if not estimate.fits:
        wanted = follow_steps(events, settings)[-1]
        return replace(estimate, peak_bytes=max(wanted.reserved_bytes, estimate.least_bytes))
    last = follow_steps(events, settings, available_bytes)[-1]
    fits = not last.out_of_memory
    wanted = last if fits else follow_steps(events, settings)[-1]
    return replace(estimate, peak_bytes=wanted.reserved_bytes, fits=fits, tight=fits and last.retries > 0)
