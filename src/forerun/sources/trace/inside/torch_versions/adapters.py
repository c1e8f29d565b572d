"""Gives an older torch the internals that it lacks and the tracer needs.

The tracer is written for the newest release. There is one adapter for each range of older ones that differ from it; an
adapter adds functions to torch under the names that newer releases have, and changes nothing that a newer one has. The
adapters run from the newest to the oldest, so each one holds only the differences from the next release.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forerun.sources.trace.inside.torch_versions import former_names, torch_2_10, torch_2_12
from forerun.sources.trace.inside.torch_versions.supported import minor_release


@dataclass(frozen=True)
class Adapter:
    """The parts that torch lacks up to and including one release."""

    last: tuple[int, int]
    core: Callable[[], None]
    """Adapts all but the compiler. It runs before anything else is installed."""
    compiler: Callable[[], None]
    """Adapts Dynamo and Inductor. It runs when the program first compiles something, because it imports both."""


ADAPTERS = (
    Adapter((2, 12), torch_2_12.adapt, torch_2_12.adapt_compiler),
    Adapter((2, 11), torch_2_10.adapt, torch_2_10.adapt_compiler),
)
"""From the newest to the oldest."""


def adapt() -> None:
    """Adapts the torch of this process, all but its compiler, also to programs that were written for an older one."""
    for adapter in _needed():
        adapter.core()
    former_names.install()


def adapt_compiler() -> None:
    """Adapts the compiler of the torch of this process."""
    for adapter in _needed():
        adapter.compiler()


def _needed() -> list[Adapter]:
    return [adapter for adapter in ADAPTERS if minor_release() <= adapter.last]
