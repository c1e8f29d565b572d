"""Changes modules when the program imports them, so that a trace imports nothing that the program does not."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

Patch = Callable[[Any], None]


def when_imported(patches: Mapping[str, Patch]) -> None:
    """Calls each patch with the module of its name: now if it is imported, else once it is."""
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
    sys.meta_path.insert(0, _Finder(patches))


class Imported:
    """The modules that the program imports: those that come after this object."""

    def __init__(self) -> None:
        self._before = frozenset(sys.modules)

    def names(self) -> list[str]:
        """Returns the names of the modules in order, without those of Python and of torch."""
        others = ("torch", "forerun", *sys.stdlib_module_names)
        return sorted(name for name in {*sys.modules} - self._before if name.partition(".")[0] not in others)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as Python does, and patches some of them once they are loaded."""

    def __init__(self, patches: Mapping[str, Patch]) -> None:
        self._patches = patches

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        patch = self._patches.get(name)
        if patch is None:
            return None
        spec: Any = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec
