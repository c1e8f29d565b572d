"""Follows calls of modules where dynamo doesn't see it.

`Modules` follows them through global hooks. Dynamo would trace those, and break there. So `Module.__call__` itself is
replaced. Dynamo treats code by the file that it is in: the new `__call__` belongs to the file of the old one, which
dynamo never captures as a frame of its own and inlines where it has to.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from forerun.trace.inside.modules import Modules


class ModuleCalls:
    """Takes the hooks of a `Modules` out and calls them from `Module.__call__` instead."""

    def __init__(self, modules: Modules) -> None:
        self.enter: Callable[..., None] = modules.enter
        self.leave: Callable[..., None] = modules.leave
        for hooks in (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is modules]:
                del hooks[key]
                torch_module._global_forward_hooks_always_called.pop(key, None)
        calls = self
        module_class: Any = torch.nn.Module
        call = module_class.__call__
        is_compiling = torch.compiler.is_compiling

        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return call(self, *args, **kwargs)
            compiled = self._modules.get("_orig_mod")
            if compiled is not None:
                _same_place(modules, self, compiled)
            calls.enter(self, args)
            try:
                return call(self, *args, **kwargs)
            finally:
                calls.leave(self, args, None)

        module_class.__call__ = _in_file(__call__, torch_module.__file__)


def _same_place(modules: Modules, wrapper: torch.nn.Module, module: torch.nn.Module) -> None:
    """`torch.compile(module)` has the path of `module`; inside another module that is where the wrapper stands."""
    if wrapper in modules.index and module in modules.index:
        inner = modules.current() != 0
        source, target = (wrapper, module) if inner else (module, wrapper)
        modules.index[target] = modules.index[source]
    elif not modules.stack:
        modules.index[wrapper] = modules.index_of(module)


def _in_file(function: Any, name: str) -> Callable[..., Any]:
    code = function.__code__.replace(co_filename=name)
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    made.__module__ = torch_module.__name__
    return made
