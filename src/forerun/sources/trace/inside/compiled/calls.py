"""Follows calls of modules where Dynamo doesn't see it.

`Modules` follows them through global hooks. Dynamo would follow those, and break there. So `Module.__call__` itself is
replaced by a stand-in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as torch_module

from forerun.sources.trace.inside.modules import Modules
from forerun.sources.trace.inside.unseen import in_place_of


def follow_calls(modules: Modules) -> None:
    """Take the hooks of `modules` out, and call them from `Module.__call__` instead."""
    for hooks in (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is modules]:
            del hooks[key]
            torch_module._global_forward_hooks_always_called.pop(key, None)
    module_class: Any = torch.nn.Module
    call = module_class.__call__
    capturing = torch.compiler.is_compiling

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if capturing():
            return call(self, *args, **kwargs)
        compiled = self._modules.get("_orig_mod")
        if compiled is not None:
            _same_place(modules, self, compiled)
        modules.enter(self, args)
        try:
            return call(self, *args, **kwargs)
        finally:
            modules.leave(self, args, None)

    module_class.__call__ = in_place_of(call, __call__)


def _same_place(modules: Modules, wrapper: torch.nn.Module, module: torch.nn.Module) -> None:
    """`torch.compile(module)` has the path of `module`; inside another module that is where the wrapper stands."""
    if wrapper in modules.index and module in modules.index:
        inner = modules.current() != 0
        source, target = (wrapper, module) if inner else (module, wrapper)
        modules.index[target] = modules.index[source]
    elif not modules.stack:
        modules.index[wrapper] = modules.index_of(module)
