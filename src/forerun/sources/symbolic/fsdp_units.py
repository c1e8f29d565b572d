"""Units: the parts of a model that are gathered, run and reduced together (embedding, layer, head)."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.core.program.types import Block, Category
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


@dataclass(frozen=True, slots=True)
class Units:
    """The distinct units of a model. Layers of one kind share a unit."""

    embedding: Unit
    dense: Unit
    dense_plain: Unit
    """a layer that is not checkpointed, where only every n-th is"""
    moe: Unit | None
    moe_plain: Unit | None
    head: Unit


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


def staged_transformer(kernels: TransformerKernels, split: bool) -> Staged:
    """Units of a transformer's stages: the embedding before the first layer, the head after the last."""
    units, model = build_units(kernels, split), kernels.model
    stages: list[list[tuple[Unit, int]]] = []
    layer = 0
    for n in stage_layers(model, kernels.plan, kernels.stack):
        stages.append([(layer_unit(units, kernels, number), number) for number in range(layer, layer + n)])
        layer += n
    stages[0].insert(0, (units.embedding, -1))
    stages[-1].append((units.head, model.n_layers))
    return Staged(kernels, stages, model.tied_embeddings)


def build_units(kernels: TransformerKernels, split: bool) -> Units:
    """Blocks of every distinct unit; with `split` weight gradients are blocks of their own."""
    model, plan = kernels.model, kernels.plan
    checkpointing = plan.activation_checkpointing != "none"
    n_dense = model.moe.n_dense_layers if model.moe else model.n_layers
    dense = _section_unit("layer", layer_section(kernels, False, checkpointing), split)
    plain = dense
    if checkpointing and plan.checkpoint_every > 1:
        plain = _section_unit("layer.plain", layer_section(kernels, False, False), split)
    moe = moe_plain = None
    if model.moe and n_dense < model.n_layers:
        moe = moe_plain = _section_unit("moe_layer", layer_section(kernels, True, checkpointing), split)
        if checkpointing and plan.checkpoint_every > 1:
            moe_plain = _section_unit("moe_layer.plain", layer_section(kernels, True, False), split)
    return Units(
        embedding=_section_unit("embedding", embedding_section(kernels), split),
        dense=dense,
        dense_plain=plain,
        moe=moe,
        moe_plain=moe_plain,
        head=_section_unit("head", head_section(kernels), split),
    )


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


def layer_unit(units: Units, kernels: TransformerKernels, layer: int) -> Unit:
    """The unit of layer number `layer`."""
    plain = (layer + 1) % kernels.plan.checkpoint_every != 0
    if kernels.model.is_moe_layer(layer):
        assert units.moe is not None
        assert units.moe_plain is not None
        return units.moe_plain if plain else units.moe
    return units.dense_plain if plain else units.dense
