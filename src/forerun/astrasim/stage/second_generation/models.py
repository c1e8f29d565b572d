"""Whole models: decoder blocks between two embeddings, with the weights of each block in one bucket."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.astrasim.stage.second_generation.blocks import (
    SPLIT_SEQUENCE,
    WHOLE_SEQUENCE,
    attention,
    embedding,
    feed_forward,
    loss,
    mixture,
    norm,
    residual,
)
from forerun.astrasim.stage.sizes import ONE, ZERO, Size
from forerun.astrasim.stage.tensors import Block, Kind, Layout, Operation, Tensor

BUCKET = "_sharded_weight"


@dataclass(frozen=True, slots=True)
class Shape:
    """The differences between the decoder blocks of models."""

    sequence: str
    """layout of tokens between blocks: split over tp, or whole on each tensor-parallel rank"""
    kv_heads: str = "Head"
    gated: bool = False
    local_experts: int = 0
    """experts on each rank; 0 for a dense block"""
    shards: Size = ONE
    """number of ranks over which a block's weights are split"""


def gpt(sequence_parallel: bool, shards: Size) -> Shape:
    """Returns a GPT: as many keys and values as queries, and a feed-forward network of two matrices."""
    return Shape(SPLIT_SEQUENCE if sequence_parallel else WHOLE_SEQUENCE, shards=shards)


def llama(shards: Size) -> Shape:
    """Returns a Llama: grouped keys and values, and a gated feed-forward network."""
    return Shape(SPLIT_SEQUENCE, "KVHead", gated=True, shards=shards)


def mixture_of_experts(local_experts: int, shards: Size) -> Shape:
    return Shape(SPLIT_SEQUENCE, "KVHead", local_experts=local_experts, shards=shards)


def decoder(shape: Shape) -> Block:
    """Returns a decoder block. Its inputs are `input_norm.x` and `ffn_res.dy`, its outputs `ffn_res.y` and
    `input_norm.dx`."""
    block = Block()
    block.nest("input_norm.", norm(shape.sequence))
    block.nest("mha.", attention(shape.sequence, shape.kv_heads))
    block.nest("mha_res.", residual(shape.sequence))
    block.nest("post_attn_norm.", norm(shape.sequence))
    if shape.local_experts:
        block.tensors |= mixture(shape.local_experts).tensors
        x, y, dx, dy = "moe.x", "moe.y", "moe.dx", "moe.dy"
    else:
        block.nest("ffn.", feed_forward(shape.sequence, shape.gated))
        x, y, dx, dy = "ffn.x0", "ffn.xdown", "ffn.dx0", "ffn.dxdown"
    block.nest("ffn_res.", residual(shape.sequence))
    block.link("input_norm.y", "mha.x")
    block.link("mha.o", "mha_res.x1")
    block.link("input_norm.x", "mha_res.x2")
    block.link("mha_res.dx1", "mha.do")
    block.link("mha_res.y", "post_attn_norm.x")
    block.link("post_attn_norm.dx", "mha_res.dy")
    block.link("post_attn_norm.y", x)
    block.link(y, "ffn_res.x1")
    block.link("post_attn_norm.x", "ffn_res.x2")
    block.link("ffn_res.dx1", dy)
    block.add_up("input_norm.dy", "mha.dx", "mha_res.dx2")
    block.add_up("post_attn_norm.dy", dx, "ffn_res.dx2")
    pool_weights(block, shape.shards)
    return block


