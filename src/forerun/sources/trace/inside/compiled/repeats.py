"""Finds equal blocks in a graph that Dynamo captured, and shortens the graph to few of them.

A model of N equal layers that is compiled whole is one graph in which the nodes of a layer follow N times. Block r + 1
reads the same values as block r, one block later, with its own parameters in place of those of block r.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

FIRST, LAST = 2, 3
"""The blocks of a shortened graph: how many of the first and of the last ones. The second and the third block then have
equal neighbours on both sides, so what is compiled of them shows what is compiled of every block between. A compiled
backward pass that recomputes a block counts it with the block before, which is why there is one more at the end."""
KEPT = FIRST + LAST
_FEWEST = 8
"""The fewest blocks that are worth compiling some of them first."""
_CANDIDATES = 30
"""How many lengths of a block are tried, the most frequent distances of equal nodes first."""

_SOURCES = "_param_name_to_source"
"""What Dynamo notes in a graph and AOTAutograd asks for, beside `meta`."""

Entry = tuple[str, Any]
"""A key of a node's `nn_module_stack`, and the module's path and class."""


class NotEqual(Exception):
    """The blocks are not equal in all that matters."""


@dataclass(frozen=True, eq=False)
class Repeats:
    """The equal blocks of a graph."""

    gm: GraphModule
    nodes: list[Node]
    """All nodes but arguments and the output, in graph order."""
    start: int
    period: int
    """The nodes of a block."""
    count: int
    owned: dict[Node, tuple[int, int]]
    """The block of each argument that one block alone reads, and its number among those of the block."""

    def block(self, number: int) -> list[Node]:
        """Returns the nodes of a block."""
        first = self.start + number * self.period
        return self.nodes[first : first + self.period]

    @property
    def kept(self) -> tuple[int, ...]:
        """Returns the blocks of the shortened graph."""
        return (*range(FIRST), *range(self.count - LAST, self.count))

    def shortened(self, gm: GraphModule) -> tuple[GraphModule, list[int]]:
        """Returns the graph with the blocks `kept` alone, and the positions of its arguments in the whole graph."""
        skipped = self.count - KEPT
        first = self.start + FIRST * self.period
        dropped = set(self.nodes[first : first + skipped * self.period])
        stands_for = dict(zip(self.block(self.count - LAST - 1), self.block(FIRST - 1), strict=True))

        def copied(graph: Graph, node: Node, made: Mapping[Node, Node]) -> Node | None:
            if node in dropped or (node in self.owned and self.owned[node][0] not in self.kept):
                return None
            return graph.node_copy(node, lambda source: made[stands_for.get(source, source)])

        shorter, positions, _ = made_of(gm, copied)
        return shorter, positions

    def modules(self, short: int, target: int) -> dict[str, Entry]:
        """Maps entries of the module stacks of block `short` of the shortened graph to those of block `target` of the
        whole graph. It also maps the entries of the neighbours of both blocks.
        """
        found: dict[str, Entry] = {}
        for beside in (-1, 1, 0):
            if 0 <= short + beside < KEPT and 0 <= target + beside < self.count:
                blocks = self.block(self.kept[short + beside]), self.block(target + beside)
                for one, other in zip(*(_stacks(self.gm, block) for block in blocks), strict=True):
                    found |= zip(one, other.items(), strict=False)
        return found


def made_of(
    gm: GraphModule, copied: Callable[[Graph, Node, Mapping[Node, Node]], Node | None]
) -> tuple[GraphModule, list[int], dict[Node, Node]]:
    """Returns a graph of some nodes of `gm`, the positions of its inputs among those of `gm`, and the copies of nodes.

    `copied(graph, node, made)` adds the copy of a node to the graph, or returns None for one that is left out.
    """
    graph, positions = Graph(), []
    made: dict[Node, Node] = {}
    inputs = 0
    for node in gm.graph.nodes:
        copy = copied(graph, node, made)
        if copy is not None:
            made[node] = copy
            if node.op == "placeholder":
                positions.append(inputs)
                if hasattr(node, "_dynamo_source"):
                    copy._dynamo_source = node._dynamo_source
        inputs += node.op == "placeholder"
    shorter = GraphModule(gm, graph)
    shorter.meta = dict(gm.meta)
    if hasattr(gm, _SOURCES):
        setattr(shorter, _SOURCES, getattr(gm, _SOURCES))
    return shorter, positions, made


def _stacks(gm: GraphModule, nodes: Iterable[Node]) -> Iterator[dict[str, Any]]:
    """Yields the module stacks of nodes and of those of the graphs that they call."""
    for node in nodes:
        yield node.meta.get("nn_module_stack") or {}
        inner = attribute(gm, str(node.target)) if node.op == "get_attr" else None
        if isinstance(inner, GraphModule):
            yield from _stacks(inner, inner.graph.nodes)


def find_repeats(gm: GraphModule) -> Repeats | None:
    """Returns the equal blocks of a graph, None if there are too few."""
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    found = _longest(_numbers(gm, nodes))
    if found is None:
        return None
    start, period, count = found
    try:
        owned = _owned(nodes, start, period, count)
    except NotEqual:
        return None
    return Repeats(gm, nodes, start, period, count, owned)


def _numbers(gm: GraphModule, nodes: Sequence[Node]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns a number for each node; nodes that do the same to tensors of the same kind have the same number."""
    known: dict[Any, int] = {}
    return np.array([known.setdefault(signature(gm, node), len(known)) for node in nodes], dtype=np.int64)


