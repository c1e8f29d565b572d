"""Hides the tracer from Dynamo, and reports the code that Dynamo fails on.

This module imports Dynamo, so only `backend.py` imports it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from forerun.sources.trace.inside import unseen

# These modules have type Any, because this module replaces their functions.
_convert_frame: Any = importlib.import_module("torch._dynamo.convert_frame")
_errors: Any = importlib.import_module("torch._dynamo.exc")
_eval_frame: Any = importlib.import_module("torch._dynamo.eval_frame")
_rules: Any = importlib.import_module("torch._dynamo.trace_rules")
_types: Any = importlib.import_module("torch._dynamo.types")
_variable: Any = importlib.import_module("torch.autograd.variable")


Failed = Callable[[str, Exception, str], None]
"""Called with the name of the failed work, the exception, and file and line of the program."""


def install(failed: Failed) -> None:
    """Hides the tracer from Dynamo. `failed` is called for each frame that Dynamo fails on. If it returns, the frame
    runs uncompiled."""
    _skip_frames(failed)
    _report_limits(failed)
    _follow_no_calls()
    _watch_no_backward()
    _allow_regions_without_graph()


def _skip_frames(failed: Failed) -> None:
    """Skips the tracer's frames, and runs frames that Dynamo fails on uncompiled, also under `fullgraph=True`.

    Dynamo asks about each frame once.
    """
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
            failed(code.co_qualname, error, f"{code.co_filename}:{code.co_firstlineno}")
            return _types.ConvertFrameReturn(frame_exec_strategy=with_all_below, skip_reason="dynamo failed")

    catching.__call__ = call


def _report_limits(failed: Failed) -> None:
    """Reports frames that Dynamo recompiles so often that it gives up, and runs them uncompiled from then on."""
    exceeds = _convert_frame.exceeds_recompile_limit

    @functools.wraps(exceeds)
    def call(cache_size: Any, compile_id: Any, *args: Any) -> Any:
        exceeded, limit = exceeds(cache_size, compile_id, *args)
        if exceeded:
            code = sys._getframe(1).f_locals["code"]
            error = RuntimeError(f"it was compiled more often than torch._dynamo.config.{limit} allows")
            failed(code.co_qualname, error, f"{code.co_filename}:{code.co_firstlineno}")
        return exceeded, limit

    _convert_frame.exceeds_recompile_limit = call


def _follow_no_calls() -> None:
    """Makes a call of the tracer that is no stand-in, such as `forerun.mark_step`, a graph break."""
    inlined = frozenset(_rules.get_legacy_mod_inlinelist()) | frozenset(unseen.OF_PROGRAMS)
    _rules.get_legacy_mod_inlinelist = functools.cache(lambda: inlined)  # torch clears this cache.
    _rules.add("forerun")


def _watch_no_backward() -> None:
    """Runs the backward pass below a frame of the tracer, so that Dynamo compiles nothing in it.

    On a GPU the backward pass runs in a thread of autograd's engine, which Dynamo doesn't watch. Here it runs in the
    thread that calls it.
    """

    class Engine(torch._C._ImperativeEngine):
        """Autograd's engine, called from Python."""

        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            return super().run_backward(*args, **kwargs)

    _variable.Variable._execution_engine = Engine()


def _allow_regions_without_graph() -> None:
    """Prevents the error `fullgraph=True found no compiled frames` where the only frame runs uncompiled."""
    count = _eval_frame.set_fullgraph_compiled_frame_count

    def set_count(value: int) -> int:
        before = int(count(value))
        return 1 if before == 0 and value < 0 else before

    _eval_frame.set_fullgraph_compiled_frame_count = set_count
