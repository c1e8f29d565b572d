"""The modules inside a module, and their tensors, read from torch's own tables.

Programs replace the methods that would tell: Megatron's wrapper has a list in place of `buffers`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


def modules_in(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields the path and the module of `root` and of each module inside it, once, in the order of `named_modules`."""
    seen: set[int] = set()
    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        below = [
            (f"{path}.{name}" if path else name, child) for name, child in module._modules.items() if child is not None
        ]
        waiting += reversed(below)


def parameters_in(root: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yields the parameters of `root` and of the modules inside it."""
    for _, module in modules_in(root):
        yield from (one for one in module._parameters.values() if one is not None)


def buffers_in(root: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yields the buffers of `root` and of the modules inside it."""
    for _, module in modules_in(root):
        yield from (one for one in module._buffers.values() if one is not None)
