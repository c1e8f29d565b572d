"""The kernels that a model runs under a plan, as rows of an op table, in the styles of the plan's software stack.

`PlanKernels` holds the parts that every model needs (casts, norms, collectives), and `TransformerKernels` adds the
transformer's own.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, NamedTuple

from forerun.common.shipped import shipped_data
from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import TokenExchange
from forerun.core.program.types import Collective, Stream
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan import rules
from forerun.describe.plan.plan import FP8_PRECISIONS, Plan
from forerun.describe.stacks.stack import NormStyle, Stack
from forerun.sources.symbolic.shapes import Shapes
from forerun.sources.symbolic.tape import Stage, on_compute

MODULES = ("embedding", "layer.attention_norm", "layer.attention", "layer.ffn_norm", "layer.ffn", "head", "optimizer")
"""modules of a transformer, to which nodes count"""
ENCODER = len(MODULES) - 1
"""number of the module of an encoder, which a model that has one counts before the optimizer"""
ENCODED = "encoded"
"""the encoder's output, which the embedding or layers with `cross_attention` read"""


def _patterns() -> dict[str, dict[str, Any]]:
    patterns: dict[str, dict[str, Any]] = shipped_data(__package__, "elementwise.yaml")
    return patterns


class _Pattern(NamedTuple):
    """An element-wise pattern in one style, by direction (forward, backward): entries of elementwise.yaml."""

    per_element: tuple[float, float]
    """bytes for each element"""
    launches: tuple[int, int]
    kinds: tuple[str, str]
    """kinds of its kernels, which determine their share of HBM's bandwidth"""


@cache
def _pattern(name: str, style: NormStyle) -> _Pattern:
    entry = _patterns()[name]
    forward, n_forward, backward, n_backward = entry[style]
    kinds = (entry.get("forward_kernel", {}).get(style, ""), entry.get("backward_kernel", {}).get(style, ""))
    return _Pattern((forward, backward), (int(n_forward), int(n_backward)), kinds)


