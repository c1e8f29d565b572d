"""Makes Dynamo break graphs where that of an older torch does.

Dynamo captures more with each release of torch. A program that ran under an older one had more graph breaks, so it kept
more tensors for its backward pass and ran more kernels than its trace under the torch that is installed. Each entry of
`_LEARNED` is one thing that Dynamo learned, and how to take it away.

This module imports Dynamo, so only `backend.py` imports it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from forerun.sources.trace.job import release

_builder: Any = importlib.import_module("torch._dynamo.variables.builder")
_errors: Any = importlib.import_module("torch._dynamo.exc")


def install(dynamo: str) -> bool:
    """Disables features that Dynamo got after the release `dynamo` of torch, such as '2.9'; '' changes nothing.

    Returns whether there was anything.
    """
    unlearn = [each for since, each in _LEARNED if dynamo and release(dynamo) < since]
    for each in unlearn:
        each()
    return bool(unlearn)


def _no_decorating_record_functions() -> None:
    """Breaks the graph at a function that `torch.profiler.record_function` decorates (pytorch/pytorch#184703)."""

    def refuse(profiled: Any) -> None:
        _errors.unimplemented(
            gb_type="record_function as a decorator",
            context=str(profiled),
            explanation="Dynamo before torch 2.13 does not capture functions that record_function decorates.",
            hints=[],
        )

    if hasattr(_builder, "RecordFunctionVariable"):
        _builder.RecordFunctionVariable = refuse


_LEARNED: tuple[tuple[tuple[int, int], Callable[[], None]], ...] = (((2, 13), _no_decorating_record_functions),)
"""The first release of torch that knows each thing, and the function that takes it away."""
