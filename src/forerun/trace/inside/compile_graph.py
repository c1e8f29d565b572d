"""CompiledGraph: runs a graph of aten operators on fakes, a kernel for each group of operators that is one kernel.

Values that don't leave a group have no memory. All others are dropped after their last use, as Inductor's code frees
its buffers, and a kernel may write its output over an input that nobody reads any more.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from forerun.trace.inside.compile_groups import Step, is_view, steps_of
from forerun.trace.inside.compile_places import Places
from forerun.trace.inside.mode import VirtualMode
from forerun.trace.inside.recorder import Recorder

aten = torch.ops.aten
_GATHERS = {aten.embedding.default, aten.index.Tensor, aten.gather.default, aten.index_select.default}
"""they read of their first tensor as much as they write"""


class CompiledGraph:
    """A callable for a graph; takes its arguments in a list, which it empties so that they can die."""

    def __init__(
        self, gm: GraphModule, mode: VirtualMode, recorder: Recorder, places: Places, donated: frozenset[int]
    ) -> None:
        self._boxed_call = True
        """torch hands over arguments that way to callables that say so, and copies this from their own attributes"""
        self.gm, self.mode, self.recorder = gm, mode, recorder
        nodes = list(gm.graph.nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        self._constants = [node for node in nodes if node.op == "get_attr"]
        self._output = next(node for node in nodes if node.op == "output")
        own = {self._inputs[i] for i in donated} | {n for n in nodes if n.op == "call_function"}
        self._steps = [_Planned(step, own) for step in steps_of(gm.graph)]
        self._places = places.of([step.nodes for step in self._steps])
        self._plan_deaths()

    def _plan_deaths(self) -> None:
        """Tell each step which values nobody needs after it."""
        kept = set(self._output.all_input_nodes)
        seen = set(kept)
        for step in reversed(self._steps):
            read = {n for node in step.nodes for n in (*node.all_input_nodes, node)}
            step.dying = [n for n in read - seen if n not in step.inner]
            seen |= read
        self._unused = [node for node in self._inputs if node not in seen]

    def __call__(self, args: list[Any]) -> Any:
        env: dict[Node, Any] = dict(zip(self._inputs, args, strict=True))
        args.clear()
        for node in self._unused:
            del env[node]
        for node in self._constants:
            env[node] = operator.attrgetter(str(node.target))(self.gm)
        recorder, places = self.recorder, self._places
        module_of_node, numbers = recorder.module_of_node, places.numbers()
        recorder.compiled += 1
        recorder.module_of_node = places.current
        try:
            for step, number in zip(self._steps, numbers, strict=True):
                places.module = number
                if step.fused:
                    self._kernel(step, env)
                else:
                    for node in step.nodes:
                        env[node] = _call(node, env)
                for node in step.dying:
                    env.pop(node, None)
        finally:
            recorder.compiled -= 1
            recorder.module_of_node = module_of_node
        return map_arg(self._output.args[0], env.__getitem__)

    def _kernel(self, step: _Planned, env: dict[Node, Any]) -> None:
        recorder = self.recorder
        recorder.paused += 1
        try:
            for node in step.nodes:
                env[node] = _call(node, env)
        finally:
            recorder.paused -= 1
        outputs = [env[node] for node in step.outputs]
        device = any(isinstance(out, torch.Tensor) and out.device.type == "cuda" for out in outputs)
        number = -1
        if device:
            read, written = step.traffic(env)
            row = recorder.ops.memory(step.name, read, written, launches=1)
            for node in step.replaced(env):
                del env[node]
            number = recorder.node(row)
        for node in step.inner:
            env.pop(node, None)
        self.mode.seen(outputs, number)


class _Planned:
    """A step with all that can be known of it before it runs."""

    def __init__(self, step: Step, own: set[Node]) -> None:
        self.nodes, self.fused = step.nodes, step.fused
        members = set(step.nodes)
        self.outputs = [n for n in step.nodes if any(user not in members for user in n.users) or _writes(n)]
        leaving = set(self.outputs)
        self.inner = [n for n in step.nodes if n not in leaving]
        self.dying: list[Node] = []
        self.name = "fused_" + "_".join(dict.fromkeys(_short(n) for n in step.nodes if not is_view(n)))
        self._own = own
        self._reads: dict[Node, list[Node]] = {}
        for node in step.nodes:
            for read in node.all_input_nodes:
                if read not in members:
                    self._reads.setdefault(read, []).append(node)

    def traffic(self, env: dict[Node, Any]) -> tuple[int, int]:
        """Bytes that the kernel reads and writes: each tensor once."""
        read = 0
        for source, users in self._reads.items():
            value = env[source]
            if isinstance(value, torch.Tensor):
                part = [_bytes(env[u]) for u in users if u.target in _GATHERS and u.args[0] is source]
                read += sum(part) if len(part) == len(users) else _bytes(value)
        return read, sum(_bytes(env[node]) for node in self.outputs)

    def replaced(self, env: dict[Node, Any]) -> list[Node]:
        """Inputs that end here and whose memory an output takes over: of its size, and read where it is written."""
        free = [n for n in self.dying if n in self._own and n in env and isinstance(env[n], torch.Tensor)]
        found: list[Node] = []
        for out in self.outputs:
            value = env[out]
            for node in free:
                if node not in found and isinstance(value, torch.Tensor) and _bytes(env[node]) == _bytes(value):
                    found.append(node)
                    break
        return found


def _call(node: Node, env: dict[Node, Any]) -> Any:
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    args = map_arg(node.args, env.__getitem__)
    kwargs = map_arg(node.kwargs, env.__getitem__)
    return target(*args, **kwargs)


def _bytes(tensor: Any) -> int:
    if not isinstance(tensor, torch.Tensor):
        return 0
    held = tensor.numel()
    if 0 in tensor.stride():
        held = min(held, 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))
    return int(held) * tensor.element_size()


def _writes(node: Node) -> bool:
    func = node.target
    return isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable


def _short(node: Node) -> str:
    func = node.target
    return func._opname if isinstance(func, torch._ops.OpOverload) else getattr(func, "__name__", "op")
