"""Turns a compiled graph of aten operators into the plain ops that `fusion.fuse` groups into kernels."""

from __future__ import annotations

import operator
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch._inductor.lowering import fallbacks, lowerings
from torch.fx import Graph, Node

from forerun.sources.trace.inside.compiled.groups import Access, FusionNode, Kind
from forerun.sources.trace.inside.kernels.attention import ATTENTION_RULES
from forerun.sources.trace.inside.kernels.cudnn import CUDNN_RULES
from forerun.sources.trace.inside.kernels.gemm import GEMM_RULES
from forerun.sources.trace.inside.kernels.tensors import as_int, elements, shape_of

_OWN_CODE = frozenset(("aten", "prims", "inductor_prims", "quantized_decomposed", "rngprims", "inductor"))
_EMPTY = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"))
_SCATTERS = frozenset(
    f"{name}{end}"
    for name in (
        "index_put",
        "_unsafe_index_put",
        "_unsafe_masked_index_put_accumulate",
        "scatter",
        "scatter_add",
        "scatter_reduce",
    )
    for end in ("", "_")
)
"""Inductor lowers these to a copy (unless in place) and a kernel over the values that adds to it."""
_EXTERN = frozenset(
    (
        "inductor_seeds",
        "inductor_seed",
        "sort",
        "topk",
        "kthvalue",
        "median",
        "mode",
        "_local_scalar_dense",
        "device_put",
    )
)
_SCANS = frozenset(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"))
_GATHERS = frozenset(("embedding", "index", "_unsafe_index", "gather", "index_select"))
_LIST_OP = "_foreach_"
_REDUCTIONS = frozenset(("prepare_softmax_online",))
"""Reductions that don't have torch's `reduction` tag."""


def fusion_nodes(graph: Graph) -> tuple[list[FusionNode], list[Node]]:
    """Returns the ops of `graph` in order, and the node of each.

    A scatter that is not in place becomes two ops: the copy, and the kernel that changes it. Every node needs its fake
    value in `meta["val"]`, whose storage tells buffers apart. What the graph returns is kept.
    """
    returned = {
        _storage(tensor)
        for node in graph.nodes
        if node.op == "output"
        for n in node.all_input_nodes
        for tensor in _tensors(n)
    }
    numbers: dict[int, int] = {}

    def access(tensor: torch.Tensor, most_bytes: int | None = None) -> Access:
        number = numbers.setdefault(_storage(tensor), len(numbers))
        size = elements(tensor) * tensor.itemsize
        offset = as_int(tensor.storage_offset()) * tensor.itemsize
        return Access(number, size if most_bytes is None else min(size, most_bytes), offset)

    found: list[FusionNode] = []
    nodes: list[Node] = []
    lists = _Lists()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        name, outputs = _name(node), _tensors(node)
        kind = _kind(node, outputs)
        made = elements(outputs[0]) * outputs[0].itemsize if outputs and name in _GATHERS else None
        # A tensor of a list reads itself, not the list, which may have all parameters.
        sources = [outputs] if node.target is operator.getitem else map(_tensors, node.all_input_nodes)
        reads = [
            access(tensor, made if position == 0 else None)
            for position, source in enumerate(sources)
            for tensor in source
        ]
        changed = _changed(node)
        writes = [access(tensor) for tensor in (changed or outputs)]
        kept = bool(changed) or any(_storage(tensor) in returned for tensor in outputs)
        numel = max(1, prod(shape_of(outputs[0]))) if outputs else 1
        if name in _SCATTERS and kind == Kind.POINTWISE:
            target = writes[0]
            if not changed:
                found.append(FusionNode(name, kind, numel, tuple(reads[:1]), (target,)))
                nodes.append(node)
            values = max((t for n in node.all_input_nodes[1:] for t in _tensors(n)), key=torch.Tensor.numel)
            hit = Access(target.storage, min(target.size_bytes, elements(values) * outputs[0].itemsize), target.offset)
            found.append(FusionNode(name, kind, elements(values), (*reads[1:], hit), (hit,), kept=kept))
        else:
            reduced, inner = _reduction(node, outputs) if kind == Kind.REDUCTION else (1, True)
            op = FusionNode(name, kind, numel, tuple(reads), tuple(writes), reduced, inner, kept)
            found.append(lists.placed(op))
        nodes.append(node)
    return found, nodes


class _Lists:
    """The tensors that operators over lists make. Inductor fuses an op over one of them with the part of the list's
    kernel that makes it."""

    def __init__(self) -> None:
        self._made: dict[Access, int] = {}
        """a tensor of a list -> the elements of the list's first one, by which its op counts"""

    def placed(self, op: FusionNode) -> FusionNode:
        """Returns `op`, which counts as the list does if it goes over one of its tensors."""
        if op.name.startswith(_LIST_OP):
            self._made |= dict.fromkeys(op.writes, op.numel)
            return op
        listed = None if op.kind != Kind.POINTWISE else next(filter(None, map(self._made.get, op.reads)), None)
        return op if listed is None else replace(op, numel=listed, of_list=True)


def _name(node: Node) -> str:
    target: Any = node.target
    return (
        str(target._opname) if isinstance(target, torch._ops.OpOverload) else str(getattr(target, "__name__", target))
    )


def _tensors(node: Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [item for item in values if isinstance(item, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _changed(node: Node) -> list[torch.Tensor]:
    """Returns the arguments that the op writes in place."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return []
    given = [
        value
        for argument, value in zip(target._schema.arguments, node.args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [tensor for value in given if isinstance(value, Node) for tensor in _tensors(value)]


def _kind(node: Node, outputs: list[torch.Tensor]) -> Kind:
    target: Any = node.target
    if target is operator.getitem or not outputs:
        return Kind.VIEW
    if not isinstance(target, torch._ops.OpOverload):
        return Kind.EXTERN
    name = target._opname
    if any(name in rules for rules in (GEMM_RULES, CUDNN_RULES, ATTENTION_RULES)):
        return Kind.TEMPLATE
    if name in _EMPTY or _shares(node, outputs[0]):
        return Kind.VIEW
    if target.namespace not in _OWN_CODE or name in _EXTERN:
        return Kind.EXTERN
    if name == "copy_" or name in _SCATTERS:
        return Kind.POINTWISE
    if target not in lowerings or target in fallbacks:
        return Kind.EXTERN
    if torch.Tag.reduction in target.tags or name in _SCANS or name in _REDUCTIONS:
        return Kind.REDUCTION
    return Kind.POINTWISE


def _shares(node: Node, output: torch.Tensor) -> bool:
    """Returns whether the op returns a view of its argument."""
    target: Any = node.target
    if target._schema.is_mutable:
        return False
    return any(_storage(tensor) == _storage(output) for source in node.all_input_nodes for tensor in _tensors(source))


def _reduction(node: Node, outputs: list[torch.Tensor]) -> tuple[int, bool]:
    """Returns how many elements are reduced to one output, and whether they lie next to each other in memory."""
    source = _tensors(node.all_input_nodes[0])[0]
    sizes = shape_of(source)
    listed: Any = next((arg for arg in node.args[1:] if isinstance(arg, int | list | tuple)), node.kwargs.get("dim"))
    if listed is None or listed == []:
        listed = range(len(sizes))
    along = [int(dim) % max(1, len(sizes)) for dim in ([listed] if isinstance(listed, int) else listed)]
    reduced = prod([sizes[dim] for dim in along]) if sizes else 1
    strides = [source.stride(dim) for dim in along if sizes and sizes[dim] > 1]
    return max(1, reduced), not strides or min(strides) <= 1
