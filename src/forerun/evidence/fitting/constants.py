"""The constants that Forerun fits to whole steps: the place of each, its prior, and the reason for the prior.

`constants.yaml` lists them. All are factors: their priors are log-normal, and `sigma` is the standard deviation of the
logarithm. Constants of one kind (such as the bandwidth that eager stacks achieve) scatter around a value of the kind,
which the fit finds too. A constant that no step informs takes the value of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal

import pydantic

from forerun.answers.analysis.setup import Setup
from forerun.common.errors import ForerunError, at
from forerun.common.shipped import shipped_text, validated
from forerun.common.yaml_files import parse_any_yaml
from forerun.describe.cluster.catalog import load_device
from forerun.describe.kernels.attention import KernelRate, attention_kernels
from forerun.describe.stacks.catalog import load_stack
from forerun.describe.stacks.stack import Stack

What = Literal[
    "sustained",
    "attention_forward",
    "attention_backward",
    "gemm_rate",
    "memory_rate",
    "network_rate",
    "launch_blocking_us",
    "owner_broadcast_us",
]
OF_KERNELS: tuple[What, ...] = ("attention_forward", "attention_backward")
OF_STACKS: tuple[What, ...] = ("gemm_rate", "memory_rate", "network_rate", "launch_blocking_us", "owner_broadcast_us")
IN_PROGRAM: frozenset[What] = frozenset({"owner_broadcast_us"})
"""constants that are part of a Program; the others are part of its operations' costs"""


@dataclass(frozen=True, slots=True)
class Kind:
    """The value that constants of one kind share, within `sigma` of `prior` or of `factor` x another kind's value."""

    what: What
    sigma: float
    spread: float
    """standard deviation of the logarithms of the kind's constants around its value"""
    source: str
    prior: float | None = None
    kind: str | None = None
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Constant:
    """One constant and its places `of`, which share it: devices, stacks, or kernels as `kernel.architecture`.

    A priori it lies within `sigma` of `prior`, or of `factor` x the value of its kind.
    """

    what: What
    of: tuple[str, ...]
    kind: str | None = None
    factor: float = 1.0
    prior: float | None = None
    sigma: float | None = None
    source: str = ""

    @property
    def name(self) -> str:
        """Returns the quantity and the first place that has it."""
        return f"{self.what} of {self.of[0]}"

    @property
    def shipped(self) -> float:
        """Returns the present value in Forerun's files."""
        return shipped_value(self.what, self.of[0])


@dataclass(frozen=True, slots=True)
class AnchorPriors:
    """The uncertainties that limit how far a user's own measured steps change rates."""

    sigma: dict[What, float]
    """standard deviation of the logarithm of one cluster's rate around that of its device and stack, by quantity"""
    noise: float
    """standard deviation of the logarithm of a measured step around its prediction with the right rates"""
    source: str


@dataclass(frozen=True)
class Registry:
    """All constants with their kinds."""

    scale: float
    """logarithmic error beyond which a row loses weight"""
    source: str
    kinds: dict[str, Kind]
    constants: tuple[Constant, ...]
    anchor: AnchorPriors

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")

    def check(self) -> None:
        """Raises ForerunError for an unknown kind, and for places that are unknown, differ in value or occur twice."""
        entries: dict[str, Kind | Constant] = {**self.kinds, **{one.name: one for one in self.constants}}
        for name, entry in entries.items():
            if (entry.prior is None) == (entry.kind is None):
                raise ForerunError(f"{name}: give one of prior and kind")
            if entry.kind is not None and entry.kind not in self.kinds:
                raise ForerunError(f"{name}: there is no kind {entry.kind!r}; add it under kinds")
        for constant in self.constants:
            if constant.kind is None and constant.sigma is None:
                raise ForerunError(f"{constant.name}: give sigma beside prior")
            if len({shipped_value(constant.what, one) for one in constant.of}) > 1:
                raise ForerunError(
                    f"{constant.name}: its places hold different values; make them equal, or list them apart"
                )
        if len(self._numbers) < sum(len(constant.of) for constant in self.constants):
            raise ForerunError("two constants name the same place; remove one of them")

    @cached_property
    def _numbers(self) -> dict[tuple[str, str], int]:
        return {(one.what, name): i for i, one in enumerate(self.constants) for name in one.of}

    def constants_of(self, setup: Setup) -> dict[What, tuple[int, str]]:
        """Maps each quantity on which the time of `setup` depends to the number of its constant and of its place.

        Quantities that no constant covers are left out.
        """
        stack, device = setup.stack, setup.cluster.device
        kernel = stack.attention_kernel(setup.plan.attention, device.architecture)
        places: dict[What, tuple[str, ...]] = dict.fromkeys(OF_STACKS, (stack.name, *stack.lineage))
        places |= {"sustained": (device.name,)}
        places |= dict.fromkeys(OF_KERNELS, (f"{kernel}.{device.architecture}",))
        known = self._numbers
        found = {what: next((one for one in ofs if (what, one) in known), None) for what, ofs in places.items()}
        return {what: (known[what, place], place) for what, place in found.items() if place is not None}

    def spread_of(self, constant: Constant) -> float:
        """Returns the standard deviation of a constant's logarithm around its prior or the value of its kind."""
        own = constant.sigma
        if own is None and constant.kind is not None:
            own = self.kinds[constant.kind].spread
        assert own is not None, f"{constant.name} has neither sigma nor kind"
        return own


def parse_registry(text: str, place: str) -> Registry:
    """Returns the Registry of a YAML text.

    Raises ForerunError if a key, device, kernel or stack is unknown, or a type is wrong. The message names `place` and
    key.
    """
    registry: Registry = validated(Registry, parse_any_yaml(text, place), place)
    with at(place):
        registry.check()
    return registry


@cache
def load_registry() -> Registry:
    """Returns the shipped constants."""
    return parse_registry(shipped_text("forerun.evidence.fitting", "constants.yaml"), "constants.yaml")


def shipped_value(what: What, of: str) -> float:
    """Returns the value of a constant in Forerun's files; `of` is a device, `kernel.architecture` or a stack.

    Raises ForerunError if the device, kernel or stack is unknown.
    """
    if what == "sustained":
        return load_device(of).sustained
    if what in OF_KERNELS:
        kernel, _, architecture = of.partition(".")
        known = attention_kernels().get(kernel)
        rate = known.rates.get(architecture) if known else None
        if not isinstance(rate, KernelRate):
            raise ForerunError(
                f"{what} of {of}: attention.yaml has no rates of this kernel on this architecture; add them"
            )
        return float(getattr(rate, what.removeprefix("attention_")))
    return float(getattr(load_stack(of), what))


def changed(stack: Stack, factors: Mapping[What, float]) -> Stack:
    """Returns `stack` with its constants times `factors`, which include those of its device and attention kernel.

    A device's clock and a kernel's rate act like rates of the stack, so that one object holds all of them.
    """
    clock, forward = factors.get("sustained", 1.0), factors.get("attention_forward", 1.0)
    own: dict[str, Any] = {name: getattr(stack, name) * factors.get(name, 1.0) for name in OF_STACKS}
    own["gemm_rate"] *= clock
    return replace(
        stack,
        attention_rate=stack.attention_rate * clock * forward,
        attention_backward_rate=stack.attention_backward_rate * factors.get("attention_backward", 1.0),
        **own,
    )
