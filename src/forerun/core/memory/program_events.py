"""The requests of a rank class to the caching allocator, and their replay over several steps.

Requests are in the order of the host. Tensors that live through the step exist before the first one, except for the
optimizer's states: torch.optim creates them in its first step, from memory that the activations have freed. A Program
states their total size, not the single tensors. The total is split like the gradients, and is one buffer if the step
creates no gradients (Megatron-LM's flat buffers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from forerun.common.jit import kernel
from forerun.core.memory.allocator_settings import AllocatorSettings
from forerun.core.memory.caching_allocator import ALLOC, FREE, CachingAllocator, Events, Replayed
from forerun.core.memory.lifetimes import tensor_lifetimes
from forerun.core.program.types import I8, I32, I64, N_STREAMS, Category, Program, Stream

PRIVATE_POOL = N_STREAMS
"""stands for a stream: blocks of a private pool, as those of a stream, serve nobody else"""
_OPTIMIZER_STATES = 2
"""tensors that Adam keeps for each parameter"""
_STEPS = 3
"""the first fills the cache, the optimizer's states go into it, and the next ones find it so"""


@dataclass(frozen=True, slots=True)
class StepEvents:
    """Allocations and frees of one step, and the tensors that live through all steps."""

    step: Events
    optimizer: int
    """event of the step before which the optimizer works for the first time"""
    before: Events
    """tensors that exist before the first step"""
    states: Events
    """tensors that the optimizer makes in the first step"""


def step_events(program: Program, rank_class: int, apart: Sequence[Category] = ()) -> StepEvents:
    """Returns the events of one rank class. Tensors that a step leaves are freed at its end, because the next step
    makes them again.

    Tensors of the categories `apart` come from a private pool, as those of CUDA graphs.
    """
    cls = program.rank_classes[rank_class]
    made = tensor_lifetimes(program, cls)
    streams = np.where(np.isin(made.category, apart), np.int8(PRIVATE_POOL), made.stream) if apart else made.stream
    kept, states = [], []
    gradients = made.size[made.category == Category.GRADIENT]
    for category in Category:
        pieces = _split(int(cls.resident_bytes[category]), gradients)
        if category == Category.OPTIMIZER:
            states += [piece // _OPTIMIZER_STATES for piece in pieces for _ in range(_OPTIMIZER_STATES)]
        else:
            kept += pieces
    n = len(made.size)
    size = np.concatenate([made.size, np.array(kept + states, np.int64)])
    stream = np.concatenate([streams, np.full(len(kept) + len(states), Stream.COMPUTE, np.int8)])

    def allocations(first: int, count: int) -> Events:
        return Events(np.full(count, ALLOC, np.int8), np.arange(first, first + count, dtype=np.int32), size, stream)

    rows = made.n_rows + 1
    ends = np.cumsum(np.bincount(made.born, minlength=rows) + np.bincount(made.died, minlength=rows))
    row_ptr = np.concatenate(([0], ends))
    kind, tensor = np.empty(2 * n, np.int8), np.empty(2 * n, np.int32)
    _in_order(made.born, made.died, row_ptr.copy(), kind, tensor)
    return StepEvents(
        step=Events(kind, tensor, size, stream),
        optimizer=int(row_ptr[made.optimizer]),
        before=allocations(n, len(kept)),
        states=allocations(n + len(kept), len(states)),
    )


@kernel
def _in_order(born: I64, died: I64, next_event: I64, kind: I8, tensor: I32) -> None:
    """Writes births and deaths to the events of their rows, births first. `next_event` of each row is used up."""
    for rows, what in ((born, ALLOC), (died, FREE)):
        for number, row in enumerate(rows):
            kind[next_event[row]], tensor[next_event[row]] = what, number
            next_event[row] += 1


def _split(size: int, like: I64) -> list[int]:
    """Returns `size` bytes split in the proportions of `like`."""
    ends = np.cumsum(like) if len(like) else np.ones(1, np.int64)
    edges = [0, *(size * end // int(ends[-1]) for end in ends.tolist())]
    return [last - first for first, last in pairwise(edges) if last > first]


def replay_steps(
    program: Program,
    rank_class: int,
    settings: AllocatorSettings | None = None,
    available_bytes: int | None = None,
    steps: int = _STEPS,
    apart: Sequence[Category] = (),
) -> tuple[Replayed, ...]:
    """Returns the allocator's state after each of some steps. If a step runs out of memory, it is the last one.

    Args:
        settings: the settings of PYTORCH_CUDA_ALLOC_CONF.
        available_bytes: bytes that the device leaves to the allocator; None for no limit.
        apart: categories of tensors that come from a private pool.
    """
    return follow_steps(step_events(program, rank_class, apart), settings, available_bytes, steps)


def follow_steps(
    events: StepEvents,
    settings: AllocatorSettings | None = None,
    available_bytes: int | None = None,
    steps: int = _STEPS,
) -> tuple[Replayed, ...]:
    """Does the same as `replay_steps`, for events that the caller has listed."""
    allocator, step = CachingAllocator(settings, available_bytes), events.step
    place = allocator.follow(events.before)
    for part in (_part(step, 0, events.optimizer), events.states, _part(step, events.optimizer, len(step))):
        allocator.follow(part, place)
    done = [allocator.result]
    while len(done) < steps and not done[-1].out_of_memory:
        allocator.follow(step, place)
        done.append(allocator.result)
        if _asks_nothing(done[-2], done[-1]):
            done += [done[-1]] * (steps - len(done))
    return tuple(done)


def _asks_nothing(before: Replayed, after: Replayed) -> bool:
    """Returns whether the allocator served a step without a request to CUDA. Such a step leaves the allocator
    unchanged, because free blocks are merged with their free neighbours. The next step then does the same.
    """
    return (before.mallocs, before.returned, before.retries) == (after.mallocs, after.returned, after.retries)


def _part(events: Events, first: int, last: int) -> Events:
    return Events(events.kind[first:last], events.tensor[first:last], events.size_bytes, events.stream)
