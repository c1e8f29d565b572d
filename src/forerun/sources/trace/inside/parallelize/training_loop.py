"""Trains a model that a caller hands over, parallelised as a plan says, in a traced process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from forerun.common.errors import ForerunError
from forerun.describe.kernels.attention import AUTO, names_in
from forerun.describe.kernels.optimizers import optimizer, optimizer_names
from forerun.describe.plan.plan import Plan
from forerun.sources.trace.inside.data_files import read_data
from forerun.sources.trace.inside.parallelize.context import context
from forerun.sources.trace.inside.parallelize.data import compute_dtype, is_sharded
from forerun.sources.trace.inside.parallelize.float8 import after_step
from forerun.sources.trace.inside.parallelize.mesh import Meshes
from forerun.sources.trace.module_request import ModuleRequest


@dataclass(frozen=True)
class Pipeline:
    """The schedule that runs this rank's stages, and whether the model's first and last stage are among them."""

    schedule: Any
    has_first: bool
    has_last: bool


def on_device(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and keyword inputs of one micro batch, copied to the device."""
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
    """Returns the tensor, among the outputs of a model, from which the loss is computed."""
    for name in ("logits", "last_hidden_state"):
        if not isinstance(output, torch.Tensor) and getattr(output, name, None) is not None:
            return getattr(output, name)
    if isinstance(output, (tuple, list)) and output:
        return output[0]
    return output


def default_loss(output: Any, target: Any) -> torch.Tensor:
    """Returns the loss that the model itself computed, else the cross entropy of its logits.

    Raises:
        ForerunError: the model returns neither.
    """
    own = None if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if own is not None:
        return own
    logits = logits_of(output)
    if not isinstance(logits, torch.Tensor) or not logits.is_floating_point():
        raise ForerunError(
            f"the model returns {type(output).__name__}, not logits or a loss; pass loss= to trace_module"
        )
    if logits.dim() == 0:
        return logits
    rows = logits.flatten(0, -2)
    if target is None:
        target = torch.zeros(logits.shape[:-1], dtype=torch.int64, device="cuda")
    return F.cross_entropy(rows.float(), target.flatten(0, rows.dim() - 2 + target.dim() - 1))


def make_optimizer(model: Iterable[nn.Module], plan: Plan, given: Callable[[Any], Any] | None) -> torch.optim.Optimizer:
    """Returns the caller's optimizer of all parameters, or the plan's."""
    parameters = [p for part in model for p in part.parameters() if p.requires_grad]
    if given is not None:
        made: torch.optim.Optimizer = given(parameters)
        return made
    # A multi-tensor kernel takes DTensors of one mesh only.
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(_mesh(parameter), []).append(parameter)
    implementation = {"fused": plan.optimizer_impl == "fused", "foreach": plan.optimizer_impl == "foreach"}
    entry = optimizer(plan.optimizer)
    if "torch" not in entry.names:
        known = ", ".join(optimizer_names("torch"))
        raise ForerunError(f"plan: optimizer {plan.optimizer} is not one of torch.optim that can be traced: {known}")
    if entry.elements.unfused is None or entry.matrices is not None:
        implementation.pop("fused")
    kind: Any = getattr(torch.optim, entry.names["torch"])
    updates: torch.optim.Optimizer = kind([{"params": group} for group in groups.values()], lr=1e-4, **implementation)
    return updates


def _mesh(tensor: Any) -> Any:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def clip_gradients(parts: Iterable[nn.Module], pipeline: Any = None) -> None:
    """Clips the norm of all gradients as torchtitan does; `pipeline` is the mesh of the stages."""
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
    max_norm = read_data("parallelize/torchtitan.yaml")["max_norm"]
    for parameters in by_mesh.values():
        clip_grads_with_norm_(parameters, max_norm, total, foreach=True)


@contextlib.contextmanager
def precision_of(plan: Plan) -> Iterator[None]:
    """Enables autocast where FSDP2 does not cast parameters and the model is kept in a wider dtype."""
    dtype = compute_dtype(plan)
    if is_sharded(plan) or dtype == torch.float32 or plan.master_dtype == plan.precision:
        yield
        return
    with torch.autocast("cuda", dtype=dtype):
        yield


def cross_entropy_sharded(plan: Plan) -> Any:
    """Returns the context in which logits may be sharded over the vocabulary."""
    return loss_parallel() if plan.tp > 1 and plan.loss_parallel else contextlib.nullcontext()


