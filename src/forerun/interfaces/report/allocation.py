"""The caching allocator's figures on the console and as a record."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from forerun.common.units import GIB

if TYPE_CHECKING:
    from forerun.answers.analysis.allocation import Allocation


def print_allocation(out: Console, found: Allocation) -> None:
    """Prints the allocator's figures in two lines below a prediction."""
    last, steps = found.last, len(found.steps)
    held = f"{last.reserved_bytes / GIB:.1f} GiB reserved, {last.allocated_bytes / GIB:.1f} allocated"
    if last.out_of_memory:
        held = f"out of memory in step {steps}: {held}, {found.available_bytes / GIB:.1f} available"
    else:
        held += f": {last.fragmentation:.0%} unused at the peak"
    over = "1 step" if steps == 1 else f"{steps} steps"
    done = f"{last.mallocs} requests to CUDA, {last.retries} retries in {over} of {found.rank_class}"
    out.print(f"allocator    {held}", highlight=False, soft_wrap=True)
    out.print(f"             {done}{', still growing' if found.still_growing else ''}", highlight=False, soft_wrap=True)


def allocation_record(found: Allocation) -> dict[str, object]:
    """Returns plain data for JSON; bytes of blocks, as torch.cuda.memory_stats counts them."""
    last = found.last
    return {
        "settings": asdict(found.settings),
        "rank_class": found.rank_class,
        "available_gib": found.available_bytes / GIB,
        "reserved_gib": last.reserved_bytes / GIB,
        "allocated_gib": last.allocated_bytes / GIB,
        "fragmentation": last.fragmentation,
        "segments": last.segments,
        "mallocs": last.mallocs,
        "retries": last.retries,
        "out_of_memory": last.out_of_memory,
        "steps_reserved_gib": [step.reserved_bytes / GIB for step in found.steps],
    }
