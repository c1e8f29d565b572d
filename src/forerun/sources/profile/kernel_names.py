"""Recognises the work of a kernel by its name (`kernel_names.yaml`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from forerun.common.shipped import shipped_data, validated

_FILE = "kernel_names.yaml"
Kind = Literal["product", "attention", "attention_backward", "recurrence", "optimizer", "memory", "communication"]


class KernelWork(NamedTuple):
    """Holds the work that the name of a kernel implies."""

    kind: Kind
    work: str
    """the kind of work, such as norm or element-wise"""


@dataclass(frozen=True)
class _Rule:
    kind: Kind
    work: str
    names: str
    source: str


_UNKNOWN = KernelWork("memory", "other")


@cache
def work_of(name: str) -> KernelWork:
    """Returns the work of a kernel with this name. A name that matches no rule is memory-bound work of another kind."""
    return next((found for pattern, found in _patterns() if pattern.search(name)), _UNKNOWN)


@cache
def memory_work_of(name: str) -> str:
    """Returns the kind of work of a memory-bound kernel or operation."""
    works = (found for pattern, found in _patterns() if found.kind in ("memory", "optimizer") and pattern.search(name))
    return next(works, _UNKNOWN).work


@cache
def _patterns() -> list[tuple[re.Pattern[str], KernelWork]]:
    rules: list[_Rule] = validated(list[_Rule], shipped_data(__package__, _FILE), _FILE)
    return [(re.compile(one.names, re.IGNORECASE), KernelWork(one.kind, one.work)) for one in rules]
