"""Joins the Programs of different kinds of GPUs into one, in which they share their data-parallel collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from forerun.common.errors import ForerunError
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import I64, Block, Channel, Collective, OpTable, Program, RankClass, joined_ops


@dataclass(frozen=True, slots=True)
class Part:
    """The GPUs of one kind, which are some of the data-parallel replicas of a run."""

    name: str
    program: Program
    """the Program that its rank classes execute in the whole run"""
    n_ranks: int
    """number of ranks of all its rank classes together"""


def joined(parts: Sequence[Part]) -> Program:
    """Returns one Program with the rank classes of every part, in order, called `<part>: <class>`.

    In each pipeline stage the ranks of the first part come first. A group with ranks of two parts is divided: the k-th
    collective of each part in it becomes one rendezvous, class by class, which starts when the last part is ready. If
    some of the equal groups of an axis are divided, all of them count as divided. All other communication stays inside
    a part. The op table has the ops of the parts one after the other, so that each part has its own costs. `meta` says
    which channels are these rendezvous (`joint_channels`), and where the ops of each part begin (`part_ops`).

    Raises:
        ForerunError: the parts have different meshes, or their common collectives differ.
    """
    first = parts[0].program
    for part in parts[1:]:
        if part.program.groups != first.groups or len(part.program.rank_classes) != len(first.rank_classes):
            raise ForerunError(f"GPUs {parts[0].name!r} and {part.name!r} have different meshes")
    divided = _divided(first.groups, parts)
    _check_same_collectives(parts, divided)
    joining = _Joining(parts, divided)
    for number in range(len(parts)):
        joining.add(number)
    return replace(
        first,
        ops=joined_ops([part.program.ops for part in parts]),
        blocks=tuple(joining.blocks),
        rank_classes=tuple(joining.classes),
        channels=tuple(joining.channels),
        meta={**first.meta, "joint_channels": sorted(joining.joint.values()), "part_ops": joining.first_ops},
    )


def _divided(groups: Sequence[CommGroup], parts: Sequence[Part]) -> list[int]:
    """Finds the groups inside a pipeline stage that have ranks of two parts; returns their indices.

    The groups of `size` ranks `inner` apart fill blocks of `size x inner` ranks of the stage. A group is divided where
    a border between parts lies inside its block.
    """
    n_stages = len(parts[0].program.rank_classes)
    ranks = [part.n_ranks // n_stages for part in parts]
    *borders, stage = accumulate(ranks)
    return [
        number
        for number, group in enumerate(groups)
        if group.size > 1 and group.inner < stage and any(border % (group.size * group.inner) for border in borders)
    ]


def _meets(block: Block, ops: OpTable, divided: Sequence[int]) -> I64:
    """Returns the divided group in which each node of `block` runs a collective, -1 for none, (n,)."""
    group = ops.group[block.op].astype(np.int64)
    meets = ops.is_collective[block.op] & np.isin(group, divided)
    return np.where(meets, group, -1)


def _check_same_collectives(parts: Sequence[Part], divided: Sequence[int]) -> None:
    """Raises ForerunError for parts that would wait for each other for ever, or exchange different bytes."""
    for number in range(len(parts[0].program.rank_classes)):
        for group in divided:
            found = [_collectives(part.program, number, group, divided) for part in parts]
            for part, other in zip(parts[1:], found[1:], strict=True):
                if other != found[0]:
                    axis = part.program.groups[group].axis
                    raise ForerunError(
                        f"GPUs {parts[0].name!r} and {part.name!r} share the collectives of {axis} and run different"
                        f" ones: {_difference(found[0], other)}"
                    )


_Run = tuple[int, float]
"""(Collective, bytes)"""


def _collectives(program: Program, number: int, group: int, divided: Sequence[int]) -> list[_Run]:
    """Lists the collectives that class `number` runs in `group`, in issue order."""
    ops = program.ops
    per_block: dict[int, list[_Run]] = {}
    out: list[_Run] = []
    for step in program.rank_classes[number].block.tolist():
        if step not in per_block:
            block = program.blocks[step]
            rows = block.op[_meets(block, ops, divided) == group].tolist()
            per_block[step] = [(int(ops.collective[row]), float(ops.bytes_comm[row])) for row in rows]
        out += per_block[step]
    return out


def _difference(first: list[_Run], other: list[_Run]) -> str:
    if len(first) != len(other):
        return f"{len(first)} and {len(other)} in a step; all need equal numbers of micro batches"
    place = next(i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
    a, b = (f"{Collective(kind).name.lower()} of {size:,.0f} bytes" for kind, size in (first[place], other[place]))
    return f"number {place + 1} is {a} and {b}"


class _Joining:
    """Blocks, classes and channels of the joined Program, part by part."""

    def __init__(self, parts: Sequence[Part], divided: Sequence[int]) -> None:
        self.parts, self.divided = parts, divided
        self.n_classes = len(parts[0].program.rank_classes)
        self.blocks: list[Block] = []
        self.classes: list[RankClass] = []
        self.channels: list[Channel] = []
        self.joint: dict[tuple[int, int], int] = {}
        """(class inside a part, group) -> channel"""
        self.first_ops: list[int] = []
        """index of the first op of each part"""

    def add(self, number: int) -> None:
        """Appends part `number`."""
        part = self.parts[number]
        program, first_class = part.program, number * self.n_classes
        first_op = sum(len(earlier.program.ops) for earlier in self.parts[:number])
        self.first_ops.append(first_op)
        first_channel = len(self.channels)
        self.channels += [
            Channel(f"{part.name}: {c.name}", tuple(first_class + member for member in c.members))
            for c in program.channels
        ]
        for place, cls in enumerate(program.rank_classes):
            own = {}
            for step in np.unique(cls.block).tolist():
                own[step] = len(self.blocks)
                self.blocks.append(self._moved(program, place, program.blocks[step], first_op, first_channel))
            block = np.array([own[step] for step in cls.block.tolist()], np.int32)
            n_ranks = part.n_ranks // self.n_classes
            self.classes.append(replace(cls, name=f"{part.name}: {cls.name}", n_ranks=n_ranks, block=block))

    def _moved(self, program: Program, place: int, block: Block, first_op: int, first_channel: int) -> Block:
        """Returns `block` with the ops and channels that class `place` of a part has in the joined Program."""
        channel = np.where(block.channel >= 0, block.channel + first_channel, -1).astype(np.int16)
        meets = _meets(block, program.ops, self.divided)
        for group in np.unique(meets[meets >= 0]).tolist():
            channel[meets == group] = self._channel(place, group)
        return replace(block, op=(block.op + first_op).astype(np.int32), channel=channel)

    def _channel(self, place: int, group: int) -> int:
        """Returns the channel in which class `place` of all parts meets for collectives of `group`."""
        if (place, group) not in self.joint:
            program = self.parts[0].program
            name = f"{program.groups[group].axis} of {program.rank_classes[place].name}"
            members = tuple(part * self.n_classes + place for part in range(len(self.parts)))
            self.joint[place, group] = len(self.channels)
            self.channels.append(Channel(name, members))
        return self.joint[place, group]
