"""Records the Triton kernels that a program launches itself, without compiling or tuning them.

A launch reads every tensor that it is given and writes those that the kernel's source stores to. A rule of
`forerun.kernels` gives its cost. Without a rule its cost follows from its bytes, because its computation is unknown.
The tensors that it writes have unknown values afterwards. Kernels inside torch.compile are operations of torch, whose
bodies pass here too.

Triton is patched when the program imports it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from forerun.sources.trace.inside.imports import when_imported
from forerun.sources.trace.inside.kernels.opaque_calls import Launches
from forerun.sources.trace.opaque import TRITON, rule_of

_KERNELS, _TUNER = "triton.runtime.jit", "triton.runtime.autotuner"
_LOADS = ("load",)
_STORES = ("store",)
_ATOMICS = "atomic_"
_PRODUCTS = ("dot", "dot_scaled")


def install(launches: Launches) -> None:
    """Records the launches of Triton's kernels from when the program imports Triton."""
    patches: dict[str, Callable[[ModuleType], None]] = {
        _KERNELS: functools.partial(_launches, launches),
        _TUNER: _untuned,
    }
    when_imported(patches)


def _launches(launches: Launches, module: Any) -> None:
    """Records kernels with fakes among their arguments instead of compiling them for a GPU that is not there."""
    kernel_class = module.JITFunction
    run = kernel_class.run

    @functools.wraps(run)
    def recorded(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        if not any(isinstance(value, FakeTensor) for value in tensors.values()):
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        if warmup:
            return None
        name, described = self.fn.__name__, rule_of(TRITON, self.fn.__name__)
        stored = (described.writes if described else None) or stored_arguments(self.fn)
        launches.launch(described, name, {**_defaults(self.fn), **given}, tuple(stored))
        if described is None or described.of_cost is None:
            launches.recorder.note(_by_bytes(name, self.fn))
        return None

    kernel_class.run = recorded


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the parameters of a kernel that have a default."""
    every = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in every if one.default is not inspect.Parameter.empty}


def _by_bytes(name: str, function: Callable[..., Any]) -> str:
    """Returns the note about a kernel that nobody described."""
    products = "" if not multiplies(function) else " and not its matrix products"
    return f"Triton kernel {name}: it costs the bytes that it reads and writes{products}; describe it with --kernels"


def _untuned(module: Any) -> None:
    """Takes the first configuration, because nothing can be timed. Tuning keys are not needed either, and some packages
    give wrong ones (`key contains names that are not kernel arguments`)."""
    tuner = module.Autotuner
    make = tuner.__init__
    signature = inspect.signature(make)

    @functools.wraps(make)
    def init(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        names = bound.arguments["arg_names"]
        bound.arguments["key"] = [name for name in bound.arguments["key"] or () if name in names]
        make(*bound.args, **bound.kwargs)

    @functools.wraps(tuner.run)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **{**self.configs[0].all_kwargs(), **kwargs})

    tuner.__init__, tuner.run = init, run


# -- what a kernel writes ------------------------------------------------------------------------------------------


@functools.cache
def multiplies(function: Callable[..., Any]) -> bool:
    """Returns whether a kernel's source multiplies matrices."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return False
    return any(isinstance(node, ast.Attribute) and node.attr in _PRODUCTS for node in ast.walk(tree))


@functools.cache
def stored_arguments(function: Callable[..., Any]) -> frozenset[str]:
    """Returns the parameters of a kernel's Python function that it stores through; all of them where its source can't
    be read.

    A pointer is followed through assignments: the result contains parameters that appear in the address of a store,
    except inside a load, and those passed to functions other than Triton's own.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return frozenset(inspect.signature(function).parameters)
    definition = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    parameters = frozenset(one.arg for one in (*definition.args.posonlyargs, *definition.args.args))
    made_of: dict[str, set[str]] = {}
    reached: set[str] = set()
    for node in ast.walk(definition):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for name in _names(target):
                    made_of.setdefault(name, set()).update(_names(node.value))
        elif isinstance(node, ast.Call):
            reached |= _written_by(node)
    todo = list(reached)
    while todo:
        new = made_of.get(todo.pop(), set()) - reached
        reached |= new
        todo += new
    return parameters & reached


def _written_by(call: ast.Call) -> set[str]:
    """Returns the names in the addresses that a call may store to: its first argument, and the tensor descriptor whose
    method it is."""
    function = call.func
    given = {str(place): one for place, one in enumerate(call.args)} | {
        str(one.arg): one.value for one in call.keywords
    }
    if isinstance(function, ast.Attribute):
        stores = function.attr in _STORES or function.attr.startswith(_ATOMICS)
        addresses = [function.value, *(given[key] for key in ("0", "pointer") if key in given)] if stores else []
        return {name for address in addresses for name in _names(address)}
    if isinstance(function, ast.Name) and function.id not in _BUILTINS:
        return {name for argument in given.values() for name in _names(argument)}
    return set()


_BUILTINS = frozenset({"range", "min", "max", "abs", "len", "int", "float", "print"})


def _names(node: ast.AST) -> set[str]:
    """Returns the names in an expression that pointers may come from, without those inside a load."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LOADS:
        return set()
    return {name for child in ast.iter_child_nodes(node) for name in _names(child)}
