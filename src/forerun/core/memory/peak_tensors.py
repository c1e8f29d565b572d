"""The tensors that are allocated at the peak of a rank class, by the op that made them.

A block names a tensor of an earlier block that it frees by bytes and category alone: the newest tensor of that size is
freed. If there is none, the oldest ones of the category are freed, the last of them possibly in part.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.core.memory.profile import MemoryProfile
from forerun.core.program.types import Block, Category, Program

RESIDENT = "lives through the step"
"""the maker of tensors that are allocated before the step and after it"""


@dataclass(frozen=True, slots=True)
class Maker:
    """The operation and the module that made a tensor, with the numbers of layers that the Program has."""

    op: str
    module: str


@dataclass(frozen=True, slots=True)
class PeakTensors:
    """Tensors of one category and one maker at the peak."""

    category: Category
    maker: Maker
    count: int
    total_bytes: int


@dataclass
class _Left:
    """Tensors that outlive their block, of one category, the oldest first."""

    tensors: list[tuple[int, Maker]] = field(default_factory=list)
    """(bytes, maker)"""

    def free(self, size: int) -> None:
        for place in range(len(self.tensors) - 1, -1, -1):
            if self.tensors[place][0] == size:
                del self.tensors[place]
                return
        while size > 0 and self.tensors:
            oldest, maker = self.tensors.pop(0)
            if oldest > size:
                self.tensors.insert(0, (oldest - size, maker))
            size -= oldest


def peak_tensors(program: Program, rank_class: int, memory: MemoryProfile) -> list[PeakTensors]:
    """Returns the tensors at the peak that `memory` names, the most bytes first. Their sum is the peak."""
    cls = program.rank_classes[rank_class]
    left = {category: _Left() for category in Category}
    for category in Category:
        if cls.resident_bytes[category]:
            left[category].tensors.append((int(cls.resident_bytes[category]), Maker(RESIDENT, "")))
    for step, number in enumerate(cls.block[: memory.peak_step + 1].tolist()):
        block = program.blocks[number]
        last = memory.peak_node if step == memory.peak_step else len(block)
        _run(program, block, left, last)
    sums: dict[tuple[Category, Maker], list[int]] = {}
    del left[Category.GRAPH_POOL]  # PyTorch doesn't count it as allocated
    for category, of_category in left.items():
        for size, maker in of_category.tensors:
            entry = sums.setdefault((category, maker), [0, 0])
            entry[0] += 1
            entry[1] += size
    found = [PeakTensors(category, maker, *entry) for (category, maker), entry in sums.items()]
    return sorted(found, key=lambda one: -one.total_bytes)


def _run(program: Program, block: Block, left: dict[Category, _Left], last: int) -> None:
    """Adds the tensors that `block` has allocated while its node `last` runs, and removes those that it has freed by
    then.

    As in `profile`, a tensor that is freed after node i is still allocated while i runs.
    """
    columns = (block.tensor_bytes, block.tensor_category, block.tensor_alloc, block.tensor_free)
    tensors = list(zip(*(column.tolist() for column in columns), strict=True))
    for size, category, alloc, free in tensors:
        if alloc < 0 and 0 <= free < last:
            left[Category(category)].free(size)
    for size, category, alloc, free in tensors:
        if 0 <= alloc <= last and not 0 <= free < last:
            left[Category(category)].tensors.append((size, _maker(program, block, alloc)))


def _maker(program: Program, block: Block, node: int) -> Maker:
    if node >= len(block):
        return Maker(block.name, "")
    module = int(block.module[node])
    path = program.modules[module] if 0 <= module < len(program.modules) else ""
    return Maker(program.ops.name[int(block.op[node])], path)
