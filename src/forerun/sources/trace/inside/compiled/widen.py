"""Compiles a graph with many equal lanes in the time that two of each kind take.

The short graph has the first two lanes of each kind, and its operators go over lists of these. torch captures it and
passes over it. What comes of it is widened: every lane gets the nodes of its kind, and lists have the items of all
lanes again. So kernels, bytes and memory are those of the whole graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from forerun.sources.trace.inside.compiled.lanes import (
    Lanes,
    columns_of,
    described_lanes,
    find_lanes,
    grouped,
    is_item,
    is_over_lists,
)
from forerun.sources.trace.inside.compiled.repeats import NotEqual, attribute, made_of
from forerun.sources.trace.inside.list_operators import another

_FEWEST = 8
"""The fewest lanes that are worth compiling some of them only."""

_Key = tuple[int, int] | Node


@dataclass(eq=False)
class Narrow:
    """A short graph with few lanes of each kind, that stands for a whole one."""

    whole: GraphModule
    lanes: Lanes
    short: GraphModule
    positions: list[int]
    """For each input of the short graph: its position among those of the whole graph."""
    source: Mapping[Node, Node]
    """The node of the whole graph for each node of the short one."""
    given: Sequence[Any] = field(default=(), init=False)
    """The inputs of the whole graph, while it runs."""

    def called(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of the inputs of the whole graph; `compiled` is one of those of the short graph."""

        def run(*given: Any) -> Any:
            self.given = given
            try:
                return compiled(*(given[position] for position in self.positions))
            finally:
                self.given = ()

        return run


def narrowed(gm: GraphModule) -> Narrow | None:
    """Returns the short graph for one that Dynamo captured, None if there are too few equal lanes."""
    return _narrowed(gm, False) or _narrowed(gm, True)


def _narrowed(gm: GraphModule, sharing: bool) -> Narrow | None:
    def value_of(node: Node) -> Any:
        return attribute(gm, str(node.target)) if node.op == "get_attr" else node.meta.get("example_value")

    try:
        lanes = find_lanes(gm.graph, value_of, sharing)
    except NotEqual:
        return None
    kept = frozenset(lanes.kept())
    if len(lanes.kinds) < _FEWEST or 2 * len(kept) > len(lanes.kinds):
        return None
    places: dict[Node, dict[int, int]] = {}

    def copied(graph: Graph, node: Node, made: Mapping[Node, Node]) -> Node | None:
        if node in lanes.of and lanes.of[node] not in kept:
            return None
        if is_over_lists(node):
            columns = {lane: column for lane, column in _columns(node, lanes.of).items() if lane in kept}
            places[node] = {lane: place for place, lane in enumerate(columns)}
            given = [[made.get(item, item) for item in column] for column in columns.values()]
            return _over_lists(graph, node, given, made)
        copy = graph.node_copy(node, made.__getitem__)
        if is_item(node, lanes.of):
            copy.update_arg(1, places[node.all_input_nodes[0]][lanes.of[node]])
        return copy

    short, positions, made = made_of(gm, copied)
    return Narrow(gm, lanes, short, positions, {copy: node for node, copy in made.items()})


def _columns(node: Node, of: Mapping[Node, int]) -> dict[int, list[Any]]:
    """Returns the entries of the lists of an operator for each lane."""
    return {next(of[n] for n in column if isinstance(n, Node)): column for column in columns_of(node)}


def _over_lists(graph: Graph, node: Node, columns: Sequence[Sequence[Any]], made: Mapping[Any, Node]) -> Node:
    """Adds a copy of an operator over lists with other lists, given by columns. `made` has the copies of all else."""
    rows = iter([list(row) for row in zip(*columns, strict=True)])
    args = tuple(next(rows) if isinstance(arg, list | tuple) else map_arg(arg, made.__getitem__) for arg in node.args)
    kwargs = map_arg(node.kwargs, made.__getitem__)
    copy = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
    copy.meta = dict(node.meta)
    return copy


def _arguments(gm: GraphModule) -> list[Node]:
    """Returns the nodes that AOTAutograd turns into the arguments of a graph: parameters, buffers, inputs."""
    read = {str(node.target): node for node in gm.graph.nodes if node.op == "get_attr"}
    named = (*gm.named_parameters(remove_duplicate=False), *gm.named_buffers(remove_duplicate=False))
    return [read[name] for name, _ in named if name in read] + _inputs(gm.graph)


