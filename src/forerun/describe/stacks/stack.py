"""Stack: the behaviour of a training framework: its kernels, its overlap, and its values for a plan's open fields.

A stack is one YAML file in `frameworks/`, or a user's own. The framework's code determines which kernels are fused and
which operations wait for others. A few rates are fitted; `fitted` names the rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal

import pydantic

from forerun.common.errors import ForerunError
from forerun.describe.kernels.attention import attention_choices, attention_kernel

Style = Literal["composed", "fused", "compiled"]
"""composed: one kernel per tensor operation; fused: hand-written kernels; compiled: TorchInductor's"""
NormStyle = Literal["composed", "fused", "compiled", "aten"]
"""aten: PyTorch's own kernel of a whole norm, which layer_norm always had and rms_norm has from torch 2.9 on"""
Schedule = Literal["1F1B", "GPipe", "Interleaved1F1B", "ZB1P", "ZBV", "DualPipeV", "DualPipe"]
CpMethod = Literal["ring", "allgather", "ulysses"]
SelectivePolicy = Literal["op", "attention", "attention-block", "mlp", "mlp-act-norm", "attention+mlp", "params"]
GradientDtype = Literal["fp32", "bf16", "fp16", "param", "fp32-unless-fp16"]
"""param: the dtype of the parameters; fp32-unless-fp16: fp16 where a model is trained in fp16, and fp32 elsewhere"""
OptimizerImpl = Literal["fused", "foreach", "loop"]


@dataclass(frozen=True)
class SearchSpace:
    """The values that a search tries for the fields of a plan; a user's own values go over them.

    The whole space also has `more_schedules` and `offload`.
    """

    source: str
    """page or file of the framework that lists its plans"""
    axes: tuple[str, ...]
    """mesh axes beside data parallelism whose degree may exceed 1"""
    zero_stages: tuple[int, ...]
    schedules: tuple[tuple[Schedule, int], ...] = (("1F1B", 1),)
    """pipeline schedules, each with its virtual stages"""
    reshard: tuple[str, ...] = ("default",)
    """reshard policies of FSDP"""
    sequence_parallel: bool = True
    """whether tensor-parallel ranks split the sequence too; the whole space tries both"""
    more_schedules: tuple[tuple[Schedule, int], ...] = ()
    offload: tuple[str, ...] = ("none",)
    """tensors that host memory holds between uses"""
    compile: tuple[bool, ...] = (False,)
    """whether torch.compile is tried, and whether its absence is"""
    narrow: tuple[tuple[str, str], ...] = ()
    """precisions of fewer than 16 bits, each with the scaling of its operands, that a search weighs against 16 bits"""
    dispatchers: tuple[str, ...] = ("auto",)
    """dispatchers of tokens between ranks with different experts; auto: the stack's own"""
    expert_overlap: tuple[Schedule, ...] = ()
    """schedules under which passes may run side by side to hide the exchanges of tokens; 1F1B stands for no pipeline"""
    recompute_modules: tuple[tuple[str, ...], ...] = ()
    """parts of a layer with experts that selective checkpointing may recompute in place of the usual policy"""

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")

    @property
    def all_schedules(self) -> tuple[tuple[Schedule, int], ...]:
        """Returns all pipeline schedules of the framework, each with its virtual stages."""
        return self.schedules + self.more_schedules


@dataclass(frozen=True)
class StackName:
    """Patterns of the words that name a framework and its version: regular expressions that ignore case.

    Every pattern has to occur in the column of its name; an empty pattern matches every text.
    """

    framework: str
    software: str = ""
    """pattern of versions and dates"""
    notes: str = ""

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        for column in fields(self):
            try:
                re.compile(getattr(self, column.name))
            except re.error as error:
                raise ValueError(f"{column.name} is not a regular expression: {error}") from None

    def letters_in(self, columns: Mapping[str, str]) -> tuple[int, ...]:
        """Returns the number of letters that the patterns cover in each column; () where one does not occur."""
        found = [
            re.search(getattr(self, column.name), columns.get(column.name, ""), re.IGNORECASE)
            for column in fields(self)
        ]
        return () if None in found else tuple(len(one[0]) for one in found if one is not None)


