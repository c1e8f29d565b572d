"""Units: the parts of a model that are gathered, run and reduced together (embedding, layer, head)."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.program.types import Block, Category
from forerun.symbolic.ends import embedding_section, head_section
from forerun.symbolic.kernels import Kit
from forerun.symbolic.layer import layer_section
from forerun.symbolic.linear import Section, Weights


@dataclass(frozen=True, slots=True)
class Unit:
    """One part of a model on one rank, with the blocks of its passes."""

    name: str
    weights: Weights
    forward: Block
    backward: Block
    weight_backward: Block | None
    """weight gradients apart, for zero-bubble schedules"""

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


def build_units(kit: Kit, split: bool) -> Units:
    """Blocks of every distinct unit; with `split` weight gradients are blocks of their own."""
    model, plan = kit.model, kit.plan
    checkpointing = plan.activation_checkpointing != "none"
    n_dense = model.moe.n_dense_layers if model.moe else model.n_layers
    dense = _unit("layer", layer_section(kit, False, checkpointing), split)
    plain = dense
    if checkpointing and plan.checkpoint_every > 1:
        plain = _unit("layer.plain", layer_section(kit, False, False), split)
    moe = moe_plain = None
    if model.moe and n_dense < model.n_layers:
        moe = moe_plain = _unit("moe_layer", layer_section(kit, True, checkpointing), split)
        if checkpointing and plan.checkpoint_every > 1:
            moe_plain = _unit("moe_layer.plain", layer_section(kit, True, False), split)
    return Units(
        embedding=_unit("embedding", embedding_section(kit), split),
        dense=dense,
        dense_plain=plain,
        moe=moe,
        moe_plain=moe_plain,
        head=_unit("head", head_section(kit), split),
    )


def _unit(name: str, section: Section, split: bool) -> Unit:
    forward = section.tape.forward_block().build(name + ".forward")
    backward, weights = section.tape.backward_block(split)
    return Unit(
        name,
        section.weights,
        forward,
        backward.build(name + ".backward"),
        None if weights is None else weights.build(name + ".weights"),
    )


def layer_unit(units: Units, kit: Kit, layer: int) -> Unit:
    """The unit of layer number `layer`."""
    plain = (layer + 1) % kit.plan.checkpoint_every != 0
    if kit.model.is_moe_layer(layer):
        assert units.moe is not None
        assert units.moe_plain is not None
        return units.moe_plain if plain else units.moe
    return units.dense_plain if plain else units.dense
