"""torch.compile under the tracer: torch captures and transforms graphs as always, and the tracer replaces code
generation.

Dynamo, AOTAutograd, the partitioner and Inductor's graph passes run unchanged, so graph breaks, saved tensors and
recomputation are torch's own. Only the last step differs: a compiled graph runs on fake tensors and records one kernel
for each group of operators that Inductor would fuse.

Dynamo is imported when the program first compiles something.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from forerun.sources.trace.inside.compiled.calls import follow_calls
from forerun.sources.trace.inside.compiled.fallbacks import Fallbacks
from forerun.sources.trace.inside.mode import VirtualMode
from forerun.sources.trace.inside.modules import Modules
from forerun.sources.trace.inside.recorder import Recorder
from forerun.sources.trace.inside.unseen import stand_in

_BACKEND = "forerun.sources.trace.inside.compiled.backend"
_kernels = torch.library.Library("aten", "IMPL")
"""A library's registrations end when the library is deleted."""


def install(
    mode: VirtualMode, recorder: Recorder, modules: Modules, allow_fallback: bool = False, release: str = ""
) -> None:
    """Makes torch.compile work in this process. Call it once, before anything imports torch._dynamo.

    Code on which torch.compile fails runs uncompiled if `allow_fallback`, else it ends the trace. `release` is the
    release of torch whose Dynamo decides where graphs break; '' is the installed one.
    """
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    follow_calls(modules)
    _own_function_for_each_device_call()
    _create_outside_of_modes(mode)
    compile_ = torch.compile
    fallbacks = Fallbacks(recorder, allow_fallback)
    prepared: list[Any] = []

    def compile(*args: Any, **kwargs: Any) -> Any:
        if not prepared:
            backend = importlib.import_module(_BACKEND)
            prepared.append(backend.Backend(mode, recorder, modules, fallbacks.failed, release))
        return compile_(*args, **kwargs)

    torch.compile = stand_in(compile_, compile)


def _create_outside_of_modes(mode: VirtualMode) -> None:
    """Prevents `Could not run aten::empty.memory_format`: torch leaves all modes to compile and makes tensors there."""

    def created(operator: Any) -> Any:
        def create(*args: Any, **kwargs: Any) -> Any:
            if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
                return mode.__torch_dispatch__(operator, (), args, kwargs)  # Entering the mode has no effect here.
            with mode:
                return operator(*args, **kwargs)

        return create

    for name in ("empty.memory_format", "empty_strided"):
        packet, _, overload = name.partition(".")
        _kernels.impl(name, created(getattr(getattr(torch.ops.aten, packet), overload or "default")), "CUDA")


def _own_function_for_each_device_call() -> None:
    """Prevents `Handler already registered`: Dynamo has one handler for each of these functions and tells them apart by
    identity."""
    exchange = torch.cuda._exchange_device
    if torch.cuda._maybe_exchange_device is exchange:
        torch.cuda._maybe_exchange_device = lambda device: exchange(device)
