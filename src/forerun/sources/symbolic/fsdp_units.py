"""Units: the parts of a model that are gathered, run and reduced together (embedding, layer, head).

In parametrisation-based FSDP each use of a parameter gathers it, and autograd decides how long it is kept. A matrix
product saves the gathered weight for its backward pass, unless a checkpoint around it runs the gather again. A policy
that recomputes only gathers frees memory in a compiled graph, but not in eager code, where the product that saves the
gathered weight is outside of the policy (simple_fsdp.py, ReplicateComputation). The gradient of an embedding does not
read its table, so nothing keeps the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain, count, repeat
from typing import Literal

from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import Block, Category, Phase
from forerun.describe.model.encoder import EncoderSpec
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.stack import Stack
from forerun.sources.symbolic.embedding_and_head import embedding_section
from forerun.sources.symbolic.encoder import encoder_layer, input_section, output_section
from forerun.sources.symbolic.further_tokens import heads_section
from forerun.sources.symbolic.kernels import PlanKernels, TransformerKernels
from forerun.sources.symbolic.layer import layer_section
from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.schedule import stage_layers
from forerun.sources.symbolic.segments import BACKWARD_EXCHANGE, FORWARD_EXCHANGE, cut
from forerun.sources.symbolic.tape import Tape
from forerun.sources.symbolic.tape_blocks import backward_block, forward_block, transit_blocks
from forerun.sources.symbolic.weights import Gathering, Weights


@dataclass(frozen=True, slots=True)
class Reference:
    """One part of a frozen reference model on one rank."""

    weights: Weights
    forward: Block
    """a forward pass that keeps nothing"""


@dataclass(frozen=True, slots=True)
class Unit:
    """One part of a model on one rank, with the blocks of its passes."""

    name: str
    weights: Weights
    forward: Block
    backward: Block
    weight_backward: Block | None
    """weight gradients alone, for zero-bubble schedules"""
    leaving: Block | None = None
    """at its end offloaded activations have left the device"""
    returning: Block | None = None
    """at its end offloaded activations have memory on the device again"""
    forward_pieces: tuple[Block, ...] = ()
    """the forward pass, cut where it may run beside a backward pass"""
    backward_pieces: tuple[Block, ...] = ()
    """the backward pass with its weight gradients, cut likewise"""
    gathering: Gathering | None = None
    """how long each unsharded parameter is kept, where that differs between parameters"""
    reference: Reference | None = None
    """the same part of the reference model, where the plan has one"""

    @property
    def gradient_bytes(self) -> int:
        """Returns the bytes of weight gradients that a backward pass leaves behind."""
        blocks = (self.backward,) if self.weight_backward is None else (self.backward, self.weight_backward)
        return sum(
            int(block.tensor_bytes @ ((block.tensor_category == Category.UNSHARDED) & (block.tensor_free < 0)))
            for block in blocks
        )


UnitKind = int
"""Number of a distinct unit of a model: EMBEDDING, HEAD, then two for each distinct layer (`layer_unit`).

Where samples have inputs for an encoder, its input, its output, and two for each of its distinct layers follow.
"""
EMBEDDING: UnitKind = 0
HEAD: UnitKind = 1


def n_unit_kinds(model: ModelSpec) -> int:
    """Returns the number of distinct units of `model`."""
    inside = 0 if model.runs is None else 2 + 2 * len(model.runs.stack.kinds)
    return _n_own_kinds(model) + inside


def _n_own_kinds(model: ModelSpec) -> int:
    """Returns the number of distinct units of `model` without those of an encoder."""
    return 2 + 2 * len(model.kinds)


def layer_unit(kind: int, plain: bool) -> UnitKind:
    """Returns the unit of the layers `model.kinds[kind]`.

    With `plain` it is that of layers that are not checkpointed, where only every n-th layer is.
    """
    return 2 + 2 * kind + plain


Units = dict[UnitKind, Unit]
"""units by kind: layers of one kind share a unit"""
UnitPart = Literal["all", "experts", "others"]
"""a part of a model's units: all of them, those with experts, or all others

