"""Rules of a plan and its stack: dtypes, dropout, and the treatment of parameters and gradients by data parallelism.

Every rule works for a Plan and for a table of plans (`columns`). Properties of the plan alone are in Plan.
The Program builder and the bounds of a search share these rules.
"""

from __future__ import annotations

from forerun.describe.kernels.attention import AUTO, attention_kernel
from forerun.describe.kernels.dispatchers import Dispatcher, dispatcher
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.columns import Column, Plans, mapped, no, numbers, where
from forerun.describe.plan.plan import FP8_PRECISIONS, Plan
from forerun.describe.stacks.stack import Stack, gradient_dtype

DTYPE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "mxfp8": 1, "nvfp4": 1}


# -- dropout ---------------------------------------------------------------------------------------------------


def drops_attention(model: ModelSpec, stack: Stack) -> bool:
    """Returns whether training drops probabilities of attention at random."""
    return stack.attention_dropout if model.attention_dropout is None else model.attention_dropout


def drops_hidden(model: ModelSpec, stack: Stack) -> bool:
    """Returns whether training drops outputs of attention and of the feed-forward at random."""
    return stack.hidden_dropout if model.hidden_dropout is None else model.hidden_dropout


# -- dtypes ----------------------------------------------------------------------------------------------------


def element_bytes(dtype: Column) -> Column:
    """Returns the bytes of an element of `dtype`."""
    return numbers(DTYPE_BYTES.__getitem__, dtype)


def wide_dtype(plan: Plans) -> Column:
    """Returns the dtype of activations, and of weights as kernels read them."""
    return mapped(_wide, plan.precision)


def _wide(precision: str) -> str:
    return "bf16" if precision in FP8_PRECISIONS else precision


def product_dtype(plan: Plan) -> str:
    """Returns the dtype of matrix products, which names the block scaling of fp8 operands too."""
    blocks = plan.precision == "fp8" and plan.fp8_recipe == "block"
    return "fp8_block" if blocks else plan.precision


def weight_bytes(plan: Plans) -> Column:
    """Returns the bytes of an element of an activation, or of a weight as kernels read it."""
    return numbers(_wide_bytes, plan.precision)


def _wide_bytes(precision: str) -> int:
    return DTYPE_BYTES[_wide(precision)]


def gradient_bytes(plan: Plans) -> Column:
    """Returns the bytes of an element of a weight's gradient after the backward pass; autocast leaves it in fp32."""
    return numbers(lambda dtype, autocast: 4 if autocast else DTYPE_BYTES[dtype], wide_dtype(plan), plan.autocast)


def reduce_dtype(plan: Plans, stack: Stack) -> Column:
    """Returns the dtype in which gradients are reduced."""

    def of(asked: str, wide: str) -> str:
        return gradient_dtype(stack.reduce_dtype, wide) if asked == "auto" else asked

    return mapped(of, plan.reduce_dtype, wide_dtype(plan))


def accumulate_dtype(plan: Plans, stack: Stack) -> Column:
    """Returns the dtype of the buffer that micro batches add their gradients to."""

    def of(asked: str, sharded: bool, reduced: str, autocast: bool, wide: str) -> str:
        if asked != "auto":
            return asked
        if stack.accumulate_dtype == "reduce":
            return reduced
        if stack.accumulate_dtype != "param":
            return gradient_dtype(stack.accumulate_dtype, wide)
        if stack.fsdp == "fsdp2" and sharded:
            return reduced  # FSDP2 casts gradients also where it reduces them only after a later micro batch
        return "fp32" if autocast else wide

    wide, reduced = wide_dtype(plan), reduce_dtype(plan, stack)
    return mapped(of, plan.accumulate_dtype, plan.shards_parameters, reduced, plan.autocast, wide)


# -- parameters ------------------------------------------------------------------------------------------------


def gathers_parameters(plan: Plans, stack: Stack) -> Column:
    """Returns whether parameters are gathered from other ranks, fetched from the host or cast before a unit uses
    them."""
    casts = stack.parametrized & (element_bytes(plan.master_dtype) != weight_bytes(plan))
    return plan.uses_fsdp & ((plan.fsdp > 1) | (plan.offload == "params") | casts)


def has_working_copy(plan: Plans, stack: Stack) -> Column:
    """Returns whether 2-byte weights are kept beside the fp32 weights that the optimizer updates.

    FSDP casts the shards that it gathers; torch.autocast and SimpleFSDP's parametrization cast at each use.
    """
    narrow = (plan.master_dtype == "fp32") & (weight_bytes(plan) == 2)
    casts = plan.autocast | (stack.autocast or stack.parametrized)
    return no(plan.uses_fsdp) & narrow & no(casts)


# -- frozen parameters ------------------------------------------------------------------------------------------

_NF4_BLOCK, _SCALE_BLOCK = 64, 256
"""elements that share a scale in nf4, and scales that share an fp32 scale of their own under double quantisation
(bitsandbytes, functional.py: quantize_4bit, and quantize_blockwise of its absmax)"""


def frozen_matrix_bytes(plan: Plans) -> Column:
    """Returns the bytes of an element of a frozen matrix of a layer, with its share of scales."""
    nf4 = 0.5 + (1 + 4 / _SCALE_BLOCK) / _NF4_BLOCK
    return where(plan.quantises_frozen, nf4, weight_bytes(plan))


# -- gradients -------------------------------------------------------------------------------------------------


def scatters_gradients(plan: Plans, stack: Stack) -> Column:
    """Returns whether gradients are reduce-scattered, so that a rank gets the sums of its shard only, or
    all-reduced."""
    return plan.shards_parameters | (plan.shards_optimizer & (stack.grad_reduce == "reduce-scatter"))


def reduces_every_microbatch(plan: Plans, stack: Stack) -> Column:
    """Returns whether each micro batch's gradients are reduced at once, and added up in shards."""
    return gathers_parameters(plan, stack) & (plan.pp == 1) & stack.fsdp_reduce_every_microbatch


def accumulates(plan: Plans, stack: Stack) -> Column:
    """Returns whether separate kernels add the gradients of several micro batches to a buffer."""
    apart = (plan.n_microbatches > 1) & no(reduces_every_microbatch(plan, stack))
    return apart & (not stack.fused_accumulation)


def keeps_gradient_buffer(stack: Stack) -> bool:
    """Returns whether the buffer of replicated gradients stays allocated through the whole step (Megatron's
    main_grad)."""
    return stack.fused_accumulation or stack.accumulate_dtype not in ("param", "reduce")


def keeps_bucket_copies(plan: Plans, stack: Stack) -> Column:
    """Returns whether the buckets of replicated gradients take memory beside the gradients."""
    return (plan.zero_stage == 0) & (plan.dp * plan.cp > 1) & stack.bucket_copies


# -- experts ---------------------------------------------------------------------------------------------------


def token_dispatcher(plan: Plan, stack: Stack) -> Dispatcher:
    """Returns the dispatcher that brings tokens to their experts: the plan's, or else the stack's."""
    return dispatcher(stack.dispatcher if plan.dispatcher == AUTO else plan.dispatcher)


# -- compilation -----------------------------------------------------------------------------------------------


def breaks_graphs(model: ModelSpec | LayeredModel, plan: Plan, stack: Stack) -> bool:
    """Returns whether compiled graphs end at module borders: the plan says so, or `stack` compiles attention
    separately."""
    attention = attention_kernel(stack.attention if plan.attention == AUTO else plan.attention)
    apart = plan.compiles_layers and stack.whole_graph and attention.breaks_graphs
    return plan.graph_breaks or (apart and isinstance(model, ModelSpec) and model.n_heads > 0)
