"""complete_plan: makes a Plan from the fields that a user gave, and derives the others from GPUs and global batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as fields_of
from typing import Any

from forerun.common.errors import ForerunError, ImpossiblePlan, UnknownName
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack

REST = -1
_FIELDS = {field.name for field in fields_of(Plan) if field.init}
_BATCH = ("micro_batch", "n_microbatches")
LAYERED = {"seq_len": 1, "stack": "pytorch-vision"}
"""default fields of the plan of a model given layer by layer, which takes samples in place of tokens"""


def complete_plan(values: Mapping[str, Any], n_gpus: int | None = None, global_batch: int | None = None) -> Plan:
    """Returns the Plan with the fields `values`.

    With `n_gpus`, a dp_shard or dp_replicate of -1 takes the GPUs that the other axes leave; when neither is given,
    dp_shard does. With `global_batch` (sequences), n_microbatches follows from it unless given.

    Raises:
        ImpossiblePlan: the degrees do not multiply to the GPUs, or the batch does not split.
        UnknownName: plans have no such field.
        ForerunError: seq_len is missing, or a field has a value out of its range.
    """
    fields = dict(values)
    for name in fields.keys() - _FIELDS:
        raise UnknownName("plan field", name, sorted(_FIELDS))
    for name, number in (("gpus", n_gpus), ("global_batch", global_batch)):
        if number is not None and number < 1:
            raise ForerunError(f"{name} must be at least 1, got {number}")
    if "seq_len" not in fields:
        raise ForerunError("plan: seq_len is missing; give --seq-len or put it in the plan file")
    _fill_data_parallel(fields, n_gpus)
    plan = Plan(**fields)
    if global_batch is not None and fields.keys().isdisjoint(_BATCH):
        fields |= _pipeline_batch(plan, global_batch)
        plan = Plan(**fields)
    if n_gpus is not None and plan.world_size != n_gpus:
        raise ImpossiblePlan(f"impossible plan: {_product(plan)} = {plan.world_size} GPUs, not {n_gpus}")
    if global_batch is None or global_batch == plan.global_batch:
        return plan
    if "n_microbatches" in fields:
        raise ImpossiblePlan(
            f"impossible plan: micro_batch {plan.micro_batch} x n_microbatches {plan.n_microbatches} x {plan.dp}"
            f" data-parallel ranks = {plan.global_batch} sequences, not the global batch of {global_batch}"
        )
    count, rest = divmod(global_batch, plan.micro_batch * plan.dp)
    if rest:
        raise ImpossiblePlan(
            f"impossible plan: global batch {global_batch} is not a multiple of micro_batch {plan.micro_batch} x"
            f" {plan.dp} data-parallel ranks"
        )
    return Plan(**fields, n_microbatches=count)


def _pipeline_batch(plan: Plan, global_batch: int) -> dict[str, int]:
    """Returns the micro_batch and n_microbatches into which the stack cuts `global_batch` sequences of a pipeline.

    The result is empty without a pipeline, or where the batch does not divide: then each sequence is a micro batch.
    """
    local, rest = divmod(global_batch, plan.dp)
    count = plan.pp * load_stack(plan.stack).microbatches_per_stage if plan.pp > 1 else 0
    if rest or not count or local % count:
        return {}
    return {"micro_batch": local // count, "n_microbatches": count}


def _fill_data_parallel(fields: dict[str, Any], n_gpus: int | None) -> None:
    if n_gpus is not None and "dp_shard" not in fields and "dp_replicate" not in fields:
        fields["dp_shard"] = REST
    open_axes = [axis for axis in ("dp_replicate", "dp_shard") if fields.get(axis) == REST]
    if not open_axes:
        return
    if n_gpus is None:
        raise ForerunError(f"plan: {open_axes[0]} -1 means the GPUs that the other axes leave; give --gpus")
    if len(open_axes) == 2:
        raise ForerunError("plan: only one of dp_replicate and dp_shard can be -1; give a degree for the other")
    axis = open_axes[0]
    others = Plan(**{**fields, axis: 1})
    if n_gpus % others.world_size:
        product = _product(others)
        total = f" = {others.world_size}" if " x " in product else ""
        raise ImpossiblePlan(f"impossible plan: {product}{total} does not divide {n_gpus} GPUs")
    fields[axis] = n_gpus // others.world_size


def _product(plan: Plan) -> str:
    axes = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    return " x ".join(f"{axis} {getattr(plan, axis)}" for axis in axes if getattr(plan, axis) > 1) or "one rank"
