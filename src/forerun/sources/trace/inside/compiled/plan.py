"""Plans the run of a compiled graph: its kernels in order, the work of each, and the values that outlive it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from forerun.sources.trace.inside.compiled.fusion import fuse
from forerun.sources.trace.inside.compiled.fusion_graph import fusion_nodes
from forerun.sources.trace.inside.compiled.groups import FusionGroup, FusionNode, Kind


@dataclass(eq=False)
class Step:
    """Nodes that run one after the other as one kernel."""

    nodes: list[Node]
    """The nodes to run, in graph order. A node that several kernels compute runs with the first of them."""
    computed: list[Node]
    """The nodes that belong to the kernel."""
    kernel: FusionGroup | None
    """None if each node is recorded on its own, as in eager mode."""
    written: list[Node] = field(default_factory=list)
    """The nodes whose values the kernel leaves in memory."""
    dying: list[Node] = field(default_factory=list)
    """The nodes whose values nothing reads after this step."""
    freed: list[list[Node]] = field(default_factory=list)
    """For each buffer of the graph that ends with this step: all values in it."""

    @property
    def name(self) -> str:
        """Returns the kernel's name, as Inductor would build it."""
        return "fused_" + "_".join(dict.fromkeys(short_name(node) for node in self.computed))


def steps_of(graph: Graph, donated: frozenset[int] = frozenset()) -> list[Step]:
    """Returns the steps of `graph`, whose nodes are aten operators with fake values, in an order in which they can run.

    `donated` are positions of arguments whose memory belongs to the graph.
    """
    _name_what_is_changed(graph)
    described, ops = fusion_nodes(graph)
    groups = fuse([_at_its_place(op, node) for op, node in zip(described, ops, strict=True)])
    members = [[ops[i] for i in group.nodes] for group in groups]
    done = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    steps = []
    for group, computed in _copies_late(list(zip(groups, members, strict=True))):
        recorded_alone = group.kind in (Kind.TEMPLATE, Kind.EXTERN) and not any(map(_scatters, computed))
        steps.append(Step(_missing(computed, done), computed, None if recorded_alone else group))
    output = next(node for node in graph.nodes if node.op == "output")
    rest = [node for node in graph.nodes if node.op != "output" and node not in done]
    if rest:
        steps.append(Step(_missing(rest, done), [], None))
    _find_written(steps, {node: i for i, node in enumerate(graph.nodes)}, output)
    _find_dying(steps, output)
    inputs = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    _find_freed(steps, output, {node for i, node in enumerate(inputs) if i not in donated})
    return steps


def _copies_late(kernels: list[tuple[FusionGroup, list[Node]]]) -> list[tuple[FusionGroup, list[Node]]]:
    """Moves kernels that only make the copy for a scatter right before the kernel that adds to it.

    A scatter runs whole at its first kernel together with everything that it reads, and a matrix product that it reads
    must not become part of that kernel.
    """
    last = {node: i for i, (_, computed) in enumerate(kernels) for node in computed}
    places = []
    for i, (_, computed) in enumerate(kernels):
        later = [last[node] for node in computed if _scatters(node) and last[node] > i]
        copies = all(_scatters(node) or not node.all_input_nodes for node in computed)
        places.append((min(later) - 0.5 if later and copies else i, i))
    return [kernels[i] for _, i in sorted(places)]


def _name_what_is_changed(graph: Graph) -> None:
    """Gives an in-place operator the fake value of the tensor that it changes; graph passes leave that of a copy
    there."""
    for node in graph.nodes:
        if node.op == "call_function" and is_mutable(node) and node.args:
            changed = node.args[0]
            values = [n.meta.get("val") for n in changed] if isinstance(changed, (list, tuple)) else None
            node.meta["val"] = changed.meta.get("val") if isinstance(changed, Node) else values


def _at_its_place(op: FusionNode, node: Node) -> FusionNode:
    """Makes the wait for a collective a kernel of its own, so that it keeps its place: it only returns its input, but
    everything after it waits too."""
    func: Any = node.target
    collective = isinstance(func, torch._ops.OpOverload) and func.namespace == "_c10d_functional"
    return replace(op, kind=Kind.EXTERN) if collective and op.kind == Kind.VIEW else op


def _missing(nodes: Sequence[Node], done: set[Node]) -> list[Node]:
    """Returns `nodes` and the views that they need, without those in `done`, and adds them to `done`."""
    found: list[Node] = []
    left = [(node, False) for node in reversed(nodes)]
    while left:
        node, ready = left.pop()
        if node in done:
            continue
        if ready:
            done.add(node)
            found.append(node)
        else:
            left.append((node, True))
            left += [(source, False) for source in node.all_input_nodes]
    return found


def _find_written(steps: Sequence[Step], place: dict[Node, int], output: Node) -> None:
    """Finds the nodes that each kernel writes: those that are returned, and those that a kernel reads without computing
    them."""
    holders: dict[Node, list[Step]] = {}
    for step in steps:
        for node in step.computed:
            holders.setdefault(node, []).append(step)
    for node, own in holders.items():
        leaves = [user for user in _readers(node, holders) if user is output or not set(holders[user]) <= set(own)]
        if leaves or is_mutable(node):
            own[-1].written.append(node)
    for step in steps:
        step.written.sort(key=place.__getitem__)


def _readers(node: Node, holders: dict[Node, list[Step]]) -> list[Node]:
    """Returns the nodes that read `node`, directly or through views."""
    found: list[Node] = []
    left = list(node.users)
    while left:
        user = left.pop()
        if user.op == "output" or user in holders:
            found.append(user)
        else:
            left += user.users
    return found


def _find_dying(steps: Sequence[Step], output: Node) -> None:
    seen = set(output.all_input_nodes)
    for step in reversed(steps):
        touched = dict.fromkeys(n for node in (*step.nodes, *step.computed) for n in (node, *node.all_input_nodes))
        step.dying = [node for node in touched if node not in seen]
        seen |= touched.keys()


def _find_freed(steps: Sequence[Step], output: Node, foreign: set[Node]) -> None:
    """Finds the buffers that end with each step, where the last value in them does. Buffers from before the graph and
    returned ones don't end."""
    last: dict[int, int] = {}
    values: dict[int, list[Node]] = {}
    for number, step in enumerate(steps):
        for node in step.dying:
            for storage in _storages(node):
                last[storage] = number
                values.setdefault(storage, []).append(node)
    for node in (*foreign, *output.all_input_nodes):
        for storage in _storages(node):
            last.pop(storage, None)
    for storage, number in last.items():
        steps[number].freed.append(values[storage])


def _storages(node: Node) -> list[int]:
    value = node.meta.get("val")
    return [int(value.untyped_storage()._cdata)] if isinstance(value, torch.Tensor) else []


def _scatters(node: Node) -> bool:
    """Returns whether a node is a scatter: Inductor generates its code but fuses nothing with it."""
    name = short_name(node)
    return "index_put" in name or name.startswith("scatter")


def is_mutable(node: Node) -> bool:
    """Returns whether a node changes one of its arguments."""
    func: Any = node.target
    return isinstance(func, torch._ops.OpOverload) and bool(func._schema.is_mutable)


def short_name(node: Node) -> str:
    """Returns the name of a node's operator without its namespace."""
    func: Callable[..., Any] | str = node.target
    return str(func._opname) if isinstance(func, torch._ops.OpOverload) else str(getattr(func, "__name__", func))