def signature(gm: GraphModule, node: Node) -> str:
    """Returns a description of a node's work, without the nodes that it reads."""
    what: Any = node.target if node.op != "placeholder" else ""
    if node.op == "get_attr":
        value = attribute(gm, str(node.target))
        what = _text(value) if isinstance(value, GraphModule) else node.target
    values = node.meta.get("example_value", node.meta.get("val"))
    return f"{node.op} {what} {map_arg((node.args, node.kwargs), lambda _: _REF)} {described(values)}"


def reads(node: Node) -> list[Node]:
    """Returns the nodes that a node reads, in the order of its arguments, one for each place where it reads it."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


class _Ref:
    def __repr__(self) -> str:
        return "%"


_REF: Any = _Ref()


def described(value: Any) -> str:
    """Returns the kind of a fake value: sizes, strides, dtype, device."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device} {value.requires_grad}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(described, value))}]"
    return type(value).__name__


def attribute(gm: Any, path: str) -> Any:
    """Returns the attribute of a module that a path names, None if there is none."""
    for name in path.split("."):
        gm = getattr(gm, name, None)
    return gm


def _text(gm: GraphModule) -> str:
    """Returns the nodes of a graph with numbers for names."""
    number = {node: f"%{i}" for i, node in enumerate(gm.graph.nodes)}
    return "; ".join(
        f"{signature(gm, node)} {[number[source] for source in node.all_input_nodes]}" for node in gm.graph.nodes
    )


def _longest(numbers: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[int, int, int] | None:
    """Returns start, length and number of the equal blocks that cover most of a sequence."""
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for place, number in enumerate(numbers.tolist()):
        if number in last:
            distances[place - last[number]] += 1
        last[number] = place
    best: tuple[int, int, int] | None = None
    for period, _ in distances.most_common(_CANDIDATES):
        start, length = _longest_run(numbers[:-period] == numbers[period:])
        count = 1 + length // period
        if count >= _FEWEST and (best is None or (count * period, -period) > (best[1] * best[2], -best[1])):
            best = start, period, count
    return best


def _longest_run(equal: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[int, int]:
    """Returns start and length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], equal.astype(np.int8), [0]))))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = int(np.argmax(lengths))
    return int(edges[2 * longest]), int(lengths[longest])


def _owned(nodes: Sequence[Node], start: int, period: int, count: int) -> dict[Node, tuple[int, int]]:
    """Returns the arguments that each belong to one block.

    Raises:
        NotEqual: a block reads other values than its neighbours do, or another node reads values inside a block.
    """
    place = {node: number for number, node in enumerate(nodes)}
    owned: dict[Node, tuple[int, int]] = {}
    numbers: dict[Node, int] = {}
    for slot in range(period):
        rows = [reads(nodes[start + block * period + slot]) for block in range(count)]
        if len({len(row) for row in rows}) > 1:
            raise NotEqual
        for sources in zip(*rows, strict=True):
            inner = sources[1:]
            if all(source is inner[0] for source in inner):
                continue
            if all(source.op == "placeholder" for source in sources):
                own = numbers.setdefault(sources[0], len(numbers))
                for block, source in enumerate(sources):
                    if owned.setdefault(source, (block, own)) != (block, own):
                        raise NotEqual
            else:
                _same_distance(inner, place, start, period)
    if not owned:  # Then nothing tells which block a node of a compiled graph belongs to.
        raise NotEqual
    end = start + period * count
    for source in owned:
        if any(not start <= place.get(user, -1) < end for user in source.users):
            raise NotEqual
    _only_kept_are_read(nodes, place, start, period, count)
    return owned


def _same_distance(sources: Sequence[Node], place: dict[Node, int], start: int, period: int) -> None:
    """Raises NotEqual unless the blocks from the second one read the same node of this block or of the one before."""
    places = [place.get(source, -1) for source in sources]
    back = (places[0] - start) // period
    if back not in (0, 1) or any(after - before != period for before, after in pairwise(places)):
        raise NotEqual


def _only_kept_are_read(nodes: Sequence[Node], place: dict[Node, int], start: int, period: int, count: int) -> None:
    """Raises NotEqual if something after the blocks reads a block that is left out."""
    end = start + period * count
    for number in range(start + FIRST * period, end - LAST * period):
        if any(place.get(user, end) >= end for user in nodes[number].users):
            raise NotEqual
