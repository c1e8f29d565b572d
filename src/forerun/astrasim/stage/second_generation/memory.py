"""Bytes of tensors as STAGE's second generation counts them: in the traces and for `--print_gpu_vram`."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.astrasim.stage.reference import SECOND_GENERATION
from forerun.astrasim.stage.second_generation.nodes import Numbers, stands_for
from forerun.astrasim.stage.second_generation.pipeline import StageGraph
from forerun.common.units import GIB

_OPTIMIZER_BYTES = SECOND_GENERATION.optimizer_bytes
_PASSING = ("_assembled_weight", "_assembled_grad")
"""buffers of whole buckets, which exist for a moment only"""


@dataclass(frozen=True, slots=True)
class Counting:
    """Everything besides its shape that the size of a tensor depends on."""

    mixed_precision: bool
    fully_sharded: bool
    """whether weights are split over several ranks, so that gradients and gathered weights count as 0"""


def is_passing(name: str) -> bool:
    """Returns whether a tensor is a gathered bucket, a weight gathered for the backward pass, or a gradient."""
    lower = name.lower()
    return any(word in name for word in _PASSING) or "_backward" in lower or lower.split(".")[-1].startswith("d")


def traced_size(graph: StageGraph, index: int, numbers: Numbers, counting: Counting) -> float:
    """Returns the size that the trace gives a tensor.

    This is its number of elements, or in mixed precision 6 bytes for each element of a weight and 2 for each element of
    other tensors. A weight has 4 more for each element, for its optimizer state.
    """
    member = graph.members[index]
    if counting.fully_sharded and is_passing(member.name):
        return 0
    elements = numbers.elements(member.operation)
    size = elements
    if counting.mixed_precision:
        size = int(elements * (1.5 if member.is_weight else 0.5)) * 4
    return size + elements * _OPTIMIZER_BYTES if member.is_weight else size


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of one GPU in bytes."""

    weight_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    gradient_bytes: float

    def __str__(self) -> str:
        parts = (self.weight_bytes, self.optimizer_bytes, self.activation_bytes, self.gradient_bytes)
        total, *each = (part / GIB for part in (sum(parts), *parts))
        text = " | ".join(
            f"{name}={gib:.3f}" for name, gib in zip(("weights", "opt", "acts", "grads"), each, strict=True)
        )
        return f"total={total:.3f} GiB | {text}"


def footprint(graph: StageGraph, micro_batches: int, numbers: Numbers, counting: Counting) -> Footprint:
    """Returns the memory of weights, optimizer state, forward activations and gradients of weight buckets.

    As STAGE does, it counts weights before and after their update, and the activations of all micro-batches.
    """
    weights = optimizer = activations = gradients = 0.0
    first_received = len(graph.members) - len(graph.received_from)
    for index, member in enumerate(graph.members):
        shared = graph.per_batch <= index < first_received
        copies = 1 if shared else micro_batches
        if any(word in member.name for word in _PASSING):
            continue
        if member.is_weight:
            elements = numbers.elements(member.operation)
            weights += int(elements * 1.5) * 4 if counting.mixed_precision else elements * 4
            optimizer += elements * _OPTIMIZER_BYTES
        elif index < graph.per_batch and "_sharded_grad" in member.name:
            gradients += copies * traced_size(graph, stands_for(graph, index), numbers, counting)
        elif not is_passing(member.name):
            activations += copies * traced_size(graph, stands_for(graph, index), numbers, counting)
    return Footprint(weights, optimizer, activations, gradients)
