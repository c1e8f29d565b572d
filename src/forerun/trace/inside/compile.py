"""torch.compile under the tracer: torch's own capture, autograd and graph passes, with our code in Inductor's place.

Dynamo, AOTAutograd, the partitioner and Inductor's passes over graphs run as they are, so graph breaks, what is saved
for backward and what is recomputed are theirs. Only the last step, making code of a graph, is ours: a compiled graph
runs on fakes and records one kernel for each group of operators that Inductor fuses.

Dynamo is imported when the program first compiles something, not before.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from forerun.trace.inside.mode import VirtualMode
from forerun.trace.inside.modules import Modules
from forerun.trace.inside.recorder import Recorder

_BACKEND = "forerun.trace.inside.compile_backend"


def install(mode: VirtualMode, recorder: Recorder, modules: Modules) -> None:
    """Make torch.compile work in this process. To be called once, before anything imports torch._dynamo."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    _call_hooks_out_of_sight(modules)
    _own_function_for_each_device_call()
    compile_ = torch.compile
    prepared: list[Any] = []

    @functools.wraps(compile_)
    def compile(*args: Any, **kwargs: Any) -> Any:
        if not prepared:
            backend = importlib.import_module(_BACKEND)
            prepared.append(backend.Backend(mode, recorder, modules))
        return compile_(*args, **kwargs)

    torch.compile = compile


def _call_hooks_out_of_sight(modules: Modules) -> None:
    """Follow module calls from `Module.__call__` instead of global hooks: dynamo would trace those, and break there.

    Dynamo treats code by the file that it is in. The new `__call__` belongs to the file of the old one, which dynamo
    never captures as a frame of its own and inlines where it has to.
    """
    for hooks in (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is modules]:
            del hooks[key]
            torch_module._global_forward_hooks_always_called.pop(key, None)

    module_class: Any = torch.nn.Module
    call, enter, leave = module_class.__call__, modules._enter, modules._exit
    is_compiling = torch.compiler.is_compiling

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return call(self, *args, **kwargs)
        compiled = self._modules.get("_orig_mod")
        if compiled is not None:
            _same_place(modules, self, compiled)
        enter(self, args)
        try:
            return call(self, *args, **kwargs)
        finally:
            leave(self, args, None)

    module_class.__call__ = _in_file(__call__, torch_module.__file__)


def _same_place(modules: Modules, wrapper: torch.nn.Module, module: torch.nn.Module) -> None:
    """`torch.compile(module)` has the path of `module`; inside another module that is where the wrapper stands."""
    if wrapper in modules._index and module in modules._index:
        inner = modules.current() != 0
        source, target = (wrapper, module) if inner else (module, wrapper)
        modules._index[target] = modules._index[source]
    elif not modules._stack:
        modules._index[wrapper] = modules._index_of(module)


def _in_file(function: Any, name: str) -> Callable[..., Any]:
    code = function.__code__.replace(co_filename=name)
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    made.__module__ = torch_module.__name__
    return made


def _own_function_for_each_device_call() -> None:
    """`Handler already registered`: dynamo has a handler for each of these and tells them apart by identity."""
    exchange = torch.cuda._exchange_device
    if torch.cuda._maybe_exchange_device is exchange:
        torch.cuda._maybe_exchange_device = lambda device: exchange(device)
