"""Plan: how a model is trained, with torchtitan's names for the mesh axes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from math import inf
from typing import Literal, get_args

from forerun.common.errors import ForerunError
from forerun.describe.kernels.dispatchers import AUTO
from forerun.describe.plan.routing import BALANCED, Routing
from forerun.describe.stacks.catalog import DEFAULT_STACK, load_stack
from forerun.describe.stacks.stack import CpMethod, OptimizerImpl, Schedule, SelectivePolicy

RecomputedModule = Literal["core_attn", "layernorm", "mla_up_proj", "moe_act", "mlp", "moe", "shared_experts"]
"""parts of a layer, under Megatron-Core's names"""
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""linear layers that may have adapters, under peft's names"""
Precision = Literal["bf16", "fp16", "fp32", "tf32", "fp8", "mxfp8", "nvfp4"]
MESH_AXES = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
"""axes of the mesh in the usual order, innermost first (torchtitan, Megatron)"""
DEFAULT_ORDER = "-".join(MESH_AXES)
FP8_PRECISIONS = ("fp8", "mxfp8", "nvfp4")
"""precisions whose matrix products cast their operands to 8 bits or fewer, with scales"""
V_SCHEDULES = ("ZBV", "DualPipeV", "DualPipe")
"""schedules with two stages on each rank, one on the way down the ranks and one on the way up"""
SPLIT_SCHEDULES = ("ZB1P", *V_SCHEDULES)
"""schedules that compute weight gradients in passes of their own"""
FROM_STACK = ("cp_method", "sequence_parallel", "selective_policy", "optimizer_impl")
"""fields that a plan may leave open; the attribute of the same name of its stack fills them"""
LARGEST_BUCKET_MIB = 1_000_000
"""a limit above the memory of any GPU"""
_COUNTS = (
    *("seq_len", "micro_batch", "n_microbatches", "dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"),
    *("virtual_stages", "checkpoint_every", "loss_chunks"),
)
"""fields that are whole numbers of at least 1"""
_RANGES = {
    "prefetch": (0, inf),
    "ddp_bucket_mib": (0, LARGEST_BUCKET_MIB),
    "shard_min_mib": (0, inf),
    "expert_imbalance": (1, inf),
    "activation_offload": (0, 1),
    "lora_rank": (0, inf),
}
"""least and largest value of the other numbers"""