The head has experts if its modules for multi-token prediction have.
"""


@dataclass(frozen=True, slots=True)
class Staged:
    """A model as pipeline stages of units, which the builder turns into a Program."""

    kernels: PlanKernels
    stages: list[list[tuple[Unit, int]]]
    """units of every stage in model order, each with its layer number"""
    first: Unit
    """the unit that holds the table of tokens, or the first layer"""
    tied: bool = False
    """whether `first` and the last unit share a matrix of `kernels.tied_elements`, listed last in both"""
    opening: Block | None = None
    """runs before the first forward pass of a step"""


def staged_kinds(model: ModelSpec, plan: Plan, stack: Stack) -> list[list[UnitKind]]:
    """Returns the kinds of units of each pipeline stage in model order, from the embedding to the head.

    Copies of the stages follow in the same order.
    """
    stages, layer = [], 0
    for n in stage_layers(model, plan, stack):
        stages.append([layer_kind(model, plan, number) for number in range(layer, layer + n)])
        layer += n
    stages[0][:0] = [*_encoder_kinds(model, plan), EMBEDDING]
    stages[-1].append(HEAD)
    return stages * plan.stage_copies


def _encoder_kinds(model: ModelSpec, plan: Plan) -> list[UnitKind]:
    """Returns the kinds of units of the encoder, from its input to its output; none without one."""
    if model.runs is None:
        return []
    stack, first = model.runs.stack, _n_own_kinds(model)
    layers = [first + layer_kind(stack, plan, number) for number in range(stack.n_layers)]
    return [first + EMBEDDING, *layers, first + HEAD]


def layer_kind(model: ModelSpec, plan: Plan, layer: int) -> UnitKind:
    """Returns the kind of unit of layer number `layer`."""
    plain = (layer + 1) % plan.checkpoint_every != 0
    return layer_unit(model.kind_of_layer[layer], plain)


def staged_transformer(kernels: TransformerKernels, split: bool) -> Staged:
    """Returns the units of a transformer's stages; with `split` weight gradients are separate blocks."""
    units, model = build_units(kernels, split), kernels.model
    kinds = staged_kinds(model, kernels.plan, kernels.stack)[: kernels.plan.distinct_stages]
    before = kinds[0].index(EMBEDDING)
    numbers = chain(repeat(-1, before), count(-1))  # the embedding and the encoder before it have layer number -1
    stages = [list(zip([units[kind] for kind in stage], numbers, strict=False)) for stage in kinds]
    table = kinds[0][0] if model.runs is not None and model.runs.reads == "text" else EMBEDDING
    return Staged(kernels, stages * kernels.plan.stage_copies, units[table], model.ends_share)


def build_units(kernels: TransformerKernels, split: bool, part: UnitPart = "all") -> Units:
    """Returns every distinct unit of `part` with its blocks; with `split` weight gradients are separate blocks."""
    units = _layer_units(kernels, layer_section, "", split, part)
    outside = ((EMBEDDING, "embedding", embedding_section), (HEAD, "head", heads_section))
    for kind, name, made in outside:
        if part != "all" and (kind == HEAD and kernels.model.mtp_modules > 0) != (part == "experts"):
            continue
        section = made(kernels)
        section.freeze()
        units[kind] = _with_reference(kernels, _section_unit(name, section, split), made)
    if kernels.encoder is not None and part != "experts":
        first = _n_own_kinds(kernels.model)
        units |= {first + kind: unit for kind, unit in _encoder_units(kernels, kernels.encoder, split).items()}
    return units


def _layer_units(
    kernels: TransformerKernels,
    made: Callable[[TransformerKernels, bool], Section],
    prefix: str,
    split: bool,
    part: UnitPart = "all",
) -> Units:
    """Returns the units of the layers of `part` of `kernels.model`; `made` writes the section of one, checkpointed or
    not.
    """
    units: Units = {}
    plan, names = kernels.plan, Counter[str]()
    checkpointing = plan.activation_checkpointing != "none"
    for number, layer in enumerate(kernels.model.kinds):
        if part != "all" and (layer.moe is not None) != (part == "experts"):
            continue
        here, name = kernels.of_layer(layer), prefix + ("moe_layer" if layer.moe else "layer")
        names[name] += 1
        name += f"_{names[name]}" if names[name] > 1 else ""
        own = _section_unit(name, made(here, checkpointing), split)
        unit = plain = _with_reference(here, own, lambda kernels: made(kernels, False))
        if checkpointing and plan.checkpoint_every > 1:
            plain = _section_unit(name + ".plain", made(here, False), split)
            plain = replace(plain, reference=unit.reference)
        units |= {layer_unit(number, False): unit, layer_unit(number, True): plain}
    return units


