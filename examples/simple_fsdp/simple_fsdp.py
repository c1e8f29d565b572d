"""SimpleFSDP: fully sharded data parallelism as a parametrisation, in plain PyTorch.

`data_parallel` turns every parameter of a model into a DTensor that is sharded or replicated over the ranks, and lets
the model see it through a property that gathers the full weight at every use. The gather is an ordinary differentiable
operation whose gradient is the reduce-scatter (or all-reduce) of the weight's gradient. So there are no hooks that
communicate behind the model's back: forward and backward are plain PyTorch, and `torch.compile(fullgraph=True)` puts
all collectives into its graph, where it can order and overlap them.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# How a parameter lies on the mesh, and the number of mesh dimensions that this needs.
PLACEMENTS: dict[str, tuple[Placement, ...]] = {
    "replicate": (Replicate(),),
    "fully_shard": (Shard(0),),
    "hybrid_shard": (Replicate(), Shard(0)),
}
# Each rank's gradient is one term of a mean, not of a sum: the loss of each rank is a mean over its own samples.
MEAN = Partial("avg")


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of gathered weights and of gradient reductions; the sharded parameters keep their own.

    None for `param_dtype` means the parameter's own dtype, None for `reduce_dtype` means that of the gathered weight.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class SavedWeight:
    """What autograd keeps instead of (a view of) a gathered weight: all that is needed to gather it again."""

    param: DTensor
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class Gathering:
    """How the parameters of one model are gathered, and which gathered weights the running forward has made."""

    precision: MixedPrecision
    reshard_after_forward: bool
    forward_depth: int = 0
    # A weak reference keeps the storage's address from being used again, so an entry never names another tensor.
    gathered: dict[StorageWeakRef, DTensor] = field(default_factory=dict)

    def weight(self, param: DTensor) -> torch.Tensor:
        """The full weight of a parameter as a plain tensor; its gradient comes back averaged over all ranks."""
        reshards = self.reshard_after_forward and any(placement.is_shard() for placement in param.placements)
        if not reshards or not torch.is_grad_enabled():
            return gather(param, self.precision)
        if torch.compiler.is_compiling():
            return checkpoint(gather, param, self.precision, use_reentrant=False, context_fn=recompute_everything)
        full = gather(param, self.precision)
        if self.forward_depth:
            self.gathered[StorageWeakRef(full.untyped_storage())] = param
        return full

    def forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the model's `forward` on inputs in the weights' dtype, without letting autograd keep gathered weights."""
        dtype = self.precision.param_dtype
        if dtype is not None:
            args, kwargs = tree_map_only(torch.Tensor, functools.partial(cast_floating, dtype=dtype), (args, kwargs))
        if not self.reshard_after_forward or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        self.forward_depth += 1
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                return forward(*args, **kwargs)
        finally:
            self.forward_depth -= 1
            if self.forward_depth == 0:
                self.gathered.clear()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | SavedWeight:
        """Called for each tensor that autograd saves: replaces gathered weights and their views."""
        if tensor.layout is not torch.strided:
            return tensor
        param = self.gathered.get(StorageWeakRef(tensor.untyped_storage()))
        if param is None or tensor.dtype != (self.precision.param_dtype or param.dtype):
            return tensor
        return SavedWeight(param, param._version, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, saved: torch.Tensor | SavedWeight) -> torch.Tensor:
        """Called when backward needs a saved tensor: gathers the weight again where it was replaced."""
        if isinstance(saved, torch.Tensor):
            return saved
        if saved.param._version != saved.version:
            raise RuntimeError(
                "a sharded parameter was changed in place between forward and backward, so its weight cannot be "
                "gathered again; update parameters after backward, or use data_parallel(reshard_after_forward=False)"
            )
        with torch.no_grad():
            full = gather(saved.param, self.precision)
        return full.as_strided(saved.size, saved.stride, saved.offset)


def gather(param: DTensor, precision: MixedPrecision) -> torch.Tensor:
    """All-gather a parameter; the gradient is reduced to the mean over all ranks and laid out as the parameter is."""
    mesh, layout = param.device_mesh, param.placements
    reduce_dtype = precision.reduce_dtype or precision.param_dtype
    grad_layout = [MEAN] * mesh.ndim
    if layout == PLACEMENTS["hybrid_shard"]:
        # Left to itself, DTensor reduces whole gradients between the replicas first. Two steps scatter them first, so
        # that only shards travel between the replicas.
        local = param.redistribute(placements=layout, backward_dtype=reduce_dtype).to_local(
            grad_placements=[MEAN if placement.is_replicate() else placement for placement in layout]
        )
        grad_layout = [placement if placement.is_replicate() else MEAN for placement in layout]
        param = DTensor.from_local(local, mesh, layout, shape=param.shape, stride=param.stride())
    full = param.redistribute(
        placements=[Replicate()] * mesh.ndim, forward_dtype=precision.param_dtype, backward_dtype=reduce_dtype
    )
    return full.to_local(grad_placements=grad_layout)