class PlanKernels:
    """Adds kernels to an op table; every method returns op numbers or stages."""

    architecture: str
    """that of the device"""
    breaks_graphs: bool
    """whether compiled graphs end at module borders"""

    def __init__(
        self,
        plan: Plan,
        stack: Stack,
        groups: dict[str, CommGroup],
        modules: tuple[str, ...],
        border_bytes: int = 0,
        table: OpTableBuilder | None = None,
        first_group: int = 0,
    ) -> None:
        """`modules` are the names that nodes count to, the optimizer last; `border_bytes` cross a pipeline border.

        The kernels go into `table`, if several plans share one, where the groups of this plan start at `first_group`.
        """
        self.plan, self.stack = plan, stack
        self.modules, self.border_bytes = modules, border_bytes
        self.optimizer_module = len(modules) - 1
        self.ops = OpTableBuilder() if table is None else table
        self.groups = tuple(groups.values())
        self.group_index = {axis: i for i, axis in enumerate(groups, first_group)}
        self.group_size = {axis: group.size for axis, group in groups.items()}
        self.marker = self.ops.delay("join", 0)
        self.matmul_dtype = rules.product_dtype(plan)
        self.wide_dtype = rules.wide_dtype(plan)
        self.fp8 = plan.precision in FP8_PRECISIONS
        self.act_bytes = self.weight_bytes = int(rules.weight_bytes(plan))
        """bytes of an element of activations, and of weights as kernels read them"""
        self.stream_bytes = 4 if plan.autocast else self.act_bytes
        """bytes of an element of the residual stream, which norms read"""
        self.accumulate_bytes = 4 if stack.fused_accumulation and self.accumulate_dtype == "fp32" else 0
        self.tied_elements = 0
        """elements of the matrix that embedding and head share where they are tied"""

    def carried_bytes(self, layer: int) -> int:
        """Returns the bytes that cross a pipeline border before layer number `layer`, beside those that cross every
        border.
        """
        return 0

    @cached_property
    def accumulate_dtype(self) -> str:
        """Returns the dtype of the buffer that micro batches add their gradients to."""
        return str(rules.accumulate_dtype(self.plan, self.stack))

    @cached_property
    def reduce_dtype(self) -> str:
        """Returns the dtype in which gradients are reduced."""
        return str(rules.reduce_dtype(self.plan, self.stack))

    @cached_property
    def grad_bytes(self) -> int:
        """Returns the bytes of an element of a weight gradient as the backward pass leaves it."""
        return int(rules.gradient_bytes(self.plan))

    @property
    def in_graphs(self) -> bool:
        """Returns whether compiled code runs from CUDA graphs, which have a memory pool of their own."""
        return self.plan.compiles_layers and self.plan.cuda_graphs

    @property
    def whole_graph(self) -> bool:
        """Returns whether the forward pass and the backward pass are each one compiled graph."""
        return self.stack.whole_graph and self.plan.compiles_layers and not self.breaks_graphs

    @property
    def caches_casts(self) -> bool:
        """Returns whether weights are cast to fp8 once a step and the casts are kept for all micro batches."""
        return self.fp8 and self.stack.fp8_caches_weights and not self.plan.shards_parameters

    # -- memory-bound --------------------------------------------------------------------------------------

    def style(self, wanted: NormStyle) -> NormStyle:
        """Returns the style in which a pattern runs: the stack's, or `compiled` where Inductor writes the kernels."""
        return "compiled" if self.plan.compiles_layers and self.stack.inductor else wanted

    def keeps_steps(self, wanted: NormStyle) -> bool:
        """Returns whether the backward pass reads the results of single operations of a pattern.

        The min-cut partitioner of AOTAutograd recomputes them, under Inductor and under aot_eager.
        """
        return self.style(wanted) == "composed" and not (self.plan.compiles_layers and self.stack.min_cut)

    @property
    def loss_style(self) -> NormStyle:
        """Returns the style of the loss. Some stacks don't compile the loss."""
        compiled = self.plan.compile and self.plan.compile_loss and self.stack.compiles_loss and self.stack.inductor
        return "compiled" if compiled else self.stack.loss

    def pattern(self, name: str, elements: float, style: NormStyle) -> tuple[list[Stage], list[Stage]]:
        """Returns forward and backward stages of an element-wise pattern over `elements` elements."""
        return self.pattern_in(name, elements, self.style(style))

    def pattern_in(self, name: str, elements: float, style: NormStyle) -> tuple[list[Stage], list[Stage]]:
        """Does as `pattern`, in exactly the style `style`."""
        pattern, scale = _pattern(name, style), elements * self.act_bytes / 2
        (forward, backward), (n_forward, n_backward), kinds = pattern
        return (
            self._memory(name, forward * scale, n_forward, kinds[0]),
            self._memory(name + ".backward", backward * scale, n_backward, kinds[1]),
        )

    def _memory(self, name: str, traffic: float, launches: int, kernel: str) -> list[Stage]:
        if traffic <= 0:
            return []
        return on_compute(self.ops.memory(name, traffic / 2, traffic / 2, max(1, launches), kernel=kernel))

    def traffic(self, name: str, bytes_read: float, bytes_written: float, launches: int = 1) -> list[Stage]:
        """Returns one memory-bound kernel (or `launches` kernels that share the traffic)."""
        if bytes_read + bytes_written <= 0:
            return []
        return on_compute(self.ops.memory(name, bytes_read, bytes_written, launches))

    # -- matrix multiplication -----------------------------------------------------------------------------

    def gemms(
        self,
        name: str,
        tokens: int,
        n_in: int,
        n_out: int,
        groups: int = 1,
        dtype: str | None = None,
        batched: bool = False,
    ) -> tuple[int, int, int]:
        """Returns the op numbers of y[tokens, n_out] = x[tokens, n_in] w: forward, input gradient, weight gradient.

        Each op stands for `groups` such products, which one kernel computes where they are `batched`.
        """
        dtype = dtype or self.matmul_dtype
        kernels = 1 if batched else groups
        gemm = self.ops.gemm
        return (
            gemm(name, tokens, n_out, n_in, groups, 0, dtype, kernels=kernels),
            gemm(name + ".dgrad", tokens, n_in, n_out, groups, 1, dtype, kernels=kernels),
            gemm(name + ".wgrad", n_out, n_in, tokens, groups, 2, dtype, self.accumulate_bytes, kernels=kernels),
        )

    def casts(self, name: str, *elements: float, again: bool = False) -> list[Stage]:
        """Returns the casts to fp8 of operands of `elements` for the forward product, with `again` for a backward one.

        Wider precisions cast nothing.
        """
        if not self.fp8:
            return []
        pattern = _pattern(self._cast_pattern, self.style(self.stack.fp8_cast))
        operands = sum(size > 0 for size in elements)
        suffix = ".recast" if again else ".cast"
        size = pattern.per_element[again] * sum(elements)
        return self._memory(name + suffix, size, pattern.launches[again] * operands, pattern.kinds[again])

    @property
    def _cast_pattern(self) -> str:
        """Returns the pattern of casts to the plan's narrow precision."""
        if self.plan.precision == "nvfp4":
            return "nvfp4_cast"
        by_recipe = {"block": "fp8_cast_block", "mx": "fp8_cast_mx", "delayed": "fp8_cast_delayed"}
        return {"rowwise": "fp8_cast_rowwise", **by_recipe}.get(self.plan.fp8_recipe, "fp8_cast")

    # -- communication -------------------------------------------------------------------------------------

    def collective(self, name: str, kind: Collective, axis: str, size_bytes: float, stream: Stream) -> list[Stage]:
        """Returns the stage of a collective over `axis`; none when the axis has one rank or no bytes move."""
        if self.group_size.get(axis, 1) == 1 or size_bytes <= 0:
            return []
        op = self.ops.collective(name, kind, self.group_index[axis], size_bytes, self.wide_dtype)
        return [((op, stream),)]

    def token_exchange(self, name: str, by: str, routing: TokenExchange[int], size_bytes: float) -> list[Stage]:
        """Returns the stage of a kernel of dispatcher `by` over the expert-parallel group; `size_bytes` are those of a
        copy of each token for each of its experts."""
        op = self.ops.collective(
            name, Collective.ALL_TO_ALL, self.group_index["ep"], size_bytes, self.wide_dtype, 1, by, routing
        )
        return [((op, Stream.EP),)]

    def collective_op(self, name: str, kind: Collective, axis: str, size_bytes: float, dtype: str) -> int:
        """Returns the op number of a collective that the caller places itself."""
        return self.ops.collective(name, kind, self.group_index[axis], size_bytes, dtype)

    def p2p(self, name: str, axis: str, size_bytes: float) -> int:
        """Returns the op number of a transfer between neighbours of `axis`."""
        return self.ops.p2p(name, self.group_index[axis], size_bytes, self.wide_dtype)


