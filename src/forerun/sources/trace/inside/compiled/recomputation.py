"""Tells which kernels of a compiled backward graph compute values of the forward pass again.

AOTAutograd's partitioner copies operators of the forward pass into the backward graph: those that a checkpoint says,
and those that cost less than to keep their results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import Graph, GraphModule, Node

from forerun.sources.trace.inside.compiled.plan import Step

_TANGENT = "tangents"
"""AOTAutograd's name for an argument that is the gradient of an output of the forward graph."""
_BACKWARD_TAGS = frozenset(("is_backward", "must_be_in_backward"))
"""The values of `meta["partitioner_tag"]` of nodes that autograd's formulas made."""


def recomputing(backward: Graph, steps: Sequence[Step]) -> frozenset[int]:
    """Returns the numbers of the steps of a `backward` graph whose operators all belong to the forward pass.

    Such an operator depends on no gradient, and autograd did not make it. A kernel in which operators of both passes
    are fused belongs to the backward pass.
    """
    own = _of_backward(backward)
    return frozenset(number for number, step in enumerate(steps) if step.computed and own.isdisjoint(step.computed))


def label(gm: GraphModule, told: Callable[[bool], None]) -> None:
    """Makes a backward graph that runs operator by operator call `told(True)` where recomputation begins and
    `told(False)` where it ends. Other graphs stay as they are."""
    if not any(map(_is_gradient, gm.graph.nodes)):
        return
    own = _of_backward(gm.graph)
    inside = False
    for node in list(gm.graph.nodes):
        again = node.op == "call_function" and node not in own
        if again != inside and node.op in ("call_function", "output"):
            with gm.graph.inserting_before(node):
                gm.graph.call_function(told, (again,))
            inside = again


def _is_gradient(node: Node) -> bool:
    return node.op == "placeholder" and _TANGENT in str(node.target)


def _of_backward(graph: Graph) -> set[Node]:
    found: set[Node] = set()
    for node in graph.nodes:
        made = node.meta.get("partitioner_tag") in _BACKWARD_TAGS
        if _is_gradient(node) or made or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
