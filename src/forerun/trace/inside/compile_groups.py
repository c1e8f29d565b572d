"""Which nodes of a compiled graph run as one kernel, and in which order kernels run."""

from __future__ import annotations

import heapq
import operator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch._inductor.lowering import fallbacks, lowerings
from torch.fx import Node

aten, prims = torch.ops.aten, torch.ops.prims
_FUSED_NAMESPACES = ("aten", "prims", "quantized_decomposed", "rngprims")
_LIBRARY = {
    *("mm", "addmm", "bmm", "baddbmm", "_int_mm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm"),
    *("convolution", "_convolution", "_sparse_semi_structured_mm", "_weight_int8pack_mm", "_local_scalar_dense"),
    *("sort", "topk", "median", "mode", "kthvalue", "device_put", "set_", "resize", "sym_size", "sym_stride"),
}
"""lowered by Inductor, but not to code that fuses"""
_SCATTERS = {"index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate", "scatter", "scatter_add"} | {
    "scatter_reduce",
    "index_put_",
    "scatter_",
    "scatter_add_",
    "scatter_reduce_",
}
"""a kernel of their own: they write where others have written"""
_SCANS = {"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"}
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_LARGEST = 64
"""nodes of a kernel: Inductor's max_fusion_size"""


@dataclass(eq=False)
class Step:
    """Nodes that run together; `fused`: as one kernel, else each as in eager mode."""

    nodes: list[Node]
    fused: bool
    space: tuple[int, int]
    """elements of the kernel's outer and reduced dimensions"""
    alone: bool
    first: int
    """place of the first node in the graph"""
    last: int
    computed: int = 0
    """nodes that are no views"""
    before: set[Step] = field(default_factory=set)
    after: set[Step] = field(default_factory=set)

    def needs(self, other: Step) -> bool:
        """Whether this can't run before `other` has."""
        seen, left = {self}, [self]
        while left:
            for earlier in left.pop().before:
                if earlier is other:
                    return True
                if earlier not in seen and earlier.last > other.first:
                    seen.add(earlier)
                    left.append(earlier)
        return False

    def needs_through_another(self, other: Step) -> bool:
        """Whether something has to run after `other` and before this."""
        return any(earlier is not other and earlier.needs(other) for earlier in self.before)


def steps_of(graph: torch.fx.Graph) -> list[Step]:
    """The steps of `graph`, in an order in which they can run."""
    return _Grouping(graph).in_order()


