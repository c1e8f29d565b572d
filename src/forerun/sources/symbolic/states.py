"""Bytes that a rank keeps through a step and that its optimizer moves, for one plan or for a table of plans.

`build` passes the elements of one rank, the bounds of a search pass columns (n,) of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from forerun.describe.kernels.optimizers import optimizer
from forerun.describe.plan import rules
from forerun.describe.plan.columns import Column, Plans, no, numbers, where
from forerun.describe.stacks.stack import Stack

_FP32 = 4


def least_moment_bytes(plan: Plans) -> Column:
    """Returns the least bytes of the optimizer's own states for an element that a rank updates."""

    def least(name: str, dtype: str) -> float:
        return optimizer(name).least_state_bytes(rules.DTYPE_BYTES[dtype])

    return numbers(least, plan.optimizer, plan.moment_dtype)


def _moment_bytes(plan: Plans) -> Column:
    """Returns the bytes of the optimizer's own states for each element that it updates by itself."""

    def each(name: str, dtype: str) -> float:
        return optimizer(name).elements.least_bytes(rules.DTYPE_BYTES[dtype])

    return numbers(each, plan.optimizer, plan.moment_dtype)


@dataclass(frozen=True, slots=True)
class States:
    """Bytes that stay allocated through the whole step: of a rank, or (n,) of the ranks of n plans."""

    parameter: Column
    gradient: Column
    optimizer: Column

    @property
    def total(self) -> Column:
        return self.parameter + self.gradient + self.optimizer


def resident_states(
    plan: Plans, stack: Stack, total: Column, local: Column, gradients: Column, moments: Column
) -> States:
    """Returns the states of a rank that uses `total` elements and updates `local` of them.

    `moments` is the bytes of the optimizer's own states. The `gradients`, in bytes, count only where their buffer stays
    allocated.
    """
    master, copied = rules.element_bytes(plan.master_dtype), rules.has_working_copy(plan, stack)
    sharded = local * master * (plan.offload != "params")
    whole = total * where(copied, rules.weight_bytes(plan), master)
    kept = no(plan.uses_fsdp) & rules.keeps_gradient_buffer(stack)
    states = (moments + local * _FP32 * copied) * (plan.offload == "none")
    return States(where(plan.uses_fsdp, sharded, whole), gradients * kept, states)


@dataclass(frozen=True, slots=True)
class Update:
    """Bytes that an optimizer moves for each element that its rank updates."""

    read: Column
    written: Column
    to_host: Column
    """bytes of master weights and optimizer state, moved where these stay on the host"""


def update_of(plan: Plans, stack: Stack, gradient_bytes: Column) -> Update:
    """Returns the memory traffic of the optimizer of `plan` for elements that it updates one by one.

    A gradient has `gradient_bytes` bytes an element.
    """
    master = where(rules.weight_bytes(plan) == 2, _FP32, rules.element_bytes(plan.master_dtype))
    kept = master + _moment_bytes(plan)
    written = kept + rules.has_working_copy(plan, stack) * rules.weight_bytes(plan)
    fused = runs_fused(plan)
    return Update(
        where(fused, kept + gradient_bytes, _unfused(plan.optimizer, "read")),
        where(fused, written, _unfused(plan.optimizer, "written")),
        kept,
    )


def least_update_of(plan: Plans, stack: Stack, gradient_bytes: Column) -> Update:
    """Returns a lower bound of the memory traffic of the optimizer of `plan` for an element of any parameter."""
    each = update_of(plan, stack, gradient_bytes)
    master = where(rules.weight_bytes(plan) == 2, _FP32, rules.element_bytes(plan.master_dtype))
    return Update(
        np.minimum(each.read, _of_matrices(plan.optimizer, "read")),
        np.minimum(each.written, _of_matrices(plan.optimizer, "written")),
        master + least_moment_bytes(plan),
    )


def runs_fused(plan: Plans) -> Column:
    """Returns whether one kernel updates a parameter: `optimizer_impl` says so, or the optimizer has no other."""
    alone = numbers(lambda name: optimizer(name).elements.unfused is None, plan.optimizer)
    return (plan.optimizer_impl == "fused") | alone


def _unfused(name: Column, what: str) -> Column:
    def of(name: str) -> float:
        unfused = optimizer(name).elements.unfused
        return 0.0 if unfused is None else float(getattr(unfused, what))

    return numbers(of, name)


def _of_matrices(name: Column, what: str) -> Column:
    def of(name: str) -> float:
        matrices = optimizer(name).matrices
        return inf if matrices is None else float(getattr(matrices, what))

    return numbers(of, name)


def update_gradient_bytes(plan: Plans, accumulated: Column) -> Column:
    """Returns the bytes of an element of the gradients that the optimizer reads.

    `accumulated` is the bytes of an element of the buffer that micro batches add their gradients to.
    """
    return where(plan.uses_fsdp, rules.element_bytes(plan.master_dtype), accumulated)


def clipping_bytes(gradient_bytes: Column) -> tuple[Column, Column]:
    """Returns the bytes an element that the norm of the gradients reads, and that scaling them reads and writes."""
    return gradient_bytes, 2 * gradient_bytes


def accumulation_bytes(made: Column, buffer: Column) -> tuple[Column, Column]:
    """Returns the bytes read and written to add a gradient of `made` bytes to a buffer element of `buffer` bytes."""
    return made + buffer, buffer
