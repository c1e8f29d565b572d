"""Optimizers whose steps Dynamo captures.

torch's own break the graph around their update, so that their `step` runs as a call, which `Steps` follows. One of a
program's own may be captured whole: then there is no call, and the operations of the graph that come from it are
marked, so that the graph tells `Steps` of the step.

Imports Dynamo: only `backend.py` and `graph.py` import this.
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
"""what AOTAutograd hands from Dynamo's nodes to those that they become"""
_optimizers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def install(within_mode: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Mark what Dynamo captures of steps. State that it lets an optimizer make for real is made `within_mode`."""
    _mark_captured_steps()
    _make_state(within_mode)


def _mark_captured_steps() -> None:
    """Where the stand-in for a step is captured, it does not run. A step that breaks the graph ends in an exception
    here, and leaves no mark."""
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
    """Dynamo lets a compiled optimizer make its state for real, outside of all modes."""
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
    """The first of the steps of a graph that belongs to an optimizer, and the optimizer. Where none does: the number of
    steps, and None."""
    for number, nodes in enumerate(steps):
        for node in nodes:
            optimizer = _optimizers.get(node.meta.get(_PASSED_ON, {}).get(_MARK, 0))
            if optimizer is not None:
                return number, optimizer
    return len(steps), None
