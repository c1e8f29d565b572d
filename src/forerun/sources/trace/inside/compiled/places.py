"""Finds the module that each kernel of a compiled graph belongs to.

All blocks that are alike share one graph. So each node keeps its path below the module that the graph was compiled in,
and the full path follows from the module that calls the graph.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.fx import Node

from forerun.sources.trace.inside.modules import Modules, plain

_ROOT = re.compile(r"^[A-Z]\['[^']*'\](\.__\w+__)*\.?")
"""Dynamo's name for the local or global variable through which it reaches a module."""


class Places:
    """Finds the modules of nodes from the metadata that Dynamo stores in them."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules

    def of(self, steps: Sequence[Sequence[Node]]) -> GraphPlaces:
        """Returns the modules of the steps of a graph."""
        index = {str(id(module)): number for module, number in self._modules.index.items()}
        found = [
            next(filter(None, (self._place(node, index) for node in reversed(nodes))), ("", True)) for nodes in steps
        ]
        return GraphPlaces(self._modules, found)

    def _place(self, node: Node, index: dict[str, int]) -> tuple[str, bool] | None:
        """Returns the module path of `node`, and whether it is relative to the module that calls the graph."""
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        if not stack:
            return None
        key, (name, kind) = list(stack.items())[-1]
        below = plain(_ROOT.sub("", name))
        number = index.get(key.split("@")[0])
        if number is None:
            return below or getattr(kind, "__name__", str(kind)), False
        path = self._modules.paths[number]
        return (below, True) if path.endswith("." + below) else (path, False)


class GraphPlaces:
    """The modules of the steps of one graph."""

    def __init__(self, modules: Modules, places: Sequence[tuple[str, bool]]) -> None:
        self._modules, self._places = modules, places
        self.module = 0
        """The module index of the step that runs."""
        self._known: dict[int, list[int]] = {}

    def current(self) -> int:
        """Returns the module index of the step that runs."""
        return self.module

    def numbers(self) -> list[int]:
        """Returns the module index of each step when the module that now runs calls the graph."""
        caller = self._modules.current()
        found = self._known.get(caller)
        if found is None:
            above = self._modules.paths[caller]
            found = self._known[caller] = [
                self._modules.number_of(f"{above}.{path}" if below and above else path) if path else caller
                for path, below in self._places
            ]
        return found
