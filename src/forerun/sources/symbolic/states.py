"""Bytes that a rank keeps through a step and that its optimizer moves, for one plan or for a table of plans.

`build` passes the elements of one rank, the bounds of a search pass columns (n,) of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forerun.common.shipped import shipped_data
from forerun.describe.plan import rules
from forerun.describe.plan.columns import Column, Plans, no, numbers, where
from forerun.describe.stacks.stack import Stack

_FP32 = 4


def tensors_per_launch() -> int:
    """Returns the number of tensors that one multi-tensor kernel updates."""
    return int(shipped_data(__package__, "optimizers.yaml")["tensors_per_launch"]["value"])


def _optimizer(name: str) -> dict[str, Any]:
    entry: dict[str, Any] = shipped_data(__package__, "optimizers.yaml")["optimizers"][name]
    return entry


def state_tensors(optimizer: Column) -> Column:
    """Returns the number of tensors that an optimizer keeps for each parameter."""
    return numbers(lambda name: _optimizer(name)["tensors"], optimizer)


def _moment_bytes(plan: Plans) -> Column:
    """Returns the bytes of the optimizer's tensors for each parameter."""
    return rules.element_bytes(plan.moment_dtype) * state_tensors(plan.optimizer)


@dataclass(frozen=True, slots=True)
class States:
    """Bytes that stay allocated through the whole step: of a rank, or (n,) of the ranks of n plans."""

    parameter: Column
    gradient: Column
    optimizer: Column

    @property
    def total(self) -> Column:
        return self.parameter + self.gradient + self.optimizer


def resident_states(plan: Plans, stack: Stack, total: Column, local: Column, gradients: Column) -> States:
    """Returns the states of a rank that uses `total` elements and updates `local` of them.

    Its `gradients`, in bytes, count only where their buffer stays allocated.
    """
    master, copied = rules.element_bytes(plan.master_dtype), rules.has_working_copy(plan, stack)
    sharded = local * master * (plan.offload != "params")
    whole = total * where(copied, rules.weight_bytes(plan), master)
    kept = no(plan.uses_fsdp) & rules.keeps_gradient_buffer(stack)
    states = (_moment_bytes(plan) + _FP32 * copied) * (plan.offload == "none")
    return States(where(plan.uses_fsdp, sharded, whole), gradients * kept, local * states)


@dataclass(frozen=True, slots=True)
class Update:
    """Bytes that an optimizer moves for each element that its rank updates."""

    read: Column
    written: Column
    to_host: Column
    """bytes of master weights and optimizer state, moved where these stay on the host"""


def update_of(plan: Plans, stack: Stack, gradient_bytes: Column) -> Update:
    """Returns what the optimizer of `plan` moves; a gradient has `gradient_bytes` bytes an element."""
    master = where(rules.weight_bytes(plan) == 2, _FP32, rules.element_bytes(plan.master_dtype))
    kept = master + _moment_bytes(plan)
    written = kept + rules.has_working_copy(plan, stack) * rules.weight_bytes(plan)
    fused = plan.optimizer_impl == "fused"
    return Update(
        where(fused, kept + gradient_bytes, _unfused(plan.optimizer, "read")),
        where(fused, written, _unfused(plan.optimizer, "written")),
        kept,
    )


def unfused_kernels(optimizer: str) -> int:
    """Returns the number of kernels that an unfused optimizer runs for each tensor, or list of tensors."""
    return int(_unfused(optimizer, "kernels"))


def _unfused(optimizer: Column, what: str) -> Column:
    return numbers(lambda name: _optimizer(name)["unfused"][what], optimizer)


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
