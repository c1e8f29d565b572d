"""The host's time of DTensors in eager Python: to redistribute them, and to run operators on them.

A DTensor is a Python object. Each redistribution runs an autograd function, makes specs and DTensors, and calls a
functional collective and its wait, all before the device gets a kernel; to_local and from_local are autograd functions
too, and an operator looks up how its operands are laid out. A program that redistributes each parameter (SimpleFSDP,
with a selective checkpoint around each) or each activation (tensor parallelism) spends hundreds of microseconds on
each, which no kernel shows. The recorder notes them as host time beside the kernels.

Code that torch.compile captured has the collectives alone, and no host time: DTensor's Python ran while it was
captured. FSDP2 gathers its parameters without redistributing them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from forerun.core.program.types import Phase
from forerun.sources.trace.inside.data_files import read_data
from forerun.sources.trace.inside.mode import VirtualMode
from forerun.sources.trace.inside.recorder import Recorder
from forerun.sources.trace.inside.unseen import rebind, stand_in

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_OPERATORS = ("torch.distributed.tensor._dispatch", "torch.distributed.tensor._api")
"""The modules that redistribute arguments of operators and gradients, without an autograd function of their own."""
_OPERATOR = "DTensor operator"
_OF_MODEL = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD)
"""Operators of the optimizer are part of the host's work between steps, which a stack has."""
_CHECKPOINT = "create_selective_checkpoint_contexts"


def install(recorder: Recorder, mode: VirtualMode) -> None:
    """Records the host's time of each redistribution, and of each operator on DTensors, from here on."""
    launches = read_data("ranks/redistribution.yaml")["launches"]

    def timed(function: Callable[..., Any], name: str, kind: Callable[..., str] | None = None) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _is_eager():
                found = launches[name]
                recorder.host_time(name, int(found if kind is None else found[kind(*args)]))
            return function(*args, **kwargs)

        return stand_in(function, call)

    def replace(function: Any, method: str, kind: Callable[..., str] | None = None) -> None:
        name = f"{function.__name__}.{method}"
        setattr(function, method, staticmethod(timed(getattr(function, method), name, kind)))

    explicit: Any = import_module("torch.distributed.tensor._redistribute").Redistribute
    replace(explicit, "forward", lambda _, given, mesh, placements, *__: _kind(given.placements, placements))
    replace(explicit, "backward", lambda ctx, grad: _kind(grad.placements, _of_gradient(ctx.current_spec.placements)))
    modules: list[Any] = [import_module(name) for name in _OPERATORS]
    for function in (modules[1]._ToTorchTensor, modules[1]._FromTorchTensor):
        replace(function, "forward")
        replace(function, "backward")
    for module in modules:
        module.redistribute_local_tensor = timed(module.redistribute_local_tensor, "redistribute_local_tensor")
    checkpoint: Any = getattr(import_module("torch.utils.checkpoint"), _CHECKPOINT)
    rebind({id(checkpoint): timed(checkpoint, _CHECKPOINT)})
    distributed: Any = modules[1].DTensor

    def operator(cls: Any) -> None:
        if cls is distributed and recorder.phase() in _OF_MODEL and _is_eager():
            recorder.host_time(_OPERATOR, int(launches[_OPERATOR]))

    mode.on_wrapped = operator


def _kind(before: Any, after: Any) -> str:
    """Returns how a DTensor gets from its placements to others: the entry of the data file."""
    changes = [(one, other) for one, other in zip(before, after, strict=True) if one != other]
    if not changes:
        return "same"
    return "local" if all(one.is_replicate() for one, _ in changes) else "collective"


def _of_gradient(placements: Any) -> Any:
    """Returns the placements of the gradient of a tensor with `placements`: whole where they are partial sums."""
    replicate = import_module("torch.distributed.tensor").Replicate()
    return tuple(replicate if one.is_partial() else one for one in placements)


def _is_eager() -> bool:
    """Returns whether Python runs for the step itself, not to capture a graph or to find shapes."""
    return not torch.compiler.is_compiling() and torch._C._get_dispatch_mode(_FAKE) is None
