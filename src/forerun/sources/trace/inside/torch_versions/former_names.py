"""Gives modules of torch the names that programs for older releases import from them (formerly.yaml)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from forerun.sources.trace.inside.data_files import read_data
from forerun.sources.trace.inside.imports import when_imported

_FILE = "torch_versions/formerly.yaml"


def install() -> None:
    """Adds the names to the modules that the program imports."""
    patches: dict[str, Callable[[Any], None]] = {
        module: partial(_add, names) for module, names in read_data(_FILE).items()
    }
    when_imported(patches)


def _add(names: Mapping[str, str], module: Any) -> None:
    for name, place in names.items():
        where, _, now = place.partition(":")
        if not hasattr(module, name):
            setattr(module, name, getattr(import_module(where), now))
