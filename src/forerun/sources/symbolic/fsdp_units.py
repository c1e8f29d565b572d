"""Units: the parts of a model that are gathered, run and reduced together (embedding, layer, head)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import count

from forerun.core.program.types import Block, Category
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.stack import Stack
from forerun.sources.symbolic.embedding_and_head import embedding_section, head_section
from forerun.sources.symbolic.gathering import parametrized
from forerun.sources.symbolic.kernels import PlanKernels, TransformerKernels
from forerun.sources.symbolic.layer import layer_section
from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.schedule import stage_layers
from forerun.sources.symbolic.tape import Tape
from forerun.sources.symbolic.weights import Gathering, Weights


@dataclass(frozen=True, slots=True)
class Unit:
    """One part of a model on one rank, with the blocks of its passes."""

    name: str
    weights: Weights
    forward: Block
    backward: Block
    weight_backward: Block | None
    """weight gradients apart, for zero-bubble schedules"""
    leaving: Block | None = None
    """after which offloaded activations have left the device"""
    returning: Block | None = None
    """after which they have their place on it again"""
    gathering: Gathering | None = None
    """how long gathered parameters are there, where that differs between them"""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of weight gradients that a backward pass leaves behind."""
        block = self.backward if self.weight_backward is None else self.weight_backward
        made = (block.tensor_category == Category.UNSHARDED) & (block.tensor_free < 0)
        return int(block.tensor_bytes[made].sum())


class UnitKind(IntEnum):
    """The distinct units of a transformer: layers may differ in experts, and in whether they are checkpointed."""

    EMBEDDING = 0
    HEAD = 1
    DENSE = 2
    DENSE_PLAIN = 3
    """a layer that is not checkpointed, where only every n-th is"""
    MOE = 4
    MOE_PLAIN = 5


Units = dict[UnitKind, Unit]
"""those that a model has; layers of one kind share a unit"""


@dataclass(frozen=True, slots=True)
class Staged:
    """A model cut into pipeline stages of units, as the builder takes it."""

    kernels: PlanKernels
    stages: list[list[tuple[Unit, int]]]
    """units of every stage in model order, each with its layer number"""
    tied: bool = False
    """the first and the last unit share a matrix of `kernels.tied_elements`, the last of either's"""
    opening: Block | None = None
    """what runs before the first forward pass of a step"""


def staged_kinds(model: ModelSpec, plan: Plan, stack: Stack) -> list[list[UnitKind]]:
    """Units of each pipeline stage in model order: the embedding before the first layer, the head after the last."""
    stages, layer = [], 0
    for n in stage_layers(model, plan, stack):
        stages.append([layer_kind(model, plan, number) for number in range(layer, layer + n)])
        layer += n
    stages[0].insert(0, UnitKind.EMBEDDING)
    stages[-1].append(UnitKind.HEAD)
    return stages


def layer_kind(model: ModelSpec, plan: Plan, layer: int) -> UnitKind:
    """What unit layer number `layer` is."""
    plain = (layer + 1) % plan.checkpoint_every != 0
    return UnitKind((UnitKind.MOE if model.is_moe_layer(layer) else UnitKind.DENSE) + plain)


def staged_transformer(kernels: TransformerKernels, split: bool) -> Staged:
    """Units of a transformer's stages."""
    units, model = build_units(kernels, split), kernels.model
    numbers = count(-1)  # the embedding's, before those of the layers
    stages = [
        [(units[kind], next(numbers)) for kind in stage] for stage in staged_kinds(model, kernels.plan, kernels.stack)
    ]
    return Staged(kernels, stages, model.tied_embeddings)


def build_units(kernels: TransformerKernels, split: bool) -> Units:
    """Blocks of every distinct unit; with `split` weight gradients are blocks of their own."""
    model, plan = kernels.model, kernels.plan
    units: Units = {}
    checkpointing = plan.activation_checkpointing != "none"
    n_dense = model.moe.n_dense_layers if model.moe else model.n_layers
    for kind, name, experts in ((UnitKind.DENSE, "layer", False), (UnitKind.MOE, "moe_layer", True)):
        if experts and n_dense >= model.n_layers:
            continue
        unit = plain = _section_unit(name, layer_section(kernels, experts, checkpointing), split)
        if checkpointing and plan.checkpoint_every > 1:
            plain = _section_unit(name + ".plain", layer_section(kernels, experts, False), split)
        units |= {kind: unit, UnitKind(kind + 1): plain}
    units[UnitKind.EMBEDDING] = _section_unit("embedding", embedding_section(kernels), split)
    units[UnitKind.HEAD] = _section_unit("head", head_section(kernels), split)
    return units


def _section_unit(name: str, section: Section, split: bool) -> Unit:
    kernels = section.kernels
    gathering = parametrized(section, not kernels.whole_graph) if kernels.stack.parametrized else None
    return tape_unit(name, section.tape, section.weights, split, gathering)


def tape_unit(name: str, tape: Tape, weights: Weights, split: bool = False, gathering: Gathering | None = None) -> Unit:
    """The unit of a finished tape; with `split` weight gradients are a block of their own."""
    forward = tape.forward_block().build(name + ".forward")
    backward, weight_backward = tape.backward_block(split)
    leaving = returning = None
    if tape.offload:
        gone, back = tape.transit_blocks()
        leaving, returning = gone.build(name + ".leaving"), back.build(name + ".returning")
    return Unit(
        name,
        weights,
        forward,
        backward.build(name + ".backward"),
        None if weight_backward is None else weight_backward.build(name + ".weights"),
        leaving,
        returning,
        gathering,
    )
