"""Which module a kernel belongs to: in forward the one that runs, in backward the one whose forward made the node."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
_NO_SEQUENCE = 1 << 62
"""gradient accumulators carry a number above all others"""


class Modules:
    """Follows module calls through global hooks. Index 0 is what runs outside all modules."""

    def __init__(self) -> None:
        self.paths: list[str] = [""]
        self.roots: WeakKeyDictionary[torch.nn.Module, None] = WeakKeyDictionary()
        """modules that were called from outside all modules"""
        self.backward_seen = False
        self.at_forward: Callable[[], None] | None = None
        """called before modules that are called from outside all modules"""
        self._index: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()
        self._numbers: dict[str, int] = {"": 0}
        self._stack: list[int] = []
        self._sequence: list[int] = []
        """autograd sequence numbers from which on the module of the same place in `_module` ran"""
        self._module: list[int] = []
        self._last = 0
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._exit, always_call=True)

    def current(self) -> int:
        """Index of the module that the operation in progress belongs to."""
        if self._stack:
            return self._stack[-1]
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
        """Drop what only the backward of an earlier step would ask for."""
        self._sequence, self._module = self._sequence[-1:], self._module[-1:]

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        if not self._stack and self.at_forward is not None:
            self.at_forward()
        self._stack.append(self._index_of(module))
        self._note()

    def _exit(self, _module: torch.nn.Module, _args: Any, _out: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._note()

    def _note(self) -> None:
        number = torch.autograd._get_sequence_nr()
        module = self._stack[-1] if self._stack else 0
        if self._sequence and self._sequence[-1] == number:
            self._module[-1] = module
        else:
            self._sequence.append(number)
            self._module.append(module)

    def _index_of(self, module: torch.nn.Module) -> int:
        found = self._index.get(module)
        if found is None:
            if not self._stack:
                self.roots[module] = None
            above = self.paths[self._stack[-1]] + "." if self._stack and self._stack[-1] else ""
            for name, child in module.named_modules():
                if child not in self._index:
                    self._index[child] = self._number(plain(above + name) if name or above else type(module).__name__)
            found = self._index[module]
        return found

    def _number(self, path: str) -> int:
        number = self._numbers.get(path)
        if number is None:
            number = self._numbers[path] = len(self.paths)
            self.paths.append(path)
        return number


def plain(path: str) -> str:
    """A module path without the names that wrappers (DDP, compile, checkpointing, FSDP1) put in."""
    for wrapper in _WRAPPERS:
        path = path.replace("." + wrapper, ".")
        while path.startswith(wrapper):
            path = path[len(wrapper) :]
    return path.rstrip(".")
