"""Which module each kernel of a compiled graph belongs to.

A graph that is compiled for one block serves all blocks like it, so what a node is told is its place below the module
that the graph was compiled in; the whole path follows from the module that calls the graph.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.fx import Node

from forerun.trace.inside.modules import Modules, plain

_ROOT = re.compile(r"^[A-Z]\['[^']*'\](\.__\w+__)*\.?")
"""how dynamo names a local or global variable, and what it finds the module by"""


class Places:
    """Finds the modules of nodes by what dynamo noted in them."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules

    def of(self, steps: Sequence[Sequence[Node]]) -> GraphPlaces:
        """The places of the steps of a graph that is compiled now."""
        index = {str(id(module)): number for module, number in self._modules._index.items()}
        paths = [next(filter(None, (self._path(node, index) for node in reversed(nodes))), "") for nodes in steps]
        return GraphPlaces(self._modules, paths)

    def _path(self, node: Node, index: dict[str, int]) -> str:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        if not stack:
            return ""
        key, (path, kind) = list(stack.items())[-1]
        number = index.get(key.split("@")[0])
        if number is not None:
            return self._modules.paths[number]
        return plain(_ROOT.sub("", path)) or getattr(kind, "__name__", str(kind))


class GraphPlaces:
    """The places of the steps of one graph."""

    def __init__(self, modules: Modules, paths: Sequence[str]) -> None:
        self._modules = modules
        self.module = 0
        """of the step that runs"""
        above = modules.paths[modules.current()] + "."
        self._paths = [(path[len(above) :], True) if path.startswith(above) else (path, False) for path in paths]
        self._same = [not path or path + "." == above for path in paths]
        self._known: dict[int, list[int]] = {}

    def current(self) -> int:
        """Index of the module of the step that runs."""
        return self.module

    def numbers(self) -> list[int]:
        """Index of the module of each step, called from the module that runs."""
        caller = self._modules.current()
        found = self._known.get(caller)
        if found is None:
            above = self._modules.paths[caller] + "."
            found = self._known[caller] = [
                caller if same else self._modules._number(above + path if below else path)
                for same, (path, below) in zip(self._same, self._paths, strict=True)
            ]
        return found
