"""Compiles models of many equal blocks in the time that five of them take, and optimizers of many equal parameters in
the time that two of each kind take.

AOTAutograd captures a graph operator by operator, and its partitioner and Inductor's passes over the joint graph look
at every node several times. For a graph with many equal blocks all of this runs on five blocks of them. The forward and
backward graphs of all blocks follow from theirs (`replicate.py`), and AOTAutograd goes on with these: metadata, runtime
wrappers and Inductor's last passes are those of the whole graph. If five blocks don't determine the result, the whole
graph is compiled, as without this module.

An optimizer does the same to every parameter (`lanes.py`). torch compiles a graph of two parameters of each kind, and
the graph of all follows from the result (`widen.py`).

This module imports AOTAutograd, so only `backend.py` imports it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._functorch.config
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from forerun.sources.trace.inside.compiled.repeats import KEPT, LAST, NotEqual, Repeats, find_repeats
from forerun.sources.trace.inside.compiled.replicate import INNER, Blocks, Long, Values, blocks_of, spread
from forerun.sources.trace.inside.compiled.widen import Narrow, Widened, narrowed

_aot: Any = importlib.import_module("torch._functorch._aot_autograd.graph_compile")
_CAPTURE, _CAPTURE_WITHOUT_GRADIENTS = "aot_dispatch_autograd_graph", "aot_dispatch_base_graph"
_PARTITION = "_partition_joint_graph_into_fw_bw"
_Compile = Callable[[Any, Sequence[Any]], Any]


class _Ended(BaseException):
    """Ends the compilation of a short graph, because its result is known or can't be found."""


@dataclass
class _Short:
    """A short graph and AOTAutograd's result for it."""

    repeats: Repeats
    places: list[tuple[int, int] | None]
    """For each argument of the whole graph: its block and its number there."""
    positions: list[int]
    """For each argument of the short graph: its position in the whole graph."""
    forward: GraphModule | None = None
    backward: GraphModule | None = None
    returned: int = 0
    """The outputs of the forward graph that are no saved values."""


