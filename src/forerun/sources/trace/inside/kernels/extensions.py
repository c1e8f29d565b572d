"""Makes compiled modules of the functions that `forerun.kernels` describes, because real ones need a GPU to load."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from forerun.sources.trace.inside.imports import when_imported
from forerun.sources.trace.inside.kernels.opaque_calls import Launches
from forerun.sources.trace.inside.refusal import Refusal
from forerun.sources.trace.opaque import EXTENSION, OPERATOR, Rule, rule_of, rules


def install(launches: Launches) -> None:
    """Lets programs import described modules, and compile them (`torch.utils.cpp_extension`); defines described
    operators."""
    described = {rule.name.rpartition(".")[0] for rule in rules(EXTENSION)}
    if described:
        sys.meta_path.insert(0, _Finder(described, launches))
    _compiled_here(launches)
    _operators()


def described_module(name: str, launches: Launches) -> ModuleType | None:
    """Returns a module of the described functions of `name`, None if nobody described one."""
    if not any(rule.name.rpartition(".")[0] == name for rule in rules(EXTENSION)):
        return None
    made = ModuleType(name)
    _fill(made, launches)
    return made


def _fill(module: ModuleType, launches: Launches) -> None:
    for rule in rules(EXTENSION):
        of, _, function = rule.name.rpartition(".")
        if of == module.__name__:
            setattr(module, function, _function(rule, launches))


def _function(rule: Rule, launches: Launches) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return launches.call(rule, args, kwargs)

    return call


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the described modules and the packages that they are in, where nothing else has them."""

    def __init__(self, names: set[str], launches: Launches) -> None:
        self._names, self._launches = names, launches

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        _fill(module, self._launches)


def _compiled_here(launches: Launches) -> None:
    """Answers a program that compiles an extension itself with the described module; one that nobody described ends
    the trace."""

    def load(name: str, *_: Any, **__: Any) -> ModuleType:
        module = described_module(name, launches)
        if module is None:
            raise Refusal(
                f"the program compiles the extension {name}, which can't run without a GPU; describe its functions"
                f" with kernels.extension('{name}.FUNCTION') in a file for --kernels (docs/extending.md)"
            )
        sys.modules[name] = module
        return module

    def patch(module: Any) -> None:
        module.load = module.load_inline = load

    when_imported({"torch.utils.cpp_extension": patch})


# -- operators -------------------------------------------------------------------------------------------------

_Library: Any = torch.library.Library
_Definition: Any = torch._library.custom_ops.CustomOpDef


def _operators() -> None:
    """Gives described operators their fake versions: those that are there, those that `schema` defines, and those that
    the program defines or loads later."""
    for rule in rules(OPERATOR):
        if not _registered(rule) and rule.schema:
            torch.library.define(rule.name, rule.schema)
            _registered(rule)
    _after(torch.ops, "load_library", lambda *_: [_registered(rule) for rule in rules(OPERATOR)])
    _after(_Definition, "__init__", _defined)
    _after(_Library, "define", _declared)


def _after(owner: Any, name: str, then: Callable[..., object]) -> None:
    """Calls `then` with the arguments of each call of `owner.name`, after it."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        then(*args)
        return out

    setattr(owner, name, call)


def _defined(definition: Any, *_: Any) -> None:
    """Gives an operator that the program defines with `torch.library.custom_op` its fake version."""
    rule = rule_of(OPERATOR, definition._qualname)
    if rule is not None and rule.shape is not None:
        definition.register_fake(rule.shape)


def _declared(library: Any, schema: str, *_: Any) -> None:
    """Does the same for one that it declares by a schema."""
    rule = rule_of(OPERATOR, f"{library.ns}::{schema.partition('(')[0].strip()}")
    if rule is not None and not isinstance(sys._getframe(2).f_locals.get("self"), _Definition):
        _registered(rule)


def _registered(rule: Rule) -> bool:
    """Registers the shape rule of an operator, and returns whether the operator is there."""
    namespace, _, name = rule.name.partition("::")
    there = hasattr(getattr(torch.ops, namespace), name.partition(".")[0])
    if there and rule.shape is not None:
        torch.library.register_fake(rule.name, rule.shape, allow_override=True)
    return there
