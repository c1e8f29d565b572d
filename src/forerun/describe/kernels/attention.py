"""Attention kernels by name, from `attention.yaml`. Plans choose a kernel, cost models compute its time, and traces
recognise it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, TypeVar

import numpy as np
import pydantic

from forerun.common.errors import ForerunError, UnknownName
from forerun.common.shipped import shipped_data, validated

Entry = TypeVar("Entry")
AUTO = "auto"
"""stands for the kernel that the stack chooses"""
Layout = Literal["heads_first", "sequence_first", "block_mask"]
Operators = dict[Layout, dict[Literal["forward", "backward"], tuple[str, ...]]]
"""names of operators by the order of the axes of queries, keys and values"""
_DEFAULT = "default"
_STRICT = pydantic.ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class KernelRate:
    """Rates of a kernel on one architecture: `forward` over the cost profile's, `backward` over `forward`, and the work
    that each query takes beside its keys.

    Each is one number, or one for each measured head size.
    """

    forward: float | dict[int, float] = field(hash=False)
    backward: float | dict[int, float] = field(hash=False)
    stands_in: str = ""
    """kernel whose rates these are, where this one has none of its own; else empty"""
    extra_keys: float | dict[int, float] | None = field(default=None, hash=False)
    """extra work of a query in the forward pass, in keys (core/cost/attention.py); None: the cost profile's, which is
    that of serving stacks' kernels"""
    backward_extra_keys: float | dict[int, float] | None = field(default=None, hash=False)
    """extra work of a query in the backward pass; None: as in the forward pass"""

    def at(self, head_dim: float) -> tuple[float, float]:
        """Returns the forward and the backward rate at a head size; between measured sizes they are linear."""
        return _at(self.forward, head_dim), _at(self.backward, head_dim)

    def extra_keys_at(self, head_dim: float, otherwise: float) -> tuple[float, float]:
        """Returns the extra keys of the forward and the backward pass at a head size; `otherwise` is the profile's."""
        forward = otherwise if self.extra_keys is None else _at(self.extra_keys, head_dim)
        backward = forward if self.backward_extra_keys is None else _at(self.backward_extra_keys, head_dim)
        return forward, backward


def _at(rate: float | dict[int, float], head_dim: float) -> float:
    if not isinstance(rate, dict):
        return rate
    sizes = sorted(rate)
    return float(np.interp(head_dim, sizes, [rate[size] for size in sizes]))


@dataclass(frozen=True, slots=True)
class Like:
    """A reference to another kernel, whose rates this one borrows."""

    like: str


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward pass of a fused kernel, as a trace counts it."""

    launches: int = 3
    """number of kernels, by default for row sums, gradients and conversion of the query gradient"""
    grouped_gradients: Literal["summed", "expanded", "wide"] = "summed"
    """how the kernel makes the gradients of keys and values that several heads share (see attention.yaml)"""
    registers_hold: int = 0
    """largest head size for which `wide` sums in registers and needs no memory"""


@dataclass(frozen=True)
class AttentionKernel:
    """One entry of `attention.yaml`, which explains the keys."""

    name: str
    says: str
    words: str
    source: str = ""
    runs_on: tuple[str, ...] = ()
    becomes: dict[str, str] = field(default_factory=dict, hash=False)
    form: Literal["fused", "products", "operations"] = "fused"
    keeps: tuple[str, ...] = ("lse",)
    head_dim_multiple: int = 1
    tf32_products: int = 0
    rates: dict[str, KernelRate | Like] = field(default_factory=dict, hash=False)
    backward: Backward = Backward()
    mask_block: int = 0
    breaks_graphs: bool = False
    names: dict[str, str] = field(default_factory=dict, hash=False)
    operators: Operators = field(default_factory=dict, hash=False)

    __pydantic_config__ = _STRICT

    @property
    def is_torchs_choice(self) -> bool:
        """Returns whether it stands for the kernel that PyTorch chooses: its FlashAttention, or the activated one."""
        return self.names.get("sdp_backend") == "any"

    def rate_on(self, architecture: str) -> KernelRate:
        """Returns the rates on `architecture`: its own, those that it borrows, or its default rates."""
        found = self.rates.get(architecture)
        if isinstance(found, KernelRate):
            return found
        if found is not None:
            other = attention_kernels()[found.like].rate_on(architecture)
            return replace(other, stands_in=f"those of {found.like}")
        default = self.rates[_DEFAULT]
        assert isinstance(default, KernelRate)
        return KernelRate(default.forward, default.backward, "assumed ones")

    def runs(self, architecture: str) -> bool:
        """Returns whether the kernel runs on devices of `architecture`."""
        return not self.runs_on or architecture in self.runs_on


def named_entries(kind: type[Entry], file: str) -> dict[str, Entry]:
    """Returns the entries of a file of this package by name. Raises ForerunError, which names an entry's wrong key."""
    entries = {name: {"name": name, **entry} for name, entry in shipped_data(__package__, file).items()}
    found: dict[str, Entry] = validated(dict[str, kind], entries, file)  # type: ignore[valid-type]
    return found


@cache
def attention_kernels() -> dict[str, AttentionKernel]:
    """Returns the attention kernels by name, in the order of the file.

    Raises ForerunError if an entry has an unknown key, a wrong type, an unknown kernel's name, or is fused and lacks a
    default rate. The message names the entry and the key.
    """
    kernels = named_entries(AttentionKernel, "attention.yaml")
    for name, kernel in kernels.items():
        likes = {key: rate.like for key, rate in kernel.rates.items() if isinstance(rate, Like)}
        for place, other in [*kernel.becomes.items(), *likes.items()]:
            if other not in kernels:
                raise ForerunError(
                    f"attention.yaml: {name}.{place}: there is no kernel {other!r}; name one of attention.yaml"
                )
        if kernel.form == "fused" and (_DEFAULT not in kernel.rates or _DEFAULT in likes):
            raise ForerunError(f"attention.yaml: {name}.rates: give it a {_DEFAULT!r} with forward and backward")
    return kernels


def attention_kernel(name: str) -> AttentionKernel:
    """Returns the kernel `name`. Raises UnknownName, which lists the known kernels."""
    kernels = attention_kernels()
    if name not in kernels:
        raise UnknownName("attention kernel", name, [*kernels])
    return kernels[name]


def fused_kernel(name: str) -> AttentionKernel:
    """Returns the fused kernel `name`. Raises UnknownName if it is unknown or not fused."""
    kernel = attention_kernel(name)
    if kernel.form != "fused":
        raise UnknownName("fused attention kernel", name, [*attention_kernels()])
    return kernel


def attention_choices() -> tuple[str, ...]:
    """Returns the values that a plan's `attention` may have."""
    return (AUTO, *attention_kernels())


def names_in(tool: str) -> dict[str, str]:
    """Returns the tool's name of each kernel that it knows, by kernel. `tool` is a key of the entries' `names`."""
    return {name: one.names[tool] for name, one in attention_kernels().items() if tool in one.names}


def kernel_in_words(text: str) -> str | None:
    """Returns the first kernel whose words occur in `text`, such as a cell of a table of measurements."""
    found = (one.name for one in attention_kernels().values() if re.search(one.words, text, re.IGNORECASE))
    return next(found, None)
