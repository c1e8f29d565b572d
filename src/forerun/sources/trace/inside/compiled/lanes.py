"""Finds the lanes of a graph: the nodes that it computes for each parameter of an optimizer.

A compiled optimizer step does the same to every parameter, whether operator by operator over lists of all of them
(`_foreach_add`) or parameter by parameter. The nodes that one parameter alone needs are its *lane*: parameter,
gradient, state, and all values made of them. An operator over lists belongs to no lane. Values that all lanes share,
such as a learning rate, belong to none either. Lanes of one *kind* do the same to tensors of the same sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from forerun.sources.trace.inside.compiled.repeats import NotEqual, described

KEPT = 2
"""The lanes of each kind in a short graph. Two show in which order the nodes of several lanes follow each other."""
_OVER_LISTS = "_foreach_"
_ARGUMENTS = ("placeholder", "get_attr")
_AROUND = (*_ARGUMENTS, "output")


@dataclass(frozen=True, eq=False)
class Lanes:
    """The lanes of a graph, in the order in which the graph computes them."""

    of: Mapping[Node, int]
    """The lane of each node that belongs to one."""
    nodes: Sequence[Sequence[Node]]
    """The nodes of each lane, in the order in which they are computed or first read: the same for lanes of one kind."""
    kinds: Sequence[int]
    """The kind of each lane."""
    sharing: bool
    """Whether lanes share arguments of one number."""

    def kept(self) -> list[int]:
        """Returns the first lanes of each kind, in order."""
        seen: dict[int, int] = {}
        found = []
        for lane, kind in enumerate(self.kinds):
            seen[kind] = seen.get(kind, 0) + 1
            if seen[kind] <= KEPT:
                found.append(lane)
        return found


def is_over_lists(node: Node) -> bool:
    """Returns whether a node is an operator that goes over lists of tensors, item by item."""
    name = getattr(node.target, "_opname", None) or getattr(node.target, "__name__", "")
    return node.op == "call_function" and str(name).startswith(_OVER_LISTS)


def is_item(node: Node, of: Mapping[Node, int]) -> bool:
    """Returns whether a node of a lane is an item of the result of an operator over lists."""
    return node.target is operator.getitem and is_over_lists(node.all_input_nodes[0]) and node in of


def columns_of(node: Node) -> list[list[Any]]:
    """Returns the entries of the lists of an operator over lists, item by item.

    Raises:
        NotEqual: its lists differ in length, or it has none.
    """
    lists = [arg for arg in node.args if isinstance(arg, list | tuple)]
    more = any(isinstance(value, list | tuple) for value in node.kwargs.values())
    if not lists or more or len({len(one) for one in lists}) > 1:
        raise NotEqual
    return [list(column) for column in zip(*lists, strict=True)]


def find_lanes(graph: Graph, value_of: Callable[[Node], Any], sharing: bool) -> Lanes:
    """Returns the lanes of a graph. `value_of` returns the value of an argument. With `sharing`, any lane may read an
    argument that is one number and in no list, such as a learning rate.

    Raises:
        NotEqual: something reads several lanes, a lane is returned, or operators go over lanes in different orders.
    """
    groups = grouped(graph, value_of, sharing)
    number: dict[Node, int] = {}
    for node in graph.nodes:
        for each in _items_of(node) if is_over_lists(node) else ([node] if node.op not in _AROUND else ()):
            if each in groups:
                number.setdefault(groups[each], len(number))
    of = {node: number[group] for node, group in groups.items() if group in number}
    lanes = described_lanes(graph, of, value_of)
    kinds: dict[Any, int] = {}
    found = [lanes[lane] for lane in range(len(number))]
    return Lanes(
        of, [lane.nodes for lane in found], [kinds.setdefault(lane.does, len(kinds)) for lane in found], sharing
    )


def grouped(graph: Graph, value_of: Callable[[Node], Any], sharing: bool) -> dict[Node, Node]:
    """Maps each node of a lane to one node that stands for the lane.

    Raises:
        NotEqual: something reads several lanes, or a lane is returned.
    """
    listed = {item for node in graph.nodes if is_over_lists(node) for item in _items_of(node)}
    arguments = [node for node in graph.nodes if node.op in _ARGUMENTS and node not in listed]
    return _Groups(graph, {node for node in arguments if sharing and _is_one_number(value_of(node))}).of()


@dataclass(eq=False)
class Described:
    """The nodes of a lane, in the order in which they are computed or first read, and a description of the lane that
    uses their numbers in that order.
    """

    nodes: list[Node] = field(default_factory=list)
    _does: list[Any] = field(default_factory=list)

    @property
    def does(self) -> tuple[Any, ...]:
        """Returns a description of the lane's work. Lanes of one kind have equal descriptions."""
        return tuple(self._does)


def described_lanes(graph: Graph, of: Mapping[Node, int], value_of: Callable[[Node], Any]) -> dict[int, Described]:
    """Returns the lanes of a graph, described; `of` is the lane of each node.

    Raises:
        NotEqual: two lanes share memory, or operators go over lanes in different orders.
    """
    descriptions = _Descriptions(of, value_of)
    for place, node in enumerate(graph.nodes):
        descriptions.add(place, node)
    return descriptions.found


def _items_of(node: Node) -> Iterator[Node]:
    for column in columns_of(node):
        yield from (item for item in column if isinstance(item, Node))


