"""Units: the parts of a model that are gathered, run and reduced together (embedding, layer, head).

In parametrisation-based FSDP each use of a parameter gathers it, and autograd decides how long it is kept: a matrix
product saves the gathered weight for its backward pass, unless a checkpoint around it runs the gather again. A policy
that recomputes only gathers frees memory in a compiled graph, but not in eager code, where the product that saves the
gathered weight is outside of the policy (simple_fsdp.py, ReplicateComputation). The gradient of an embedding does not
read its table, so nothing keeps the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from forerun.core.program.types import Block, Category
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.stack import Stack
from forerun.sources.symbolic.embedding_and_head import embedding_section
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
    """how long each gathered parameter is kept, where that differs between parameters"""
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
"""Number of a distinct unit of a model: EMBEDDING, HEAD, then two for each distinct layer (`layer_unit`)."""
EMBEDDING: UnitKind = 0
HEAD: UnitKind = 1


def n_unit_kinds(model: ModelSpec) -> int:
    """Returns the number of distinct units of `model`."""
    return 2 + 2 * len(model.kinds)


def layer_unit(kind: int, plain: bool) -> UnitKind:
    """Returns the unit of the layers `model.kinds[kind]`.

    With `plain` it is that of layers that are not checkpointed, where only every n-th layer is.
    """
    return 2 + 2 * kind + plain


Units = dict[UnitKind, Unit]
"""units by kind: layers of one kind share a unit"""


@dataclass(frozen=True, slots=True)
class Staged:
    """A model as pipeline stages of units, which the builder turns into a Program."""

    kernels: PlanKernels
    stages: list[list[tuple[Unit, int]]]
    """units of every stage in model order, each with its layer number"""
    tied: bool = False
    """whether the first and the last unit share a matrix of `kernels.tied_elements`, listed last in both"""
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
    stages[0].insert(0, EMBEDDING)
    stages[-1].append(HEAD)
    return stages * plan.stage_copies


def layer_kind(model: ModelSpec, plan: Plan, layer: int) -> UnitKind:
    """Returns the kind of unit of layer number `layer`."""
    plain = (layer + 1) % plan.checkpoint_every != 0
    return layer_unit(model.kind_of_layer[layer], plain)


def staged_transformer(kernels: TransformerKernels, split: bool) -> Staged:
    """Returns the units of a transformer's stages; with `split` weight gradients are separate blocks."""
    units, model = build_units(kernels, split), kernels.model
    numbers = count(-1)  # the embedding has layer number -1
    kinds = staged_kinds(model, kernels.plan, kernels.stack)
    stages = [
        list(zip([units[kind] for kind in stage], numbers, strict=False))
        for stage in kinds[: kernels.plan.distinct_stages]
    ]
    return Staged(kernels, stages * kernels.plan.stage_copies, model.ends_share)


def build_units(kernels: TransformerKernels, split: bool) -> Units:
    """Returns every distinct unit with its blocks; with `split` weight gradients are separate blocks."""
    model, plan = kernels.model, kernels.plan
    units: Units = {}
    checkpointing = plan.activation_checkpointing != "none"
    names = Counter[str]()
    for number, layer in enumerate(model.kinds):
        here, name = kernels.of_layer(layer), "moe_layer" if layer.moe else "layer"
        names[name] += 1
        name += f"_{names[name]}" if names[name] > 1 else ""
        own = _section_unit(name, layer_section(here, checkpointing), split)
        unit = plain = _with_reference(here, own, partial(layer_section, checkpointed=False))
        if checkpointing and plan.checkpoint_every > 1:
            plain = _section_unit(name + ".plain", layer_section(here, False), split)
            plain = replace(plain, reference=unit.reference)
        units |= {layer_unit(number, False): unit, layer_unit(number, True): plain}
    outside = ((EMBEDDING, "embedding", embedding_section), (HEAD, "head", heads_section))
    for kind, name, made in outside:
        section = made(kernels)
        section.freeze()
        units[kind] = _with_reference(kernels, _section_unit(name, section, split), made)
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
    gathering = parametrized(section, not kernels.whole_graph) if kernels.stack.parametrized else None
    unit = tape_unit(name, section.tape, section.weights, split, gathering)
    if not kernels.plan.expert_overlap:
        return unit
    backward = backward_block(section.tape, late=True)[0].build(unit.backward.name)
    forward_pieces, backward_pieces = cut(unit.forward, FORWARD_EXCHANGE), cut(backward, BACKWARD_EXCHANGE)
    return replace(unit, forward_pieces=tuple(forward_pieces), backward_pieces=tuple(backward_pieces))


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
    """Returns which of a section's weights stay gathered for its backward pass, and which are gathered again.

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
    return Gathering(held, again, once=Weights())