class Training:
    """One training run; each call of `step` is one optimizer step."""

    def __init__(
        self, parts: list[nn.Module], request: ModuleRequest, meshes: Meshes, pipeline: Pipeline | None = None
    ) -> None:
        """Makes the optimizer. `parts` are the model, or this rank's stages, which `pipeline` runs."""
        self.parts, self.request, self.plan, self.meshes, self.pipeline = parts, request, request.plan, meshes, pipeline
        self.optimizer = make_optimizer(parts, self.plan, request.optimizer)
        self.loss = loss_of(request)

    def step(self) -> None:
        """Computes the gradients of all micro batches, clips them, and steps the optimizer."""
        self.optimizer.zero_grad()
        if self.pipeline is not None:
            self._run_pipeline(self.pipeline)
        else:
            for number in range(self.plan.n_microbatches):
                with self._reduction(number == self.plan.n_microbatches - 1):
                    self._micro_batch()
        clip_gradients(self.parts, self.meshes.axis("pp"))
        self.optimizer.step()
        for part in self.parts:
            after_step(part, self.plan)

    def _reduction(self, last: bool) -> Any:
        """Returns the context that delays DDP's reduction to the last micro batch. FSDP2 reduces every micro batch, as
        in torchtitan."""
        model = self.parts[0]
        if isinstance(model, DistributedDataParallel) and not last:
            return model.no_sync()
        return contextlib.nullcontext()

    def _micro_batch(self) -> None:
        args, named = on_device(self.request.inputs())
        target = self._target()
        with self._contexts([*args, *named.values(), target]):
            with precision_of(self.plan):
                output = self.parts[0](*args, **named)
                loss = self.loss(output, target)
                if self.plan.n_microbatches > 1:
                    loss = loss / self.plan.n_microbatches
            del output
            loss.backward()

    def _run_pipeline(self, pipeline: Pipeline) -> None:
        """Runs all micro batches through the schedule."""
        args, named = on_device(self.request.inputs())
        if not args:
            # A stage passes on the model's first input; the other inputs go to all stages.
            first, *rest = named.items()
            args, named = (first[1],), dict(rest)
        args, named = self._all(args), dict(zip(named, self._all(tuple(named.values())), strict=True))
        target = self._target()
        # Without a target of the caller's the loss makes its own, but the schedule needs a tensor to split.
        target = args[0] if target is None else self._all((target,))[0]
        with self._contexts([*args, *named.values(), target]), precision_of(self.plan):
            given = {"target": target, "losses": []} if pipeline.has_last else {}
            pipeline.schedule.step(*(args if pipeline.has_first else ()), **named, **given, return_outputs=False)

    def _all(self, one: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the inputs of all micro batches, made from those of one."""
        n = self.plan.n_microbatches
        return tuple(torch.cat([t] * n) if isinstance(t, torch.Tensor) and t.dim() else t for t in one)

    def _target(self) -> Any:
        return None if self.request.target is None else on_device((self.request.target,))[0][0]

    @contextlib.contextmanager
    def _contexts(self, inputs: list[Any]) -> Iterator[None]:
        parallel = context(self.plan, self.meshes.axis("cp"), self.parts, unique(inputs))
        with parallel, cross_entropy_sharded(self.plan), offloaded_activations(self.plan), attention_of(self.plan):
            yield


def unique(values: list[Any]) -> list[Any]:
    """Returns the same objects, each once."""
    return list({id(value): value for value in values}.values())


def loss_of(request: ModuleRequest) -> Callable[[Any, Any], Any]:
    """Returns the caller's loss or the default one, which sees a target only if the caller gave one.

    It is compiled as torchtitan compiles it, where the plan says so.
    """
    loss, has_target = request.loss or default_loss, request.target is not None
    if request.plan.compile and request.plan.compile_loss:
        loss = torch.compile(loss)
    return lambda output, target: loss(output, target if has_target else None)


def attention_of(plan: Plan) -> Any:
    """Returns the context that chooses the attention kernel.

    Raises:
        ForerunError: the kernel is not one of those behind scaled_dot_product_attention.
    """
    backends = names_in("sdp_backend")
    backend = backends.get(plan.attention)
    if plan.attention == AUTO or backend == "any":
        return contextlib.nullcontext()
    if backend is None:
        raise ForerunError(
            f"plan: attention {plan.attention} can only be chosen in the model's code; a trace can set auto,"
            f" {', '.join(backends)}"
        )
    return sdpa_kernel(SDPBackend.__members__[backend])


def offloaded_activations(plan: Plan) -> Any:
    """Returns the context in which saved activations are kept in pinned host memory."""
    if plan.activation_offload:
        return torch.autograd.graph.save_on_cpu(pin_memory=True)
    return contextlib.nullcontext()
