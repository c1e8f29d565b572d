"""Finds the module that a kernel belongs to: in forward the one that runs, in backward the one whose forward made the
autograd node."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._C._autograd import _get_sequence_nr
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from forerun.sources.trace.inside.module_tree import modules_in

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_NO_SEQUENCE = 1 << 62
"""The sequence number of gradient accumulators is above this."""


class Modules:
    """Follows module calls through global hooks. Index 0 stands for everything outside all modules."""

    def __init__(self) -> None:
        self.paths: list[str] = [""]
        self.roots: WeakKeyDictionary[torch.nn.Module, None] = WeakKeyDictionary()
        """The modules that were called from outside all modules."""
        self.backward_seen = False
        self.at_forward: Callable[[], None] | None = None
        """Called before each module that is called from outside all modules."""
        self.at_root: Callable[[torch.nn.Module, Any, Any], None] | None = None
        """Called with each such module, its arguments and its keyword arguments."""
        self.index: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()
        """The index of every module that was called, or is inside one that was."""
        self._by_path: dict[str, int] = {"": 0}
        self.stack: list[int] = []
        """The indices of the modules that run, innermost last."""
        self._sequence: list[int] = []
        """The autograd sequence numbers from which on the module at the same position of `_module` ran."""
        self._module: list[int] = []
        self._last = 0
        register_module_forward_pre_hook(self.enter)
        register_module_forward_hook(self.leave, always_call=True)

    def current(self) -> int:
        """Returns the index of the module that the operation in progress belongs to."""
        if self.stack:
            return self.stack[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return 0
        self.backward_seen = True
        number = node._sequence_nr()
        if number < _NO_SEQUENCE and self._sequence:
            place = bisect_right(self._sequence, number) - 1
            self._last = self._module[place] if place >= 0 else 0
        return self._last

    def forget_sequence(self) -> None:
        """Drops the entries that only the backward pass of an earlier step would need."""
        self._sequence, self._module = self._sequence[-1:], self._module[-1:]

    def enter(self, module: torch.nn.Module, args: Any, kwargs: Any = MappingProxyType({})) -> None:
        """Notes that `module` begins its forward."""
        if not self.stack and self.at_forward is not None:
            self.at_forward()
        if not self.stack and self.at_root is not None:
            self.at_root(module, args, kwargs)
        self.stack.append(self.index_of(module))
        self._note()

    def leave(self, _module: torch.nn.Module, _args: Any, _out: Any) -> None:
        """Notes that the innermost module ends its forward."""
        if self.stack:
            self.stack.pop()
        self._note()

    def _note(self) -> None:
        number = _get_sequence_nr()
        module = self.stack[-1] if self.stack else 0
        if self._sequence and self._sequence[-1] == number:
            self._module[-1] = module
        else:
            self._sequence.append(number)
            self._module.append(module)

    def index_of(self, module: torch.nn.Module) -> int:
        """Returns the index of `module`, which the innermost running module calls."""
        found = self.index.get(module)
        if found is None:
            if not self.stack:
                self.roots[module] = None
            above = self.paths[self.stack[-1]] + "." if self.stack and self.stack[-1] else ""
            for name, child in modules_in(module):
                if child not in self.index:
                    self.index[child] = self.number_of(plain(above + name) if name or above else type(module).__name__)
            found = self.index[module]
        return found

    def number_of(self, path: str) -> int:
        """Returns the index that stands for a path."""
        number = self._by_path.get(path)
        if number is None:
            number = self._by_path[path] = len(self.paths)
            self.paths.append(path)
        return number


def plain(path: str) -> str:
    """Returns a module path without the names that wrappers (DDP, compile, checkpointing, FSDP1) insert."""
    names = path.split(".")
    own = [name for i, name in enumerate(names) if name not in _WRAPPERS and not (name == "module" and i == 0)]
    return ".".join(own)
