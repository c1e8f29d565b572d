"""Bytes of the states of a rank: parameters, gradients, optimizer state. Elementwise on plans and on tables of them.

What `symbolic.optimizer` keeps through a step, without what is not certain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.core.program.types import F64
from forerun.describe.plan.constraints import Column, Plans, values_of
from forerun.describe.plan.stack import Stack
from forerun.sources.symbolic.shapes import DTYPE_BYTES

_STATES = {"adamw": 8, "adam": 8, "sgd": 4}
"""bytes of optimizer state for an element"""


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of a rank, each (n,) or one value."""

    parameter: F64
    gradient: F64
    """buffers of gradients that live through the whole step"""
    optimizer: F64
    reduced: F64
    """gradients at the end of the step, beside those buffers"""
    local: F64
    """elements that the rank updates"""

    @property
    def resident(self) -> F64:
        """What lives through the whole step."""
        return self.parameter + self.gradient + self.optimizer


class StateBytes:
    """States of ranks with so many elements, under the habits of one stack."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._casts = stack.autocast or stack.parametrized
        """weights are cast where they are used"""
        self.fused = stack.fused_accumulation
        """gradients are added up inside the matrix products"""
        self.persistent = stack.fused_accumulation or stack.accumulate_dtype != "param"
        """gradient buffers live through the whole step, unless parameters are sharded"""

    def of(self, plan: Plans, dense: F64, experts: F64) -> States:
        """States of ranks of `plan` with `dense` and `experts` elements before data-parallel sharding."""
        total, sharded = dense + experts, plan.zero_stage == 3
        shard = dense / plan.fsdp + experts / np.maximum(1, plan.fsdp // plan.ep)
        local = np.where(plan.zero_stage == 0, total, shard)
        master, weight = sizes(plan.master_dtype), self.weight_bytes(plan)
        copy = (
            np.logical_not(sharded) & (master == 4) & (weight == 2) & (not self._casts) & np.logical_not(plan.autocast)
        )
        parameter = np.where(sharded, np.where(plan.offload == "params", 0, local * master), 0.0)
        parameter = np.where(sharded, parameter, total * np.where(copy, weight, master))
        states = (self.optimizer_bytes(plan) + 4 * copy) * (plan.offload == "none")
        unsharded = total / np.where(plan.zero_stage == 2, plan.fsdp, 1) * self.sum_bytes(plan)
        kept = np.where(sharded, 0.0, unsharded if self.persistent else 0.0)
        on_host = plan.offload == "params"
        shards = sharded & ((plan.fsdp > 1) | on_host)
        reduced = np.where(shards, np.where(on_host, 0.0, local * master), 0.0 if self.persistent else unsharded)
        return States(parameter, kept, local * states, reduced, local)

    def optimizer_bytes(self, plan: Plans) -> Column:
        """Bytes of optimizer state for an element, without a master copy."""
        return _chosen(plan.optimizer, _STATES)

    def weight_bytes(self, plan: Plans) -> Column:
        """Bytes of a weight as kernels read it."""
        return np.where(_any(plan.precision, ("fp32", "tf32")), 4, 2)

    def sum_bytes(self, plan: Plans) -> Column:
        """Bytes of an element of the buffer that gradients of micro batches are added into, at least."""
        own = self._stack.accumulate_dtype
        usual = self.weight_bytes(plan) if own == "param" else DTYPE_BYTES[own]
        return np.where(plan.accumulate_dtype == "auto", usual, _chosen(plan.accumulate_dtype, DTYPE_BYTES, 2))


def sizes(dtype: Column) -> Column:
    """Bytes of an element of each dtype."""
    return _chosen(dtype, DTYPE_BYTES)


def _chosen(column: Column, of: dict[str, int], other: int = 0) -> Column:
    """What `of` says of each value."""
    out: Any = 0
    for value, here in values_of(column):
        out = out + np.where(here, of.get(value, other), 0)
    return out


def _any(column: Column, values: tuple[str, ...]) -> Column:
    out: Any = False
    for value, here in values_of(column):
        out = out | (here & (value in values))
    return out
