"""The events of a rank class, listed by the words of `forerun.core.memory.carried_tensors` one tensor after the other.

It is what the compiled listing is held to: lists and dicts, and nothing that is fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from forerun.core.memory.caching_allocator import ALLOC, FREE
from forerun.core.program.types import Block, Category, Collective, Phase, Program, Stream

Event = tuple[int, int, int, int]
"""(ALLOC or FREE, tensor, bytes, stream)"""


@dataclass(eq=False)
class Tensor:
    """One tensor, or a piece of one."""

    size: int
    category: int
    stream: int
    tag: tuple[int, int]
    row: int
    """at which it is allocated"""
    died: int = -1


@dataclass
class Step:
    """What is there at some point of the step."""

    tensors: list[Tensor] = field(default_factory=list)
    pieces: list[Tensor] = field(default_factory=list)
    in_order: list[Tensor] = field(default_factory=list)
    """what blocks left and nobody has freed, the oldest first"""
    entered: list[Tensor] = field(default_factory=list)
    """the same in the order in which it came to be: a piece when it was cut"""
    row: int = 0

    def free(self, size: int, category: int, tag: tuple[int, int], row: int) -> None:
        """Free so many bytes."""
        equal = [each for each in reversed(self.entered) if (each.size, each.category) == (size, category)]
        own = [each for each in equal if each.tag == tag]
        for each in (own or equal)[:1]:
            self._gone(each, row)
            return
        live = [each for each in self.in_order if each.category == category]
        for last in range(len(live), 0, -1):
            for first in range(last):
                if sum(each.size for each in live[first:last]) == size:
                    for each in live[first:last]:
                        self._gone(each, row)
                    return
        for each in live:
            if size <= 0:
                return
            if each.size > size:
                piece = Tensor(each.size - size, category, each.stream, each.tag, each.row)
                each.size = size
                self.pieces.append(piece)
                self.entered.append(piece)
                self.in_order.insert(self.in_order.index(each) + 1, piece)
            size -= each.size
            self._gone(each, row)

    def _gone(self, tensor: Tensor, row: int) -> None:
        tensor.died = row
        self.in_order.remove(tensor)
        self.entered.remove(tensor)


def events_in_python(program: Program, rank_class: int) -> tuple[list[Event], int]:
    """The events of a step, and before which of them the optimizer works."""
    cls, step = program.rank_classes[rank_class], Step()
    optimizer = None
    for number, microbatch, layer in zip(cls.block.tolist(), cls.microbatch.tolist(), cls.layer.tolist(), strict=True):
        block = program.blocks[number]
        if optimizer is None and Phase.OPTIMIZER in block.phase:
            optimizer = step.row
        _run(program, block, (microbatch, layer), step)
    tensors = step.tensors + step.pieces
    for tensor in tensors:
        tensor.died = step.row if tensor.died < 0 else tensor.died
    made = [(tensor.row, 0, which, ALLOC) for which, tensor in enumerate(tensors)]
    gone = [(tensor.died, 1, which, FREE) for which, tensor in enumerate(tensors)]
    events = sorted(made + gone)
    before = sum(row < (step.row if optimizer is None else optimizer) for row, *_ in events)
    return [(kind, which, tensors[which].size, tensors[which].stream) for _, _, which, kind in events], before


def _run(program: Program, block: Block, tag: tuple[int, int], step: Step) -> None:
    """One block: it takes what earlier ones left, then leaves its own."""
    moments = []
    for which, size in enumerate(block.tensor_bytes.tolist()):
        alloc, free = int(block.tensor_alloc[which]), int(block.tensor_free[which])
        moments += [(2 * alloc, which, True)] if size and alloc >= 0 else []
        moments += [(2 * free + 1, which, False)] if size and free >= 0 else []
    made: dict[int, Tensor] = {}
    rows = {(which, is_made): step.row + place for place, (_, which, is_made) in enumerate(sorted(moments))}
    for (which, is_made), row in rows.items():
        size, category = int(block.tensor_bytes[which]), int(block.tensor_category[which])
        if not is_made and block.tensor_alloc[which] < 0:
            step.free(size, category, tag, row)
        elif is_made:
            made[which] = Tensor(size, category, _stream(program, block, category), tag, row)
            made[which].died = rows.get((which, False), -1)
    for which in sorted(made):
        step.tensors.append(made[which])
        if made[which].died < 0:
            step.in_order.append(made[which])
            step.entered.append(made[which])
    step.row += len(moments)


def _stream(program: Program, block: Block, category: int) -> int:
    collectives = program.ops.collective[block.op] != Collective.NONE
    if not (collectives & np.isin(block.stream, (Stream.GATHER, Stream.REDUCE))).any():
        return Stream.COMPUTE
    if (block.phase == Phase.FORWARD).all():
        return Stream.GATHER if category in (Category.UNSHARDED, Category.COMMUNICATION) else Stream.COMPUTE
    return Stream.REDUCE if category == Category.GRADIENT else Stream.COMPUTE