@dataclass(frozen=True, slots=True)
class Plan:
    """Describes how one optimizer step is parallelised and run.

    The world has dp_replicate x dp_shard x cp x tp x pp ranks. Experts have a separate mesh over the ranks of tp x cp x
    dp_shard (Megatron-Core's parallel folding). The innermost `etp` ranks split each expert, the next `ep` have
    different experts, and the others hold the same ones. With both at 1 they are placed as other parameters.

    `n_microbatches` is the number of micro batches of one data-parallel rank in one optimizer step: pipeline micro
    batches when pp > 1, gradient accumulation steps otherwise.
    """

    seq_len: int
    micro_batch: int = 1
    n_microbatches: int = 1
    document_lengths: tuple[int, ...] = ()
    """tokens of the documents that are packed into a sequence; a token attends only to its own document. The list
    repeats until seq_len is full. Without any, a sequence is one document"""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    """number of ranks that split the matrices of each expert; at 1 a rank has whole experts, also under tensor
    parallelism"""
    mesh_order: str = DEFAULT_ORDER
    """order of the mesh axes, from neighbouring ranks outwards, joined by -; the first ones are inside a node"""

    zero_stage: Literal[0, 1, 2, 3] = 3
    """what dp_shard shards: 0 nothing (DDP), 1 optimizer state, 2 gradients too, 3 parameters too (FSDP)"""
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    """whether unsharded parameters are freed after the forward pass; default: unless pp > 1, as in torchtitan"""
    shard_min_mib: float = 0.0
    """size in MiB (2**20 bytes, in master_dtype) below which a parameter is not sharded; its gradient is all-reduced"""
    prefetch: int = 1
    """number of units that FSDP gathers ahead of compute (FSDP2: 1); at 0 prefetching is off and every gather is
    exposed"""
    ddp_bucket_mib: float = 0.0
    """size in MiB of the buckets in which replicated gradients are reduced; 0: the stack's size"""
    reduce_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """dtype in which gradients are reduced over ranks; auto: the stack's dtype"""
    accumulate_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """dtype of the buffer that accumulates gradients over micro batches; auto: the stack's dtype"""
    overlap_grad_reduce: bool = True
    """reduce gradients while the backward pass still runs"""

    sequence_parallel: bool | None = None
    """split the sequence over tp outside of tensor-parallel regions; None: as the stack does"""
    loss_parallel: bool = True
    loss_chunks: int = 1
    """number of chunks of the tokens for which head and loss run one after the other, including gradients, so that
    memory has the logits of one chunk only (Liger's fused linear cross entropy)"""
    async_tp: bool = False

    pp_schedule: Schedule = "1F1B"
    virtual_stages: int = 1
    """stages per rank (Megatron's model chunks); above 1 needs an interleaved or V schedule"""
    layers_per_stage: tuple[int, ...] | None = None
    """layers of each of the pp x virtual_stages stages in model order; None spreads them evenly"""
    balance_ends: bool = False
    """count embedding and head as one layer each when spreading layers over stages"""

    cp_method: CpMethod | Literal["auto"] = "auto"
    """how context-parallel ranks exchange keys and values; auto: the stack's method"""
    cp_load_balance: Literal["head_tail", "striped", "none"] = "head_tail"
    """tokens of a causal sequence on a context-parallel rank: a chunk from the head and one from the tail (PyTorch,
    Megatron), every cp-th token, or consecutive ones; `ulysses` splits heads and is always balanced"""
    expert_imbalance: float = 1.0
    """tokens of the busiest expert-parallel rank divided by the mean of all ranks, at least 1"""
    expert_routing: str = BALANCED
    """distribution of tokens over experts: balanced; uniform (random); zipf:S (Zipf's law with exponent S); or
    loads:A:B:... (measured tokens of each expert). The busiest rank has at least expert_imbalance times the mean"""
    dispatcher: str = AUTO
    """implementation that sends tokens to their experts and back (describe/kernels/dispatchers.yaml); auto: the
    stack's"""
    expert_overlap: bool = False
    """run the forward pass of one micro batch beside the backward pass of another one, so that the kernels of each hide
    the exchanges of the other (DualPipe; Megatron-Core's --overlap-moe-expert-parallel-comm). One more micro batch is
    in flight"""

    shared_expert_overlap: bool = False
    """run the shared experts while tokens travel to the routed ones (Megatron-Core's --moe-shared-expert-overlap)"""

    precision: Precision = "bf16"
    """dtype of the matrix multiplications"""
    autocast: bool = False
    """torch.autocast: weights, norms, the residual stream and the loss are in fp32; matrix products cast their operands
    to `precision` and keep the casts for the backward pass"""
    master_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """dtype of the weights that the optimizer updates"""
    fp8_recipe: Literal["tensorwise", "rowwise", "delayed", "block", "mx", "none"] = "none"
    fp8_all_gather: bool = False

    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    selective_policy: SelectivePolicy | Literal["auto"] = "auto"
    """op: torchtitan's per-operator list; attention: Megatron's core attention; attention-block: attention with its
    projections; mlp: the feed-forward; mlp-act-norm: feed-forward activation and norms; attention+mlp: both blocks,
    each checkpointed alone;
    params: only the gathered or cast parameters; auto: as the stack does"""
    recompute_modules: tuple[RecomputedModule, ...] = ()
    """modules of a layer that selective checkpointing recomputes, under Megatron-Core's names; they replace
    selective_policy"""
    checkpoint_every: int = 1
    """n: every n-th layer is checkpointed"""
    compile: bool = False
    compile_model: bool = True
    """whether torch.compile covers the layers; otherwise it covers the loss alone, as in torchtitan's recipes with
    experts"""
    compile_loss: bool = True
    """whether torch.compile also covers the loss, if the stack supports it"""
    graph_breaks: bool = False
    """torch.compile's graphs end at module borders: norms, attention and the loss are each a graph, matrix products and
    collectives run eagerly between them"""
    cuda_graphs: bool = False
    attention: str = "auto"
    """attention kernel (describe/kernels/attention.yaml); auto is the stack's default, flex_uncompiled is FlexAttention
    outside of torch.compile, which materialises all scores in fp32"""

    lora_rank: int = 0
    """rank of the low-rank adapters (LoRA) that are trained while the weights are frozen; 0 trains the weights"""
    lora_targets: tuple[LoraTarget, ...] = get_args(LoraTarget)
    """linear layers that have adapters"""
    frozen_dtype: Literal["wide", "nf4"] = "wide"
    """format of frozen weight matrices: wide (dtype of the activations), or nf4 (4 bits with double quantisation, as in
    QLoRA). Other frozen weights are always wide"""

    reference: bool = False
    """a frozen reference model runs a forward pass on each micro batch before the trained one (DPO, GRPO). With
    adapters it is the frozen model itself; otherwise it is a copy of the weights in the dtype of the activations"""

    optimizer: str = "adamw"
    """optimizer that updates the weights (describe/kernels/optimizers.yaml)"""
    moment_dtype: Literal["fp32", "bf16"] = "fp32"
    """dtype of the optimizer's moments"""
    optimizer_impl: OptimizerImpl | Literal["auto"] = "auto"
    offload: Literal["none", "optimizer", "params"] = "none"
    """which state is kept in host memory between uses"""
    activation_offload: float = 0.0
    """fraction of the saved activations that waits in host memory for the backward pass"""

    stack: str = DEFAULT_STACK
    """the training framework: a name that `forerun stacks` lists, or the path of a stack's file. It determines which
    kernels run, what overlaps, the host's time, and the fields that the plan leaves open"""

    def __post_init__(self) -> None:
        self._take_from_stack()
        for field in _COUNTS:
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ForerunError(f"plan: {field} must be a whole number of at least 1, got {value!r}")
        for field, (least, most) in _RANGES.items():
            value = getattr(self, field)
            if not least <= value <= most:
                bounds = f"at least {least}" if most == inf else f"between {least} and {most}"
                raise ForerunError(f"plan: {field} must be {bounds}, got {value}")
        Routing.parse(self.expert_routing)
        if any(length < 1 for length in self.document_lengths):
            raise ForerunError(f"plan: document_lengths must be at least 1 each, got {self.document_lengths}")
        if self.mesh_order != DEFAULT_ORDER and sorted(self.mesh_axes) != sorted(MESH_AXES):
            raise ForerunError(
                f"plan: mesh_order must name {', '.join(MESH_AXES)} once each, innermost first and joined by -,"
                f" got {self.mesh_order!r}"
            )

    def _take_from_stack(self) -> None:
        """Fills open fields with the values of the stack. The dtypes of gradients stay `auto`: they follow
        `precision`."""
        open_fields = [name for name in FROM_STACK if getattr(self, name) in (None, "auto")]
        if not open_fields and self.zero_stage != 2:
            return
        stack = load_stack(self.stack)
        values = {name: getattr(stack, name) for name in open_fields}
        if "optimizer_impl" in values and stack.whole_graph and self.compiles_layers and self.compile_loss:
            values["optimizer_impl"] = "fused"  # the compiled function goes on to the end of the step
        if self.zero_stage == 2 and stack.keeps_gathered_at_zero_2:
            values["zero_stage"] = 3
            if self.reshard_after_forward == "default":
                values["reshard_after_forward"] = "never"
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def compiles_layers(self) -> bool:
        """Returns whether torch.compile covers the layers."""
        return self.compile and self.compile_model

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def dp(self) -> int:
        """Returns the data-parallel degree: ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Returns the number of ranks over which state is sharded. It includes context-parallel ranks, which have the
        same weights."""
        return self.dp_shard * self.cp

    @property
    def state_ranks(self) -> int:
        """Returns the number of ranks that share one model state: those of `fsdp`, for all copies of a stage."""
        return self.fsdp * self.stage_copies

    @property
    def expert_ranks(self) -> int:
        """Returns the number of ranks that share the state of an expert; 1 if no state is shared."""
        around = 1 + self.experts_apart * (self.tp - 1)
        shared = self.state_ranks * around // (self.ep * self.etp)
        return 1 + (self.fsdp > 1) * (shared - 1)

    @property
    def experts_apart(self) -> bool:
        """Returns whether experts have a separate mesh. Without one, the ranks of `fsdp` share their state."""
        return (self.ep > 1) | (self.etp > 1)

    @property
    def global_batch(self) -> int:
        """Returns the number of sequences in an optimizer step."""
        return self.micro_batch * self.n_microbatches * self.dp

    @property
    def documents(self) -> tuple[int, ...]:
        """Returns the number of tokens of each document in a sequence; the last document may be truncated."""
        if not self.document_lengths:
            return (self.seq_len,)
        found, left = [], self.seq_len
        for length in cycle(self.document_lengths):
            found.append(min(length, left))
            left -= found[-1]
            if not left:
                return tuple(found)
        raise AssertionError("a cycle has no end")

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """Returns the axes of the mesh, innermost first."""
        return tuple(self.mesh_order.split("-"))

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    @property
    def n_stages(self) -> int:
        return self.pp * self.virtual_stages

    @property
    def distinct_stages(self) -> int:
        """Returns the number of stages that a model is split into."""
        return self.n_stages // self.stage_copies

    @property
    def stage_copies(self) -> int:
        """Returns the number of ranks of a pipeline that hold the same stage: two in DualPipe, where micro batches
        enter at both ends."""
        both_ends = (self.pp_schedule == "DualPipe") & (self.pp > 1)
        return 1 + both_ends

    # The properties below also work on a table of plans, as they combine comparisons with & and |.

    @property
    def uses_fsdp(self) -> bool:
        """Returns whether FSDP wraps the model, also on a single rank: weights are then stored in master_dtype only."""
        return self.zero_stage == 3

    @property
    def shards_parameters(self) -> bool:
        """Returns whether each rank keeps a part of the parameters (FSDP, ZeRO-3)."""
        return self.uses_fsdp & (self.fsdp > 1)

    @property
    def shards_gradients(self) -> bool:
        """Returns whether each rank keeps a part of the gradients (ZeRO-2 and above)."""
        return (self.zero_stage >= 2) & (self.fsdp > 1)

    @property
    def shards_optimizer(self) -> bool:
        """Returns whether each rank updates a part of the parameters and keeps its optimizer state (ZeRO-1 and
        above)."""
        return (self.zero_stage >= 1) & (self.fsdp > 1)

    @property
    def quantises_frozen(self) -> bool:
        """Returns whether frozen matrices are kept in 4 bits."""
        return (self.lora_rank > 0) & (self.frozen_dtype == "nf4")

    @property
    def gathers_updates(self) -> bool:
        """Returns whether ranks that keep whole parameters gather the others' updates after a step (ZeRO-1 and
        ZeRO-2)."""
        return self.shards_optimizer & (self.zero_stage < 3)

    @property
    def reshards(self) -> bool:
        """Returns whether unsharded parameters are freed after a unit's forward pass."""
        by_default = (self.reshard_after_forward == "default") & (self.pp == 1)
        return (self.reshard_after_forward == "always") | by_default

    @property
    def gathers_once(self) -> bool:
        """Returns whether all micro batches of a pipeline use the parameters that the first one gathered."""
        return (self.pp > 1) & (self.reshards ^ True)

    @property
    def splits_backward(self) -> bool:
        """Returns whether the pipeline schedule computes weight gradients in passes of their own."""
        split = False
        for schedule in SPLIT_SCHEDULES:
            split |= self.pp_schedule == schedule
        return split & (self.pp > 1)

    @property
    def sharding(self) -> str:
        """Returns the name of the treatment of a model's state by data parallelism: DDP, ZeRO-1, ZeRO-2, FSDP, or HSDP,
        which shards among some ranks and replicates over the others.
        """
        if not self.shards_optimizer:
            return "DDP"
        if self.zero_stage < 3:
            return f"ZeRO-{self.zero_stage}"
        return "HSDP" if self.dp_replicate > 1 else "FSDP"

    def describe(self) -> str:
        """Returns the parallelism in one short line, without axes of one rank. `HSDP=8x16 tp=4` has 8 copies of a
        model, each sharded over 16 groups of 4 tensor-parallel ranks.
        """
        words = []
        if self.dp * self.cp > 1:
            hybrid = self.shards_optimizer and self.dp_replicate > 1
            degree = f"{self.dp_replicate}x{self.dp_shard}" if hybrid else str(self.dp)
            words.append(self.sharding if degree == "1" else f"{self.sharding}={degree}")
        degrees = ((name, getattr(self, name)) for name in ("cp", "tp", "pp", "ep", "etp"))
        return " ".join([*words, *(f"{name}={degree}" for name, degree in degrees if degree > 1)]) or "one GPU"
