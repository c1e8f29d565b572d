"""Numbers that ASTRA-sim's source code fixes."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.common.shipped import shipped


@dataclass(frozen=True)
class Reference:
    """The keys of `reference.yaml`. The file explains them."""

    source: str
    subgroup_endpoint_ns: int
    tag_space: int
    constant_hops: dict[str, int]
    idle_ns: int


REFERENCE = shipped(Reference, __package__, "reference.yaml")
