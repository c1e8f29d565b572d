"""Activation checkpointing of a model's layers, by PyTorch's own wrappers and with torchtitan's choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from forerun.common.errors import ForerunError
from forerun.describe.plan.plan import Plan
from forerun.sources.trace.inside.parallelize.depth import blocks

aten = torch.ops.aten
_SAVE, _RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
_MATMULS = (aten.mm.default, aten.linear.default)
_ATTENTION_OPS = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
    aten._scaled_dot_product_attention_math.default,
)
_SAVED_BESIDES = (
    aten.max.default,  # The scale of a low-precision matrix.
    aten.topk.default,  # Routing must be the same when recomputed.
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
    torch.ops._c10d_functional_autograd.all_to_all_single.default,
    torch._higher_order_ops.flex_attention,
)
_ACTIVATION_AND_NORM = (
    aten.silu.default,
    aten.gelu.default,
    aten.relu.default,
    aten.native_layer_norm.default,
    aten._fused_rms_norm.default,
    aten.mul.Tensor,
    aten.pow.Tensor_Scalar,
    aten.rsqrt.default,
    aten.mean.dim,
)
_MLP = ("feed_forward", "mlp", "ffn", "moe", "block_sparse_moe")
_ATTENTION = ("attention", "self_attn", "attn", "self_attention")


def checkpoint_layers(layers: Sequence[nn.Module], plan: Plan) -> None:
    """Wraps every `checkpoint_every`-th layer of each container in `layers` as `plan` says.

    Raises:
        ForerunError: the policy names parts of layers that the model doesn't have, or has no counterpart in PyTorch.
    """
    if plan.activation_checkpointing == "none":
        return
    if plan.compiles_layers:
        # The policy counts matrix products, so graphs have to be called in the order in which they were made.
        import_module("torch._C._dynamo.eval_frame")._set_lru_cache(False)
    seen: dict[int, int] = {}
    for container, name in blocks(layers):
        number = seen[id(container)] = seen.get(id(container), 0) + 1
        if number % plan.checkpoint_every == 0:
            container.register_module(name, _wrapped(container.get_submodule(name), plan))


def _wrapped(block: nn.Module, plan: Plan) -> nn.Module:
    if plan.activation_checkpointing == "full":
        return _checkpointed(block)
    policy = plan.selective_policy
    if policy in _POLICIES:
        # Dynamo takes a partial of any function, but no function of the tracer itself.
        return _checkpointed(block, partial(_contexts, policy))
    if policy == "params":
        raise ForerunError(
            "plan: selective_policy params is what FSDP2 does by reshard_after_forward; use that, and"
            " activation_checkpointing none"
        )
    names = {"mlp": _MLP, "attention-block": _ATTENTION, "attention+mlp": _MLP + _ATTENTION}[policy]
    found = [name for name, _ in block.named_children() if name in names]
    if not found:
        raise ForerunError(
            f"plan: selective_policy {policy}: a {type(block).__name__} has none of {', '.join(names)}; it has"
            f" {', '.join(name for name, _ in block.named_children())}"
        )
    for name in found:
        block.register_module(name, _checkpointed(block.get_submodule(name)))
    return block


def _checkpointed(module: nn.Module, contexts: Callable[[], Any] | None = None) -> nn.Module:
    given: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    wrapped: nn.Module = checkpoint_wrapper(module, preserve_rng_state=False, early_stop=False, **given)
    return wrapped


def _contexts(policy: str) -> Any:
    """Returns the two contexts of one checkpointed call, with a policy that has counted nothing yet."""
    return create_selective_checkpoint_contexts(_POLICIES[policy]())


def _saved_ops() -> set[Any]:
    """Returns the operators whose outputs torchtitan saves: those that the compiler rates as expensive, attention and
    communication."""
    partitioners = import_module("torch._functorch.partitioners")  # This import takes a second.
    expensive = {op.default for op in partitioners.get_default_op_list().compute_intensive_ops}
    return expensive | set(_ATTENTION_OPS) | set(_SAVED_BESIDES) | {aten.linear.default}


def _by_operation() -> Callable[..., CheckpointPolicy]:
    """Returns torchtitan's policy: it recomputes every second matrix product and every cheap operator."""
    saved = _saved_ops()
    counts = {True: 0, False: 0}

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func is aten._to_copy.default and args[0].device.type == "cuda" and str(kwargs.get("device")) == "cpu":
            return _SAVE
        if func in _MATMULS:
            counts[ctx.is_recompute] += 1
            return _SAVE if counts[ctx.is_recompute] % 2 else _RECOMPUTE
        return _SAVE if func in saved else _RECOMPUTE

    return policy


def _all_but(recomputed: tuple[Any, ...]) -> Callable[[], Callable[..., CheckpointPolicy]]:
    def make() -> Callable[..., CheckpointPolicy]:
        return lambda ctx, func, *args, **kwargs: _RECOMPUTE if func in recomputed else _SAVE

    return make


_POLICIES: dict[str, Callable[[], Callable[..., CheckpointPolicy]]] = {
    "op": _by_operation,
    "attention": _all_but(_ATTENTION_OPS),
    "mlp-act-norm": _all_but(_ACTIVATION_AND_NORM),
}
