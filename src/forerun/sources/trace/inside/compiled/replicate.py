"""Makes the compiled graphs of a model with many equal blocks from those of a model with five of them.

Every node of the short graph belongs to one of the five blocks or to none (`Blocks`). The nodes of the second block and
those of the third have to be alike, node by node. Then the blocks between them in the long graph are alike too, and are
copies. Nodes of the first and the last blocks alone (beginning, end, values that are computed once) are in the short
graph already.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.fx import Graph, GraphModule, Node

from forerun.sources.trace.inside.compiled.repeats import (
    FIRST,
    KEPT,
    LAST,
    Entry,
    NotEqual,
    described,
    reads,
    signature,
)

_T = TypeVar("_T")
INNER = (1, 2)
"""The blocks that are compared and copied."""
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")


class Blocks:
    """The block of each node of a short graph, by the nodes that it reads.

    A forward node belongs to the last block that it reads from, a backward node to the first one. A node that reads
    nothing from a block belongs to none. With `constants` it belongs to the block that reads it, if only one does: a
    block may have its own constants, or one block alone may read the beginning or the end.
    """

    def __init__(
        self, gm: GraphModule, arguments: Mapping[Node, tuple[int, int]], backward: bool, constants: bool
    ) -> None:
        """`arguments` are the block of each argument that belongs to one, and its number there. Those of the first and
        the last block of a backward graph may have other numbers, as these blocks may save other values.

        Raises:
            NotEqual: the inner blocks are not alike.
        """
        self.gm, self.of = gm, {node: block for node, (block, _) in arguments.items()}
        self.backward = backward
        self.template, choose = (1, min) if backward else (2, max)
        """The block that is copied. It reads other blocks only if these have both neighbours."""
        own = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
        for node in own:
            blocks = [self.of[source] for source in node.all_input_nodes if source in self.of]
            if blocks:
                self.of[node] = choose(blocks)
        for node in reversed(own) if constants else ():
            readers = {self.of.get(user, -1) for user in node.users}
            if node not in self.of and len(readers) == 1 and min(readers) >= 0:
                self.of[node] = readers.pop()
        self.nodes = own
        self.number = {node: number for node, (_, number) in arguments.items()}
        counts = [len(arguments)] * KEPT
        for node in own:
            if node in self.of:
                self.number[node] = counts[self.of[node]]
                counts[self.of[node]] += 1
        self._compare()

    def _compare(self) -> None:
        """Raises NotEqual unless the inner blocks are alike."""
        one, other = ([node for node in self.nodes if self.of.get(node) == block] for block in INNER)
        if len(one) != len(other):
            raise NotEqual
        for first, second in zip(one, other, strict=True):
            if signature(self.gm, first) != signature(self.gm, second):
                raise NotEqual
            for source, after in zip(reads(first), reads(second), strict=True):
                self._same(source, after)

    def _same(self, source: Node, after: Node) -> None:
        block, next_block = self.of.get(source, -1), self.of.get(after, -1)
        if source is after and block < 0:
            return
        same_numbers = source.op == "placeholder" and not self.backward
        comparable = same_numbers or (block in INNER and next_block in INNER)
        alike = block >= 0 and next_block == block + 1
        if not alike or (comparable and self.number[source] != self.number[after]):
            raise NotEqual
        if described(source.meta.get("val")) != described(after.meta.get("val")):
            raise NotEqual


def blocks_of(gm: GraphModule, arguments: Mapping[Node, tuple[int, int]], backward: bool) -> Blocks:
    """Returns the blocks of a short graph; for the arguments see `Blocks`.

    Raises:
        NotEqual: the inner blocks are not alike.
    """
    try:
        return Blocks(gm, arguments, backward, constants=False)
    except NotEqual:
        return Blocks(gm, arguments, backward, constants=True)


def spread(
    items: Sequence[_T], block: Callable[[_T], int | None], count: int, template: int
) -> Iterator[tuple[_T, int | None]]:
    """Yields the items of a short graph in the order in which they are in a graph of `count` blocks, each with its
    block there; None for those of no block. A block between two others yields the items of block `template`.

    Raises:
        NotEqual: the order does not show where the blocks between belong.
    """
    of_block: dict[int, list[_T]] = {number: [] for number in INNER}
    inner: list[tuple[int, int]] = []
    places: list[int] = []
    for place, item in enumerate(items):
        number = block(item)
        if number in INNER:
            inner.append((number, len(of_block[number])))
            of_block[number].append(item)
            places.append(place)
    made: dict[int, list[tuple[_T, int | None]]] = {}
    for start, end in _closed(inner):
        for at, row in _rows(inner[start:end], count):
            found = [(_item(of_block, number, own, count, template), number) for number, own in row]
            made.setdefault(places[start + at], []).extend(found)
    for place, item in enumerate(items):
        number = block(item)
        if number in INNER:
            yield from made[place]
        else:
            yield item, None if number is None else _at(number, count)


def _at(block: int, count: int) -> int:
    """Returns the number that a block of the short graph has in a graph of `count` blocks."""
    return block if block < FIRST else count - KEPT + block


def _item(of_block: Mapping[int, Sequence[_T]], number: int, own: int, count: int, template: int) -> _T:
    kept = next((block for block in INNER if _at(block, count) == number), template)
    return of_block[kept][own]


def _closed(inner: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields start and end of the shortest parts of a sequence of (block, number) with the same numbers in both
    blocks."""
    start, more = 0, 0
    for end, (block, _) in enumerate(inner, 1):
        more += 1 if block == INNER[0] else -1
        if more == 0:
            yield start, end
            start = end
    if more:
        raise NotEqual


