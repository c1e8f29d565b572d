"""Records calls of kernels that torch does not know, by the rules of `forerun.kernels` or by their bytes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.common.errors import ForerunError
from forerun.sources.trace.inside.kernels.opaque_costs import cost_of, cost_of_call, kernels_of, tensors_in
from forerun.sources.trace.inside.mode import VirtualMode
from forerun.sources.trace.inside.recorder import Recorder
from forerun.sources.trace.opaque import Cost, Rule


class Launches:
    """Records launches of kernels that write to their arguments, and calls that return tensors."""

    def __init__(self, mode: VirtualMode, recorder: Recorder) -> None:
        self.mode, self.recorder = mode, recorder

    def launch(self, rule: Rule | None, name: str, given: Mapping[str, Any], written: Sequence[str]) -> None:
        """Records one launch with the named arguments `given`. The launch writes to those in `written`."""
        recorder = self.recorder
        stored = tensors_in(given[key] for key in written if key in given)
        if recorder.recording and not recorder.paused:
            read = tensors_in(value for key, value in given.items() if key not in written)
            self.record(name, Cost() if rule is None else cost_of(rule, given), read, stored)
        self.mode.oracle.overwritten(stored)

    def record(self, name: str, cost: Cost, read: Any, written: Any) -> int:
        """Appends the node of a call and returns its number, -1 if it does nothing."""
        recorder, node = self.recorder, -1
        for kernel in kernels_of(recorder.ops, name, cost, read, written):
            node = recorder.node(kernel.op)
            if kernel.workspace_bytes:
                recorder.memory.workspace(kernel.workspace_bytes, node)
        return node

    def call(self, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls the function of a compiled module by its rule and returns its results.

        Raises:
            ForerunError: the rule does not describe the result of the function.
        """
        if rule.shape is None:
            raise ForerunError(f"kernels.extension({rule.name!r}) has no shape rule: put it on a function")
        recorder = self.recorder
        recorder.paused += 1
        try:
            out = rule.shape(*args, **kwargs)
        finally:
            recorder.paused -= 1
        names = inspect.signature(rule.shape).parameters
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        changed = tensors_in(given[key] for key in rule.writes or () if key in given)
        node = -1
        if recorder.recording and not recorder.paused:
            cost = cost_of_call(rule, args, kwargs)
            node = self.record(rule.name, cost, tensors_in(given.values()), [*changed, *tensors_in([out])])
        self.mode.seen(out, node)
        self.mode.oracle.overwritten(changed)
        return out
