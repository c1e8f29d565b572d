"""Imports by the names that modules had before they were grouped into wings still work, with a DeprecationWarning.

`from forerun.plan.plan import Plan` in a user's file imports the very module `forerun.describe.plan.plan`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_ROOMS = {
    "common": ("content", "errors", "files", "jit", "processes", "ray_cluster", "records", "units"),
    "describe": ("cluster", "model", "plan"),
    "core": ("cost", "engine", "memory", "network", "program"),
    "sources": ("symbolic", "trace"),
    "astrasim": ("astra", "chakra", "dse", "stage"),
    "answers": ("analysis", "experiment", "search"),
    "evidence": ("fitting", "measure", "validation"),
    "interfaces": ("api", "cli", "experiments", "report"),
}
_MESSAGES = {
    "engine": ("algorithms", "calendar", "collectives", "custom", "fabric", "mailbox", "ready", "slots", "state"),
    "network": ("flows", "links", "traffic"),
}
NOW = {f"forerun.{room}": f"forerun.{wing}.{room}" for wing, rooms in _ROOMS.items() for room in rooms} | {
    f"forerun.{room}.{name}": f"forerun.astrasim.messages.{name}" for room, names in _MESSAGES.items() for name in names
}
NOW["forerun.plan.stack"] = "forerun.describe.stacks.catalog"
"""former name of a room or module -> its name now"""
_FUNCTIONS = ("forerun.search", "forerun.trace")
"""rooms that must not become attributes of `forerun`, as functions have these names: empty packages stand for them"""


def name_now(former: str) -> str | None:
    """The name that module `former` has now; None where it was never a former name."""
    known = former
    while known not in NOW:
        known, _, last = known.rpartition(".")
        if not last or known == "forerun":
            return None
    return NOW[known] + former[len(known) :]


class _Alias(Loader):
    """Hands out the module of today in place of a new one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import system has put the former name's there


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = name_now(fullname) if fullname.startswith("forerun.") else None
        if name is None or find_spec(name) is None:
            return None
        warnings.warn(f"{fullname} is {name} now", DeprecationWarning, stacklevel=2)
        return ModuleSpec(fullname, _Alias(name))


def install() -> None:
    """Let Python find modules by their former names; a second call changes nothing."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())  # first, else a module would be found in its folder and run a second time
    for name in _FUNCTIONS:
        room = ModuleType(name)
        room.__path__ = []
        sys.modules.setdefault(name, room)