class _Groups:
    """The nodes of a graph in groups. No group reads another one."""

    def __init__(self, graph: Graph, shared: Set[Node]) -> None:
        """`shared` are arguments that any group may read."""
        self._graph, self._shared = graph, shared
        self._above: dict[Node, Node] = {}
        self._members: set[Node] = set()
        self._items: dict[Node, list[Node | None]] = {}
        for node in graph.nodes:
            if node.op == "output":
                continue
            if is_over_lists(node):
                columns = [[item for item in column if isinstance(item, Node)] for column in columns_of(node)]
                self._items[node] = [self._joined(column) for column in columns]
            else:
                self._add(node)
        self._adopt()

    def of(self) -> dict[Node, Node]:
        """Returns the group of each node that belongs to one.

        Raises:
            NotEqual: a group is returned, or a list has several items of it.
        """
        found = {node: self._top(node) for node in self._members}
        for node in self._graph.nodes:
            if node.op == "output" and any(source in found or source in self._items for source in node.all_input_nodes):
                raise NotEqual
        for operation, items in self._items.items():
            plain = [arg for arg in (*operation.args, *operation.kwargs.values()) if isinstance(arg, Node)]
            if not found.keys().isdisjoint(plain):
                raise NotEqual
            tops = [self._top(item) for item in items if item is not None]
            if len(tops) != len(items) or len(set(tops)) != len(tops):
                raise NotEqual
        return found

    def _add(self, node: Node) -> None:
        if node.op in _ARGUMENTS:
            if node not in self._shared:
                self._joined([node])
            return
        source = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(source, Node) and source in self._items:
            item = self._items[source][int(str(node.args[1]))]
            self._joined([node] if item is None else [item, node])
            return
        if any(one in self._items for one in node.all_input_nodes):
            raise NotEqual
        read = [one for one in node.all_input_nodes if one in self._members]
        if read:
            self._joined([*read, node])

    def _adopt(self) -> None:
        """Adds nodes that only one group reads to that group."""
        for node in reversed(self._graph.nodes):
            if node in self._members or node in self._items or node.op == "output" or not node.users:
                continue
            tops = {self._top(user) if user in self._members else None for user in node.users}
            if len(tops) == 1 and None not in tops:
                self._joined([next(iter(node.users)), node])

    def _joined(self, nodes: Sequence[Node]) -> Node | None:
        self._members.update(nodes)
        for node in nodes[1:]:
            one, other = self._top(nodes[0]), self._top(node)
            if one is not other:
                self._above[other] = one
        return nodes[0] if nodes else None

    def _top(self, node: Node) -> Node:
        passed = []
        while node in self._above:
            passed.append(node)
            node = self._above[node]
        self._above.update(dict.fromkeys(passed, node))
        return node


def _is_one_number(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.numel() == 1


class _Descriptions:
    """Describes lanes node by node."""

    def __init__(self, of: Mapping[Node, int], value_of: Callable[[Node], Any]) -> None:
        self._of, self._value_of = of, value_of
        self.found: dict[int, Described] = {lane: Described() for lane in of.values()}
        self._number: dict[Node, int] = {}
        self._place: dict[Node, int] = {}
        self._storages: dict[int, int] = {}

    def add(self, place: int, node: Node) -> None:
        """Adds the next node of the graph."""
        self._place[node] = place
        if is_over_lists(node):
            lanes = []
            for column in columns_of(node):
                lane = next(self._of[item] for item in column if isinstance(item, Node))
                lanes.append(lane)
                self._says(lane, (place, *(self._reference(lane, item) for item in column)))
            if sorted(set(lanes)) != lanes:
                raise NotEqual
        elif node in self._of and node.op not in _ARGUMENTS:
            lane = self._of[node]
            if is_item(node, self._of):
                what: Any = self._place[node.all_input_nodes[0]]
            else:
                args: Any = map_arg((node.args, node.kwargs), lambda each: self._shown(lane, each))
                what = (node.op, node.target, str(args))
            self._says(lane, (what, described(node.meta.get("example_value", node.meta.get("val")))))
            self._enter(lane, node)

    def _reference(self, lane: int, item: Any) -> Any:
        if not isinstance(item, Node):
            return repr(item)
        if item not in self._of:
            return "shared", self._place[item]
        if self._of[item] != lane:
            raise NotEqual
        if item not in self._number:  # It is an argument that is read for the first time.
            self._enter(lane, item)
            self._says(lane, self._argument(lane, item))
        return self._number[item]

    def _shown(self, lane: int, item: Node) -> Any:
        return _Shown(self._reference(lane, item))

    def _says(self, lane: int, what: Any) -> None:
        self.found[lane]._does.append(what)

    def _enter(self, lane: int, node: Node) -> None:
        self._number[node] = len(self.found[lane].nodes)
        self.found[lane].nodes.append(node)

    def _argument(self, lane: int, node: Node) -> Any:
        value = self._value_of(node)
        if not isinstance(value, torch.Tensor):
            return node.op, repr(value)
        storage = value.untyped_storage()
        if self._storages.setdefault(int(storage._cdata), lane) != lane:
            raise NotEqual
        return node.op, type(value), described(value), value.storage_offset(), storage.nbytes()


class _Shown:
    """Text without quotes."""

    def __init__(self, what: Any) -> None:
        self._what = what

    def __repr__(self) -> str:
        return f"%{self._what}"
