"""Records the Triton kernels that a program launches itself, without compiling or tuning them.

A launch reads every tensor that it is given and writes those that the kernel's source stores to. It costs its bytes,
because what it computes is not known, and the tensors that it writes have unknown values afterwards. Kernels inside
torch.compile are operations of torch and don't pass here.

Triton is patched when the program imports it.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from forerun.sources.trace.inside.kernels.tensors import all_bytes, dtype_name
from forerun.sources.trace.inside.mode import VirtualMode
from forerun.sources.trace.inside.recorder import Recorder

_KERNELS, _TUNER = "triton.runtime.jit", "triton.runtime.autotuner"
_LOADS = ("load",)
_STORES = ("store",)
_ATOMICS = "atomic_"


def install(mode: VirtualMode, recorder: Recorder) -> None:
    """Records the launches of Triton's kernels from when the program imports Triton."""
    patches: dict[str, Callable[[ModuleType], None]] = {
        _KERNELS: functools.partial(_launches, mode, recorder),
        _TUNER: _untuned,
    }
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
    sys.meta_path.insert(0, _Finder(patches))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as Python does, and patches some of them once they are loaded."""

    def __init__(self, patches: Mapping[str, Callable[[ModuleType], None]]) -> None:
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


def _launches(mode: VirtualMode, recorder: Recorder, module: Any) -> None:
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
        stored = stored_arguments(self.fn)
        written = [value for name, value in tensors.items() if name in stored]
        if recorder.recording and not recorder.paused:
            read = [value for name, value in tensors.items() if name not in stored]
            sizes = (float(all_bytes(read)), float(all_bytes(written)))
            recorder.node(recorder.ops.memory(self.fn.__name__, *sizes, 1, 0.0, dtype_name(list(tensors.values()))))
            recorder.note(f"Triton kernel {self.fn.__name__}: it costs the bytes that it reads and writes")
        mode.oracle.overwritten(written)
        return None

    kernel_class.run = recorded


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
    """Returns the names in the addresses that a call may store to."""
    function = call.func
    if isinstance(function, ast.Attribute):
        stores = function.attr in _STORES or function.attr.startswith(_ATOMICS)
        return _names(call.args[0]) if stores and call.args else set()
    if isinstance(function, ast.Name) and function.id not in _BUILTINS:
        return {name for argument in call.args for name in _names(argument)}
    return set()


_BUILTINS = frozenset({"range", "min", "max", "abs", "len", "int", "float", "print"})


def _names(node: ast.AST) -> set[str]:
    """Returns the names in an expression that pointers may come from, without those inside a load."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LOADS:
        return set()
    return {name for child in ast.iter_child_nodes(node) for name in _names(child)}
