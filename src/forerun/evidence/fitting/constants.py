"""The constants that are fitted to whole steps: where each lives, what it is before any step is seen, and why.

They come from `constants.yaml`. All are multiplicative: a prior is log-normal, `sigma` the standard deviation of the
logarithm. Constants of one kind (the bandwidth that eager stacks achieve, say) scatter around a value of their kind,
which is fitted with them: what no step informs takes the value of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import resources
from typing import Any, Literal

import pydantic
import yaml

from forerun.answers.analysis.setup import Setup
from forerun.common.errors import ForerunError
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
"""constants that Programs hold; others are in what their operations cost"""


@dataclass(frozen=True, slots=True)
class Kind:
    """What constants of one kind share: a value that lies `sigma` around `prior` or `factor` x another kind's."""

    what: What
    sigma: float
    spread: float
    """how far a constant of the kind may be from its value"""
    source: str
    prior: float | None = None
    kind: str | None = None
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Constant:
    """One constant, shared by all of `of`: devices, attention kernels as `kernel.architecture`, or stacks.

    Before any step is seen it lies `sigma` around `prior`, or around `factor` x its kind's value.
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
        """What it is, and of what first."""
        return f"{self.what} of {self.of[0]}"

    @property
    def shipped(self) -> float:
        """The value in force in Forerun's files."""
        return shipped_value(self.what, self.of[0])


@dataclass(frozen=True, slots=True)
class AnchorPriors:
    """What measured steps of a user's own may change."""

    sigma: dict[What, float]
    """how far the rates of one cluster lie from those of its device and stack: standard deviations of logarithms"""
    noise: float
    """of a measured step, as a logarithm, around what is predicted with the right rates"""
    source: str


@dataclass(frozen=True)
class Registry:
    """All constants with their kinds."""

    scale: float
    """error of a row, as a logarithm, beyond which it loses weight"""
    source: str
    kinds: dict[str, Kind]
    constants: tuple[Constant, ...]
    anchor: AnchorPriors

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")

    def check(self) -> None:
        """Raise ForerunError for a kind that does not exist, and for places that do not, differ or are named twice."""
        entries: dict[str, Kind | Constant] = {**self.kinds, **{one.name: one for one in self.constants}}
        for name, entry in entries.items():
            if (entry.prior is None) == (entry.kind is None):
                raise ForerunError(f"{name}: give one of prior and kind")
            if entry.kind is not None and entry.kind not in self.kinds:
                raise ForerunError(f"{name}: there is no kind {entry.kind!r}")
        for constant in self.constants:
            if constant.kind is None and constant.sigma is None:
                raise ForerunError(f"{constant.name}: give sigma beside prior")
            if len({shipped_value(constant.what, one) for one in constant.of}) > 1:
                raise ForerunError(f"{constant.name}: its places hold different values")
        if len(self._numbers) < sum(len(constant.of) for constant in self.constants):
            raise ForerunError("a place is named by two constants")

    @cached_property
    def _numbers(self) -> dict[tuple[str, str], int]:
        return {(one.what, name): i for i, one in enumerate(self.constants) for name in one.of}

    def constants_of(self, setup: Setup) -> dict[What, tuple[int, str]]:
        """What the time of `setup` depends on -> number of the constant, and the place among its `of`.

        Without what is not fitted.
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
        """How far a constant may be from its prior or the value of its kind, as a standard deviation of logarithms."""
        own = constant.sigma
        if own is None and constant.kind is not None:
            own = self.kinds[constant.kind].spread
        assert own is not None, f"{constant.name} has neither sigma nor kind"
        return own


def parse_registry(text: str, place: str) -> Registry:
    """The Registry of a YAML text.

    Raises:
        ForerunError: `place` and the key, for an unknown key, a wrong type, or a device, kernel or stack that is none.
    """
    try:
        registry = pydantic.TypeAdapter(Registry).validate_python(yaml.safe_load(text))
        registry.check()
        return registry
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ForerunError(f"{place}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except ForerunError as error:
        raise ForerunError(f"{place}: {error}") from None


@cache
def load_registry() -> Registry:
    """The shipped constants."""
    path = resources.files("forerun.evidence.fitting") / "constants.yaml"
    return parse_registry(path.read_text(encoding="utf-8"), "constants.yaml")


def shipped_value(what: What, of: str) -> float:
    """A constant as Forerun's files have it; `of` is a device, `kernel.architecture` or a stack.

    Raises:
        ForerunError: there is no such thing.
    """
    if what == "sustained":
        return load_device(of).sustained
    if what in OF_KERNELS:
        kernel, _, architecture = of.partition(".")
        known = attention_kernels().get(kernel)
        rate = known.rates.get(architecture) if known else None
        if not isinstance(rate, KernelRate):
            raise ForerunError(f"{what} of {of}: attention.yaml has no rates of such a kernel and architecture")
        return float(getattr(rate, what.removeprefix("attention_")))
    return float(getattr(load_stack(of), what))


def changed(stack: Stack, factors: Mapping[What, float]) -> Stack:
    """`stack` with constants times `factors`, those of its device and its attention kernel included.

    A device's clock and a kernel's rate act as rates of the stack do, so that one object holds all.
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
