"""Writes linear layers with their tensor-parallel collectives on a tape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from forerun.core.program.types import Collective, Stream
from forerun.describe.plan.rules import DTYPE_BYTES, drops_hidden
from forerun.sources.symbolic.adapters import adapter, dequantised, freeze, is_adapted
from forerun.sources.symbolic.kernels import TransformerKernels
from forerun.sources.symbolic.products import Product
from forerun.sources.symbolic.tape import Stage, Tape, TapeOp, on_compute
from forerun.sources.symbolic.weights import Weights


class Casts(NamedTuple):
    """Elements that a rank casts to fp8 for one product."""

    own: float
    """of the input before a gather; 0 if another product has cast it"""
    read: float
    """of the input as the product reads it"""
    gradient: float
    """of the result's gradient before a gather"""
    gathered: float = 0.0
    """of the casts that the rank gathers, of input and gradient together"""


class AutocastWeight(NamedTuple):
    """The casts of one weight under autocast."""

    forward: list[Stage]
    backward: list[Stage]
    made: tuple[tuple[str, int], ...]
    """(tensor, bytes) kept for the backward pass"""


@dataclass(slots=True)
class Section:
    """A tape under construction, with the weights it collects."""

    kernels: TransformerKernels
    tape: Tape
    weights: Weights
    adapters: list[tuple[int, int]] = field(default_factory=list)
    """input and output width of each matrix of low-rank adapters"""

    def freeze(self) -> None:
        """Trains the section's adapters and nothing else, or nothing at all in a reference model.

        In other models without adapters it changes nothing.
        """
        if self.kernels.plan.lora_rank or self.kernels.scores:
            freeze(self.tape, self.weights, self.adapters)

    # -- element-wise --------------------------------------------------------------------------------------

    def pointwise(
        self,
        name: str,
        pattern: str,
        elements: float,
        style: str,
        reads: tuple[str, ...],
        makes: tuple[tuple[str, int], ...],
        saves: tuple[str, ...] = (),
        module: int = 0,
        kind: str = "pointwise",
    ) -> None:
        """Writes an element-wise pattern as one operation."""
        forward, backward = self.kernels.pattern(pattern, elements, style)  # type: ignore[arg-type]
        self.tape.add(TapeOp(name, kind, module, forward, backward, reads=reads, saves=saves, makes=makes))

    def norm(self, name: str, x: str, y: str, tokens: int, module: int, width: int | None = None) -> None:
        """Writes a norm of `width` (the hidden size unless given) over `tokens` and adds its weights to the section."""
        kernels = self.kernels
        width = width or kernels.shapes.hidden
        kind = kernels.model.norm
        vectors = [width] * (2 if kind == "layernorm" and kernels.model.norm_bias else 1) * kernels.model.norm_weight
        self.weights.vectors += vectors
        if self.sp:
            self.weights.shared += vectors
        size = tokens * width * kernels.shapes.act_bytes
        makes = [(y, size)]
        saves: tuple[str, ...] = (x,)
        if kind == "rmsnorm" and kernels.keeps_steps(kernels.stack.norm):  # fp32 copy, normed copy and its 2-byte cast
            wide = tokens * width * 4
            makes += [(y + ".float", wide), (y + ".unit", wide), (y + ".cast", size)]
            saves = tuple(tensor for tensor, _ in makes[1:])
        elements = tokens * width * kernels.stream_bytes // kernels.shapes.act_bytes
        pattern, style = kernels.norm_pattern, kernels.stack.norm
        self.pointwise(name, pattern, elements, style, (x,), tuple(makes), saves, module, "norm")

    def narrowed(self, x: str, module: int) -> str:
        """Returns the name of the tensor that products read of the residual stream `x`: under autocast its cast."""
        kernels, y = self.kernels, x + ".cast"
        if kernels.stream_bytes == kernels.act_bytes:
            return x
        elements = kernels.shapes.tokens_sp * kernels.shapes.hidden
        wide, narrow = elements * kernels.stream_bytes, elements * kernels.act_bytes
        forward, backward = kernels.traffic(y, wide, narrow), kernels.traffic(y + ".backward", narrow, wide)
        self.tape.add(TapeOp(y, "pointwise", module, forward, backward, reads=(x,), makes=((y, narrow),)))
        return y

    def fan_out(self, name: str, x: str, elements: float, readers: int, module: int) -> None:
        """Writes the sums of the gradients that `readers` operations give to `x` of `elements` elements."""
        if readers > 1:
            _, backward = self.kernels.pattern("fan_out", (readers - 1) * elements, "composed")
            self.tape.add(TapeOp(name + ".fan_out", "view", module, [], backward, reads=(x,)))

    def residual(self, name: str, x: str, branch: str, y: str, module: int, scaled: bool = False) -> None:
        """Writes y = x + branch, with `scaled` after a scale and a bias of each."""
        kernels = self.kernels
        elements = kernels.shapes.tokens_sp * kernels.shapes.hidden
        drops = drops_hidden(kernels.model, kernels.stack)
        pattern = "dropout_add" if drops else "affine_residual" if scaled else "residual"
        moved = elements * kernels.stream_bytes // kernels.shapes.act_bytes
        forward, backward = kernels.pattern(pattern, moved, kernels.stack.residual)
        makes = [(y, elements * kernels.stream_bytes)]
        saves: tuple[str, ...] = (x, branch) if scaled else ()
        self.weights.vectors += [kernels.shapes.hidden] * (4 * scaled)
        if drops:
            makes.append((y + ".mask", elements))
            saves = (*saves, y + ".mask")
        self.tape.add(
            TapeOp(name, "residual", module, forward, backward, reads=(x, branch), saves=saves, makes=tuple(makes))
        )

    # -- tensor-parallel borders ----------------------------------------------------------------------------

    @property
    def tp(self) -> int:
        return self.kernels.plan.tp

    @property
    def sp(self) -> bool:
        return bool(self.kernels.plan.sequence_parallel) and self.tp > 1

    @property
    def gathered_share(self) -> float:
        """Returns the bytes that a gather of activations moves over their size: with one scale a tensor, casts are
        gathered."""
        return 0.5 if self.kernels.fp8 and self.kernels.plan.fp8_recipe in ("tensorwise", "delayed") else 1.0

    @property
    def cast_share(self) -> float:
        """Returns the share of a gathered tensor that a rank casts to fp8: tensorwise scaling casts before the
        gather."""
        return 1 / self.tp if self.sp and self.gathered_share < 1 else 1.0

    def fp8_casts(self, name: str, casts: Casts, weight: float) -> tuple[list[Stage], list[Stage]]:
        """Returns the casts before the forward product and before the backward ones.

        Weights that are gathered in fp8 are cast in their shards; cached casts are made at the end of the step before.
        """
        kernels, gradient = self.kernels, name + ".grad"
        weight = 0.0 if kernels.plan.fp8_all_gather or kernels.caches_casts else weight
        again = kernels.casts(name, casts.read, weight, again=True)
        both = kernels.casts(gradient, casts.gradient) + kernels.casts(gradient, casts.gradient, again=True)
        if casts.gathered and kernels.transposes_casts:
            both += kernels.pattern("fp8_transpose", casts.gathered, kernels.stack.fp8_cast)[1]
        return kernels.casts(name, casts.own, weight), again + both

    def _absolutes(self, name: str, x: str, casts: Casts, weight: int, module: int) -> None:
        """Writes the absolute values that eager casts make of a product's operands, where a policy may keep them."""
        kernels = self.kernels
        if not (kernels.fp8 and kernels.stack.op_policy_keeps_abs) or kernels.plan.compiles_layers:
            return
        operands = ((".abs", casts.own), (".weight.abs", 0 if kernels.plan.fp8_all_gather else weight))
        made = tuple((name + suffix, int(elements) * kernels.act_bytes) for suffix, elements in operands)
        self.tape.add(TapeOp(name + ".abs", "absolutes", module, [], [], reads=(x,), makes=made))

    def copies(self, name: str, size_bytes: float) -> list[Stage]:
        """Returns the layout copies that the stack makes around a tensor-parallel collective of sequence shards.

        Asynchronous tensor parallelism writes into the product's operand; a compiler reduces whole tensors in place.
        """
        if self._async_tp or (self.kernels.plan.compiles_layers and not self.sp):
            return []
        return self._layout_copies(name, size_bytes)

    def _layout_copies(self, name: str, size_bytes: float) -> list[Stage]:
        return self.kernels.traffic(name + ".copy", size_bytes, size_bytes) * self.kernels.stack.tp_copies

    def enter(self, name: str, x: str, y: str, module: int, width: int | None = None) -> str:
        """Brings `x` into the tensor-parallel region and returns the name of the tensor inside."""
        if self.tp == 1:
            return x
        kernels, shapes = self.kernels, self.kernels.shapes
        size = shapes.tokens * (width or shapes.hidden) * shapes.act_bytes
        if self.sp:
            moved = size * self.gathered_share
            forward = kernels.collective(name + ".gather", Collective.ALL_GATHER, "tp", moved, Stream.TP)
            backward = kernels.collective(name + ".scatter", Collective.REDUCE_SCATTER, "tp", size, Stream.TP)
            forward += self.copies(name, moved)
            backward = self.copies(name, size) + backward
            self.tape.add(TapeOp(name, "gather", module, forward, backward, reads=(x,), makes=((y, size),)))
            return y
        backward = kernels.collective(name + ".reduce", Collective.ALL_REDUCE, "tp", size, Stream.TP)
        self.tape.add(
            TapeOp(name, "gather", module, [], self.copies(name, size) + backward, reads=(x,), makes=((y, 0),))
        )
        return x

    def column(self, name: str, x: str, n_in: int, outs: list[tuple[str, str, int]], bias: bool, module: int) -> None:
        """Writes column-parallel linear layers over one input: `outs` are (name, tensor, local output width).

        When the stack overlaps, the gather of the input runs beside the first product in the forward pass (ring
        exchange), and beside the input gradient in the backward pass. A stack that does not keep the gathered input
        gathers it again for the weight gradient.
        """
        kernels, stack = self.kernels, self.kernels.stack
        border = self.tp > 1 and (
            stack.tp_backward_overlap or self._ring or (self.sp and not stack.save_gathered_input)
        )
        inside = x if border else self.enter(name + ".enter", x, name + ".x", module, n_in)
        self.fan_out(name, inside, kernels.shapes.tokens * n_in, len(outs), module)
        for i, (label, y, width) in enumerate(outs):
            self.weights.add_matrix(n_in, width)
            if bias:
                self.weights.vectors.append(width)
            if border:
                first, last = i == 0, i == len(outs) - 1
                self._column_with_border(
                    Product(label, x, y, n_in, width, bias, module), first, last, alone=len(outs) == 1
                )
            else:
                casts = self._column_casts(n_in, width, first=i == 0)
                self.linear(Product(label, inside, y, n_in, width, bias, module), kernels.shapes.tokens, casts)

    def _column_casts(self, n_in: int, n_out: int, first: bool) -> Casts:
        """Returns the casts of one of several products that read one input, which a compiler casts only once."""
        tokens = self.kernels.shapes.tokens
        read = float(tokens * n_in) if first or not self.kernels.plan.compiles_layers else 0.0
        return Casts(read * self.cast_share, read, tokens * n_out, read if self.cast_share < 1 else 0.0)

    @property
    def _async_tp(self) -> bool:
        """Returns whether a matrix product and the collective beside it are one kernel.

        Inductor fuses a gather only with a product that reads its result directly, which scaling other than tensorwise
        does not: it casts to fp8 in between (torch/_inductor/fx_passes/micro_pipeline_tp.py).
        """
        return self.kernels.plan.async_tp and not (self.kernels.fp8 and self.gathered_share == 1.0)

    @property
    def _ring(self) -> bool:
        return self._async_tp or self.kernels.stack.tp_forward_overlap

    def kept_input(self, x: str, elements: float) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
        """Returns the tensors that a product keeps of its input `x` for its weight gradient, and the tensors that it
        makes for this.

        That is `x`, or its cast to fp8 where the stack keeps casts, or nothing if the backward pass computes `x`
        anew. A cast that another product has made is not made again; a new one is returned as (name, bytes). `x` has
        `elements` elements.
        """
        kernels = self.kernels
        if not (kernels.fp8 and kernels.stack.fp8_keeps_cast):
            return () if self._casts_anew(x) else (x,), ()
        cast = x + ".fp8"
        if any(name == cast for op in self.tape.ops for name, _ in op.makes):
            return (cast,), ()
        return (cast,), ((cast, int(elements) * DTYPE_BYTES[kernels.plan.precision]),)

    def _casts_anew(self, x: str) -> bool:
        """Says whether a compiled backward pass computes the input `x` of an fp8 product together with its cast.

        The min-cut partitioner (torch/_functorch/partitioners.py) keeps the result of an element-wise operation that a
        product reads in the backward pass, but not one that a cast reads, with which it fuses.
        """
        kernels, plan = self.kernels, self.kernels.plan
        compiled = plan.compiles_layers and kernels.stack.min_cut and plan.activation_checkpointing == "none"
        if not (kernels.fp8 and compiled and self.tp == 1):
            return False
        made_by = next((op for op in reversed(self.tape.ops) if any(name == x for name, _ in op.makes)), None)
        return made_by is not None and made_by.kind in ("norm", "pointwise")

    def linear(self, product: Product, tokens: int, casts: Casts | None = None, keeps_input: bool = False) -> None:
        """Writes a product of `tokens` rows without collectives; with `keeps_input` it keeps `x` in any precision."""
        kernels, (name, x, y, n_in, n_out, bias, module, groups) = self.kernels, product
        elements, rows = product.elements, tokens * groups
        adapted = is_adapted(kernels, product)
        y += ".frozen" if adapted else ""
        forward, dgrad, wgrad = kernels.gemms(name, tokens, n_in, n_out, groups, batched=True)
        size = rows * n_out * kernels.shapes.act_bytes
        casts = casts or Casts(rows * n_in, rows * n_in, rows * n_out)
        cast_in, cast_out = self.fp8_casts(name, casts, elements)
        self._absolutes(name, x, casts, elements, module)
        kept, made = ((x,), ()) if keeps_input else self.kept_input(x, rows * n_in)
        weight = self.autocast_weight(name, elements)
        wide, held = dequantised(kernels, product)
        self.tape.add(
            TapeOp(
                name,
                "matmul",
                module,
                cast_in + weight.forward + wide + on_compute(forward),
                cast_out + wide + on_compute(dgrad),
                on_compute(wgrad) + weight.backward + self._bias_grad(name, tokens, n_out, bias),
                reads=(x,),
                saves=(*kept, *(tensor for tensor, _ in weight.made)),
                makes=((y, size), *made, *weight.made),
                parameters=(elements, n_out) if bias else (elements,),
                weight_grad_bytes=self.weight_grad_bytes(elements + (n_out if bias else 0)),
                forward_held=held,
                backward_held=held,
            )
        )
        if adapted:
            self.adapters += [(n_in, kernels.plan.lora_rank), (kernels.plan.lora_rank, n_out)]
            grads = self.weight_grad_bytes(kernels.plan.lora_rank * (n_in + n_out))
            self.tape.add(adapter(kernels, product, y, tokens, grads))

    def autocast_weight(self, name: str, elements: int) -> AutocastWeight:
        """Returns the cast of a weight, which autocast keeps, and its gradient's cast back; empty without autocast."""
        kernels, cast = self.kernels, name + ".weight"
        if not kernels.plan.autocast:
            return AutocastWeight([], [], ())
        wide, narrow = 4 * elements, kernels.act_bytes * elements
        back = kernels.traffic(cast + ".backward", narrow, wide)
        return AutocastWeight(kernels.traffic(cast, wide, narrow), back, ((cast, narrow),))

    def weight_grad_bytes(self, elements: int) -> int:
        """Returns the bytes of the gradient of `elements` weights until it is accumulated."""
        return 0 if self.kernels.stack.fused_accumulation else elements * self.kernels.grad_bytes

    def _bias_grad(self, name: str, tokens: int, n_out: int, bias: bool) -> list[Stage]:
        if not bias or self.kernels.stack.fused_bias_grad:
            return []
        return self.kernels.pattern("bias_add", tokens * n_out, "fused")[1]

    def _column_with_border(self, column: Product, first: bool, last: bool, alone: bool) -> None:
        """Writes a column-parallel layer with the collectives at its input.

        Backward runs in Megatron's order: gather the input beside dgrad, then reduce the input gradient beside wgrad; a
        stack that does not overlap them runs them one after the other. Inductor fuses a reduction with a product only:
        layers that are not `alone` on their input sum their gradients first, so their reduction is not fused.
        `first` and `last` say whether this is the first or last layer on the shared input: only they communicate.
        """
        kernels, shapes, sp = self.kernels, self.kernels.shapes, self.sp
        name, x, y, n_in, n_out, bias, module, _ = column
        tokens, size = shapes.tokens, shapes.tokens * n_in * shapes.act_bytes
        forward_op, dgrad, wgrad = kernels.gemms(name, tokens, n_in, n_out)
        product: list[Stage] = on_compute(forward_op)
        moved = size * self.gathered_share
        gather = kernels.collective(name + ".gather", Collective.ALL_GATHER, "tp", moved, Stream.TP) if sp else []
        casts = self._column_casts(n_in, n_out, first)
        forward, cast_out = self.fp8_casts(name, casts, n_in * n_out)
        self._absolutes(name, x, casts, n_in * n_out, module)
        if sp and first:
            forward += self._beside(gather, product, name, moved) if self._ring else [*gather, *product]
        else:
            forward += product
        kept, made = self.kept_input(x, tokens * n_in / (self.tp if sp else 1))
        kind = Collective.REDUCE_SCATTER if sp else Collective.ALL_REDUCE
        reduce = kernels.collective(name + ".reduce", kind, "tp", size, Stream.TP) if first else []
        again = gather if last and not kernels.stack.save_gathered_input else []
        if reduce and self._async_tp and not alone:
            copies = self._layout_copies(name + ".reduce", size)
            backward = [sum((*again, ((dgrad, Stream.COMPUTE),)), ()), *copies, *reduce, *on_compute(wgrad)]
        elif kernels.stack.tp_backward_overlap or self._ring:
            backward = [sum((*again, ((dgrad, Stream.COMPUTE),)), ()), sum((*reduce, ((wgrad, Stream.COMPUTE),)), ())]
        else:
            backward = [*again, *on_compute(dgrad), *reduce, *on_compute(wgrad)]
        self.tape.add(
            TapeOp(
                name,
                "matmul",
                module,
                forward,
                cast_out + backward,
                self._bias_grad(name, tokens, n_out, bias),
                reads=(x,),
                saves=kept,
                makes=((y, tokens * n_out * shapes.act_bytes), *made),
                parameters=(n_in * n_out, n_out) if bias else (n_in * n_out,),
                weight_grad_bytes=self.weight_grad_bytes(n_in * n_out + (n_out if bias else 0)),
            )
        )

    def _beside(self, collective: list[Stage], product: list[Stage], name: str, size: float) -> list[Stage]:
        """Returns a ring exchange in tp pieces: the first piece is exposed, the others run beside the product."""
        kernels, head = self.kernels, size / self.tp
        kind = Collective.ALL_GATHER
        first = kernels.collective(name + ".head", kind, "tp", head, Stream.TP)
        rest = kernels.collective(name + ".rest", kind, "tp", size - head, Stream.TP)
        return [*first, (*rest[0], *product[0])] if collective else product

    def row(self, name: str, x: str, y: str, n_in: int, n_out: int, bias: bool, module: int) -> None:
        """Writes a row-parallel linear layer: the local product, then the reduction over tp."""
        kernels, shapes = self.kernels, self.kernels.shapes
        self.weights.add_matrix(n_in, n_out)
        if bias:
            self.weights.vectors.append(n_out)
        if self.tp == 1:
            self.linear(Product(name, x, y, n_in, n_out, bias, module), shapes.tokens)
            return
        size = shapes.tokens * n_out * shapes.act_bytes
        read = shapes.tokens * n_in
        made = float(shapes.tokens * n_out)
        casts = Casts(read, read, made * self.cast_share, made if self.cast_share < 1 else 0.0)
        self.linear(Product(name, x, y + ".partial", n_in, n_out, False, module), shapes.tokens, casts)
        linear = self.tape.ops[-1]
        kind = Collective.REDUCE_SCATTER if self.sp else Collective.ALL_REDUCE
        reduce = kernels.collective(name + ".reduce", kind, "tp", size, Stream.TP)
        moved = size * self.gathered_share
        gather = kernels.collective(name + ".gather", Collective.ALL_GATHER, "tp", moved, Stream.TP) if self.sp else []
        copies = self.copies(name, size)
        backward = [*gather, *(self.copies(name, moved) if self.sp else [])]
        if self._ring:
            linear.forward = linear.forward[:-1] + self._beside(reduce, linear.forward[-1:], name + ".reduce", size)
            reduce = []
            if gather:
                linear.backward = linear.backward[:-1] + self._beside(
                    gather, linear.backward[-1:], name + ".dgather", moved
                )
                backward = []
        backward += self._bias_grad(name, shapes.tokens_sp, n_out, bias)
        out_bytes = shapes.tokens_sp * n_out * shapes.act_bytes
        self.tape.add(
            TapeOp(
                name + ".border",
                "reduce",
                module,
                copies + reduce,
                backward,
                reads=(y + ".partial",),
                makes=((y, out_bytes),),
            )
        )
