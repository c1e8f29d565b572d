"""Writes the layers of a LayeredModel on tapes, one for each unit, with their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from forerun.core.program.builder import BlockBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import Block, Category, Collective, Stream
from forerun.describe.model.layer_types import Activation, Add, Norm
from forerun.describe.model.layered import INPUT, Layer, LayeredModel, Traffic
from forerun.describe.plan.plan import Plan
from forerun.describe.plan.rules import DTYPE_BYTES
from forerun.describe.stacks.stack import Stack
from forerun.sources.symbolic.checkpoints import settle_activations
from forerun.sources.symbolic.fsdp_units import Staged, Unit, tape_unit
from forerun.sources.symbolic.layered_kernels import LayeredKernels
from forerun.sources.symbolic.tape import Tape, TapeOp, on_compute
from forerun.sources.symbolic.weights import Weights

FORWARD, DGRAD, WGRAD = 0, 1, 2
_CAST = ".cast"
_PRODUCTS = ("conv2d", "linear", "attention", "custom")
"""layer types whose weights autocast casts at each use"""


def staged_layers(
    model: LayeredModel, plan: Plan, stack: Stack, groups: dict[str, CommGroup], architecture: str
) -> Staged:
    """Returns the units of `model` in one stage, on devices of `architecture`."""
    kernels = LayeredKernels(model, plan, stack, groups, architecture)
    parts: list[tuple[Unit, int]] = []
    held: frozenset[str] = frozenset()
    for number, layers in enumerate(model.units):
        last = number == len(model.units) - 1
        turn = (number + 1) % plan.checkpoint_every == 0
        checkpointed = plan.activation_checkpointing != "none" and not last and turn
        writer = _UnitTape(kernels, layers, held)
        writer.write(with_loss=last and model.classes_loss)
        settle_activations(kernels, writer.tape, checkpointed)
        parts.append((tape_unit(_unit_name(model, layers), writer.tape, writer.weights), number))
        held = writer.tape.kept
    return Staged(kernels, [parts], parts[0][0], opening=_broadcast_buffers(kernels))


def _unit_name(model: LayeredModel, layers: Sequence[int]) -> str:
    first = model.layers[layers[0]]
    return first.unit or first.layer_id


def _broadcast_buffers(kernels: LayeredKernels) -> Block | None:
    """Returns the block that broadcasts rank 0's running statistics to all replicas; None without any."""
    size = sum(layer.buffer_bytes for layer in kernels.model.layers)
    if not kernels.stack.broadcast_buffers or kernels.plan.uses_fsdp or kernels.group_size["dp_all"] == 1 or not size:
        return None
    block = BlockBuilder()
    start = block.node(kernels.marker)
    op = kernels.collective_op("buffers.broadcast", Collective.BROADCAST, "dp_all", size, "fp32")
    end = block.node(op, Stream.GATHER, after=(start,))
    block.node(kernels.marker, after=(end,))
    return block.build("buffers.broadcast")


def _is_plain_add(layer: Layer | None) -> TypeGuard[Add]:
    """Says whether a layer is a sum without stated memory; a stated one is not fused, so that it keeps its memory."""
    return isinstance(layer, Add) and not layer.own_bytes


def _is_plain_relu(layer: Layer | None) -> TypeGuard[Activation]:
    """Says whether a layer is a ReLU without stated memory."""
    return isinstance(layer, Activation) and layer.function == "relu" and layer.saves_output


@dataclass(slots=True)
class _Fused:
    """A norm with the sum and the activation that its kernels include; each may be missing."""

    norm: Norm
    add: Add | None = None
    activation: Activation | None = None
    last: int = 0
    """number of the last of these layers"""


