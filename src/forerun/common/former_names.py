"""Keeps imports by former module names working, with a DeprecationWarning.

`from forerun.plan.plan import Plan` in a user's file imports the module `forerun.describe.plan.plan` itself.
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
"""former name of a package or module -> its present name"""
_FUNCTIONS = ("forerun.search", "forerun.trace")
"""packages that share their name with a function of `forerun`; empty packages stand for them"""


def name_now(former: str) -> str | None:
    """Returns the present name of the module once called `former`, or None if no module had that name."""
    known = former
    while known not in NOW:
        known, _, last = known.rpartition(".")
        if not last or known == "forerun":
            return None
    return NOW[known] + former[len(known) :]


class _Alias(Loader):
    """Loads the present module under its former name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import system has replaced it by the former name's


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
    """Lets Python find modules by their former names; a second call changes nothing."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())  # first, or Python would find a module in its folder and run it again
    for name in _FUNCTIONS:
        room = ModuleType(name)
        room.__path__ = []
        sys.modules.setdefault(name, room)
