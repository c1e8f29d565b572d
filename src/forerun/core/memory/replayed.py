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
    """Returns `estimate` with what a replay shows. Tensors of the categories `pooled` come from a pool of CUDA graphs.

    A class that runs out of the `available_bytes` has the peak that it would need, which no allocator can hold for it.
    It fits where replay and estimate both say so: the one knows the order of the tensors, the other what else a run
    was seen to lose. What a search refuses is therefore never shown as fitting.
    """
    events = step_events(program, rank_class, pooled)
    last = follow_steps(events, settings, available_bytes)[-1]
    wanted = follow_steps(events, settings)[-1] if last.out_of_memory else last
    fits = estimate.fits and not last.out_of_memory
    held = wanted.reserved_bytes if estimate.fits else max(wanted.reserved_bytes, estimate.least_bytes)
    return replace(estimate, peak_bytes=held, fits=fits, tight=fits and last.retries > 0)
