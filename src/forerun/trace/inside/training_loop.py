"""The training of a model that a caller hands over, in a traced world: built, parallelised as a plan says, stepped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from forerun.errors import ForerunError
from forerun.plan.plan import Plan
from forerun.trace.inside.parallelize_data import compute_dtype, is_sharded
from forerun.trace.inside.parallelize_mesh import Meshes
from forerun.trace.module_request import ModuleRequest

_MAX_NORM = 1.0
_OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def on_device(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs of one micro batch, copied to the device."""
    if isinstance(inputs, Mapping):
        return (), {name: _moved(value) for name, value in inputs.items()}
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    return tuple(_moved(value) for value in inputs), {}


def _moved(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type == "meta":
        return torch.empty(value.shape, dtype=value.dtype, device="cuda")
    return value.to("cuda")


def logits_of(output: Any) -> Any:
    """The tensor that a loss is computed from, in what a model returns."""
    for name in ("logits", "last_hidden_state"):
        if not isinstance(output, torch.Tensor) and getattr(output, name, None) is not None:
            return getattr(output, name)
    if isinstance(output, (tuple, list)) and output:
        return output[0]
    return output


def default_loss(output: Any, target: Any) -> torch.Tensor:
    """The loss that the model itself computed, else cross entropy of its logits.

    Raises:
        ForerunError: the model returns neither.
    """
    own = None if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if own is not None:
        return own  # type: ignore[no-any-return]
    logits = logits_of(output)
    if not isinstance(logits, torch.Tensor) or not logits.is_floating_point():
        raise ForerunError(f"the model returns {type(output).__name__} and no logits; give loss=")
    if logits.dim() == 0:
        return logits
    rows = logits.flatten(0, -2)
    if target is None:
        target = torch.zeros(logits.shape[:-1], dtype=torch.int64, device="cuda")
    return F.cross_entropy(rows.float(), target.flatten(0, rows.dim() - 2 + target.dim() - 1))


def make_optimizer(model: Iterable[nn.Module], plan: Plan, given: Callable[[Any], Any] | None) -> torch.optim.Optimizer:
    """The caller's optimizer of all parameters, or the plan's."""
    parameters = [p for part in model for p in part.parameters() if p.requires_grad]
    if given is not None:
        made: torch.optim.Optimizer = given(parameters)
        return made
    # Kernels over many tensors take DTensors of one mesh at a time.
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(_mesh(parameter), []).append(parameter)
    implementation = {"fused": plan.optimizer_impl == "fused", "foreach": plan.optimizer_impl == "foreach"}
    return _OPTIMIZERS[plan.optimizer]([{"params": group} for group in groups.values()], lr=1e-4, **implementation)


def _mesh(tensor: Any) -> Any:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def clip_gradients(parts: Iterable[nn.Module], pipeline: Any = None) -> None:
    """Clip the norm of all gradients to 1, as torchtitan does it; `pipeline` is the mesh of the stages."""
    by_mesh: dict[Any, list[Any]] = {}
    for part in parts:
        for parameter in part.parameters():
            if parameter.grad is not None:
                by_mesh.setdefault(_mesh(parameter.grad), []).append(parameter)
    norms = []
    for parameters in by_mesh.values():
        norm = get_total_norm([p.grad for p in parameters], 2.0, foreach=True)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), 2.0)
    if pipeline is not None:
        total = total**2
        torch.distributed.all_reduce(total, group=pipeline.get_group())
        total = total**0.5
    for parameters in by_mesh.values():
        clip_grads_with_norm_(parameters, _MAX_NORM, total, foreach=True)


@contextlib.contextmanager
def precision_of(plan: Plan) -> Iterator[None]:
    """Autocast where FSDP2 does not cast parameters and the model is kept in a wider dtype."""
    dtype = compute_dtype(plan)
    if is_sharded(plan) or dtype == torch.float32 or plan.master_dtype == plan.precision:
        yield
        return
    with torch.autocast("cuda", dtype=dtype):
        yield


def cross_entropy_sharded(plan: Plan) -> Any:
    """The context in which logits may be sharded over the vocabulary."""
    return loss_parallel() if plan.tp > 1 and plan.loss_parallel else contextlib.nullcontext()


class Training:
    """One training run: `step` is one optimizer step."""

    def __init__(self, parts: list[nn.Module], request: ModuleRequest, meshes: Meshes) -> None:
        self.parts, self.request, self.plan, self.meshes = parts, request, request.plan, meshes
        self.optimizer = make_optimizer(parts, self.plan, request.optimizer)
        self.loss = request.loss or default_loss

    def step(self) -> None:
        """Gradients of all micro batches, clipped, and a step of the optimizer."""
        self.optimizer.zero_grad()
        for number in range(self.plan.n_microbatches):
            with self._reduction(number == self.plan.n_microbatches - 1):
                self._micro_batch()
        clip_gradients(self.parts, self.meshes.axis("pp"))
        self.optimizer.step()

    def _reduction(self, last: bool) -> Any:
        """FSDP2 reduces gradients of every micro batch, as torchtitan lets it; DDP those of the last."""
        model = self.parts[0]
        if isinstance(model, DistributedDataParallel) and not last:
            return model.no_sync()
        return contextlib.nullcontext()

    def _micro_batch(self) -> None:
        args, named = on_device(self.request.inputs())
        target = self._target()
        with cross_entropy_sharded(self.plan), offloaded_activations(self.plan):
            with precision_of(self.plan):
                output = self.parts[0](*args, **named)
                loss = self.loss(output, target)
                if self.plan.n_microbatches > 1:
                    loss = loss / self.plan.n_microbatches
            del output
            loss.backward()

    def _target(self) -> Any:
        return None if self.request.target is None else on_device((self.request.target,))[0][0]


def offloaded_activations(plan: Plan) -> Any:
    """The context in which saved activations live in pinned host memory."""
    if plan.activation_offload:
        return torch.autograd.graph.save_on_cpu(pin_memory=True)
    return contextlib.nullcontext()
