"""Makes Inductor's graph passes take less time, with the same result."""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from typing import Any


def skip_unchanged_nodes() -> None:
    """Lets Inductor's update of fake values look at the arguments of a node only where it may have to compute anew.

    After each group of passes Inductor asks every node of a graph for its arguments, and then leaves those alone that
    it has seen with the same arguments. The arguments of a compiled multi-tensor optimizer are lists of all parameters.
    """
    utils: Any = import_module("torch._inductor.fx_utils")
    updater, arguments_of = utils.FakeTensorUpdater, utils.get_fake_args_kwargs
    update = updater.incremental_update

    @wraps(update)
    def incremental_update(self: Any) -> Any:
        graph = self.gm.graph if hasattr(self, "gm") else self.graph
        if getattr(self, "subgraph_updaters", None):
            return update(self)
        before = {node: node.meta.get("val") for node in graph.nodes}

        def get_fake_args_kwargs(node: Any, *graph: Any) -> tuple[bool, Any, Any]:
            seen = node in before and self.hash_node(node) in self.processed_hashes
            if seen and all(source.meta.get("val") is before.get(source) for source in node.all_input_nodes):
                return False, (), {}
            return arguments_of(node, *graph)

        utils.get_fake_args_kwargs = get_fake_args_kwargs
        try:
            return update(self)
        finally:
            utils.get_fake_args_kwargs = arguments_of

    updater.incremental_update = incremental_update
