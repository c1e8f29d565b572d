"""training.gradient_compression: how an experiment compresses its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forerun.answers.analysis.setup import Setup
from forerun.common.errors import ForerunError, UnknownName, at
from forerun.core.network.gradient_compression import Int8, PowerSgd, TopK
from forerun.core.network.patterns import CommunicationPattern
from forerun.core.network.patterns_collectives import Nccl
from forerun.describe.model.fields import Fields
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.matrices import matrices
from forerun.describe.model.parameters import parameter_count

CASTS = ("fp16", "bf16")
METHODS = ("none", *CASTS, "int8", "powersgd", "topk")
_GATHERED = ("int8", "topk")
_LARGEST_RANK = 4096


@dataclass(frozen=True)
class Compression:
    """A method with its options."""

    method: str
    rank: int = 1
    """rank of powersgd's matrices; the default of torch's PowerSGDState (matrix_approximation_rank) is 1 too"""
    density: float = 0.01
    """of topk: share of the gradients that is sent (arXiv 1704.05021 drops 99 %)"""

    @property
    def reduce_dtype(self) -> str | None:
        """Returns the dtype that gradients are cast to and summed in, as torch's fp16_compress_hook does; None for all
        else."""
        return self.method if self.method in CASTS else None


def read_compression(given: Any, place: str) -> Compression | None:
    """What the key means: a method's name, or {name: ..., rank: ..., density: ...}. None for none.

    Raises ForerunError for an unknown method or option, or a value that makes no sense.
    """
    if given is None:
        return None
    at_key = f"{place}: gradient_compression"
    if not isinstance(given, str | dict):
        raise ForerunError(
            f"{at_key}: expected one of {', '.join(METHODS)}, or keys such as name and rank, got {given!r:.60}"
        )
    fields = Fields({"name": given} if isinstance(given, str) else given, at_key)
    method = fields.text("name").strip().lower()
    if method not in METHODS:
        raise ForerunError(f"{at_key}: {UnknownName('method', method, list(METHODS))}")
    rank = fields.integer("rank", Compression.rank, most=_LARGEST_RANK) if method == "powersgd" else Compression.rank
    density = (fields.number("density") if method == "topk" else None) or Compression.density
    if density > 1:
        raise fields.error("density", f"is a share of the gradients, at most 1, got {density:g}")
    fields.finish()
    return None if method == "none" else Compression(method, rank, density)


def compressed(compression: Compression, setup: Setup, place: str) -> CommunicationPattern | None:
    """Returns the setup with compressed gradients; unchanged if the compression is only a cast.

    Raises ForerunError for a pattern or a plan that doesn't go with it.
    """
    own, method = setup.pattern, compression.method
    if method in CASTS or (own is not None and own.everything):
        return own
    if method in _GATHERED and own is not None and own.name != "all_gather":
        raise ForerunError(
            f"{place}: gradient_compression {method} gathers from all ranks, so it doesn't go with"
            f" communication_pattern {own.name}; leave the pattern out or use powersgd"
        )
    found: Int8 | TopK | PowerSgd
    if method == "int8":
        found = Int8(setup.gradient_bytes)
    elif method == "topk":
        found = TopK(setup.gradient_bytes, compression.density)
    else:
        model = setup.model
        parameters = model.parameter_count if isinstance(model, LayeredModel) else parameter_count(model)
        found = PowerSgd.of(matrices(model), parameters, compression.rank, own or Nccl())
    with at(place):
        found.check(setup.plan)
    return found
