"""LayeredKernels: the kernels of a LayeredModel under a plan, as rows of an op table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import Attention as AttentionShape
from forerun.core.program.kinds import Gemm
from forerun.describe.model.layered import Attention, Kernel, LayeredModel, Matmul, Traffic
from forerun.describe.plan import rules
from forerun.describe.plan.plan import Plan
from forerun.describe.plan.rules import DTYPE_BYTES
from forerun.describe.stacks.stack import Stack
from forerun.sources.symbolic.kernels import PlanKernels
from forerun.sources.symbolic.tape import Stage, on_compute


class LayeredKernels(PlanKernels):
    """The kernels of a model given layer by layer."""

    def __init__(
        self, model: LayeredModel, plan: Plan, stack: Stack, groups: dict[str, CommGroup], architecture: str
    ) -> None:
        """`architecture` is the device's, which decides which kernel scaled_dot_product_attention runs."""
        self.model, self.architecture = model, architecture
        self.breaks_graphs = rules.breaks_graphs(model, plan, stack)
        super().__init__(plan, stack, groups, (*(layer.layer_id for layer in model.layers), "loss", "optimizer"))

    @property
    def casts_weights(self) -> bool:
        """Returns whether weights have a wider dtype than products read, and are cast at each use (torch.autocast)."""
        wider = DTYPE_BYTES[self.plan.master_dtype] > self.weight_bytes
        return (self.stack.autocast or self.plan.autocast) and wider and not self.plan.uses_fsdp

    @cached_property
    def accumulate_dtype(self) -> str:
        """Returns the dtype of the gradient buffer: that of the gradients, unless plan or stack say otherwise."""
        as_made = self.plan.accumulate_dtype == "auto" and self.stack.accumulate_dtype == "param"
        return self.plan.master_dtype if as_made and self.casts_weights else super().accumulate_dtype

    @cached_property
    def grad_bytes(self) -> int:
        """Returns the bytes of a gradient element: autocast leaves gradients in the dtype of the weights."""
        return DTYPE_BYTES[self.plan.master_dtype] if self.casts_weights else super().grad_bytes

    @property
    def attention_kernel(self) -> str:
        """Returns the name of the fused attention kernel of the plan, or of the stack."""
        return self.stack.attention_kernel(self.plan.attention, self.architecture)

    def stages(self, name: str, kernels: Sequence[Kernel], role: int) -> list[Stage]:
        """Returns one stage for each kernel, with the layout copies around it."""
        made: list[Stage] = []
        for kernel in kernels:
            made += on_compute(self._row(name, kernel, role))
            converted = not self.stack.channels_last and self.matmul_dtype != "fp32"  # fp32 reads either layout
            if converted and isinstance(kernel, Matmul) and kernel.elements_read > 0:
                size = (kernel.elements_read + kernel.elements_written) * self.act_bytes
                made += self.traffic(name + ".layout", size, size, launches=3)
        return made

    def _row(self, name: str, kernel: Kernel, role: int) -> int:
        width, ops, dtype = self.act_bytes, self.ops, self.matmul_dtype
        if isinstance(kernel, Attention):
            return ops.attention(
                name,
                AttentionShape(
                    batch=kernel.samples,
                    heads=kernel.heads,
                    kv_heads=kernel.heads,
                    seq_q=kernel.seq,
                    seq_kv=kernel.seq,
                    head_dim=kernel.head_dim,
                    causal=int(kernel.causal),
                    backward=int(kernel.backward),
                    v_head_dim=kernel.head_dim,
                ),
                self.attention_kernel,
                self.wide_dtype,
                element_bytes=width,
                flops=kernel.flops,
            )
        if isinstance(kernel, Traffic):
            read = kernel.elements_read * width + kernel.bytes_read
            written = kernel.elements_written * width + kernel.bytes_written
            return ops.memory(name, read, written, kernel.launches, kernel.flops)
        if not kernel.elements_read:
            return ops.gemm(
                name, kernel.m, kernel.n, kernel.k, kernel.groups, role, dtype, element_bytes=(width, width)
            )
        read, written = kernel.elements_read * width, kernel.elements_written * width
        implicit = Gemm(kernel.m, kernel.n, kernel.k, kernel.groups, role, operand_bytes=read, result_bytes=written)
        return ops.counted_gemm(name, implicit, dtype, kernel.flops, read, written)