def pool_weights(block: Block, shards: Size) -> None:
    """Puts the block's weights into one flat tensor, the bucket. Each rank has 1 / `shards` of it.

    The bucket is gathered before the forward and before the backward pass. Its gradient is assembled and then scattered
    or, with one shard, reduced.
    """
    weights = {name: tensor for name, tensor in block.tensors.items() if tensor.is_weight}
    gradients = [tensor.gradient for tensor in weights.values() if tensor.gradient is not None]
    elements = ZERO
    for tensor in weights.values():
        elements += tensor.operation.result.elements
    flat, shard = Layout((elements,)), Layout((elements / shards,))

    def gathered() -> Tensor:
        return Tensor(Operation(Kind.SAME, flat, None, flat, ZERO), BUCKET)

    def cut_from(bucket: str, at: Layout) -> Tensor:
        return Tensor(Operation(Kind.CUSTOM, flat, at, at, ZERO), bucket)

    for name, tensor in block.tensors.items():
        if name.split(".")[-1].startswith("d"):
            tensor.x1, tensor.x2 = (
                f"_{operand}_backward" if operand in weights else operand for operand in (tensor.x1, tensor.x2)
            )
    first = block.tensors[gradients[0]].operation.result
    summed = replace(flat, summed=first.summed)
    for name, tensor in weights.items():
        block.tensors[name] = cut_from("_assembled_weight", tensor.operation.result)
    block.weight(BUCKET, shard, "_sharded_grad")
    block.tensors["_assembled_weight"] = gathered()
    block.same("_sharded_grad", "_assembled_grad", shard)
    block.custom("_assembled_grad", (gradients[0], first), summed, ZERO, after=tuple(gradients[1:]))
    for name, tensor in weights.items():
        block.tensors[f"_{name}_backward"] = cut_from("_assembled_weight_backward", tensor.operation.result)
    block.tensors["_assembled_weight_backward"] = gathered()


@dataclass(slots=True)
class Member:
    """A tensor of the whole model; its operands are positions in the list of members, -1 for none."""

    name: str
    operation: Operation
    x1: int
    x2: int
    after: tuple[int, ...]
    is_weight: bool
    gradient: int
    layer: int
    """its decoder block; -1 for the input embedding, `layers` for the output embedding and the loss"""


def model(shape: Shape, layers: int) -> list[Member]:
    """Returns the tensors of one micro-batch in STAGE's order: blocks, embeddings, loss."""
    template = decoder(shape)
    outer = Block()
    outer.nest("in_emb.", embedding(shape.sequence, "Dvocal", "Dmodel"))
    outer.nest("out_emb.", embedding(shape.sequence, "Dmodel", "Dvocal"))
    outer.nest("loss.", loss(shape.sequence))
    outer.link("out_emb.y", "loss.y")
    outer.link("loss.dy", "out_emb.dy")
    for block, names in ((template, ("input_norm.x", "ffn_res.dy")), (outer, ("in_emb.dy", "out_emb.x"))):
        for name in names:
            block.provided(name)
    size = len(template.tensors)
    position = {name: index for index, name in enumerate(template.tensors)}
    position_in_outer = {name: layers * size + index for index, name in enumerate(outer.tensors)}
    members: list[Member] = []
    for layer in range(layers):
        members += _members(template, f"transformer.{layer}.", position, layer * size, [layer] * size)
    parts = [-1 if name.startswith("in_emb") else layers for name in outer.tensors]
    members += _members(outer, "", position_in_outer, 0, parts)

    for layer in range(layers):
        here, last = layer * size, layer == layers - 1
        before = here - size + position["ffn_res.y"] if layer else position_in_outer["in_emb.y"]
        behind = position_in_outer["out_emb.dx"] if last else here + size + position["input_norm.dx"]
        members[here + position["input_norm.x"]].x1 = before
        members[here + position["ffn_res.dy"]].x1 = behind
    members[position_in_outer["in_emb.dy"]].x1 = position["input_norm.dx"]
    members[position_in_outer["out_emb.x"]].x1 = (layers - 1) * size + position["ffn_res.y"]
    return members


def _members(block: Block, prefix: str, position: dict[str, int], offset: int, parts: list[int]) -> list[Member]:
    def at(name: str | None) -> int:
        return -1 if name is None else offset + position[name]

    return [
        Member(
            prefix + name,
            tensor.operation,
            at(tensor.x1),
            at(tensor.x2),
            tuple(at(other) for other in tensor.after),
            tensor.is_weight,
            at(tensor.gradient),
            layer,
        )
        for (name, tensor), layer in zip(block.tensors.items(), parts, strict=True)
    ]
