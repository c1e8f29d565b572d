"""Maps the modules of a profile, whose paths have names of classes, to predicted modules.

A matrix product whose shape only one predicted module has votes for that module. A module of the profile is mapped to
the predicted module for which nearly all work in it, and in the modules below it, votes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from forerun.answers.comparison.ran_step import Line

_MOST = 0.9
"""share of the votes that makes a module"""
_PARTS = ("product", "attention")
"""begins of the parts whose shapes tell the module"""


class _Pair(Protocol):
    @property
    def measured(self) -> tuple[Line, ...]: ...

    @property
    def predicted(self) -> tuple[Line, ...]: ...


def modules_of(pairs: Iterable[_Pair]) -> Mapping[str, str]:
    """Returns the predicted module for each path of the profile whose module the pairs determine."""
    votes: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for pair in pairs:
        weight = _weights(pair.predicted)
        for line in pair.measured:
            for path in _paths(line.module) if line.shape and line.part.startswith(_PARTS) else ():
                for module, share in weight.items():
                    votes[path][module] += share * line.count
    found = {}
    for path, of_path in votes.items():
        module = max(of_path, key=lambda name: (of_path[name], name))
        if of_path[module] >= _MOST * sum(of_path.values()):
            found[path] = module
    return found


def module_of(names: Mapping[str, str], path: str) -> str:
    """Returns the predicted module of a path: its own, or that of the nearest module around it; empty for none."""
    return next((names[around] for around in reversed([*_paths(path)]) if around in names), "")


def _weights(lines: tuple[Line, ...]) -> dict[str, float]:
    """Returns the share of each module in the runs of the work."""
    runs = sum(line.count for line in lines)
    shares: dict[str, float] = defaultdict(float)
    for line in lines:
        if line.module and runs:
            shares[line.module] += line.count / runs
    return shares


def _paths(path: str) -> Iterator[str]:
    """Yields the path and those of the modules around it, the outermost first; none for work outside of modules."""
    names = path.split(".") if path else []
    for length in range(1, len(names) + 1):
        yield ".".join(names[:length])