@dataclass(slots=True)
class _UnitTape:
    """Writes the tape of one unit."""

    kernels: LayeredKernels
    layers: Sequence[int]
    held: frozenset[str]
    """names of tensors that the unit before keeps"""
    tape: Tape = field(init=False)
    weights: Weights = field(default_factory=Weights)

    def write(self, with_loss: bool) -> None:
        """Writes the unit's tape and collects its weights; the last unit of a model ends in the loss."""
        kernels, model = self.kernels, self.kernels.model
        inside = {model.layers[number].layer_id for number in self.layers}
        outside = [name for number in self.layers for name in model.read_by(number) if name not in inside]
        self.tape = Tape([(name, self._size(name)) for name in dict.fromkeys(outside)], kernels.marker)
        self.tape.held = self.held & set(outside)
        number = self.layers[0]
        if INPUT in outside and kernels.casts_weights:
            self._cast_sample()
        while number <= self.layers[-1]:
            fused = self._fusion(number)
            if fused is not None:
                self._norm(number, fused)
                number = fused.last + 1
            elif self._adds_and_activates(number):
                self._added(number)
                number += 2
            else:
                self._layer(number)
                number += 1
        if with_loss:
            self._loss()
        self._sum_gradients()
        first = self.tape.ops[0]  # lifetimes are counted in nodes, so a pass without kernels needs one too
        if not any(op.forward for op in self.tape.ops):
            first.forward = on_compute(kernels.marker)
        if not any(op.backward or op.weight_backward for op in self.tape.ops):
            first.backward = on_compute(kernels.marker)

    # -- sizes and names -------------------------------------------------------------------------------------

    @property
    def _samples(self) -> int:
        return self.kernels.plan.micro_batch

    def _size(self, name: str) -> int:
        """Returns the bytes of a tensor of a micro batch; samples come in the dtype of the master weights."""
        model = self.kernels.model
        if name == INPUT:
            width = (
                DTYPE_BYTES[self.kernels.plan.master_dtype] if self.kernels.casts_weights else self.kernels.act_bytes
            )
            return self._samples * model.layers[0].input_elements * width
        layer = model.layers[self.kernels.modules.index(name)]
        return self._samples * layer.output_elements * self.kernels.act_bytes

    def _reads(self, number: int) -> tuple[str, ...]:
        cast = INPUT + _CAST if self.kernels.casts_weights else INPUT
        return tuple(cast if name == INPUT else name for name in self.kernels.model.read_by(number))

    # -- operations ------------------------------------------------------------------------------------------

    def _cast_sample(self) -> None:
        elements = self._samples * self.kernels.model.layers[0].input_elements
        size = elements * self.kernels.act_bytes
        forward = self.kernels.traffic(INPUT + _CAST, self._size(INPUT), size)
        made = ((INPUT + _CAST, size),)
        self.tape.add(
            TapeOp(INPUT + _CAST, "cast", 0, forward, [], reads=(INPUT,), saves=(INPUT,), makes=made, gradless=True)
        )

    def _cast_weights(self, layer: Layer, number: int) -> tuple[str, ...]:
        """Writes the cast of a layer's weights, and of their gradients back; returns the name of the cast tensor."""
        kernels, elements = self.kernels, layer.num_parameters
        wide, narrow = elements * kernels.grad_bytes, elements * kernels.weight_bytes
        name = layer.layer_id + _CAST
        made, launches = layer.gradient_bytes(kernels.grad_bytes), len(layer.parameters)
        self.tape.add(
            TapeOp(
                name,
                "cast",
                number,
                kernels.traffic(name, wide, narrow, launches),
                kernels.traffic(name + ".backward", narrow, wide, launches),
                makes=((name, narrow),),
                weight_grad_bytes=made,
                category=Category.UNSHARDED,
            )
        )
        return (name,)

    def _layer(self, number: int) -> None:
        kernels, samples = self.kernels, self._samples
        layer, reads = kernels.model.layers[number], self._reads(number)
        name, wanted = layer.layer_id, kernels.model.input_gradients[number]
        matrices = layer.layer_type in _PRODUCTS
        cast = self._cast_weights(layer, number) if kernels.casts_weights and matrices and layer.parameters else ()
        kept = round(samples * (layer.own_elements * kernels.act_bytes + layer.own_bytes))
        makes = [(name, self._size(name)), *([(name + ".kept", kept)] if kept else [])]
        saves = (*(reads if layer.saves_input else ()), *((name,) if layer.saves_output else ()), *cast)
        summed = layer.layer_type == "add"  # the summand made first waits longest for the gradient
        self.tape.add(
            TapeOp(
                name,
                "residual" if summed else "matmul" if matrices else layer.layer_type,
                number,
                kernels.stages(name, layer.forward(samples), FORWARD),
                kernels.stages(name + ".dgrad", layer.backward(samples), DGRAD) if wanted else [],
                kernels.stages(name + ".wgrad", layer.weight_backward(samples), WGRAD),
                reads=(*(self._by_age(reads) if summed else reads), *cast),
                saves=(*saves, *(made for made, _ in makes[1:])),
                makes=tuple(makes),
                weight_grad_bytes=0 if cast else self._weight_gradients(layer),
                gradless=not wanted and not cast,
            )
        )
        self._own(layer)

    def _own(self, layer: Layer) -> None:
        """Adds the parameters of a layer to the unit: matrices before vectors."""
        large = layer.layer_type in (*_PRODUCTS, "embedding")
        self.weights.matrices += layer.parameters[:1] if large else ()
        self.weights.vectors += layer.parameters[1:] if large else layer.parameters
        if layer.gradient_elements is not None:
            self.weights.surplus += layer.gradient_elements - layer.num_parameters

    def _weight_gradients(self, layer: Layer) -> int:
        return 0 if self.kernels.stack.fused_accumulation else layer.gradient_bytes(self.kernels.grad_bytes)

    def _by_age(self, names: tuple[str, ...]) -> tuple[str, ...]:
        made = [name for op in self.tape.ops for name, _ in op.makes]
        return tuple(sorted(names, key=lambda name: made.index(name) if name in made else -1))

    # -- norms whose kernels include a sum or an activation --------------------------------------------------------

    def _fusion(self, number: int) -> _Fused | None:
        """Returns a norm with the sum or activation behind it that its kernels include; None without such kernels."""
        kernels, layers = self.kernels, self.kernels.model.layers
        norm = layers[number]
        alone = kernels.style(kernels.stack.norm) == "composed" or not kernels.model.input_gradients[number]
        if not isinstance(norm, Norm) or alone or not norm.saves_input:
            return None
        found, last = _Fused(norm, last=number), norm.layer_id
        end = self.layers[-1]
        following = layers[number + 1] if number < end else None
        sums = kernels.style(kernels.stack.residual) != "composed"
        if sums and _is_plain_add(following) and self._only_reader(last, number + 1):
            found.add, found.last, last = following, number + 1, following.layer_id
            following = layers[number + 2] if number + 1 < end else None
        if (
            _is_plain_relu(following)
            and self._only_reader(last, found.last + 1)
            and kernels.style(kernels.stack.activation) != "composed"
        ):
            found.activation, found.last = following, found.last + 1
        return found if found.last > number else None

    def _only_reader(self, name: str, number: int) -> bool:
        model = self.kernels.model
        return [n for n in range(len(model.layers)) if name in model.read_by(n)] == [number]

    def _norm(self, number: int, fused: _Fused) -> None:
        """Writes a fused norm as one operation.

        Forward reads x twice and the other summands, and writes the activation's output. Backward reads the gradient
        and x twice with the sign of the output, and writes the gradients of x and of the sum. Hand-written kernels keep
        the sign as a bit an element; compiled ones read the output again.
        """
        kernels, norm, samples = self.kernels, fused.norm, self._samples
        size = samples * norm.output_elements
        name, made = norm.layer_id, kernels.model.layers[fused.last].layer_id
        others = tuple(n for n in self._reads(number + 1) if n != name) if fused.add else ()
        (forward,), (backward,), (sums,) = norm.forward(samples), norm.backward(samples), norm.weight_backward(samples)
        compiled, signs = kernels.style(kernels.stack.activation) == "compiled", 0
        if fused.activation is not None and not compiled:
            signs = size // 8
        again = 2 * size if fused.activation is not None and compiled else 0
        summed = len(others) * size
        reads = self._reads(number)
        of_backward = [
            Traffic(sums.elements_read + again / 2, 0, bytes_read=signs),
            Traffic(backward.elements_read + again / 2, size + bool(others) * size, bytes_read=signs),
        ]
        self.tape.add(
            TapeOp(
                name,
                "norm",
                number,
                kernels.stages(name, [Traffic(forward.elements_read + summed, size, bytes_written=signs)], FORWARD),
                kernels.stages(name + ".dgrad", of_backward, DGRAD),
                reads=(*reads, *others),
                saves=(*reads, *((name + ".signs",) if signs else (made,) if again else ())),
                makes=((made, self._size(made)), *(((name + ".signs", signs),) if signs else ())),
                weight_grad_bytes=self._weight_gradients(norm),
            )
        )
        self._own(norm)

    def _adds_and_activates(self, number: int) -> bool:
        """Says whether a sum and the ReLU behind it run as one element-wise kernel."""
        kernels, layers = self.kernels, self.kernels.model.layers
        if not _is_plain_add(layers[number]) or number == self.layers[-1]:
            return False
        following, styles = layers[number + 1], (kernels.stack.residual, kernels.stack.activation)
        one_kernel = all(kernels.style(style) != "composed" for style in styles)
        return (
            one_kernel
            and _is_plain_relu(following)
            and kernels.model.input_gradients[number]
            and self._only_reader(layers[number].layer_id, number + 1)
        )

    def _added(self, number: int) -> None:
        """Writes a sum and its ReLU as one operation; backward writes the gradient that all summands share."""
        kernels, samples = self.kernels, self._samples
        made, reads = kernels.model.layers[number + 1], self._by_age(self._reads(number))
        size, name = samples * made.output_elements, kernels.model.layers[number].layer_id
        self.tape.add(
            TapeOp(
                name,
                "residual",
                number,
                kernels.stages(name, [Traffic(len(reads) * size, size)], FORWARD),
                kernels.stages(name + ".dgrad", [Traffic(2 * size, size)], DGRAD),
                reads=reads,
                saves=(made.layer_id,),
                makes=((made.layer_id, self._size(made.layer_id)),),
            )
        )
        self.tape.ops[-1].scratch_bytes = self._size(made.layer_id)

    # -- loss and gradient sums ----------------------------------------------------------------------------------

    def _loss(self) -> None:
        """Writes the cross entropy over the last output, with its log-softmax in fp32."""
        kernels, layer = self.kernels, self.kernels.model.layers[self.layers[-1]]
        elements = self._samples * layer.output_elements
        forward, backward = kernels.pattern_in("loss", elements, kernels.loss_style)
        made = ("log_softmax", elements * 4)
        self.tape.add(
            TapeOp(
                "loss",
                "loss",
                len(kernels.model.layers),
                forward,
                backward,
                reads=(layer.layer_id,),
                saves=made[:1],
                makes=(made,),
                category=Category.LOGITS,
            )
        )

    def _sum_gradients(self) -> None:
        """Writes the sums of gradients of tensors that several operations read.

        The first of these operations to run backward makes the gradient, each other one adds to it.
        """
        seen: set[str] = set()
        sizes = self.tape.sizes()
        for op in reversed(self.tape.ops):
            if op.gradless:
                continue
            for name in op.reads:
                if name in seen:
                    size = sizes[name]
                    op.backward = [*op.backward, *self.kernels.traffic(name + ".sum", 2 * size, size)]
                    op.scratch_bytes += size
                seen.add(name)
