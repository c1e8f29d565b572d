"""Follows module calls without being seen by Dynamo.

`Modules` follows calls through global hooks. Dynamo would trace these hooks and break its graph there, so this module
replaces `Module.__call__` by a stand-in before the first compilation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as torch_module

from forerun.sources.trace.inside.modules import Modules
from forerun.sources.trace.inside.unseen import in_place_of


def follow_calls(modules: Modules) -> None:
    """Removes the hooks of `modules` and calls them from `Module.__call__` instead."""
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
        modules.enter(self, args, kwargs)
        try:
            return call(self, *args, **kwargs)
        finally:
            modules.leave(self, args, None)

    module_class.__call__ = in_place_of(call, __call__)


def _same_place(modules: Modules, wrapper: torch.nn.Module, module: torch.nn.Module) -> None:
    """Gives the wrapper that `torch.compile(module)` returns and `module` the same path: inside another module that is
    the wrapper's path, else the module's own."""
    if wrapper in modules.index and module in modules.index:
        inner = modules.current() != 0
        source, target = (wrapper, module) if inner else (module, wrapper)
        modules.index[target] = modules.index[source]
    elif not modules.stack:
        modules.index[wrapper] = modules.index_of(module)
