"""The rows of kernels that torch does not know, by the rules of `forerun.kernels` or by their bytes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from forerun.common.errors import ForerunError
from forerun.common.units import PS_PER_US
from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.kinds import Gemm
from forerun.sources.trace.inside.kernels.tensors import Kernel, all_bytes, dtype_name
from forerun.sources.trace.opaque import Cost, Rule

_ALIGNED = 128
"""The elements of a tile that matrix units are filled by."""


def with_named(function: Any, given: Mapping[str, Any]) -> Any:
    """Calls `function` with those of the arguments `given` that it has parameters for.

    Raises:
        ForerunError: the kernel has no such parameter.
    """
    wanted = inspect.signature(function).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in wanted.values()):
        return function(**given)
    unknown = [name for name in wanted if name not in given]
    if unknown:
        asked, known = ", ".join(unknown), ", ".join(given)
        raise ForerunError(f"the rule {function.__name__} asks for {asked}; the kernel has the parameters {known}")
    return function(**{name: given[name] for name in wanted})


def kernels_of(table: OpTableBuilder, name: str, cost: Cost, read: Any, written: Any) -> list[Kernel]:
    """Returns the row of a call that costs `cost`. `read` and `written` hold its tensors."""
    bytes_read = float(all_bytes(read) if cost.bytes_read is None else cost.bytes_read)
    bytes_written = float(all_bytes(written) if cost.bytes_written is None else cost.bytes_written)
    dtype = dtype_name(read, written)
    if cost.time_us is not None:
        row = table.delay(name, round(cost.time_us * PS_PER_US), cost.launches, cost.flops, bytes_written)
    elif cost.unit and cost.flops:
        row = table.counted_gemm(name, _square(cost.flops), cost.unit, cost.flops, bytes_read, bytes_written)
    elif bytes_read + bytes_written or cost.flops:
        row = table.memory(name, bytes_read, bytes_written, cost.launches, cost.flops, dtype)
    else:
        return []
    return [Kernel(row, cost.workspace_bytes)]


def _square(flops: float) -> Gemm[int]:
    """Returns the product of three equal sides, aligned where they are long, of about as many FLOPs."""
    side = max(1, round((flops / 2.0) ** (1.0 / 3.0)))
    return Gemm(*3 * (side if side < _ALIGNED else round(side / _ALIGNED) * _ALIGNED,))


def cost_of(rule: Rule, given: Mapping[str, Any]) -> Cost:
    """Returns the cost of a call with the arguments `given`. The bytes of the arguments replace missing figures of the
    rule.
    """
    if rule.of_cost is None:
        return Cost()
    return _checked(rule, with_named(rule.of_cost, given))


def cost_of_call(rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Cost:
    """Returns the cost of a call with these arguments in order."""
    return Cost() if rule.of_cost is None else _checked(rule, rule.of_cost(*args, **kwargs))


def _checked(rule: Rule, cost: Any) -> Cost:
    if not isinstance(cost, Cost):
        raise ForerunError(f"the cost rule of {rule.kind} {rule.name} returns {type(cost).__name__}, not kernels.Cost")
    return cost


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Returns the tensors among `values`, also those in lists and tuples."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found
