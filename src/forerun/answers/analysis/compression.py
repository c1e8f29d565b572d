"""Gradient compression: the methods by name, and the prediction of a step that uses one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite, sqrt
from typing import Any

from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.common.errors import ForerunError, UnknownName, at
from forerun.common.shipped import shipped_data
from forerun.common.units import GIB
from forerun.core.network.gradient_compression import GradientCompression, Int8, PowerSgd, TopK
from forerun.core.network.gradient_levels import BetweenNodes
from forerun.core.network.gradient_sums import OneBit, Summed8
from forerun.core.network.patterns import CommunicationPattern
from forerun.core.network.patterns_collectives import Nccl
from forerun.describe.model.fields import Fields
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.matrices import matrices
from forerun.describe.model.parameters import parameter_count

CASTS = ("fp16", "bf16")
METHODS = ("none", *CASTS, "int8", "int8_sum", "fp8_sum", "onebit", "powersgd", "topk")
_AS_THEY_ARE = ("int8", "topk", "int8_sum", "fp8_sum", "onebit")
"""methods whose collectives are their own"""
_STEPS = 7
_WIDEST = 64.0
"""the break-even bandwidth is sought up to this factor from the cluster's"""
_LARGEST_RANK = 4096


@dataclass(frozen=True)
class Compression:
    """A method with its options."""

    method: str
    rank: int = 1
    """rank of powersgd's matrices; the default of torch's PowerSGDState (matrix_approximation_rank) is 1 too"""
    density: float = 0.01
    """of topk: share of the gradients that is sent (arXiv 1704.05021 drops 99 %)"""
    between_nodes: bool = False
    """whether ranks of a node sum gradients as they are, and the method applies between nodes only"""

    @property
    def reduce_dtype(self) -> str | None:
        """Returns the dtype that gradients are cast to and summed in, as torch's fp16_compress_hook does; None for all
        else."""
        return self.method if self.method in CASTS else None


