"""Data parallelism: FSDP2 and HSDP, or DDP, as torchtitan applies them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from forerun.describe.plan.plan import Plan
from forerun.sources.trace.inside.data_files import read_data
from forerun.sources.trace.inside.parallelize.depth import blocks
from forerun.sources.trace.inside.parallelize.mesh import Meshes

Note = Callable[[str], None]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}


def compute_dtype(plan: Plan) -> torch.dtype:
    """Returns the dtype of activations. Low-precision matrix units read and write bf16."""
    return DTYPES.get(plan.precision, torch.bfloat16)


def reduce_dtype(plan: Plan) -> torch.dtype:
    """Returns the dtype in which gradients are communicated; torchtitan's is fp32."""
    return DTYPES["fp32" if plan.reduce_dtype == "auto" else plan.reduce_dtype]


def is_sharded(plan: Plan) -> bool:
    """Returns whether FSDP2 is used."""
    return plan.shards_parameters


def data_parallel(
    model: nn.Module, layers: Sequence[nn.Module], meshes: Meshes, plan: Plan, experts: set[nn.Module], note: Note
) -> nn.Module:
    """Returns `model` under FSDP2, HSDP or DDP, or the model itself where one rank holds all of it.

    `layers` are the containers of its layers. `experts` are the modules that expert parallelism has split; they are
    sharded over the remaining ranks.
    """
    if is_sharded(plan):
        _shard(model, layers, meshes, plan, experts)
        _prefetch(layers, plan, note)
        return model
    mesh = meshes.replicated()
    if mesh is None:
        return model
    return _replicate(model, mesh, plan)


# -- FSDP2 ----------------------------------------------------------------------------------------------------------


def _shard(model: nn.Module, layers: Sequence[nn.Module], meshes: Meshes, plan: Plan, experts: set[nn.Module]) -> None:
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype(plan), reduce_dtype=reduce_dtype(plan))
    offload = CPUOffloadPolicy() if plan.offload == "params" else OffloadPolicy()
    common: dict[str, Any] = {"mesh": meshes.sharded(), "mp_policy": policy, "offload_policy": offload}
    reshard = plan.reshard_after_forward == "always" or (plan.reshard_after_forward == "default" and plan.pp == 1)
    front, back = around_layers(model, layers)
    if _owned_elsewhere(model, [*front, *back]):  # Their weights go into the unit of the whole model.
        front = back = []
    if _tied(front, back):
        fully_shard([*front, *back], **common, reshard_after_forward=plan.reshard_after_forward == "always")
        front = back = []
    if front:
        fully_shard(front, **common, reshard_after_forward=reshard)
    for container, name in blocks(layers):
        block = container.get_submodule(name)
        _shard_experts(block, experts, meshes, plan, common | {"reshard_after_forward": reshard})
        fully_shard(block, **common, reshard_after_forward=reshard)
    if back:
        # The backward pass needs the last layers again at once.
        fully_shard(back, **common, reshard_after_forward=plan.reshard_after_forward == "always")
    fully_shard(model, **common)


def _shard_experts(
    block: nn.Module, experts: set[nn.Module], meshes: Meshes, plan: Plan, common: dict[str, Any]
) -> None:
    for module in block.modules():
        if module in experts:
            fully_shard(module, **common | {"mesh": meshes.expert_sharded()})
            assert isinstance(module, FSDPModule)
            # A gradient is the mean over all tokens, not over the ranks that share an expert.
            module.set_gradient_divide_factor(plan.fsdp * plan.dp_replicate)


def around_layers(model: nn.Module, layers: Sequence[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Returns the leaf modules with weights before the first and after the last of `layers`: embeddings; norm and
    output."""
    inside = {id(module) for container in layers for module in container.modules()}
    order = list(model.modules())
    places = [i for i, module in enumerate(order) if id(module) in inside]
    leaves = [
        (i, module)
        for i, module in enumerate(order)
        if id(module) not in inside and module is not model
        if next(module.children(), None) is None and next(module.parameters(), None) is not None
    ]
    if not places:
        return [], []
    return [m for i, m in leaves if i < places[0]], [m for i, m in leaves if i > places[-1]]


def _owned_elsewhere(model: nn.Module, group: list[nn.Module]) -> bool:
    """Returns whether a module outside `group` has a parameter of one in it, as BERT's head and its decoder share a
    bias."""
    inside = {id(p) for module in group for p in module.parameters()}
    members = {id(module) for module in group}
    others = (module for module in model.modules() if id(module) not in members)
    return any(id(p) in inside for module in others for p in module.parameters(recurse=False))


def _tied(front: list[nn.Module], back: list[nn.Module]) -> bool:
    before = {id(p) for module in front for p in module.parameters()}
    return any(id(p) in before for module in back for p in module.parameters())


def _prefetch(layers: Sequence[nn.Module], plan: Plan, note: Note) -> None:
    """Sets how many units FSDP2 gathers ahead. By itself it gathers one."""
    if plan.prefetch == 0:
        note("prefetch 0: traced with 1, because FSDP2 always gathers one unit ahead")
    units: list[Any] = [container.get_submodule(name) for container, name in blocks(layers)]
    if plan.prefetch > 1:
        for i, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + plan.prefetch])
            unit.set_modules_to_backward_prefetch(units[max(0, i - plan.prefetch) : i][::-1])


# -- DDP ------------------------------------------------------------------------------------------------------------


def _replicate(model: nn.Module, mesh: Any, plan: Plan) -> nn.Module:
    bucket_mib = plan.ddp_bucket_mib or read_data("parallelize/torchtitan.yaml")["ddp_bucket_mib"]
    wrapped = DistributedDataParallel(
        model, device_ids=[torch.cuda.current_device()], process_group=mesh.get_group(), bucket_cap_mb=bucket_mib
    )
    hook = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}.get(plan.reduce_dtype)
    if hook is not None:
        wrapped.register_comm_hook(mesh.get_group(), hook)
    return wrapped
