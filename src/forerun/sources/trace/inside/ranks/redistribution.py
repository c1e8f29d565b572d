"""The host's time to redistribute DTensors in eager Python.

A DTensor is a Python object. Each redistribution runs an autograd function, makes specs and DTensors, and calls a
functional collective and its wait, all before the device gets a kernel. A program that redistributes each parameter
(SimpleFSDP) or each activation (tensor parallelism) spends hundreds of microseconds on each, which no kernel shows. The
recorder notes them as host time beside the kernels.

Code that torch.compile captured has the collectives alone, and no host time: DTensor's Python ran while it was
captured. FSDP2 gathers its parameters without redistributing them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from forerun.sources.trace.inside.data_files import read_data
from forerun.sources.trace.inside.recorder import Recorder
from forerun.sources.trace.inside.unseen import stand_in

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_OPERATORS = ("torch.distributed.tensor._dispatch", "torch.distributed.tensor._api")
"""The modules that redistribute arguments of operators and gradients, without an autograd function of their own."""


def install(recorder: Recorder) -> None:
    """Records the host's time of each redistribution from here on."""
    launches = read_data("ranks/redistribution.yaml")["launches"]

    def timed(function: Callable[..., Any], name: str) -> Any:
        count = int(launches[name])

        def call(*args: Any, **kwargs: Any) -> Any:
            if _is_eager():
                recorder.host_time(name, count)
            return function(*args, **kwargs)

        return stand_in(function, call)

    explicit: Any = import_module("torch.distributed.tensor._redistribute").Redistribute
    for method in ("forward", "backward"):
        setattr(explicit, method, staticmethod(timed(getattr(explicit, method), f"Redistribute.{method}")))
    modules: list[Any] = [import_module(name) for name in _OPERATORS]
    for module in modules:
        module.redistribute_local_tensor = timed(module.redistribute_local_tensor, "redistribute_local_tensor")


def _is_eager() -> bool:
    """Returns whether Python runs for the step itself, not to capture a graph or to find shapes."""
    return not torch.compiler.is_compiling() and torch._C._get_dispatch_mode(_FAKE) is None
