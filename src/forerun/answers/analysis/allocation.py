"""Replays the tensors of a Program through PyTorch's caching allocator under given settings."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.answers.analysis.memory_need import memory_need
from forerun.core.memory.allocator_settings import AllocatorSettings
from forerun.core.memory.caching_allocator import Replayed
from forerun.core.memory.program_events import replay_steps
from forerun.core.program.types import Program
from forerun.describe.cluster.types import Cluster
from forerun.describe.stacks.stack import Stack


@dataclass(frozen=True, slots=True)
class Allocation:
    """The outcome of replaying some steps of the fullest rank class of a Program."""

    settings: AllocatorSettings
    rank_class: str
    available_bytes: int
    """the device's memory without that of CUDA and NCCL"""
    steps: tuple[Replayed, ...]
    """state of the allocator after each step"""

    @property
    def last(self) -> Replayed:
        """Returns the state of the allocator after the last step."""
        return self.steps[-1]

    @property
    def still_growing(self) -> bool:
        """Returns whether the last step needed more memory than the step before it."""
        return len(self.steps) > 1 and self.steps[-1].reserved_bytes > self.steps[-2].reserved_bytes


def allocation(program: Program, cluster: Cluster, stack: Stack, settings: AllocatorSettings) -> Allocation:
    """Replays the allocator on the fullest rank class of `program` (not folded), beside the memory that `stack` keeps
    on a device of `cluster`.
    """
    need = memory_need(program, cluster, stack)
    available = need.limit_bytes - need.outside_bytes
    steps = replay_steps(program, need.worst, settings, available)
    return Allocation(settings, program.rank_classes[need.worst].name, available, steps)
