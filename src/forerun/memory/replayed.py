"""What the caching allocator holds for a rank class, from a replay of its steps."""

from __future__ import annotations

from dataclasses import replace

from forerun.memory.allocator_settings import AllocatorSettings
from forerun.memory.profile import IN_GRAPHS
from forerun.memory.program_events import replay_steps
from forerun.memory.reserved import Reserved
from forerun.program.types import Program


def replayed(
    program: Program,
    rank_class: int,
    settings: AllocatorSettings,
    available_bytes: int,
    estimate: Reserved,
    graphs: bool = False,
) -> Reserved:
    """`estimate` with what a replay shows. With `graphs` compiled code runs from CUDA graphs, out of a pool of its own.

    A class that runs out of the `available_bytes` has the peak that it would need, which no allocator can hold for it.
    """
    apart = IN_GRAPHS if graphs else ()
    last = replay_steps(program, rank_class, settings, available_bytes, apart=apart)[-1]
    if last.out_of_memory:
        wanted = replay_steps(program, rank_class, settings, apart=apart)[-1].reserved_bytes
        return replace(estimate, peak_bytes=wanted, fits=False, tight=False)
    return replace(estimate, peak_bytes=last.reserved_bytes, fits=True, tight=last.retries > 0)
