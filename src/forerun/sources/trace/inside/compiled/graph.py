"""CompiledGraph: runs a compiled graph of aten operators on fake tensors and records one kernel for each fused group.

Values that are used only inside a group take no memory. Every other value is freed after its last use, as Inductor's
generated code frees its buffers, and a kernel may write its output over an input that nothing reads any more.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from forerun.core.program.types import Category
from forerun.sources.trace.inside.compiled.groups import FusionGroup
from forerun.sources.trace.inside.compiled.optimizers import update_of
from forerun.sources.trace.inside.compiled.places import Places
from forerun.sources.trace.inside.compiled.plan import Step, is_mutable, steps_of
from forerun.sources.trace.inside.compiled.recomputation import recomputing
from forerun.sources.trace.inside.mode import VirtualMode
from forerun.sources.trace.inside.recorder import Recorder

_Values = dict[Node, Any]


class CompiledGraph:
    """A callable that runs a graph. It takes its arguments in a list and empties the list, so that the arguments can be
    freed.

    `donated` are the positions of arguments whose memory the graph may reuse. A `pooled` graph runs from a CUDA graph,
    which keeps its results in a private pool. Each node needs its fake value in `meta["val"]`.
    """

    def __init__(
        self,
        gm: GraphModule,
        mode: VirtualMode,
        recorder: Recorder,
        places: Places,
        backward: bool = False,
        donated: frozenset[int] = frozenset(),
        pooled: bool = False,
    ) -> None:
        self._boxed_call = True
        """Tells torch to pass the arguments in a list that this callable empties."""
        self.gm, self.mode, self.recorder = gm, mode, recorder
        nodes = list(gm.graph.nodes)
        self._backward = backward
        self._category = int(Category.GRAPH_POOL) if pooled else -1
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        self._constants = [node for node in nodes if node.op == "get_attr"]
        self._output = next(node for node in nodes if node.op == "output")
        self._steps = steps_of(gm.graph, donated)
        self._update, self._optimizer = update_of([step.computed for step in self._steps])
        self._recomputing = recomputing(gm.graph, self._steps) if backward else frozenset()
        """The steps that compute values of the forward pass again."""
        self._places = places.of([step.computed for step in self._steps])
        used = {n for node in nodes for n in node.all_input_nodes}
        self._unused = [node for node in self._inputs if node not in used]

    def __call__(self, args: list[Any]) -> Any:
        values: _Values = dict(zip(self._inputs, args, strict=True))
        args.clear()
        for node in self._unused:
            del values[node]
        for node in self._constants:
            values[node] = operator.attrgetter(str(node.target))(self.gm)
        recorder, places = self.recorder, self._places
        module_of_node, numbers = recorder.module_of_node, places.numbers()
        recorder.compiled += 1
        recorder.memory.category = self._category
        recorder.module_of_node = places.current
        again = not self._backward and not recorder.in_optimizer and torch._C._current_graph_task_id() != -1
        try:
            for index, (step, number) in enumerate(zip(self._steps, numbers, strict=True)):
                places.module = number
                recorder.recomputing = again or index in self._recomputing
                if index == self._update:
                    recorder.update_begins(self._optimizer)
                if step.kernel is None:
                    self._run(step, values)
                else:
                    self._run_as_kernel(step, step.kernel, values)
                for node in step.dying:
                    values.pop(node, None)
            if self._optimizer is not None:
                recorder.update_ends(self._optimizer)
        finally:
            recorder.compiled -= 1
            recorder.memory.category = -1
            recorder.module_of_node = module_of_node
            recorder.recomputing = False
        return map_arg(self._output.args[0], values.__getitem__)

    @staticmethod
    def _run(step: Step, values: _Values) -> None:
        for node in step.nodes:
            target: Callable[..., Any] = node.target  # type: ignore[assignment]
            arguments = map_arg((node.args, node.kwargs), values.__getitem__)
            out = target(*arguments[0], **arguments[1])
            values[node] = arguments[0][0] if out is None and is_mutable(node) else out

    def _run_as_kernel(self, step: Step, kernel: FusionGroup, values: _Values) -> None:
        recorder = self.recorder
        recorder.paused += 1
        try:
            self._run(step, values)
        finally:
            recorder.paused -= 1
        written = [values[node] for node in step.written]
        if _on_device([values[node] for node in step.computed if node in values]):
            for node in self._overwritten(step, values):
                del values[node]
            number = recorder.node(recorder.ops.memory(step.name, kernel.read_bytes, kernel.written_bytes, launches=1))
            self.mode.seen(written, number)

    @staticmethod
    def _overwritten(step: Step, values: _Values) -> list[Node]:
        """Returns the values whose buffers end with this step and that an output of the same size overwrites."""
        free: dict[int, list[list[Node]]] = {}
        computed = set(step.computed)
        for nodes in step.freed if step.written else ():
            if all(n in values and n not in computed for n in nodes):
                free.setdefault(_bytes(values[nodes[0]]), []).append(nodes)
        found: list[Node] = []
        for node in step.written:
            size = _bytes(values[node])
            if size and free.get(size):
                found += free[size].pop(0)
        return found


def _on_device(values: list[Any]) -> bool:
    return any(
        _on_device(list(value))
        if isinstance(value, (list, tuple))
        else isinstance(value, torch.Tensor) and value.is_cuda
        for value in values
    )


def _bytes(value: Any) -> int:
    return int(value.untyped_storage().nbytes()) if isinstance(value, torch.Tensor) else 0
