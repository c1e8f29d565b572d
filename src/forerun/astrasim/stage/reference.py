"""Numbers that STAGE's source code fixes."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.common.shipped import shipped


@dataclass(frozen=True)
class FirstGeneration:
    """The keys for the first generation in `reference.yaml`. The file explains them."""

    source: str
    norm_ops: int
    chained_collectives: int


@dataclass(frozen=True)
class SecondGeneration:
    """The keys for the second generation in `reference.yaml`."""

    source: str
    norm_ops: int
    loss_ops: int
    attention_ops: int
    attention_gradient_ops: int
    optimizer_bytes: int


@dataclass(frozen=True)
class _File:
    first_generation: FirstGeneration
    second_generation: SecondGeneration


_FILE = shipped(_File, __package__, "reference.yaml")
FIRST_GENERATION, SECOND_GENERATION = _FILE.first_generation, _FILE.second_generation
