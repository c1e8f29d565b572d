"""Tells Dynamo what it must not see, and lets what it fails on run as it is.

Imports Dynamo: only `backend.py` imports this.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from forerun.sources.trace.inside import unseen

# Modules whose functions are replaced are looked up here, where they have no types.
_convert_frame: Any = importlib.import_module("torch._dynamo.convert_frame")
_errors: Any = importlib.import_module("torch._dynamo.exc")
_eval_frame: Any = importlib.import_module("torch._dynamo.eval_frame")
_rules: Any = importlib.import_module("torch._dynamo.trace_rules")
_types: Any = importlib.import_module("torch._dynamo.types")
_variable: Any = importlib.import_module("torch.autograd.variable")


def install(failed: Callable[[str, Exception], None]) -> None:
    """Hide the tracer from Dynamo. `failed(what, error)` hears of frames that Dynamo fails on."""
    _skip_frames(failed)
    _follow_no_calls()
    _watch_no_backward()
    _allow_regions_without_graph()


def _skip_frames(failed: Callable[[str, Exception], None]) -> None:
    """Dynamo asks here about each frame once. Frames that it fails on run as they are, also where the program wants one
    graph or an error."""
    catching = _convert_frame.CatchErrorsWrapper
    convert = catching.__call__
    skip, default = _types.FrameAction.SKIP, _types.FrameAction.DEFAULT
    with_all_below = _types.FrameExecStrategy(skip, skip)
    alone = _types.FrameExecStrategy(skip, default)

    @functools.wraps(convert)
    def call(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        code = frame.f_code
        if unseen.is_own(code):
            return _types.ConvertFrameReturn(frame_exec_strategy=with_all_below, skip_reason="frame of the tracer")
        if unseen.stands_in(code):
            return _types.ConvertFrameReturn(frame_exec_strategy=alone, skip_reason="stand-in of the tracer")
        try:
            return convert(self, frame, *args, **kwargs)
        except _errors.ResumePrologueTracingError:
            raise
        except Exception as error:
            failed(f"capturing {code.co_qualname}", error)
            return _types.ConvertFrameReturn(frame_exec_strategy=with_all_below, skip_reason="dynamo failed")

    catching.__call__ = call


def _follow_no_calls() -> None:
    """A call of the tracer that is no stand-in (a mark of the program's) is a graph break."""
    _rules.LEGACY_MOD_INLINELIST |= set(unseen.PROGRAMS)
    _rules.get_legacy_mod_inlinelist.cache_clear()
    _rules.add("forerun")


def _watch_no_backward() -> None:
    """Backward on a GPU runs in a thread of autograd's engine, where Dynamo watches no frames. Here it runs in the
    thread that calls it, below a frame of the tracer."""

    class Engine(torch._C._ImperativeEngine):
        """Autograd's engine."""

        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            return super().run_backward(*args, **kwargs)

    _variable.Variable._execution_engine = Engine()


def _allow_regions_without_graph() -> None:
    """`fullgraph=True found no compiled frames`, where the one frame runs as it is."""
    count = _eval_frame.set_fullgraph_compiled_frame_count

    def set_count(value: int) -> int:
        before = int(count(value))
        return 1 if before == 0 and value < 0 else before

    _eval_frame.set_fullgraph_compiled_frame_count = set_count
