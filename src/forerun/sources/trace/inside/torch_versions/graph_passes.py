"""Makes Inductor's graph passes take time in proportion to a graph, with the same result."""

from __future__ import annotations

import operator
from importlib import import_module
from typing import Any


class _Leaf(list[Any]):
    """A list that torch's tree functions take for one leaf."""


def keep_passes_linear() -> None:
    """Looks up the fake value of one item of a list without walking through the list.

    Inductor looks at the arguments of every node of a graph after each group of passes. A compiled multi-tensor
    optimizer has nodes with a list of n results and n nodes that each take one of them, which makes n * n steps.
    """
    utils: Any = import_module("torch._inductor.fx_utils")
    plain, fake_of = utils.get_fake_args_kwargs, utils.get_fake

    def get_fake_args_kwargs(node: Any, *graph: Any) -> tuple[bool, Any, Any]:
        if node.target is not operator.getitem:
            return plain(node, *graph)
        whole = fake_of(node.args[0], *graph)
        return (True, (_Leaf(whole), node.args[1]), {}) if type(whole) is list else plain(node, *graph)

    utils.get_fake_args_kwargs = get_fake_args_kwargs
