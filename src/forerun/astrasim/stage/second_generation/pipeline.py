"""Pipeline stages: the tensors of each stage, and those that it receives from others."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.astrasim.stage.second_generation.models import Member
from forerun.astrasim.stage.sizes import ZERO
from forerun.astrasim.stage.tensors import Kind, Operation
from forerun.common.errors import ForerunError


@dataclass(slots=True)
class StageGraph:
    """The tensors of one pipeline stage: those of one micro-batch, shared ones, and those received in one micro-batch.

    Operands are positions in the list of members.
    """

    members: list[Member] = field(default_factory=list)
    revisions: list[int] = field(default_factory=list)
    """1 for a weight after its update, else 0"""
    per_batch: int = 0
    """number of leading members that exist once for each micro-batch"""
    received_from: list[int] = field(default_factory=list)
    """sending stage of each of the last members, which are received once for each micro-batch"""
    sent_to: dict[int, list[int]] = field(default_factory=dict)
    """member -> stages that it is sent to"""
    rank_of_send: dict[tuple[int, int], int] = field(default_factory=dict)
    """(member, receiving stage) -> number among that stage's received tensors"""


def stage_of_layers(layers: int, stages: int, head_on_last: bool) -> dict[int, int]:
    """Returns the stage of every layer, of the input embedding (-1), and of the output embedding and loss (`layers`).

    Stages get equal runs of layers; if the stages don't divide the layers, the first stages get one more. STAGE puts
    the output embedding on stage (layers - 1) mod stages, or in mixed precision on the last one.

    Raises ForerunError if a stage has no tensors.
    """
    each, more = divmod(layers, stages)
    stage = {-1: 0}
    for number in range(stages):
        start = len(stage) - 1
        stage |= {start + index: number for index in range(each + (number < more))}
    stage[layers] = stages - 1 if head_on_last else (layers - 1) % stages
    idle = sorted(set(range(stages)) - set(stage.values()))
    if idle:
        raise ForerunError(
            f"--num_stacks {layers} leaves pipeline stage {idle[0]} of --pp {stages} without layers; "
            f"use --pp {layers} at most"
        )
    return stage


def split(members: list[Member], stage_of: dict[int, int], stages: int) -> list[StageGraph]:
    """Deals one micro-batch's tensors to stages, and adds tensors that micro-batches share and that stages receive.

    It changes the tensors themselves: their operands become positions in their stage's list.
    """
    weights = [index for index, member in enumerate(members) if member.is_weight]
    gradients = {members[index].gradient for index in weights}
    graphs = [StageGraph() for _ in range(stages)]
    place: dict[int, tuple[int, int]] = {}
    derived = _Derived()

    def put(stage: int, member: Member, revision: int = 0) -> int:
        graphs[stage].members.append(member)
        graphs[stage].revisions.append(revision)
        return len(graphs[stage].members) - 1

    for index, member in enumerate(members):
        if not member.is_weight:
            stage = stage_of[member.layer]
            place[index] = stage, put(stage, member)
    for graph in graphs:
        graph.per_batch = len(graph.members)
    merged = {}
    for index in sorted(gradients):
        member, (stage, own) = members[index], place[index]
        collected = Member(member.name, derived(Kind.CUSTOM, member), own, -1, (), False, -1, member.layer)
        merged[index] = put(stage, collected)
    for index in weights:
        stage = stage_of[members[index].layer]
        place[index] = stage, put(stage, members[index])
    for index in weights:
        member, (stage, own) = members[index], place[index]
        sources = own, merged[member.gradient]
        put(stage, Member(member.name, derived(Kind.SUM, member), *sources, (), True, -1, member.layer), revision=1)
    for stage in range(stages):
        _receive(stage, graphs, members, place, derived)
    return graphs


class _Derived:
    """The operations on tensors after the micro-batches and between stages, which all layers share."""

    def __init__(self) -> None:
        self._made: dict[tuple[Kind, int], Operation] = {}

    def __call__(self, kind: Kind, of: Member) -> Operation:
        key = kind, id(of.operation)
        if key not in self._made:
            at = of.operation.result
            received = kind is Kind.RECEIVED
            self._made[key] = Operation(kind, at, None if received else at, at, ZERO if received else at.elements)
        return self._made[key]


def _receive(
    stage: int, graphs: list[StageGraph], members: list[Member], place: dict[int, tuple[int, int]], derived: _Derived
) -> None:
    graph = graphs[stage]
    received: dict[int, int] = {}

    def local(operand: int) -> int:
        if operand < 0:
            return -1
        home, own = place[operand]
        if home == stage:
            return own
        if operand not in received:
            remote = members[operand]
            shadow = derived(Kind.RECEIVED, remote)
            graph.members.append(Member(remote.name, shadow, -1, -1, (), False, -1, remote.layer))
            graph.revisions.append(0)
            received[operand] = len(graph.members) - 1
            graphs[home].rank_of_send[own, stage] = len(graph.received_from)
            graphs[home].sent_to.setdefault(own, []).append(stage)
            graph.received_from.append(home)
        return received[operand]

    for member in graph.members[: graph.per_batch]:
        member.x1, member.x2 = local(member.x1), local(member.x2)
        member.after = tuple(local(other) for other in member.after)