def _inputs(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _value(node: Node) -> Any:
    return node.meta.get("val")


class Widened:
    """The compiled graph of all lanes. A lane that is not in the short graph is a copy of the first one of its kind."""

    def __init__(self, compiled: GraphModule, narrow: Narrow) -> None:
        """`compiled` is torch's result for the short graph.

        Raises:
            NotEqual: it does not tell the whole graph.
        """
        self._narrow, self._compiled = narrow, compiled
        self._of, self._argument = self._named()
        lanes = described_lanes(compiled.graph, self._of, _value)
        self._first: dict[int, int] = {}
        """The first lane of each kind."""
        for lane in sorted(lanes):
            first = self._first.setdefault(narrow.lanes.kinds[lane], lane)
            if lanes[lane].does != lanes[first].does:
                raise NotEqual
        self._nodes = {lane: own.nodes for lane, own in lanes.items()}
        self._number = {node: number for own in self._nodes.values() for number, node in enumerate(own)}
        self._made: dict[_Key, Node] = {}
        """The new nodes, by the result of `_key`."""
        self._places: dict[Node, dict[int, int]] = {}
        """The place of each lane in the lists of an operator."""
        self._copies = _Copies()
        self._graph = Graph()
        self._sources: list[Callable[[Sequence[Any]], Any]] = []
        self._add_arguments()
        self._add_nodes()
        self.gm = GraphModule(compiled, self._graph)

    def called(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Returns a function of the arguments of the short graph, in a list that it empties; `run` is one of those of
        this graph."""

        def call(given: list[Any]) -> Any:
            arguments = [source(given) for source in self._sources]
            given.clear()
            return run(arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def _named(self) -> tuple[dict[Node, int], dict[Node, Node]]:
        """Returns the lane of each node of the compiled graph, and its argument for each one of the whole graph."""
        narrow, inputs = self._narrow, _inputs(self._compiled.graph)
        arguments = [narrow.source[node] for node in _arguments(narrow.short)]
        if len(arguments) != len(inputs):
            raise NotEqual
        groups = grouped(self._compiled.graph, _value, narrow.lanes.sharing)
        found: dict[Node, int] = {}
        for whole, node in zip(arguments, inputs, strict=True):
            lane = narrow.lanes.of.get(whole)
            if node in groups and node.users and (lane is None or found.setdefault(groups[node], lane) != lane):
                raise NotEqual
        if any(node.op != "placeholder" and group not in found for node, group in groups.items()):
            raise NotEqual
        of = {node: found[group] for node, group in groups.items() if group in found}
        return of, dict(zip(arguments, inputs, strict=True))

    def _like(self, lane: int) -> int:
        """Returns the lane of the short graph that a lane is like."""
        return lane if lane in self._nodes else self._first[self._narrow.lanes.kinds[lane]]

    def _key(self, short: Node, lane: int) -> _Key:
        """Returns the key of the new node that stands for one of the short graph, in a lane if it belongs to lanes."""
        return (lane, self._number[short]) if short in self._of else short

    def _meta(self, short: Node, lane: int) -> dict[str, Any]:
        same = short not in self._of or self._of[short] == lane
        return short.meta | {"val": _value(short) if same else self._copies.of(_value(short), lane)}

    def _add_arguments(self) -> None:
        """Adds the arguments of the whole graph, in its order."""
        narrow, lanes = self._narrow, self._narrow.lanes
        number = {node: number for nodes in lanes.nodes for number, node in enumerate(nodes)}
        place = {node: place for place, node in enumerate(_inputs(self._compiled.graph))}
        given = {node: place for place, node in enumerate(_inputs(narrow.whole.graph))}
        for whole in _arguments(narrow.whole):
            short, lane = self._argument.get(whole), lanes.of.get(whole, -1)
            if short is not None:
                self._sources.append(operator.itemgetter(place[short]))
            else:
                short = self._argument[lanes.nodes[self._like(lane)][number[whole]]]
                self._sources.append(_input_or_attribute(narrow, whole, given.get(whole)))
            node = self._graph.placeholder(f"argument{len(self._sources)}")
            node.meta = self._meta(short, lane)
            self._made[self._key(short, lane)] = node

    def _add_nodes(self) -> None:
        *nodes, output = (node for node in self._compiled.graph.nodes if node.op != "placeholder")
        ends = len(nodes) - _stores_at_end(nodes)
        for own, part in groupby(nodes[:ends], self._of.__contains__):
            if own:
                for run in _runs(part, self._of):
                    for lane, short in self._of_all_lanes(run):
                        self._add(lane, short)
            else:
                for short in part:
                    self._add_shared(short)
        self._add_stores(nodes[ends:])
        self._graph.node_copy(output, self._made.__getitem__)

    def _add_stores(self, stores: Sequence[Node]) -> None:
        """Adds the copies of results to arguments, in the order of the arguments."""
        place = {node: place for place, node in enumerate(_inputs(self._graph))}
        found = [(-1, node) for node in stores if node not in self._of]
        found += self._of_all_lanes([node for node in stores if node in self._of])
        found.sort(key=lambda each: place[self._made[self._key(each[1].all_input_nodes[0], each[0])]])
        for lane, short in found:
            self._add(lane, short)

    def _of_all_lanes(self, nodes: Iterable[Node]) -> Iterator[tuple[int, Node]]:
        """Yields the nodes of all lanes for some nodes of lanes of the short graph, as pairs of a lane and the node of
        the short graph that is copied.

        Raises:
            NotEqual: lanes of one kind have different nodes there.
        """
        own: dict[int, list[Node]] = {}
        for node in nodes:
            own.setdefault(self._of[node], []).append(node)
        for lane in self._all_lanes(own):
            first, there = own[self._first[self._narrow.lanes.kinds[lane]]], own[self._like(lane)]
            if [self._number[node] for node in there] != [self._number[node] for node in first]:
                raise NotEqual
            yield from ((lane, node) for node in there)

    def _all_lanes(self, some: Collection[int]) -> list[int]:
        """Returns all lanes of the kinds of some lanes.

        Raises:
            NotEqual: the short graph has other lanes of these kinds.
        """
        kinds = self._narrow.lanes.kinds
        among = {kinds[lane] for lane in some}
        found = [lane for lane, kind in enumerate(kinds) if kind in among]
        if any(self._like(lane) not in some for lane in found):
            raise NotEqual
        return found

    def _add(self, lane: int, short: Node) -> None:
        """Adds a copy of a node of the short graph for a lane."""
        node = self._graph.node_copy(short, lambda source: self._made[self._key(source, lane)])
        if is_item(short, self._of):
            node.update_arg(1, self._places[short.all_input_nodes[0]][lane])
        node.meta = self._meta(short, lane)
        self._made[self._key(short, lane)] = node

    def _add_shared(self, short: Node) -> None:
        if not is_over_lists(short):
            self._add(-1, short)
            return
        columns = _columns(short, self._of)
        lanes = self._all_lanes(columns)
        self._places[short] = {lane: place for place, lane in enumerate(lanes)}
        wide = [
            [
                self._made[self._key(item, lane)] if isinstance(item, Node) else item
                for item in columns[self._like(lane)]
            ]
            for lane in lanes
        ]
        node = self._made[short] = _over_lists(self._graph, short, wide, self._made)
        values = dict(zip(columns, _value(short) or (), strict=False))
        node.meta["val"] = [
            value if lane in self._nodes else self._copies.of(value, lane)
            for lane, value in ((lane, values.get(self._like(lane))) for lane in lanes)
        ]


def _input_or_attribute(narrow: Narrow, whole: Node, place: int | None) -> Callable[[Sequence[Any]], Any]:
    if place is not None:
        return lambda _: narrow.given[place]
    value = attribute(narrow.whole, str(whole.target))
    return lambda _: value


def _stores_at_end(nodes: Sequence[Node]) -> int:
    """Returns how many of the last nodes copy a result to an argument."""
    count = 0
    for node in reversed(nodes):
        if node.target is not torch.ops.aten.copy_.default or node.all_input_nodes[0].op != "placeholder":
            break
        count += 1
    return count


def _runs(nodes: Iterable[Node], of: Mapping[Node, int]) -> Iterator[list[Node]]:
    """Yields parts of nodes in which the nodes of each lane follow those of the lanes before it."""
    run: list[Node] = []
    for node in nodes:
        if run and of[node] < of[run[-1]]:
            yield run
            run = []
        run.append(node)
    yield run


class _Copies:
    """Makes the fake values of copied lanes: of sizes as those that they are copies of, in memory of their own."""

    def __init__(self) -> None:
        self._memory: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._views: dict[Any, Any] = {}

    def of(self, value: Any, lane: int) -> Any:
        """Returns the value that `value` is in a lane."""
        if isinstance(value, list | tuple):
            return [self.of(item, lane) for item in value]
        if not isinstance(value, FakeTensor):
            return value
        place = int(value.untyped_storage()._cdata), lane, value.dtype
        key = (*place, tuple(value.shape), value.stride(), value.storage_offset())
        if key not in self._views:
            self._views[key] = self._made(value, place)
        return self._views[key]

    def _made(self, value: FakeTensor, place: tuple[int, int, torch.dtype]) -> torch.Tensor:
        elements = value.untyped_storage().nbytes() // value.itemsize
        if place not in self._memory and value.storage_offset() == 0 and value.numel() == elements:
            self._memory[place] = another(value.fake_mode, value)
            return self._memory[place]
        with value.fake_mode, torch.no_grad():
            if place not in self._memory:
                self._memory[place] = torch.empty(elements, dtype=value.dtype, device=value.device)
            return self._memory[place].as_strided(value.shape, value.stride(), value.storage_offset())