def _encoder_units(kernels: TransformerKernels, encoder: EncoderSpec[ModelSpec], split: bool) -> Units:
    """Returns the units of an encoder, numbered as those of a model."""
    inside = kernels.of_encoder()
    behind = copy(inside)
    behind.scores = kernels.scores or kernels.plan.lora_rank > 0  # the projector of a frozen encoder is trained
    units = _layer_units(inside, encoder_layer, "encoder.", split)
    units[EMBEDDING] = _section_unit("encoder.input", input_section(inside, encoder), split)
    units[HEAD] = _section_unit("encoder.output", output_section(behind, encoder), split)
    return units


def _with_reference(kernels: TransformerKernels, unit: Unit, made: Callable[[TransformerKernels], Section]) -> Unit:
    """Returns `unit` with the same part of the reference model, where the plan has one; `made` writes its section."""
    if not kernels.plan.reference:
        return unit
    section = made(kernels.of_reference())
    section.freeze()
    forward = forward_block(section.tape, keeps=False).build(unit.name + ".reference")
    return replace(unit, reference=Reference(section.weights, forward))


def _section_unit(name: str, section: Section, split: bool) -> Unit:
    kernels = section.kernels
    if kernels.scores:
        return _frozen_unit(name, section, split)
    gathering = parametrized(section, not kernels.whole_graph) if kernels.stack.parametrized else None
    unit = tape_unit(name, section.tape, section.weights, split, gathering)
    if not kernels.plan.expert_overlap:
        return unit
    backward = backward_block(section.tape, late=True)[0].build(unit.backward.name)
    forward_pieces, backward_pieces = cut(unit.forward, FORWARD_EXCHANGE), cut(backward, BACKWARD_EXCHANGE)
    return replace(unit, forward_pieces=tuple(forward_pieces), backward_pieces=tuple(backward_pieces))


def _frozen_unit(name: str, section: Section, split: bool) -> Unit:
    """Returns the unit of a section without trained parameters. Only the forward pass uses its parameters."""
    forward, nothing = forward_block(section.tape, keeps=False).build(name + ".forward"), BlockBuilder()
    nothing.node(section.tape.marker, phase=Phase.BACKWARD)
    backward = nothing.build(name + ".backward")
    gathering = Gathering(Weights(), Weights(), once=section.weights)
    unit = Unit(name, section.weights, forward, backward, backward if split else None, gathering=gathering)
    if not section.kernels.plan.expert_overlap:
        return unit
    return replace(unit, forward_pieces=(forward,), backward_pieces=(backward,))


def tape_unit(name: str, tape: Tape, weights: Weights, split: bool = False, gathering: Gathering | None = None) -> Unit:
    """Returns the unit of a finished tape; with `split` weight gradients are a separate block."""
    forward = forward_block(tape).build(name + ".forward")
    backward, weight_backward = backward_block(tape, split)
    leaving = returning = None
    if tape.offload:
        gone, back = transit_blocks(tape)
        leaving, returning = gone.build(name + ".leaving"), back.build(name + ".returning")
    return Unit(
        name,
        weights,
        forward,
        backward.build(name + ".backward"),
        None if weight_backward is None else weight_backward.build(name + ".weights"),
        leaving,
        returning,
        gathering=gathering,
    )


def parametrized(section: Section, eager: bool) -> Gathering:
    """Returns the weights of a section that stay unsharded for its backward pass, and those that are gathered again.

    In eager code weights of products outside of checkpoints stay; one compiled graph gathers all of them again.
    """
    weights, ops = section.weights, section.tape.ops
    if any(op.kind == "embedding" for op in ops):
        return Gathering(held=Weights(), again=Weights(), once=weights)
    inside = {i for region in section.tape.regions for i in range(region.first, region.last + 1)}
    stay = Counter(size for i, op in enumerate(ops) if eager and i not in inside for size in op.parameters)
    held, again = Weights(), Weights(experts=weights.experts)
    for kind in ("matrices", "vectors"):
        for size in getattr(weights, kind):
            stays = stay[size] > 0 or (eager and not inside)
            stay[size] -= 1
            getattr(held if stays else again, kind).append(size)
    frozen = Weights(frozen=weights.frozen, frozen_wide=weights.frozen_wide, frozen_experts=weights.frozen_experts)
    return Gathering(held, again, once=frozen)
