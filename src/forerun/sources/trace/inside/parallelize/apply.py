"""Applies a plan to a model with PyTorch's own parallelism, in torchtitan's order.

Expert and tensor parallelism come first, then activation checkpointing, compilation layer by layer, and data
parallelism around all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from forerun.common.errors import ForerunError
from forerun.describe.plan.plan import Plan
from forerun.sources.trace.inside.parallelize.checkpoint import checkpoint_layers
from forerun.sources.trace.inside.parallelize.data import DTYPES, data_parallel, is_sharded
from forerun.sources.trace.inside.parallelize.depth import blocks
from forerun.sources.trace.inside.parallelize.expert import expert_parallel
from forerun.sources.trace.inside.parallelize.mesh import Meshes
from forerun.sources.trace.inside.parallelize.tensor import Styles, tensor_parallel

Note = Callable[[str], None]


def check_traceable(plan: Plan, note: Note) -> None:
    """Refuses settings that PyTorch has no counterpart of, and notes those that are traced differently.

    Raises:
        ForerunError: the plan asks for something that has no counterpart in PyTorch.
    """
    if plan.loss_chunks > 1:
        raise ForerunError("plan: loss_chunks is not put into a traced model; let the script call the fused loss")
    if plan.document_lengths:
        raise ForerunError("plan: document_lengths is not put into a traced model; let the script pack documents")
    if plan.reference:
        raise ForerunError("plan: reference is not put into a traced model; let the script run both models")
    if plan.lora_rank:
        raise ForerunError("plan: lora_rank is not put into a traced model; let the script make the adapters")
    if plan.offload == "optimizer":
        raise ForerunError("plan: offload optimizer has no counterpart in PyTorch; offload params can be traced")
    if plan.activation_offload not in (0.0, 1.0):
        raise ForerunError(
            f"plan: activation_offload {plan.activation_offload:g} can't be traced: PyTorch's save_on_cpu offloads all"
            " saved activations; use 0 or 1"
        )
    if plan.cp > 1 and plan.cp_method == "ulysses":
        raise ForerunError(
            "plan: cp_method ulysses has no counterpart in PyTorch's context_parallel; use ring or allgather"
        )
    if plan.cp > 1 and plan.cp_load_balance == "striped":
        raise ForerunError(
            "plan: cp_load_balance striped has no counterpart in PyTorch's context_parallel; use head_tail or none"
        )
    if plan.gathers_updates:
        raise ForerunError(
            f"plan: zero_stage {plan.zero_stage} has no counterpart among PyTorch's fully_shard and DDP;"
            " zero_stage must be 0 (DDP) or 3 (FSDP2) to be traced"
        )
    if plan.ep > 1 and not is_sharded(plan):
        raise ForerunError(
            f"plan: ep {plan.ep} can't be traced without zero_stage 3: DDP would average gradients of different experts"
        )
    if plan.tp > 1 and plan.dp > 1 and not is_sharded(plan):
        raise ForerunError(
            f"plan: tp {plan.tp} under DDP can't be traced: torchtitan refuses it, and DDP takes no DTensors; replace"
            f" dp_replicate {plan.dp_replicate} by dp_shard {plan.dp_replicate}"
        )
    if plan.precision not in DTYPES and plan.precision != "fp8":
        raise ForerunError(f"plan: precision {plan.precision} can't be traced; known: {', '.join(DTYPES)}, fp8")
    if plan.cuda_graphs:
        note("cuda_graphs: traced without CUDA graphs, which change the host's launch costs and not the kernels")
    if plan.async_tp and not plan.compiles_layers:
        note("async_tp: no effect without compile, as only the compiler fuses matrix products with collectives")
    if not plan.overlap_grad_reduce:
        note("overlap_grad_reduce false: traced with overlap, because DDP and FSDP2 always overlap")


def parallelize(
    model: nn.Module,
    layers: Sequence[nn.Module],
    meshes: Meshes,
    plan: Plan,
    tp_plan: Styles | None,
    note: Note,
) -> nn.Module:
    """Returns `model`, given on the meta device, sharded, wrapped and with memory on the device. `layers` are the
    containers of its layers.

    Raises:
        ForerunError: the plan does not fit the model.
    """
    if plan.master_dtype != "fp32":
        model.to(DTYPES[plan.master_dtype])
    experts: set[nn.Module] = set()
    if plan.ep > 1:
        experts = expert_parallel(model, meshes, plan)
    if plan.tp > 1:
        tensor_parallel(model, meshes.axis("tp"), plan, tp_plan, note)
        if plan.async_tp and plan.compiles_layers:
            _fuse_with_products(meshes.axis("tp"))
    checkpoint_layers(layers, plan)
    if plan.compiles_layers:
        compile_layers(model, layers)
    host = "cpu" if plan.offload == "params" else "cuda"
    if not is_sharded(plan):
        materialise(model, host)  # DDP checks the device of parameters.
    wrapped = data_parallel(model, layers, meshes, plan, experts, note)
    if is_sharded(plan):
        materialise(model, host)
    return wrapped


def _fuse_with_products(mesh: Any) -> None:
    """Lets the compiler split collectives over `mesh` and overlap the parts with the matrix products around them."""
    config: Any = import_module("torch._inductor.config")
    config._micro_pipeline_tp = True
    import_module("torch.distributed._symmetric_memory").enable_symm_mem_for_group(mesh.get_group().group_name)


def materialise(model: nn.Module, device: str, buffer_device: str = "cuda") -> None:
    """Allocates parameters and buffers that are on the meta device; shared ones stay shared."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(weight) not in made:
                made[id(weight)] = nn.Parameter(torch.empty_like(weight, device=device), weight.requires_grad)
            module._parameters[name] = made[id(weight)]
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.device.type == "meta":
                module._buffers[name] = made.setdefault(id(buffer), torch.empty_like(buffer, device=buffer_device))


def compile_layers(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Calls `torch.compile` on each layer, or on the whole model if it has none."""
    for module in [container.get_submodule(name) for container, name in blocks(layers)] or [model]:
        module.compile(fullgraph=True)
        _wait_for_inputs(module)


def _wait_for_inputs(compiled: nn.Module) -> None:
    """Makes a compiled module wait for those of its inputs that a collective is still computing.

    AOTAutograd waits for such an input itself, and then computes no gradient for it: with PyTorch 2.13, backward of a
    compiled layer behind an embedding in `RowwiseParallel` ends in an AttributeError, on GPUs too.
    """
    module: Any = compiled
    call = module._compiled_call_impl

    def call_with_complete(*args: Any, **kwargs: Any) -> Any:
        complete = (_Complete.apply(x) if isinstance(x, AsyncCollectiveTensor) else x for x in args)
        return call(*complete, **kwargs)

    module._compiled_call_impl = call_with_complete


class _Complete(torch.autograd.Function):
    """Waits for a collective and returns its result as a plain tensor."""

    @staticmethod
    def forward(_: Any, result: Any) -> torch.Tensor:
        complete: torch.Tensor = result.trigger_wait()
        return complete.view_as(complete)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