def read_compression(given: Any, place: str) -> Compression | None:
    """Reads the key: a method's name, or {name: ..., rank: ..., density: ..., between_nodes: ...}. None stays None.

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
    between = fields.flag("between_nodes")
    if between and method not in _AS_THEY_ARE:
        known = ", ".join(_AS_THEY_ARE)
        raise fields.error("between_nodes", f"goes with methods that compress each element ({known}), not {method}")
    fields.finish()
    return None if method == "none" else Compression(method, rank, density, between)


def compressed(compression: Compression, setup: Setup, place: str) -> CommunicationPattern | None:
    """Returns the setup with compressed gradients; unchanged if the compression is only a cast.

    Raises ForerunError for a pattern or a plan that doesn't go with it.
    """
    own, method = setup.pattern, compression.method
    if method in CASTS or (own is not None and own.everything):
        return own
    if method in _AS_THEY_ARE and own is not None and own.name != "all_gather":
        raise ForerunError(
            f"{place}: gradient_compression {method} has collectives of its own, so it doesn't go with"
            f" communication_pattern {own.name}; leave the pattern out or use powersgd"
        )
    found: GradientCompression
    if method == "int8":
        found = Int8(setup.gradient_bytes)
    elif method in ("int8_sum", "fp8_sum"):
        found = Summed8(method.removesuffix("_sum"), setup.gradient_bytes)
    elif method == "onebit":
        found = OneBit(setup.gradient_bytes)
    elif method == "topk":
        found = TopK(setup.gradient_bytes, compression.density)
    else:
        found = PowerSgd.of(matrices(setup.model), _parameters(setup), compression.rank, own or Nccl())
    if compression.between_nodes:
        within = setup.n_gpus // setup.plan.dp
        found = BetweenNodes(found, max(1, min(setup.plan.dp, setup.cluster.node_size // within)))
    with at(place):
        found.check(setup.plan)
    return found


def _parameters(setup: Setup) -> int:
    model = setup.model
    return model.parameter_count if isinstance(model, LayeredModel) else parameter_count(model)


@dataclass(frozen=True)
class CompressionEffect:
    """Holds the effect of compressed gradients on a step."""

    method: str
    plain_step_s: float
    """the step without compression"""
    step_s: float
    wire_share: float
    """bytes that a rank sends over those of an all-reduce of all gradients"""
    residual_gib: float
    """memory of a rank for errors that are fed back, in addition to the prediction"""
    break_even_bytes_per_s: float | None
    """bandwidth of the outermost link below which compression makes the step shorter; None: it never does, or always"""
    caveat: str
    source: str


def of_text(text: str) -> Compression | None:
    """Returns the compression of an option: a method, with its rank or density after a colon, as in powersgd:4.

    `@nodes` behind it compresses between nodes only.

    Raises ForerunError as `read_compression` does.
    """
    method, at_sign, where = text.partition("@")
    name, _, value = method.partition(":")
    given: dict[str, Any] = {"name": name, "between_nodes": True} if at_sign else {"name": name}
    key = {"powersgd": "rank", "topk": "density"}.get(name.strip().lower())
    if at_sign and where != "nodes":
        raise ForerunError(f"--compress-gradients {text}: expected nodes after @, got {where!r}")
    if not value:
        return read_compression(given, "--compress-gradients")
    try:
        number = float(value)
    except ValueError:
        number = None
    if key is None or number is None or not isfinite(number):
        raise ForerunError(f"--compress-gradients {text}: expected a method, powersgd:RANK or topk:DENSITY")
    given[key] = int(number) if key == "rank" else number
    return read_compression(given, "--compress-gradients")


def under_compression(setup: Setup, compression: Compression) -> Setup:
    """Returns the setup with compressed gradients. Raises ForerunError for a plan that doesn't go with it."""
    if compression.method == "fp16":
        return replace(setup, plan=replace(setup.plan, reduce_dtype="fp16"))
    if compression.method == "bf16":
        return replace(setup, plan=replace(setup.plan, reduce_dtype="bf16"))
    return replace(setup, pattern=compressed(compression, setup, "--compress-gradients"))


def effect_of(plain: Setup, compression: Compression) -> CompressionEffect | None:
    """Returns the effect of `compression` on the step of a setup that has none. Returns None for a cast, because a cast
    is a dtype of the plan.

    Raises ForerunError for a plan that doesn't go with it.
    """
    if compression.method in CASTS:
        return None
    changed = under_compression(plain, compression)
    pattern = changed.pattern
    assert isinstance(pattern, GradientCompression)
    gradients = _parameters(plain) / plain.plan.pp * plain.gradient_bytes
    said = shipped_data(__package__, "compression.yaml")[compression.method]
    return CompressionEffect(
        method=pattern.name,
        plain_step_s=_step_s(plain),
        step_s=_step_s(changed),
        wire_share=pattern.wire_share(plain.plan.dp),
        residual_gib=gradients * pattern.residual_share(plain.plan.dp) / GIB,
        break_even_bytes_per_s=_break_even(plain, changed),
        caveat=said["caveat"],
        source=said["source"],
    )


def _step_s(setup: Setup, factor: float = 1.0) -> float:
    """Returns the step where the outermost link is `factor` times as fast."""
    where = setup.cluster.with_outermost_link(factor)
    return simulate_setup(replace(setup, cluster=where, replays=False), folded=True).prediction.step_time_s


def _break_even(plain: Setup, changed: Setup) -> float | None:
    """Returns the bandwidth at which both steps take the same time, by bisection on a logarithmic scale."""
    if plain.network is not None:
        return None
    low, high = 1.0 / _WIDEST, _WIDEST

    def gains(factor: float) -> bool:
        return _step_s(changed, factor) < _step_s(plain, factor)

    if not gains(low) or gains(high):
        return None
    for _ in range(_STEPS):
        middle = sqrt(low * high)
        low, high = (middle, high) if gains(middle) else (low, middle)
    return plain.cluster.links[-1].bytes_per_s * sqrt(low * high)