class TransformerKernels(PlanKernels):
    """The kernels of a transformer under a plan."""

    def __init__(
        self,
        model: ModelSpec,
        plan: Plan,
        stack: Stack,
        groups: dict[str, CommGroup],
        architecture: str,
        table: OpTableBuilder | None = None,
        first_group: int = 0,
    ) -> None:
        """`architecture` is the device's, which decides which kernel scaled_dot_product_attention runs; `table` and
        `first_group` are those of `PlanKernels`.
        """
        self.model, self.architecture = model, architecture
        self.depth = model.n_layers
        """layers of the whole model, also where `model` is one of its layers"""
        self.dispatcher = rules.token_dispatcher(plan, stack)
        self.breaks_graphs = rules.breaks_graphs(model, plan, stack)
        self.shapes = shapes = Shapes.of(model, plan, stack)
        self._border_share = plan.tp if plan.sequence_parallel or stack.p2p_scatter else 1
        row = shapes.hidden * (model.streams.count if model.streams else 1) * shapes.act_bytes
        self.encoder = model.runs
        modules = MODULES if self.encoder is None else (*MODULES[:-1], "encoder", *MODULES[-1:])
        border_bytes = shapes.tokens * row // self._border_share
        super().__init__(plan, stack, groups, modules, border_bytes, table, first_group)
        self.tied_elements = shapes.vocab * shapes.hidden
        self.scores = False
        """whether the kernels are those of a reference model, which runs forward passes without adapters"""

    def carried_bytes(self, layer: int) -> int:
        """Returns the bytes of the inputs that the layers from `layer` on have for themselves, and of the keys and
        values that they share with earlier ones."""
        model, s = self.model, self.shapes
        if not model.layer_input and not any(kind.shared_kv for kind in model.kinds):
            return 0
        behind = range(layer, model.n_layers)
        inputs = s.tokens * len(behind) * model.layer_input * s.act_bytes // self._border_share
        sources = {model.kv_source(number) for number in behind if model.layer(number).shared_kv}
        read = [Shapes.of(model.layer(number), self.plan, self.stack) for number in sources if number < layer]
        return inputs + sum(s.tokens * one.kv_heads * (one.head_dim + one.v_head_dim) * s.act_bytes for one in read)

    @property
    def norm_pattern(self) -> str:
        """Returns the pattern of a norm: the model's kind, or that of norms without weights."""
        return self.model.norm if self.model.norm_weight else "weightless_norm"

    @property
    def transposes_casts(self) -> bool:
        """Returns whether gathered casts are transposed, as the device multiplies fp8 operands in one layout only."""
        return self.architecture in ("ada", "hopper")

    def of_reference(self) -> TransformerKernels:
        """Returns the same kernels and op table for the reference model."""
        found = copy(self)
        found.scores = True
        return found

    def of_encoder(self) -> TransformerKernels:
        """Returns the same kernels and op table for the layers of the encoder, on micro batches of its inputs.

        Those of a frozen encoder run forward alone, as a reference model's do; so do those of all encoders where the
        plan trains adapters of the language model.
        """
        encoder = self.encoder
        assert encoder is not None
        found = self._on(self.plan.micro_batch * encoder.inputs, encoder.tokens, encoder.stack)
        found.scores = self.scores or encoder.frozen or self.plan.lora_rank > 0
        return found

    def of_encoded(self) -> TransformerKernels:
        """Returns the same kernels and op table on the tokens of the encoder's output."""
        assert self.encoder is not None
        return self._on(self.plan.micro_batch, self.encoder.out_tokens, self.model)

    def _on(self, micro_batch: int, seq_len: int, model: ModelSpec) -> TransformerKernels:
        """Returns the same kernels and op table for `model` on `micro_batch` sequences of `seq_len` tokens."""
        found = copy(self)
        found.plan = replace(self.plan, micro_batch=micro_batch, seq_len=seq_len)
        found.model, found.shapes = model, Shapes.of(model, found.plan, self.stack)
        return found

    def of_layer(self, layer: ModelSpec) -> TransformerKernels:
        """Returns the same kernels and op table for the layer that `layer`, a model of one layer, describes."""
        found = copy(self)
        found.model, found.shapes = layer, Shapes.of(layer, self.plan, self.stack)
        return found