class _Grouping:
    """Adds node by node: each joins a kernel that makes or reads something that it reads too, or begins its own."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._index = {node: i for i, node in enumerate(graph.nodes)}
        self._place: dict[Node, Step] = {}
        self._readers: dict[Node, list[Node]] = {}
        """nodes that read a node, directly or through views"""
        self._steps: dict[Step, None] = {}
        for node in graph.nodes:
            if node.op not in ("placeholder", "get_attr", "output"):
                self._add(node)

    def _add(self, node: Node) -> None:
        space, view, alone = _space(node), is_view(node), _alone(node)
        step: Step | None = None
        if view:
            inputs = self._inputs(node)
            step = next((s for s in inputs if s.fused and len(inputs) == 1 and not s.alone), None)
        elif space is not None and not alone:
            step = self._joined(node, space)
        place = self._index[node]
        if step is None:
            step = Step([], space is not None, space or (0, 0), alone, place, place)
            self._steps[step] = None
        if space is not None and space[1] > 1:
            step.space = space
        step.nodes.append(node)
        step.last = place
        step.computed += not view
        self._place[node] = step
        for earlier in self._inputs(node):
            if earlier is not step:
                step.before.add(earlier)
                earlier.after.add(step)
        if not view:
            for source in node.all_input_nodes:
                self._readers.setdefault(_base(source), []).append(node)

    def _inputs(self, node: Node) -> list[Step]:
        return list(dict.fromkeys(self._place[n] for n in node.all_input_nodes if n in self._place))

    def _joined(self, node: Node, space: tuple[int, int]) -> Step | None:
        """The step that `node` joins, if any, after it is merged with the others that `node` would join."""
        inputs = self._inputs(node)
        near = dict.fromkeys(inputs)
        for source in node.all_input_nodes:
            near |= dict.fromkeys(self._place[n] for n in self._readers.get(_base(source), ()))
        found: Step | None = None
        for step in near:
            if not step.fused or step.alone or not _same_space(step.space, space) or step.computed >= _LARGEST:
                continue
            if any(other is not step and other.needs(step) for other in inputs):
                continue
            if found is None:
                found = step
            elif step in inputs and self._can_merge(found, step):
                self._merge(found, step)
                inputs = self._inputs(node)
        return found

    @staticmethod
    def _can_merge(one: Step, other: Step) -> bool:
        return (
            _same_space(one.space, other.space)
            and one.computed + other.computed < _LARGEST
            and not one.needs_through_another(other)
            and not other.needs_through_another(one)
        )

    def _merge(self, step: Step, other: Step) -> None:
        """All of `other` becomes part of `step`."""
        for node in other.nodes:
            self._place[node] = step
        step.nodes = sorted(step.nodes + other.nodes, key=self._index.__getitem__)
        step.first, step.last = min(step.first, other.first), max(step.last, other.last)
        step.computed += other.computed
        step.space = max(step.space, other.space, key=lambda space: space[1])
        for earlier in other.before:
            earlier.after = earlier.after - {other} | {step}
        for later in other.after:
            later.before = later.before - {other} | {step}
        step.before = (step.before | other.before) - {step, other}
        step.after = (step.after | other.after) - {step, other}
        for near in (step.before, step.after):
            for one in near:
                one.before.discard(other)
                one.after.discard(other)
        step.before.discard(step)
        step.after.discard(step)
        del self._steps[other]

    def in_order(self) -> list[Step]:
        """Each step as late as its last node stands in the graph."""
        missing = {step: len(step.before) for step in self._steps}
        ready = [(step.last, step) for step in self._steps if not missing[step]]
        heapq.heapify(ready)
        order: list[Step] = []
        while ready:
            step = heapq.heappop(ready)[1]
            order.append(step)
            for later in step.after:
                missing[later] -= 1
                if not missing[later]:
                    heapq.heappush(ready, (later.last, later))
        assert len(order) == len(self._steps), "kernels that need each other"
        return order


def _same_space(one: tuple[int, int], other: tuple[int, int]) -> bool:
    if one[1] == 1 or other[1] == 1:
        return prod(one) == prod(other) or (one[0] == other[0] and max(one[1], other[1]) > 1)
    return one == other


def _base(node: Node) -> Node:
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _alone(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._opname in _SCATTERS


def _space(node: Node) -> tuple[int, int] | None:
    """Outer and reduced elements of a node that Inductor makes code for; None for all others."""
    func, out = node.target, node.meta.get("val")
    if not isinstance(func, torch._ops.OpOverload) or func.namespace not in _FUSED_NAMESPACES:
        return None
    name = func._opname
    if func not in lowerings or func in fallbacks or name in _LIBRARY or name in _EMPTY or is_view(node):
        return None
    tensors = [t for t in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(t, torch.Tensor)]
    if not tensors:
        return None
    if name.startswith("_foreach"):
        return sum(numel(t) for t in tensors), 1
    n = max(1, numel(tensors[0]))
    if name in _SCANS:
        along = int(tensors[0].shape[node.args[1]]) if tensors[0].dim() else 1  # type: ignore[call-overload]
        return max(1, n // max(1, along)), max(1, along)
    if torch.Tag.reduction in func.tags and node.all_input_nodes:
        whole = max(1, numel(node.all_input_nodes[0].meta["val"]))
        return n, max(1, whole // n)
    return n, 1


def numel(tensor: torch.Tensor) -> int:
    """Elements of a tensor; open sizes count by their hint."""
    return prod(s if isinstance(s, int) else int(s.node.hint or 1) for s in tensor.shape)


def is_view(node: Node) -> bool:
    """Whether a node launches nothing."""
    func: Any = node.target
    if func is operator.getitem:
        return True
    if not isinstance(func, torch._ops.OpOverload):
        return False
    out, given = node.meta.get("val"), next((n.meta.get("val") for n in node.all_input_nodes), None)
    if func._opname in ("reshape", "contiguous"):
        return isinstance(out, torch.Tensor) and isinstance(given, torch.Tensor) and _shares(out, given)
    return func.is_view or func._opname in ("_unsafe_view", "inductor_force_stride_order")


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


__all__ = ["Step", "is_view", "numel", "steps_of"]