def recompute_everything() -> tuple[Any, Any]:
    """The contexts of a checkpointed region of which the compiler must keep nothing for backward."""
    return create_selective_checkpoint_contexts(lambda *_args, **_kwargs: CheckpointPolicy.MUST_RECOMPUTE)


def cast_floating(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in `dtype` where it holds floating-point numbers, else unchanged."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def data_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    mode: str = "replicate",
    mixed_precision: MixedPrecision | None = None,
    reshard_after_forward: bool = True,
    shard_at_least: int = 0,
) -> nn.Module:
    """Make a model data parallel over all ranks of a mesh, in place, and return it.

    Args:
        model: the whole model, on the mesh's device. Rank 0's parameters are given to all ranks.
        mesh: one dimension for "replicate" and "fully_shard", two (replicate, shard) for "hybrid_shard".
        mode: "replicate" (as DDP), "fully_shard" (as FSDP) or "hybrid_shard" (as HSDP). Parameters are sharded on
            their first dimension; scalars are replicated.
        mixed_precision: dtypes of the gathered weights and of the gradient reduction; inputs of the model are cast to
            `param_dtype`.
        reshard_after_forward: gather sharded weights again in backward instead of keeping them. Without it, or where
            a weight is used outside of the model's `forward`, they live until their gradient is computed.
        shard_at_least: smaller parameters, in bytes, are replicated in every mode.

    Gradients are the mean over all ranks. The names of parameters, and so of the state dict, stay as they are; the
    state dict holds DTensors. The model must be given to the optimizer after this call.

    Raises ValueError where the mode is unknown or does not fit the mesh, and where a module keeps its weights in a
    way that a property cannot replace.
    """
    if mode not in PLACEMENTS:
        raise ValueError(f"unknown mode {mode!r}: use one of {', '.join(PLACEMENTS)}")
    placements = PLACEMENTS[mode]
    if mesh.ndim != len(placements):
        raise ValueError(f"mode {mode!r} needs a mesh of {len(placements)} dimension(s), this one has {mesh.ndim}")
    for path, module in model.named_modules():
        check_module(path, module)
    gathering = Gathering(mixed_precision or MixedPrecision(), reshard_after_forward)
    # A parameter that several modules share stays one parameter, and modules of one class share the class made of it,
    # so that what is compiled for one layer serves all.
    distributed: dict[nn.Parameter, nn.Parameter] = {}
    classes: dict[tuple[type, tuple[str, ...]], type] = {}
    for module in model.modules():
        own = {name: param for name, param in module._parameters.items() if param is not None}
        for name, param in own.items():
            if param not in distributed:
                distributed[param] = distribute(param, mesh, placements, shard_at_least)
            module._parameters[name] = distributed[param]
        if own:
            key = (type(module), tuple(own))
            if key not in classes:
                classes[key] = with_gathered_weights(*key, gathering)
            module.__class__ = classes[key]
    model.__class__ = with_forward(type(model), gathering)
    return model


def check_module(path: str, module: nn.Module) -> None:
    """Refuse what a property cannot make data parallel."""
    place = f"module {path or 'model'!r} ({type(module).__name__})"
    if isinstance(module, nn.RNNBase):
        raise ValueError(f"{place} keeps its weights in a list of its own, which cannot be gathered at use")
    for name, param in module._parameters.items():
        if isinstance(param, DTensor):
            raise ValueError(f"{place} has a parameter {name!r} that is a DTensor already")


def distribute(
    param: nn.Parameter, mesh: DeviceMesh, placements: tuple[Placement, ...], shard_at_least: int = 0
) -> nn.Parameter:
    """A parameter as DTensor over the mesh, with the values of the first rank. Scalars and parameters of fewer than
    `shard_at_least` bytes are replicated."""
    if param.ndim == 0 or param.nbytes < shard_at_least:
        placements = (Replicate(),) * mesh.ndim
    return nn.Parameter(distribute_tensor(param.detach(), mesh, placements), requires_grad=param.requires_grad)


def with_gathered_weights(cls: type, names: tuple[str, ...], gathering: Gathering) -> type:
    """A subclass whose parameters `names` read as full weights. `nn.Module` goes on storing and naming them."""

    def weight(name: str) -> property:
        return property(lambda module: gathering.weight(module._parameters[name]))

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, **{name: weight(name) for name in names}})


def with_forward(cls: type, gathering: Gathering) -> type:
    """A subclass of the root module's class whose forward lets go of the gathered weights."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return gathering.forward(functools.partial(cls.forward, module), *args, **kwargs)

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "forward": forward})
