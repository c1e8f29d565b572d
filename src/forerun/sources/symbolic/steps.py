"""Steps of a rank class: its blocks in order, with micro batch and layer, and the counters that building them needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from forerun.core.program.types import Block
from forerun.sources.symbolic.activation_offload import ActivationOffload
from forerun.sources.symbolic.data_parallel import Action, DataParallel
from forerun.sources.symbolic.fsdp_units import Unit
from forerun.sources.symbolic.weights import Weights


class Blocks(list[Block]):
    """The blocks of a Program in the order of their numbers.

    They are separate from the builder, so that objects which add blocks don't refer back to it. Python frees a builder
    at once when nothing refers to it. It frees cycles only in garbage collections, which cost a twentieth of a
    prediction.
    """

    def add(self, block: Block | None) -> int:
        """Appends a block; returns its number, -1 without one."""
        if block is None:
            return -1
        self.append(block)
        return len(self) - 1


class Around(dict[tuple[Action, int, int], int]):
    """Block numbers of the data-parallel actions around one unit, by (action, turn, bytes of the buffer before).

    The first look-up of a key builds its block.
    """

    def __init__(
        self,
        parallel: DataParallel,
        add: Callable[[Block | None], int],
        name: str,
        weights: Weights,
        gradient_bytes: int,
    ) -> None:
        """`add` appends a block to the Program and returns its number."""
        super().__init__()
        self.parallel, self.add, self.name = parallel, add, name
        self.weights, self.gradient_bytes = weights, gradient_bytes

    def __missing__(self, key: tuple[Action, int, int]) -> int:
        action, turn, before = key
        block = self.parallel.block(action, turn, self.name, self.weights, self.gradient_bytes, before)
        number = self[key] = self.add(block)
        return number


@dataclass(slots=True)
class Part:
    """A unit at its place in a stage, with the numbers of its blocks."""

    unit: Unit
    layer: int
    gathered_bytes: int
    """bytes of its unsharded parameters"""
    gradients: int
    """elements of its gradients"""
    forward: int
    backward: int
    weights: int
    leaving: int
    returning: int
    forward_pieces: tuple[int, ...]
    backward_pieces: tuple[int, ...]
    parallel: Around
    after_forward: Around
    """around the parameters that are freed after the forward pass"""
    again: Around | None
    """around the parameters that are gathered for the backward pass, if any"""
    after_backward: Around | None
    """around the parameters that are freed after the backward pass, if any"""
    reference: int = -1
    """block of the reference model's forward pass"""
    around_reference: Around | None = None
    """around the parameters of the reference model"""
    alone: bool = True
    """whether it is gathered and reduced by itself: it has parameters, and is no part of the root unit"""


@dataclass(slots=True)
class Steps:
    """The steps of one rank class."""

    block: list[int] = field(default_factory=list)
    microbatch: list[int] = field(default_factory=list)
    layer: list[int] = field(default_factory=list)
    now: int = 0
    bucket: list[Unit] = field(default_factory=list)
    """units whose gradients wait in the bucket that is being filled"""
    waiting: int = 0
    """elements of the gradients in that bucket"""
    gathers: int = 0
    opens: int = 0
    gathered: int = 0
    """bytes of the buffer into which the last unit was gathered"""
    reducing: int = 0
    """bytes of the buffer that the last reduction uses"""
    activation_offload: ActivationOffload | None = None
    stages: list[list[Part]] = field(default_factory=list)
    """units of each stage, which `activation_offload` looks up"""
    runs: int = 0
    """number of forward and backward passes of units so far"""

    def add(self, block: int, layer: int = -1) -> None:
        """Appends a step; a block number of -1 appends nothing."""
        if block >= 0:
            self.block.append(block)
            self.microbatch.append(self.now)
            self.layer.append(layer)

    def run(self, block: int, layer: int) -> None:
        """Appends a forward or backward pass of a unit, and the offload copies that end or start beside it."""
        if self.activation_offload is not None:
            for stage, unit, microbatch in self.activation_offload.returning.get(self.runs, ()):
                part = self.stages[stage][unit]
                self._add_of(microbatch, part.returning, part.layer)
        self.add(block, layer)
        if self.activation_offload is not None:
            for stage, unit, microbatch in self.activation_offload.leaving.get(self.runs, ()):
                part = self.stages[stage][unit]
                self._add_of(microbatch, part.leaving, part.layer)
        self.runs += 1

    def _add_of(self, microbatch: int, block: int, layer: int) -> None:
        """Appends a step of another micro batch than the one whose pass is written now."""
        now, self.now = self.now, microbatch
        self.add(block, layer)
        self.now = now
