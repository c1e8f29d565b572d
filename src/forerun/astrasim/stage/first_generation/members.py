"""The tensors of a whole model, and those of each pipeline stage.

A model has positions: 0 is the input embedding, 1 to L are the layers, L + 1 is the output embedding. Position p is on
pipeline stage p mod pp, so with several stages neighbours are never on the same stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache

from forerun.astrasim.stage.first_generation.blocks import (
    BACKWARD_IN,
    BACKWARD_OUT,
    FORWARD_IN,
    FORWARD_OUT,
    embedding,
    layer,
)
from forerun.astrasim.stage.sizes import ZERO
from forerun.astrasim.stage.tensors import Block, Kind, Operation


class Form(IntEnum):
    """The kinds of tensors on a stage, in the order in which the stage lists them."""

    OWN = 0
    UPDATED = 1
    """a weight plus its gradient"""
    RECEIVED = 2


@dataclass(slots=True, eq=False)
class Member:
    """A tensor of the model; its operands are other members."""

    position: int
    name: str
    """its name in its block"""
    operation: Operation
    form: Form
    user: int
    """position of the tensor; of a received one, the position that uses it"""
    x1: Member | None = None
    x2: Member | None = None
    after: tuple[Member, ...] = ()
    is_backward: bool = False
    """whether a received tensor comes from the next position, not the previous one"""


@dataclass(slots=True)
class StageMembers:
    """The tensors of one pipeline stage, in the order of their node ids."""

    members: list[Member] = field(default_factory=list)
    sent: dict[int, bool] = field(default_factory=dict)
    """id() of a member that another stage receives -> whether it goes backward"""


@cache
def _blocks(sharded: bool, recompute: bool) -> tuple[Block, Block, Block]:
    return embedding("Din", "Dmodel", sharded), layer(sharded, recompute), embedding("Dmodel", "Dout", sharded)


def model(sharded: bool, recompute: bool, layers: int) -> list[Member]:
    """Returns all tensors in STAGE's order: the embeddings, the layers, then the updated weights in the same order."""
    first, middle, last = _blocks(sharded, recompute)
    placed = {0: first, layers + 1: last} | dict.fromkeys(range(1, layers + 1), middle)
    members: dict[tuple[int, str], Member] = {}
    for position, block in placed.items():
        for name, tensor in block.tensors.items():
            members[position, name] = Member(position, name, tensor.operation, Form.OWN, position)
    for position, block in placed.items():
        for name, tensor in block.tensors.items():
            member = members[position, name]
            member.x1 = members[position, tensor.x1] if tensor.x1 else None
            member.x2 = members[position, tensor.x2] if tensor.x2 else None
            member.after = tuple(members[position, other] for other in tensor.after)
    _link(members, layers)
    updates = [
        _updated(members[position, name], members[position, tensor.gradient])
        for position, block in placed.items()
        for name, tensor in block.tensors.items()
        if tensor.gradient
    ]
    return [*members.values(), *updates]


def _link(members: dict[tuple[int, str], Member], layers: int) -> None:
    def provide(position: int, held: str, of: int, source: str) -> None:
        member = members[position, held]
        member.operation, member.x1 = _provided(member.operation), members[of, source]

    end = layers + 1
    provide(end, "dy", end, "y")
    for position in range(1, end):
        before = "y" if position == 1 else FORWARD_OUT
        provide(position, FORWARD_IN, position - 1, before)
        behind = "dy" if position == 1 else BACKWARD_IN
        provide(position - 1, behind, position, BACKWARD_OUT)
    if layers > 1:  # STAGE doesn't link the output embedding to a single layer
        provide(end, "x", layers, FORWARD_OUT)
        provide(layers, BACKWARD_IN, end, "dx")


@cache
def _provided(held: Operation) -> Operation:
    return replace(held, kind=Kind.SAME)


@cache
def _update(weight: Operation) -> Operation:
    at = weight.result
    return Operation(Kind.SUM, at, at, at, at.elements)


@cache
def _received(remote: Operation) -> Operation:
    return Operation(Kind.RECEIVED, remote.result, None, remote.result, ZERO)


def _updated(weight: Member, gradient: Member) -> Member:
    position = weight.position
    return Member(position, weight.name, _update(weight.operation), Form.UPDATED, position, weight, gradient)


def stage_order(layers: int, stages: int) -> list[int]:
    """Returns the pipeline stages in the order of their ranks, which is that of STAGE's list of tensors."""
    positions = [0, layers + 1, *range(1, layers + 1)]
    return list(dict.fromkeys(position % stages for position in positions))


def deal(members: list[Member], layers: int, stages: int) -> list[StageMembers]:
    """Returns each stage's tensors in the order of `stage_order`; received tensors replace operands of other stages."""
    order = stage_order(layers, stages)
    own: dict[int, StageMembers] = {stage: StageMembers() for stage in order}
    for member in members:
        own[member.position % stages].members.append(member)
    for stage, part in own.items():
        received: dict[int, Member] = {}
        for member in part.members:
            for operand in ("x1", "x2"):
                remote = getattr(member, operand)
                if remote is None or remote.position % stages == stage:
                    continue
                backward = remote.position > member.position
                if id(remote) not in received:
                    received[id(remote)] = Member(
                        remote.position,
                        remote.name,
                        _received(remote.operation),
                        Form.RECEIVED,
                        member.position,
                        is_backward=backward,
                    )
                    own[remote.position % stages].sent[id(remote)] = backward
                setattr(member, operand, received[id(remote)])
        part.members += received.values()
    return list(own.values())