@dataclass(frozen=True)
class Stack:
    """One software stack. Times are in microseconds, shares between 0 and 1."""

    name: str
    description: str
    source: str
    lineage: tuple[str, ...] = ()
    """stacks that this one extends, the nearest first; their fitted rates apply unless it states its own"""
    family: str = ""
    """family of the stack; a fit leaves out a whole family at a time. By default the stack's name"""
    names: tuple[StackName, ...] = ()
    """patterns of the words by which a table of measurements names this framework"""
    imports: tuple[str, ...] = ()
    """modules of Python whose import tells that a traced program runs on this stack"""
    launch: tuple[str, ...] = ()
    """tools of `--launch` that start this framework"""
    launch_arguments: tuple[str, ...] = ()
    """arguments of those tools that start it, beside those of the plan"""
    today: bool = False
    """whether a search that is free to choose the framework considers this stack: a maintained framework in the form of
    today"""
    search: SearchSpace | None = None
    """plans that a search tries; None: the stack can't be searched"""

    # Values of fields that a plan leaves open.
    cp_method: CpMethod = "ring"
    sequence_parallel: bool = True
    optimizer_impl: OptimizerImpl = "fused"
    usual_checkpointing: Literal["none", "selective", "full"] = "none"
    """the recomputation of the framework's own configurations, which a published step has if its source states none"""
    recomputes: tuple[SelectivePolicy, ...] = ("op",)
    """policies of selective checkpointing; the first one recomputes least and is the default"""
    keeps_gathered_at_zero_2: bool = False
    """whether ZeRO-2 is FSDP that keeps parameters gathered from forward to backward and shards them between steps"""
    microbatches_per_stage: int = 0
    """number of a pipeline's micro batches for each of its ranks; 0: one for each sequence"""
    attention: str = "flash2"
    attention_becomes: dict[str, dict[str, str]] = field(default_factory=dict, hash=False)
    """attention kernel -> architecture -> the kernel that this framework runs there in its place, as its version of
    PyTorch or TransformerEngine decides; elsewhere attention.yaml says"""
    reduce_dtype: GradientDtype = "fp32"
    """dtype of gradient reduction"""
    accumulate_dtype: GradientDtype | Literal["reduce"] = "param"
    """dtype of the buffer that sums the gradients of micro batches; param: that of the backward pass's gradients;
    reduce: that of the reduction, which uses the same buffer"""

    # Kernels.
    norm: NormStyle = "composed"
    activation: Style = "composed"
    rope: Style = "composed"
    residual: Style = "composed"
    loss: Style = "composed"
    loss_in_fp32: bool = True
    """whether the loss uses an fp32 copy of the logits, which a composed loss makes and a fused one keeps"""
    compiles_loss: bool = True
    """whether torch.compile covers the loss too, not only the layers"""
    whole_graph: bool = False
    """whether torch.compile takes model and loss as one graph where a plan has no graph breaks; else layer by layer"""
    inductor: bool = True
    """whether torch.compile writes fused kernels; else the operations of a captured graph run one by one (aot_eager)"""
    min_cut: bool = True
    """whether the min-cut partitioner of AOTAutograd chooses the tensors that compiled code keeps; otherwise it keeps
    all that the backward pass reads
    """
    softmax: Style = "fused"
    """scale, mask and softmax of unfused attention"""
    moe: Style = "composed"
    """routing, permutation and combination of a mixture of experts"""
    dispatcher: str = "alltoall"
    """name of the token dispatcher (describe/kernels/dispatchers.yaml)"""
    weights_in_activation: bool = False
    """whether experts multiply by the router's weights between their two products, so that the sum of their results
    keeps none of them for the backward pass"""
    attention_dropout: bool = False
    hidden_dropout: bool = False
    repeat_kv: bool = False
    """whether attention works on copies of the key and value heads, one for each query head"""
    qkv_copies: int = 0
    """number of layout copies of queries, keys, values and output around the attention kernel"""
    sequence_first: bool = False
    """whether the sequence is the first dimension of activations. With several samples in a micro batch, the
    projection then copies attention's output and keeps the copy"""
    fused_qkv: bool = False
    """whether queries, keys and values have one matrix"""
    fused_bias_grad: bool = False
    """whether the matrix multiplication also makes the bias gradients"""
    blas_workspaces: int = 2
    """number of workspaces that the framework gives cuBLAS: PyTorch has one for the thread that runs the program and
    one for that of autograd"""
    transformer_engine: bool = False
    """whether Transformer Engine multiplies the matrices of layers, in a workspace of its own"""
    fp8_cast: Style = "fused"
    """casts of operands to fp8"""
    fp8_caches_weights: bool = False
    """whether a step's first micro batch casts unsharded weights to fp8 for all micro batches (TransformerEngine)"""
    fp8_params: bool = False
    """whether both fp8 layouts of a weight replace its 2-byte copy (NeMo's fp8_params), which otherwise stays"""
    fp8_keeps_cast: bool = False
    """whether a product keeps its input for the weight's gradient only as an fp8 cast (TransformerEngine)"""
    fp8_kept: dict[Literal["activation_input", "attention_output"], float] = field(default_factory=dict, hash=False)
    """bytes of an element of tensors that fp8 training keeps narrower than 2 bytes for the backward pass: the input of
    the feed-forward's activation function, and the output of attention, of which no other copy is kept then"""
    save_gathered_input: bool = True
    """whether sequence parallelism keeps the gathered input of a column-parallel layer, or gathers it again"""
    padded_vocab_multiple: int = 1

    issue_us: float = 6.0
    """host time to launch one eager kernel"""
    module_us: float = 0.0
    """host time of the Python around each eager operation, beside its launches, on a host of speed 1"""
    compiled_issue_us: float = 2.5
    launch_blocking_us: float = 0.0
    """idle time after every kernel when the host waits for each (CUDA_LAUNCH_BLOCKING)"""
    kernel_gap_us: float = 1.0
    """idle time of the device between two kernels of one stream"""
    allocator: str = ""
    """value of PYTORCH_CUDA_ALLOC_CONF in the run scripts"""
    allocator_across_nodes: str | None = None
    """value in the script for several nodes; None: the same"""
    lazy_kernels: bool = True
    """whether CUDA loads a kernel at its first use, as from PyTorch 1.13 on"""
    communicators: tuple[str, ...] = ()
    """groups with a communicator beside those of the step's collectives: `world`, or mesh axes joined by +"""
    clip_grad: bool = True
    autocast: bool = False
    """whether weights stay fp32 and each use casts them (torch.autocast)"""
    step_us: float = 3000.0
    """host time of a step outside forward, backward and optimizer"""

    fsdp: Literal["fsdp1", "fsdp2", "simple"] = "fsdp2"
    fsdp_reduce_every_microbatch: bool = True
    parametrized: bool = False
    """whether each use of a parameter casts and gathers it, and autograd frees the result (SimpleFSDP)"""
    parameter_launches: int = 0
    """host time to pass one sharded parameter to an eager module, or its gradient back, in kernel launches (DTensor's
    redistribution with its autograd function)"""
    list_collectives: bool = False
    """whether gathers and reductions take a list with a piece of the parameter for each rank, and copy each piece"""
    persistent_elements: int = 0
    """parameters of at most this many elements stay whole on every rank (stage3_param_persistence_threshold)"""
    reuse_elements: int = 0
    """between recomputation and backward pass a rank keeps parameters whose next use is within this many elements, and
    gathers others again (stage3_max_reuse_distance); 0 keeps all"""
    joint_ends: bool = False
    """whether embedding, final norm and head are one FSDP unit (the root), gathered until the end of backward"""
    grad_reduce: Literal["reduce-scatter", "all-reduce", "owner-reduce"] = "reduce-scatter"
    """collective by which ZeRO-1 reduces gradients before its sharded step"""
    owner_broadcast_us: float = 0.0
    """time of each broadcast, when every rank broadcasts its updated parameters in turn"""
    grad_reduce_overlap: bool = True
    bucket_mib: float = 25.0
    """size of the buckets that reduce replicated gradients beside the backward pass"""
    channels_last: bool = True
    """whether images have the memory layout of the matrix units; else convolutions copy each operand and result"""
    broadcast_buffers: bool = False
    """whether a step begins with a broadcast of rank 0's buffers (running statistics), as in DDP"""
    bucket_copies: bool = False
    """whether buckets always take memory beside the gradients (DDP without gradient_as_bucket_view)"""
    late_accumulation: bool = False
    """whether gradients of all units keep their dtype until the backward pass ends, and then go into a wider buffer
    (DeepSpeed's BF16_Optimizer)"""
    step_elements: int = 0
    """elements of the largest flat copy through which the end of a step reduces gradients and gathers updated
    parameters; 0: without copies"""
    fused_accumulation: bool = False
    """whether the matrix multiplication adds weight gradients to the buffer"""
    dummy_weight_grads: bool = False
    """whether fused accumulation gives autograd an empty gradient for each weight shape, which is never freed"""
    overlap_slowdown: float = 0.15
    """fraction by which a kernel slows down beside a collective (NCCL takes multiprocessors and memory bandwidth)"""

    tp_forward_overlap: bool = False
    tp_backward_overlap: bool = False
    """whether tensor-parallel collectives of the backward pass run beside the other gradient's matrix multiplication"""
    tp_copies: int = 0
    """number of extra layout copies of the buffer around each tensor-parallel collective"""
    dtensor: bool = False
    """whether tensor-parallel ranks sum the gradients of replicated parameters tensor by tensor, and reduce the
    gradient norm over one mesh axis after the other, as PyTorch's DTensor does"""
    stages_by_cost: bool = False
    """whether pipeline stages have equal shares of the matrices, the head's included (nanotron)"""
    pipeline_keeps: bool = False
    """whether a stage has a receive buffer for every micro batch and keeps its outputs until the backward pass ends, as
    torch.distributed.pipelining does"""
    all_forward_first: bool = False
    """whether interleaved stages with as many micro batches as pipeline ranks run all forward passes before the first
    backward pass (Megatron-Core before 0.10)"""
    p2p_overlap: bool = False
    p2p_syncs: Literal["never", "uninterleaved", "always"] = "never"
    """schedules in which the host waits for the device after each exchange between pipeline stages"""
    reads_loss: bool = False
    """whether the host reads the loss of each micro batch before the backward pass (Megatron-Core's check for NaN)"""
    p2p_scatter: bool = False
    """whether each tensor-parallel rank sends a share of the activation, which the receivers gather (Megatron-LM)"""
    cp_overlap: bool = True
    cp_merge: Style = "fused"
    """how context parallelism merges the parts of attention. Composed is PyTorch's way: piece by piece even where keys
    and values are gathered at once, and with gradients that travel in fp32"""
    recompute_early_stop: bool = True
    op_policy_misses: tuple[str, ...] = ()
    """attention kernels that checkpointing by operation doesn't know, so that the backward pass runs them again"""
    op_policy_keeps_abs: bool = False
    """whether checkpointing by operation keeps the absolute values of operands from which eager fp8 casts find the
    largest one"""
    offloads_from_gb_s: float | None = None
    """speed of the link to the host from which the framework's recipes keep activations in host memory; None: never"""
    offload_turn: Literal["layer", "pass"] = "layer"
    """activations that one offloading copy moves, and that the device holds until it ends: a layer's, as in
    TransformerEngine, or those of a whole pass through a stage"""

    gemm_rate: float = 1.0
    """rate of matrix multiplications relative to the device profile"""
    memory_rate: float = 1.0
    """bandwidth of memory-bound kernels relative to the device profile"""
    attention_rate: float = 1.0
    attention_backward_rate: float = 1.0
    """further factor on the backward pass; `attention_rate` applies to both passes"""
    network_rate: float = 1.0

    fitted: dict[str, str] = field(default_factory=dict, hash=False, compare=False)
    """rate -> method and number of rows of its fit"""

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        for name in self.fitted:
            if not hasattr(self, name):
                raise ValueError(f"fitted names {name!r}, which is not a rate of a stack")
        for wanted, runs in self.attention_becomes.items():
            for name in (wanted, *runs.values()):
                if name not in attention_choices():
                    raise ValueError(f"attention_becomes names {name!r}, which is not a kernel of attention.yaml")

    def across(self, nodes: int) -> Stack:
        """Returns the stack with the settings of its run script for so many nodes."""
        return self if nodes == 1 or self.allocator_across_nodes is None else self._on_nodes

    @cached_property
    def _on_nodes(self) -> Stack:
        """Returns the stack with the settings of its run script for several nodes. Searches ask once a plan."""
        return replace(self, allocator=self.allocator_across_nodes or "")

    def search_space(self) -> SearchSpace:
        """Returns the plans that a search tries. Raises ForerunError for a stack without a section `search`."""
        if self.search is None:
            raise ForerunError(f"stack {self.name} has no section search; add one to its file, or use predict")
        return self.search

    def attention_kernel(self, wanted: str, architecture: str) -> str:
        """Returns the attention kernel that a device of `architecture` runs for a plan whose attention is `wanted`."""
        kernel = self.attention if wanted == "auto" else wanted
        own = self.attention_becomes.get(kernel, {})
        return own.get(architecture) or attention_kernel(kernel).becomes.get(architecture, kernel)

    @property
    def selective_policy(self) -> SelectivePolicy:
        """Returns the framework's default policy of selective checkpointing."""
        return self.recomputes[0]


def gradient_dtype(named: str, wide: str) -> str:
    """Returns the dtype that a GradientDtype means for parameters in the dtype `wide`."""
    if named == "fp32-unless-fp16":
        return "fp16" if wide == "fp16" else "fp32"
    return wide if named == "param" else named
