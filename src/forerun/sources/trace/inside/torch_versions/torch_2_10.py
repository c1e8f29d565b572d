"""What torch 2.10 and older lack."""

# mypy: disable-error-code="attr-defined"
from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch._subclasses.fake_tensor as fake_tensor
import torch.distributed.distributed_c10d as c10d
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from forerun.sources.trace.inside.unseen import rebind


def adapt() -> None:
    """Adds the registration of process groups and the switch of FlashAttention 3."""
    fake: Any = fake_tensor
    module: Any = c10d
    core: Any = torch._C
    # Every fake tensor on a GPU makes a real one first, which would be fake again.
    fake.init_gpu_context = lambda *_: None
    module._register_pg_in_world = _register_group
    core._get_fa3_sdp_enabled = lambda: False  # There is no FlashAttention 3.


def adapt_compiler() -> None:
    """Adds what newer releases have of the compiler: the count of compiled frames, by which they refuse
    `fullgraph=True` without a graph, the reason of a skipped frame, and graphs whose inputs are fake tensors of another
    mode than Dynamo's."""
    frames: Any = import_module("torch._dynamo.eval_frame")
    types: Any = import_module("torch._dynamo.types")
    frames.set_fullgraph_compiled_frame_count = lambda value: value
    plain: Any = types.ConvertFrameReturn

    class ConvertFrameReturn(plain):
        """What Dynamo makes of a frame; the reason is only logged."""

        def __init__(self, *args: Any, skip_reason: str | None = None, **settings: Any) -> None:
            super().__init__(*args, **settings)

    types.ConvertFrameReturn = ConvertFrameReturn
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


def _register_group(
    pg: Any,
    backend_name: Any,
    store: Any,
    group_name: str,
    backend_config: str,
    pg_tag: str | None = None,
    add_to_default_tag: bool = False,
) -> None:
    """Enters a process group in c10d's tables, as `_register_pg_in_world` does."""
    world: Any = c10d._world
    world.pg_map[pg] = (backend_name, store)
    world.pg_names[pg] = group_name
    world.pg_backend_config[pg] = backend_config
    c10d._register_process_group(group_name, pg)
    tag = pg_tag or f"ptd:{group_name}"
    if add_to_default_tag:
        world.tags_to_pg.setdefault("", []).append(pg)
    world.tags_to_pg.setdefault(tag, []).append(pg)
    world.pg_to_tag[pg] = tag
