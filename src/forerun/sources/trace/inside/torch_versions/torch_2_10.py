"""Supplies functions that torch 2.10 and 2.11 lack."""

# mypy: disable-error-code="attr-defined"
from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch._subclasses.fake_tensor as fake_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from forerun.sources.trace.inside.unseen import rebind


def adapt() -> None:
    """Adds the switch of FlashAttention 3."""
    fake: Any = fake_tensor
    core: Any = torch._C
    # Every fake tensor on a GPU makes a real one first, which would be fake again.
    fake.init_gpu_context = lambda *_: None
    if not hasattr(core, "_get_fa3_sdp_enabled"):
        core._get_fa3_sdp_enabled = lambda: False  # There is no FlashAttention 3.


def adapt_compiler() -> None:
    """Adds two features of newer releases to the compiler. One is the count of compiled frames, by which they refuse
    `fullgraph=True` without a graph. The other is graphs whose inputs are fake tensors of another mode than
    Dynamo's.
    """
    frames: Any = import_module("torch._dynamo.eval_frame")
    if not hasattr(frames, "set_fullgraph_compiled_frame_count"):
        frames.set_fullgraph_compiled_frame_count = lambda value: value
    _take_fakes_of_another_mode()


def _take_fakes_of_another_mode() -> None:
    """Prevents `fake mode from tracing context doesn't match mode from fake tensor input`: Dynamo's mode is the one
    that counts, and AOTAutograd makes fakes of that mode of its inputs."""
    guards: Any = import_module("torch._guards")
    frontend: Any = import_module("torch._functorch._aot_autograd.frontend_utils")
    detect, process = guards.detect_fake_mode, frontend.process_inputs

    def detect_fake_mode(inputs: Any = None) -> Any:
        context = guards.TracingContext.try_get()
        return detect(inputs) if context is None or context.fake_mode is None else context.fake_mode

    def process_inputs(flat_args: Any, aot_config: Any, fake_mode: Any, *args: Any, **settings: Any) -> Any:
        own = [_of_mode(one, fake_mode, guards.TracingContext.try_get()) for one in flat_args]
        return process(own, aot_config, fake_mode, *args, **settings)

    rebind({id(detect): detect_fake_mode, id(process): process_inputs})


def _of_mode(value: Any, fake_mode: Any, context: Any) -> Any:
    """Returns an input of a graph as a fake tensor of `fake_mode`, where it is one of another mode or consists of
    such."""
    parts = [getattr(value, name) for name in value.__tensor_flatten__()[0]] if _wraps(value) else [value]
    if all(not isinstance(one, fake_tensor.FakeTensor) or one.fake_mode is fake_mode for one in parts):
        return value
    known = context.tensor_to_context.get(value) if context is not None and _wraps(value) else None
    if known is None:
        return fake_mode.from_tensor(value)
    return fake_mode.from_tensor(value, symbolic_context=known, source=known.tensor_source, trace=False)


def _wraps(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)
