"""Recognises optimizer steps that Dynamo captures into a graph.

Dynamo breaks the graph around the steps of torch's own optimizers, so `step` runs as a call, which `Steps` follows. An
optimizer of the program's own may be captured whole. Then `step` is never called: the graph's operations that come from
it are marked instead, and the graph reports the step when it runs them.

This module imports Dynamo, so only `backend.py` and `graph.py` import it.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Node

from forerun.sources.trace.inside.unseen import stands_in

_symbolic_convert: Any = importlib.import_module("torch._dynamo.symbolic_convert")
_variable: Any = importlib.import_module("torch._dynamo.variables.optimizer").OptimizerVariable
_MARK = "forerun_optimizer"
_PASSED_ON = "custom"
"""AOTAutograd copies this entry of `meta` from Dynamo's nodes to the nodes that it makes of them."""
_optimizers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def install(within_mode: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Marks the operations of captured optimizer steps. `within_mode` wraps the function that makes an optimizer's
    state."""
    _mark_captured_steps()
    _make_state(within_mode)


def _mark_captured_steps() -> None:
    """Marks the operations that Dynamo captures while it inlines the stand-in for an optimizer's `step`.

    A step that breaks the graph raises an exception inside, and marks nothing.
    """
    translator = _symbolic_convert.InliningInstructionTranslator
    inline = translator.inline_call

    def inline_call(parent: Any, function: Any, args: Any, kwargs: Any, **settings: Any) -> Any:
        if not (args and isinstance(args[0], _variable) and stands_in(function.get_code())):
            return inline(parent, function, args, kwargs, **settings)
        graph = parent.output.graph
        before = set(graph.nodes)
        out = inline(parent, function, args, kwargs, **settings)
        optimizer = args[0].value
        _optimizers[id(optimizer)] = optimizer
        for node in graph.nodes:
            if node not in before:
                node.meta[_PASSED_ON] = {**node.meta.get(_PASSED_ON, {}), _MARK: id(optimizer)}
        return out

    translator.inline_call = staticmethod(inline_call)


def _make_state(within_mode: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Makes the state of a compiled optimizer under the tracing mode, which Dynamo leaves to run `_init_group`."""
    original = _variable.call_method

    def call_method(this: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name != "_init_group" or not hasattr(this.value, name):
            return original(this, tx, name, args, kwargs)
        vars(this.value)[name] = within_mode(getattr(this.value, name))
        try:
            return original(this, tx, name, args, kwargs)
        finally:
            del vars(this.value)[name]

    _variable.call_method = call_method


def update_of(steps: Sequence[Sequence[Node]]) -> tuple[int, Any]:
    """Returns the number of the first step of a graph that belongs to an optimizer, and the optimizer; the number of
    steps and None if there is none."""
    for number, nodes in enumerate(steps):
        for node in nodes:
            optimizer = _optimizers.get(node.meta.get(_PASSED_ON, {}).get(_MARK))
            if optimizer is not None:
                return number, optimizer
    return len(steps), None
