"""A lower bound of memory, to discard plans without simulating them.

It leaves out what is not certain (gathered parameters, buffers of collectives, gradients while backward still runs),
so that it never exceeds what a simulation of the same plan gives: what it discards can't fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from forerun.model.parameters import layer_parameters, outer_parameters
from forerun.model.spec import ModelSpec
from forerun.plan.plan import Plan
from forerun.program.types import N_CATEGORIES, Category
from forerun.search.units import EMBEDDING, HEAD, UnitRun
from forerun.symbolic.schedule import layers_of_stages, rank_stages

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_STATES = {"adamw": 8, "adam": 8, "sgd": 4}
"""bytes of optimizer state for an element"""
_SMALLEST_GRADIENT = 2
_V_SCHEDULES = ("ZBV", "DualPipeV")


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """Bytes that the fullest rank holds at least, by cause."""

    where: str
    by_category: dict[str, int]

    @property
    def total(self) -> int:
        """Sum of the categories, bytes."""
        return sum(self.by_category.values())


class MemoryBounds:
    """Lower bounds of the plans of one model."""

    def __init__(self, model: ModelSpec) -> None:
        self.model = model
        parts = [layer_parameters(model, layer) for layer in range(model.n_layers)]
        experts = [part.get("experts", 0) for part in parts]
        dense = [sum(part.values()) - e for part, e in zip(parts, experts, strict=True)]
        outer = outer_parameters(model)
        self._embedding = outer.get("embedding", 0)
        self._dense, self._experts = [0, *accumulate(dense)], [0, *accumulate(experts)]
        self._outer = sum(outer.values())
        self._known: dict[tuple[object, ...], MemoryBound] = {}

    def of_states(self, plan: Plan) -> MemoryBound:
        """Before the optimizer step: parameters, gradients and optimizer state, the mean over pipeline ranks."""
        layers = self.model.n_layers
        dense, experts = (self._dense[layers] + self._outer) / plan.pp, self._experts[layers] / plan.pp
        parameter, gradient, optimizer = self._states(plan, dense, experts)
        states = {"parameter": int(parameter), "gradient": int(gradient), "optimizer": int(optimizer)}
        return MemoryBound("the mean rank" if plan.pp > 1 else "every rank", states)

    def of_first_rank(self, plan: Plan, units: UnitRun) -> MemoryBound:
        """The first rank of the pipeline at its first backward pass: parameters, optimizer state, saved activations."""
        sizes = layers_of_stages(self.model.n_layers, plan)
        starts = [0, *accumulate(sizes)]
        mine = rank_stages(plan, 0)
        dense = self._embedding + sum(self._dense[starts[s + 1]] - self._dense[starts[s]] for s in mine)
        experts = sum(self._experts[starts[s + 1]] - self._experts[starts[s]] for s in mine)
        parameter, _, optimizer = self._states(plan, dense, experts)
        passes = _forwards_before_backward(plan, mine)
        key = (id(units), *sizes, *passes, int(parameter), int(optimizer), plan.activation_offload)
        if key not in self._known:
            resident = np.zeros(N_CATEGORIES, np.int64)
            resident[Category.PARAMETER], resident[Category.OPTIMIZER] = int(parameter), int(optimizer)
            held = units.peak(*self._numbers(plan, passes, starts), resident)
            held["activation"] = int(held.get("activation", 0) * (1 - plan.activation_offload))
            self._known[key] = MemoryBound("stage 0" if plan.pp > 1 else "every rank", held)
        return self._known[key]

    def _numbers(self, plan: Plan, passes: list[int], starts: list[int]) -> tuple[list[int], int]:
        """Units of the forward passes through `passes` (stages), and the unit whose backward pass comes first."""
        numbers: list[int] = []
        for stage in passes:
            numbers += [EMBEDDING] * (stage == 0)
            numbers += range(starts[stage], starts[stage + 1])
            numbers += [HEAD] * (stage == plan.n_stages - 1)
        return numbers, numbers[-1]

    def _states(self, plan: Plan, dense: float, experts: float) -> tuple[float, float, float]:
        """Bytes of parameters, gradients and optimizer state of a rank with so many elements over all of tp and ep."""
        dense, experts = dense / plan.tp, experts / plan.ep
        elements = dense + experts
        local = elements
        if plan.zero_stage:
            local = dense / plan.fsdp + experts / max(1, plan.fsdp // plan.ep)
        master = _BYTES[plan.master_dtype]
        weight = 4 if plan.precision in ("fp32", "tf32") else 2
        states = _STATES[plan.optimizer] if plan.offload == "none" else 0
        if plan.zero_stage == 3:
            return local * master, elements / plan.fsdp * _SMALLEST_GRADIENT, local * states
        copy = master if plan.offload == "none" and master > weight else 0
        gradient = elements / (1 if plan.zero_stage < 2 else plan.fsdp) * _SMALLEST_GRADIENT
        return elements * min(weight, master), gradient, local * (states + copy)


def _forwards_before_backward(plan: Plan, stages: list[int]) -> list[int]:
    """Stages of the forward passes that the first pipeline rank has certainly run before its first backward pass."""
    p, v, m = plan.pp, plan.virtual_stages, plan.n_microbatches
    if p == 1 or plan.pp_schedule in _V_SCHEDULES:
        return stages
    if plan.pp_schedule == "GPipe":
        return [0] * m
    if plan.pp_schedule == "Interleaved1F1B":
        ahead = min(m * v, 2 * (p - 1) + (v - 1) * p + 1)
        return [(k % (p * v)) // p * p for k in range(ahead)]
    return [0] * min(p, m)