def _rows(part: Sequence[tuple[int, int]], count: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yields the item at each place of a part in a graph of `count` blocks, as a pair of a block and a number.

    Once the second one of both blocks has begun, its items and the last ones of the first block alternate in some way.
    Any two blocks that follow each other alternate in the same way.
    """
    first = part[0][0]
    begin = next(place for place, (block, _) in enumerate(part) if block != first)
    length = len(part) // 2
    turn = part[begin : begin + length]
    if len({own for _, own in turn}) != length:
        raise NotEqual
    second = sum(INNER) - first
    between = range(FIRST, count - LAST)[:: second - first]
    for place, (block, own) in enumerate(part):
        before = (
            [(number + other - second, each) for number in between for other, each in turn] if place == begin else []
        )
        inside = begin <= place < begin + length
        yield place, [*before, (_at(second, count) + block - second if inside else _at(block, count), own)]


class Long:
    """A long graph in the making."""

    def __init__(self, blocks: Blocks, count: int, modules: Callable[[int, int], dict[str, Entry]]) -> None:
        self.blocks, self.count = blocks, count
        self.graph = Graph()
        self._made: dict[tuple[int, int], Node] = {}
        self._same: dict[Node, Node] = {}
        self._modules = functools.cache(modules)

    def _at(self, block: int) -> int:
        return _at(block, self.count)

    def argument(
        self, name: str, value: Any, short: Node | None, place: tuple[int, int] | None, meta: Any = ()
    ) -> None:
        """Adds an argument: `short` is the same in the short graph, `place` its block and number."""
        node = self.graph.placeholder(name)
        node.meta = dict(meta if short is None else short.meta)
        node.meta["val"] = value
        if place is not None:
            self._made[place] = node
        if short is not None:
            self._same[short] = node

    def fill(self) -> None:
        """Adds all nodes that are no arguments."""
        blocks = self.blocks
        for node, number in spread(blocks.nodes, blocks.of.get, self.count, blocks.template):
            if node in self._same and number in (None, self._at(blocks.of.get(node, 0))):
                continue  # Added already, before what reads it.
            if number is None or number == self._at(blocks.of[node]):
                self._add(node)
            else:
                copied = self.graph.node_copy(node, functools.partial(self._read_by_copy, number))
                copied.meta = self.moved(node, number)
                self._made[number, blocks.number[node]] = copied

    def _add(self, node: Node) -> Node:
        made = self.graph.node_copy(node, lambda source: self._read(node, source))
        self._same[node] = made
        block = self.blocks.of.get(node)
        if block in INNER:
            self._made[self._at(block), self.blocks.number[node]] = made
            made.meta = self.moved(node, self._at(block))
        return made

    def _read(self, reader: Node, source: Node) -> Node:
        """Returns the node that the copy of a node of the short graph reads in place of `source`."""
        here, there = self.blocks.of.get(reader), self.blocks.of.get(source)
        if here is None or there is None or here == there or {here, there} != set(INNER):
            if (
                here is not None
                and there is not None
                and here != there
                and (min(here, there) < FIRST) != (max(here, there) < FIRST)
            ):  # It reads across the blocks between.
                raise NotEqual
            return self.known(source)
        node = self._made.get((self._at(here) + there - here, self.blocks.number[source]))
        if node is None:
            raise NotEqual
        return node

    def known(self, source: Node) -> Node:
        """Returns the node that stands for one of the short graph."""
        if source not in self._same:
            if source in self.blocks.of:
                raise NotEqual
            self._add(source)
        return self._same[source]

    def _read_by_copy(self, number: int, source: Node) -> Node:
        block = self.blocks.of.get(source)
        return self.known(source) if block is None else self.at(source, number - self.blocks.template)

    def at(self, source: Node, further: int) -> Node:
        """Returns the node that is to `source` as another block is, `further` blocks on.

        Raises:
            NotEqual: there is none.
        """
        node = self._made.get((self.blocks.of[source] + further, self.blocks.number[source]))
        if node is None:
            raise NotEqual
        return node

    def stands_for(self, source: Node, number: int | None) -> Node:
        """Returns the node that `source` of the short graph is in block `number` of the long one."""
        block = self.blocks.of.get(source)
        if block is None or number is None or number == self._at(block):
            return self.known(source)
        return self.at(source, number - block)

    def own_memory(self, values: Values) -> None:
        """Tells `values` the memory of the arguments of each block."""
        inner = {(block, self.blocks.number[node]): node for node, block in self.blocks.of.items() if block in INNER}
        for (block, number), node in inner.items():
            if node.op == "placeholder":
                for place in range(FIRST, self.count - LAST):
                    other = self._made[block + place - self.blocks.template, number]
                    values.owner(node.meta["val"], place, other.meta["val"])

    def moved(self, node: Node, number: int) -> dict[str, Any]:
        """Returns the metadata of a node of an inner block for its copy in block `number`, with the modules of that
        block.
        """
        entries = self._modules(self.blocks.of[node], number)
        moved = copy.copy(node.meta)
        for name in _STACKS:
            if moved.get(name):
                moved[name] = dict(entries.get(key, (key, entry)) for key, entry in moved[name].items())
        return moved

    def finished(self, output: Any) -> GraphModule:
        """Returns the graph, which returns `output`.

        Raises:
            NotEqual: a node reads one that follows.
        """
        node = self.graph.output(tuple(output))
        node.meta = dict(next(n for n in self.blocks.gm.graph.nodes if n.op == "output").meta)
        try:
            self.graph.lint()
        except RuntimeError as error:
            raise NotEqual from error
        return GraphModule(self.blocks.gm, self.graph)


class Values:
    """Makes the fake values of copies: of sizes as those that they are copies of, in memory of their own."""

    def __init__(self, fakes: Any) -> None:
        self._fakes = fakes
        self._bases: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def owner(self, short: torch.Tensor, number: int, value: torch.Tensor) -> None:
        """Says that in block `number`, `value` has the memory that `short` has in the block that is copied."""
        self._bases[self._key(short, number)] = value

    def copy(self, value: Any, number: int) -> Any:
        """Returns the value that `value` is in block `number`."""
        if not isinstance(value, torch.Tensor):
            return value
        key = self._key(value, number)
        with self._fakes, torch.no_grad():
            if key not in self._bases:
                elements = value.untyped_storage().nbytes() // value.itemsize
                self._bases[key] = torch.empty(elements, dtype=value.dtype, device=value.device)
            return self._bases[key].as_strided(value.shape, value.stride(), value.storage_offset())

    @staticmethod
    def _key(value: torch.Tensor, number: int) -> tuple[int, int, torch.dtype]:
        return int(value.untyped_storage()._cdata), number, value.dtype