@dataclass
class Folding:
    """Replaces the stages of AOTAutograd in which a short graph stands for the whole one."""

    _short: _Short | None = field(default=None, init=False)
    _narrow: Narrow | None = field(default=None, init=False)
    _ending: bool = field(default=False, init=False)
    _long: tuple[GraphModule, GraphModule, int] | None = field(default=None, init=False)
    _original: dict[str, Callable[..., Any]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        names = {
            _CAPTURE: self._capture,
            _CAPTURE_WITHOUT_GRADIENTS: self._capture_without_gradients,
            _PARTITION: self._partition,
        }
        if all(hasattr(_aot, name) for name in names):  # Releases of torch before 2.13 lack some.
            self._original = {name: getattr(_aot, name) for name in names}
            for name, replacement in names.items():
                setattr(_aot, name, replacement)

    def compile(self, gm: Any, inputs: Sequence[Any], compile_fx: _Compile) -> Any:
        """Returns the result of `compile_fx(gm, inputs)`, in less time if `gm` has many equal parts."""
        made = self._compiled_narrow(gm, inputs, compile_fx)
        if made is not None:
            return made
        self._short = self._shortened(gm, inputs, compile_fx)
        try:
            return compile_fx(gm, inputs)
        finally:
            self._short = self._long = None

    def widened(self, compiled: GraphModule) -> Widened | None:
        """Returns the graph of all parameters, where `compiled` is that of two of each kind."""
        if self._narrow is None:
            return None
        try:
            return Widened(compiled, self._narrow)
        except NotEqual as error:
            raise _Ended from error

    def _compiled_narrow(self, gm: Any, inputs: Sequence[Any], compile_fx: _Compile) -> Any:
        if not self._original or not isinstance(gm, GraphModule) or not all(map(_is_plain, inputs)):
            return None
        self._narrow = narrowed(gm)
        if self._narrow is None:
            return None
        try:
            short = self._narrow.short
            return self._narrow.called(compile_fx(short, [inputs[position] for position in self._narrow.positions]))
        except _Ended:
            return None
        finally:
            self._narrow = None

    def _shortened(self, gm: Any, inputs: Sequence[Any], compile_fx: _Compile) -> _Short | None:
        whole_budget = torch._functorch.config.activation_memory_budget == 1
        if not self._original or not whole_budget or not isinstance(gm, GraphModule) or not all(map(_is_plain, inputs)):
            return None
        repeats = find_repeats(gm)
        if repeats is None:
            return None
        places = [repeats.owned.get(node) for node in gm.graph.nodes if node.op == "placeholder"]
        shorter, positions = repeats.shortened(gm)
        self._short, self._ending = _Short(repeats, places, positions), True
        try:
            compile_fx(shorter, [inputs[position] for position in positions])
        except _Ended:
            pass
        except Exception:
            return None  # The whole graph is compiled next, and fails too.
        finally:
            self._ending = False
        return self._short if self._short.forward is not None else None

    def _capture(self, flat_fn: Any, args: Any, descriptions: Any, aot_config: Any, *, fw_metadata: Any) -> Any:
        """Captures the joint graph, or makes forward and backward graph of those of the short graph."""
        if self._narrow is not None:  # Parameters are updated without gradients.
            raise _Ended
        if self._short is not None and not self._ending and self._long is None:
            try:
                self._long = _lengthened(self._short, args, fw_metadata)
            except (NotEqual, LookupError):
                self._short = None
            else:
                fw_metadata.mutated_inp_stream_indices = []
                tangents = fw_metadata.traced_tangents
                given = [[a.detach() if isinstance(a, torch.Tensor) else a for a in each] for each in (args, tangents)]
                return _nothing(), tuple(given), (descriptions, fw_metadata.traced_tangents_descs), None
        return self._original[_CAPTURE](flat_fn, args, descriptions, aot_config, fw_metadata=fw_metadata)

    def _capture_without_gradients(self, *args: Any, **kwargs: Any) -> Any:
        if self._ending:
            raise _Ended
        return self._original[_CAPTURE_WITHOUT_GRADIENTS](*args, **kwargs)

    def _partition(self, joint: Any, inputs: Any, inner_meta: Any, fw_metadata: Any, *rest: Any) -> Any:
        if self._long is not None:
            fw_metadata.num_graphsafe_rng_states = 0
            return self._long
        found = self._original[_PARTITION](joint, inputs, inner_meta, fw_metadata, *rest)
        if self._ending and self._short is not None:
            if _is_simple(fw_metadata):
                self._short.forward, self._short.backward, self._short.returned = found
            raise _Ended
        return found


def _is_plain(value: Any) -> bool:
    return type(value) in (FakeTensor, torch.nn.Parameter, torch.Tensor)


def _is_simple(fw_metadata: Any) -> bool:
    """Returns whether a graph changes none of its arguments outside of itself."""
    return fw_metadata.num_mutated_inp_runtime_indices == 0 and not fw_metadata.tokens


def _nothing() -> GraphModule:
    graph = Graph()
    graph.output(())
    return GraphModule({}, graph)


def _lengthened(short: _Short, args: Sequence[Any], fw_metadata: Any) -> tuple[GraphModule, GraphModule, int]:
    """Returns forward and backward graph of all blocks, and the number of the forward graph's outputs that are no saved
    values. `args` are the fake arguments of the whole graph.

    Raises:
        NotEqual: the result for the short graph does not determine them.
    """
    if len(args) != len(short.places) or not _is_simple(fw_metadata) or not all(map(_is_plain, args)):
        raise NotEqual
    forward, saved, values = _forward(short, args)
    return forward, _backward(short, saved, values), short.returned


Saved = list[tuple[Node, int | None]]
"""Values that the short forward graph saves, each with its block in the whole graph, in the order of its outputs."""


def _arguments(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def _outputs(gm: GraphModule) -> list[Any]:
    return list(next(node for node in gm.graph.nodes if node.op == "output").args[0])


def _forward(short: _Short, args: Sequence[Any]) -> tuple[GraphModule, Saved, list[Any]]:
    gm, repeats = short.forward, short.repeats
    if gm is None or len(_arguments(gm)) != len(short.positions):
        raise NotEqual
    of_short = dict(zip(short.positions, _arguments(gm), strict=True))
    owned = {}
    for position, node in of_short.items():
        place = short.places[position]
        if place is not None:
            owned[node] = repeats.kept.index(place[0]), place[1]
    blocks = blocks_of(gm, owned, backward=False)
    long = Long(blocks, repeats.count, repeats.modules)
    for position, (value, place) in enumerate(zip(args, short.places, strict=True)):
        same = of_short.get(position)
        value = value if same is None else same.meta["val"]
        long.argument(f"primals_{position + 1}", value, same, place)
    long.fill()
    outputs = _outputs(gm)
    returned, saved = outputs[: short.returned], outputs[short.returned :]
    if not all(isinstance(item, Node) for item in saved):
        raise NotEqual
    values = Values(next(value.fake_mode for value in args if isinstance(value, FakeTensor)))
    long.own_memory(values)
    order = list(spread(saved, blocks.of.get, repeats.count, blocks.template))
    nodes = [long.stands_for(item, number) for item, number in order]
    for (item, number), node in zip(order, nodes, strict=True):
        if node is not long.known(item) and node.op != "placeholder":
            node.meta["val"] = values.copy(item.meta["val"], int(number or 0))
    if any(blocks.of.get(item, KEPT - 1) < KEPT - 1 for item in returned if isinstance(item, Node)):
        raise NotEqual
    made = [long.known(item) if isinstance(item, Node) else item for item in returned]
    return long.finished([*made, *nodes]), order, [node.meta["val"] for node in nodes]


def _backward(short: _Short, saved: Saved, values: Sequence[Any]) -> GraphModule:
    gm, repeats, forward = short.backward, short.repeats, short.forward
    if gm is None or forward is None:
        raise NotEqual
    outputs = _outputs(forward)[short.returned :]
    given = dict(zip(outputs, _arguments(gm), strict=False))
    tangents = _arguments(gm)[len(outputs) :]
    if len(given) != len(outputs) or not all("tangents" in str(node.target) for node in tangents):
        raise NotEqual
    counts = [0] * KEPT
    owned: dict[Node, tuple[int, int]] = {}
    kept = {at: number for number, at in enumerate(repeats.kept)}
    for item, number in saved:
        if number in kept:
            owned[given[item]] = kept[number], counts[kept[number]]
            counts[kept[number]] += 1
    blocks = blocks_of(gm, owned, backward=True)
    long = Long(blocks, repeats.count, repeats.modules)
    for (item, number), value in zip(saved, values, strict=True):
        node = given[item]
        if number is None or number in kept:
            inner = number is not None and kept[number] in INNER
            long.argument(str(node.target), value, node, (number or 0, blocks.number[node]) if inner else None)
        else:
            meta = long.moved(node, number)
            long.argument(f"{node.target}_{number}", value, None, (number, blocks.number[node]), meta)
    for node in tangents:
        long.argument(str(node.target), node.meta["val"], node, None)
    long.fill()
    return long.finished(_gradients(short, blocks, long, _outputs(gm)))


def _gradients(short: _Short, blocks: Blocks, long: Long, outputs: Sequence[Any]) -> list[Any]:
    """Returns the gradient of each argument of the whole graph."""
    if len(outputs) != len(short.positions):
        raise NotEqual
    of_short = dict(zip(short.positions, outputs, strict=True))
    inner: dict[int, dict[int, Any]] = {}
    kept = short.repeats.kept
    for position, output in of_short.items():
        place = short.places[position]
        if place is not None:
            inner.setdefault(kept.index(place[0]), {})[place[1]] = output
    found: list[Any] = []
    for position, place in enumerate(short.places):
        block = kept.index(place[0]) if place is not None and place[0] in kept else None
        if place is not None and (block is None or block in INNER):
            found.append(_between(blocks, long, [inner[each][place[1]] for each in INNER], place[0]))
        else:
            output = of_short[position]
            found.append(long.known(output) if isinstance(output, Node) else output)
    return found


def _between(blocks: Blocks, long: Long, outputs: Sequence[Any], number: int) -> Node | None:
    """Returns the output of block `number` that is as `outputs` are of the second and the third block.

    It may be a value of a block beside it: the last block whose values it is made of.
    """
    if outputs[0] is None and outputs[1] is None:
        return None
    if not all(isinstance(output, Node) for output in outputs):
        raise NotEqual
    own = [blocks.of.get(output, -1) for output in outputs]
    if own[0] < 0 or own[1] != own[0] + 1:
        raise NotEqual
    if own[0] == 1 and blocks.number[outputs[0]] != blocks.number[outputs[1]]:
        raise NotEqual
    for output, block, at in zip(outputs, own, (1, long.count - LAST), strict=True):
        if number == at and block not in INNER:
            return long.known(output)  # A value of a block that is not copied.
    which = 0 if own[0] > 0 else 1
    return long.stands_for(outputs[which], number + own[which] - which - 1)
