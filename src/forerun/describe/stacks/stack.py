"""Stack: what a training framework does that decides which kernels run, what overlaps and what a plan leaves open.

A stack is one YAML file in `frameworks/`, or a user's own. Which kernels are fused and who waits for whom are facts of
the framework's code. The few rates are fitted, and `fitted` says on what.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import pydantic

from forerun.common.errors import ForerunError
from forerun.describe.kernels.attention import attention_kernel
from forerun.describe.stacks.names import StackName
from forerun.describe.stacks.search_space import SearchSpace
from forerun.describe.stacks.words import CpMethod, GradientDtype, OptimizerImpl, SelectivePolicy, Style


@dataclass(frozen=True)
class Stack:
    """One software stack. Times in microseconds of host or device time; shares between 0 and 1."""

    name: str
    description: str
    source: str
    lineage: tuple[str, ...] = ()
    """the stacks that this one extends, the nearest first; it has their fitted rates unless it states its own"""
    family: str = ""
    """stacks that a fit leaves out together have one family; the name where a file states none"""
    names: tuple[StackName, ...] = ()
    """the words by which a table of measurements names this framework"""
    launch: tuple[str, ...] = ()
    """the tools of `--launch` that start this framework"""
    search: SearchSpace | None = None
    """what a search tries; None: there is nothing to search"""

    # What a plan means that leaves the field open.
    cp_method: CpMethod = "ring"
    sequence_parallel: bool = True
    optimizer_impl: OptimizerImpl = "fused"
    recomputes: tuple[SelectivePolicy, ...] = ("op",)
    """policies of selective checkpointing, the one that recomputes least first, which is the usual one"""
    keeps_gathered_at_zero_2: bool = False
    """ZeRO-2 is FSDP whose parameters stay gathered from forward to backward, and are sharded between steps"""
    microbatches_per_stage: int = 0
    """micro batches of a pipeline for each of its ranks; 0: one for each sequence"""
    attention: str = "flash2"
    reduce_dtype: GradientDtype = "fp32"
    """dtype in which gradients are reduced"""
    accumulate_dtype: GradientDtype | Literal["reduce"] = "param"
    """dtype of the gradient buffer that micro batches add into; param: as the backward pass makes gradients; reduce:
    the buffer is the one that is reduced"""

    # Kernels.
    norm: Style = "composed"
    activation: Style = "composed"
    rope: Style = "composed"
    residual: Style = "composed"
    loss: Style = "composed"
    loss_in_fp32: bool = True
    """the loss is computed on an fp32 copy of the logits: a composed one makes it, a fused one keeps it"""
    compiles_loss: bool = True
    """torch.compile covers the loss too, not only the layers"""
    whole_graph: bool = False
    """torch.compile takes the model and its loss as one graph, where a plan has no graph breaks; else layer by layer"""
    softmax: Style = "fused"
    """scale, mask and softmax of unfused attention"""
    moe: Style = "composed"
    """routing, permutation and combination of a mixture of experts"""
    dispatcher: str = "alltoall"
    """how tokens come to their experts (describe/kernels/dispatchers.yaml)"""
    attention_dropout: bool = False
    hidden_dropout: bool = False
    repeat_kv: bool = False
    """key and value heads are copied to the number of query heads before attention"""
    qkv_copies: int = 0
    """layout copies of queries, keys, values and output around the attention kernel"""
    sequence_first: bool = False
    """activations are kept by place in the sequence, attention works sample by sample: with several of them in a micro
    batch its output is copied for the projection, which keeps the copy"""
    fused_qkv: bool = False
    """one matrix for queries, keys and values"""
    fused_bias_grad: bool = False
    """bias gradients come out of the matrix multiplication"""
    fp8_cast: Style = "fused"
    """casts of operands to fp8"""
    fp8_caches_weights: bool = False
    """weights that are not sharded are cast to fp8 for the first micro batch of a step and kept (TransformerEngine)"""
    fp8_params: bool = False
    """both fp8 layouts of a weight take the place of its 2-byte copy (NeMo's fp8_params), and stand beside it otherwise
    """
    fp8_keeps_cast: bool = False
    """products keep the fp8 cast of their input for the weight's gradient in place of the input (TransformerEngine)"""
    save_gathered_input: bool = True
    """sequence parallel: keep the gathered input of a column-parallel layer instead of gathering it again"""
    padded_vocab_multiple: int = 1

    issue_us: float = 6.0
    """host time to launch one kernel, eager"""
    compiled_issue_us: float = 2.5
    launch_blocking_us: float = 0.0
    """gap after every kernel when the host waits for each (CUDA_LAUNCH_BLOCKING)"""
    kernel_gap_us: float = 1.0
    """idle time of the device between two kernels of one stream"""
    allocator: str = ""
    """what the run scripts set in PYTORCH_CUDA_ALLOC_CONF"""
    allocator_across_nodes: str | None = None
    """what the script for several nodes sets there, where it is another; None: the same"""
    lazy_kernels: bool = True
    """CUDA loads kernels when they are first used: from PyTorch 1.13 on"""
    communicators: tuple[str, ...] = ()
    """groups with a communicator beside those that the step's collectives use: `world`, or mesh axes joined by +"""
    clip_grad: bool = True
    autocast: bool = False
    """weights stay fp32 and are cast where they are used (torch.autocast)"""
    step_us: float = 3000.0
    """host time of a step outside forward, backward and optimizer"""

    fsdp: Literal["fsdp1", "fsdp2", "simple"] = "fsdp2"
    fsdp_reduce_every_microbatch: bool = True
    parametrized: bool = False
    """each use of a parameter casts and gathers it, and autograd decides how long the result lives (SimpleFSDP)"""
    parameter_launches: int = 0
    """host work of handing one sharded parameter to an eager module, or its gradient back, in launches (DTensor's
    redistribution with its autograd function)"""
    list_collectives: bool = False
    """gathers and reductions take a list with one piece of the parameter for each rank, and copy piece by piece"""
    persistent_elements: int = 0
    """parameters of at most so many elements stay whole on every rank (stage3_param_persistence_threshold)"""
    reuse_elements: int = 0
    """between recomputation and backward pass parameters are kept that are used again within so many elements, others
    gathered again (stage3_max_reuse_distance); 0 keeps all"""
    joint_ends: bool = False
    """embedding, final norm and head are one FSDP unit (the root), gathered from the first layer to the end of backward
    """
    grad_reduce: Literal["reduce-scatter", "all-reduce", "owner-reduce"] = "reduce-scatter"
    """what ZeRO-1 does with gradients before its sharded step"""
    owner_broadcast_us: float = 0.0
    """per owning rank, when every rank broadcasts its updated parameters in turn"""
    grad_reduce_overlap: bool = True
    bucket_mib: float = 25.0
    """size of a bucket in which replicated gradients are reduced beside the backward pass"""
    channels_last: bool = True
    """images lie in memory as matrix units take them; else convolutions on them copy each operand and result"""
    broadcast_buffers: bool = False
    """replicas take over rank 0's buffers (running statistics) before the first forward pass of a step, as DDP does"""
    bucket_copies: bool = False
    """buckets are buffers of their own beside the gradients, for good (DDP without gradient_as_bucket_view)"""
    late_accumulation: bool = False
    """gradients of all units stay in their own dtype until the backward pass ends, and then go into a wider buffer
    (DeepSpeed's BF16_Optimizer)"""
    step_elements: int = 0
    """at the end of a step gradients are reduced, and updated parameters gathered, through flat copies of at most so
    many elements; 0: where they are"""
    fused_accumulation: bool = False
    """weight gradients are added to the buffer inside the matrix multiplication"""
    dummy_weight_grads: bool = False
    """fused accumulation hands autograd one empty gradient per distinct weight shape, kept for ever"""
    overlap_slowdown: float = 0.15
    """how much slower a kernel runs beside a collective (NCCL takes multiprocessors and memory bandwidth)"""

    tp_forward_overlap: bool = False
    tp_backward_overlap: bool = False
    """tensor-parallel collectives of the backward pass run beside the other gradient's matrix multiplication"""
    tp_copies: int = 0
    """extra layout copies of the buffer around each tensor-parallel collective"""
    dtensor: bool = False
    """as PyTorch's own DTensor code: tensor-parallel ranks sum the gradients of what they hold whole tensor by tensor,
    and norms of gradients are reduced over one mesh axis after the other"""
    stages_by_cost: bool = False
    """pipeline stages are cut where they come to equal shares of the matrices, the head's among them (nanotron)"""
    pipeline_keeps: bool = False
    """as torch.distributed.pipelining: buffers for what every micro batch receives, and outputs of a stage until its
    backward pass has ended"""
    p2p_overlap: bool = False
    p2p_scatter: bool = False
    """tensor-parallel ranks send a share of the activation each and gather it on arrival (Megatron-LM)"""
    cp_overlap: bool = True
    cp_merge: Style = "fused"
    """how the parts of attention under context parallelism are put together. Composed is PyTorch's: piece by piece also
    where keys and values are gathered at once, with gradients that are passed on in fp32 until they are back"""
    recompute_early_stop: bool = True
    op_policy_misses: tuple[str, ...] = ()
    """attention kernels that checkpointing by operation does not know, so that it runs them again in backward"""
    op_policy_keeps_abs: bool = False
    """checkpointing by operation keeps the absolute values that eager casts to fp8 make of whole operands to find the
    largest one"""
    offload_turn: Literal["layer", "pass"] = "layer"
    """what of offloaded activations is copied at once, and held by the device until the copy's end: a layer's, as
    TransformerEngine does, or those of a whole pass through a stage"""

    gemm_rate: float = 1.0
    """sustained matrix-multiplication rate of this stack over the device profile's"""
    memory_rate: float = 1.0
    """achieved bandwidth of memory-bound kernels over the device profile's"""
    attention_rate: float = 1.0
    attention_backward_rate: float = 1.0
    """of the backward pass, beside `attention_rate`, which counts in both"""
    network_rate: float = 1.0

    fitted: dict[str, str] = field(default_factory=dict, hash=False, compare=False)
    """constant -> how it was fitted and on how many rows"""

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")

    def across(self, nodes: int) -> Stack:
        """The stack with the settings of its script for so many nodes."""
        if nodes == 1 or self.allocator_across_nodes is None:
            return self
        return replace(self, allocator=self.allocator_across_nodes)

    def search_space(self) -> SearchSpace:
        """What a search tries. Raises ForerunError for a stack that says nothing about it."""
        if self.search is None:
            raise ForerunError(f"stack {self.name} has no section search; add one to its file, or use predict")
        return self.search

    def attention_kernel(self, wanted: str, architecture: str) -> str:
        """The attention kernel that a device of `architecture` runs for a plan whose attention is `wanted`."""
        kernel = self.attention if wanted == "auto" else wanted
        return attention_kernel(kernel).becomes.get(architecture, kernel)

    @property
    def selective_policy(self) -> SelectivePolicy:
        """The policy of selective checkpointing that the framework has unless it is told another."""
        return self.recomputes[0]


def gradient_dtype(named: str, wide: str) -> str:
    """The dtype that a GradientDtype means for parameters in the dtype `wide`."""
    if named == "fp32-unless-fp16":
        return "fp16" if wide == "fp16" else "fp32"
    return wide if named == "param" else named
