"""Bytes of tensors as STAGE's second generation counts them: in the traces and for `--print_gpu_vram`."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.astrasim.stage.second_generation.nodes import Numbers, stands_for
from forerun.astrasim.stage.second_generation.pipeline import StageGraph

_OPTIMIZER_BYTES = 4
_PASSING = ("_assembled_weight", "_assembled_grad")
"""buffers of whole buckets, which are there for a moment only"""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Counting:
    """What the size of a tensor depends on besides its shape."""

    mixed_precision: bool
    fully_sharded: bool
    """weights spread over more than one rank: then gradients and gathered weights count as nothing"""


def is_passing(name: str) -> bool:
    """Whether a tensor is a gathered bucket, a weight gathered for the backward pass, or a gradient."""
    lower = name.lower()
    return any(word in name for word in _PASSING) or "_backward" in lower or lower.split(".")[-1].startswith("d")


def traced_size(graph: StageGraph, index: int, numbers: Numbers, counting: Counting) -> float:
    """The size that the trace gives a tensor: elements, plus four of them each for a weight's optimizer state; with
    mixed precision 6 bytes an element of a weight and 2 of anything else."""
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
    """What one GPU keeps, in bytes."""

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
    """Weights (before and after their update, as STAGE counts them), their optimizer state, the forward activations
    of all micro-batches, and the gradients of weight buckets."""
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
