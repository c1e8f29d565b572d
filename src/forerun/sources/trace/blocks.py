"""Cuts the nodes of one role into blocks, and stores equal blocks once.

A block ends where the phase or the unit of the compute stream's modules changes. A unit is a layer of a repeated stack
(a module path up to its first number), or any other child of the model; nodes outside both belong to the block around
them. A wait for a node of an earlier block becomes an event slot, one for each kind of node, so that layers that do the
same get equal blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from forerun.common.errors import ForerunError
from forerun.core.program.types import I8, I16, I32, I64, Block, Phase, Stream

_MOST_SLOTS = 1 << 15


@dataclass(frozen=True, slots=True)
class Module:
    """A module path: up to its first number, the number, the rest."""

    unit: str
    number: int
    """-1 if the path has none."""
    rest: str

    @staticmethod
    def of(path: str) -> Module:
        """Splits `path`."""
        words = path.split(".")
        for at, word in enumerate(words):
            if word.isdigit():
                return Module(".".join(words[:at]), int(word), ".".join(words[at + 1 :]))
        return Module(path, -1, "")

    def relative(self, layer: int) -> str:
        """Returns the path as seen from a block of `layer`, whose own number is a star."""
        if self.number < 0:
            return self.unit
        distance = self.number - layer
        number = str(self.number) if layer < 0 else "*" if not distance else f"*{distance:+d}"
        return ".".join(part for part in (self.unit, number, self.rest) if part)


@dataclass(frozen=True, slots=True)
class Nodes:
    """One role, ready to be cut into blocks. Columns as in Block for all its nodes; `pred` are nodes on other
    streams."""

    op: I32
    stream: I8
    phase: I8
    module: I32
    """Index into `modules`."""
    pred_ptr: I64
    pred: I32
    channel: I16
    sync: I8
    tensor_bytes: I64
    tensor_category: I8
    tensor_alloc: I32
    tensor_free: I32
    modules: tuple[Module, ...]

    def __len__(self) -> int:
        return len(self.op)


@dataclass(frozen=True, slots=True)
class _Steps:
    """The blocks that the nodes are cut into, in order."""

    ptr: I64
    """(blocks + 1,)"""
    of_node: I64
    names: list[str]
    layer: I32


class Blocks:
    """All distinct blocks of a Program and the modules that they name."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._known: dict[tuple[str, bytes, bytes, bytes], int] = {}
        self._modules: dict[str, int] = {}

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self._modules) or ("",)

    def add(self, nodes: Nodes, cuts: Iterable[int] = ()) -> tuple[I32, I32]:
        """Cuts `nodes` into blocks, also before the nodes `cuts`, and returns block and layer of each in order.

        Raises:
            ForerunError: more nodes are waited for at a time than there are event slots.
        """
        steps = _cut(nodes, cuts)
        module = self._relative_modules(nodes, steps)
        local, record = _waits(nodes, steps, module)
        counts = np.diff(nodes.pred_ptr)
        columns = (nodes.op, nodes.stream, nodes.phase, module, record, nodes.channel, nodes.sync, counts)
        table = np.stack([column.astype(np.int64) for column in columns], axis=1)
        tensors, tensor_ptr = _tensors(nodes, steps)
        ptr, pred_ptr = steps.ptr.tolist(), nodes.pred_ptr.tolist()
        block = np.empty(len(ptr) - 1, np.int32)
        for step, (a, b) in enumerate(pairwise(ptr)):
            pred = local[pred_ptr[a] : pred_ptr[b]]
            tensor = tensors[tensor_ptr[step] : tensor_ptr[step + 1]]
            key = (steps.names[step], table[a:b].tobytes(), pred.tobytes(), tensor.tobytes())
            if key not in self._known:
                self._known[key] = len(self.blocks)
                self.blocks.append(_block(steps.names[step], table[a:b], pred, tensor))
            block[step] = self._known[key]
        return block, steps.layer

    def _relative_modules(self, nodes: Nodes, steps: _Steps) -> I32:
        """Returns the module of every node, relative to its block's layer."""
        layer = steps.layer[steps.of_node].astype(np.int64)
        key = nodes.module.astype(np.int64) * (int(layer.max()) + 2) + layer + 1
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        texts = [nodes.modules[nodes.module[i]].relative(int(layer[i])) for i in first.tolist()]
        numbers = [self._modules.setdefault(text, len(self._modules)) for text in texts]
        of_node: I32 = np.array(numbers, np.int32)[inverse.reshape(-1)]
        return of_node


def _block(name: str, table: I64, pred: I32, tensors: I64) -> Block:
    pointer = np.zeros(len(table) + 1, np.int32)
    np.cumsum(table[:, 7], out=pointer[1:])
    return Block(
        name=name,
        op=table[:, 0].astype(np.int32),
        stream=table[:, 1].astype(np.int8),
        phase=table[:, 2].astype(np.int8),
        module=table[:, 3].astype(np.int32),
        pred_ptr=pointer,
        pred=pred.copy(),
        record=table[:, 4].astype(np.int16),
        channel=table[:, 5].astype(np.int16),
        sync=table[:, 6].astype(np.int8),
        tensor_bytes=tensors[:, 0].copy(),
        tensor_category=tensors[:, 1].astype(np.int8),
        tensor_alloc=tensors[:, 2].astype(np.int32),
        tensor_free=tensors[:, 3].astype(np.int32),
    )


# -- steps ---------------------------------------------------------------------------------------------------------


def unit_changes(phase: I8, stream: I8, module: I32, modules: Sequence[Module]) -> tuple[I64, list[str], I32]:
    """Returns first node, name and layer of every block: a block begins where compute nodes go to another phase or
    unit."""
    # Recomputation is part of the backward pass around it.
    of_phase = np.where(phase == Phase.RECOMPUTE, Phase.BACKWARD, phase).astype(np.int64)
    units: dict[tuple[str, int], int] = {("", -1): 0}
    unit_of = np.array([units.setdefault(_unit(one), len(units)) for one in modules], np.int64)
    unit = unit_of[module]
    counted = np.flatnonzero((stream == Stream.COMPUTE) & (unit > 0))
    turn = np.flatnonzero(np.diff(of_phase)) + 1
    begins = np.zeros(len(phase), np.bool_)
    begins[0] = True
    begins[turn] = True
    phase_number = np.cumsum(begins)
    here, before = counted[1:], counted[:-1]
    changes = here[(unit[here] != unit[before]) & (phase_number[here] == phase_number[before])]
    begins[changes] = True
    starts = np.flatnonzero(begins)
    # The unit of a block is that of its first compute node that has one.
    owner = np.zeros(len(starts), np.int64)
    step = np.cumsum(begins)[counted] - 1
    owner[step[::-1]] = unit[counted][::-1]
    told = list(units)
    names = []
    for start, number in zip(starts.tolist(), owner.tolist(), strict=True):
        name, _ = told[number]
        names.append(f"{Phase(int(of_phase[start])).name.lower()} {name}".rstrip())
    return starts, names, np.array([told[number][1] for number in owner.tolist()], np.int32)


def _unit(module: Module) -> tuple[str, int]:
    """Returns the unit of a module: its repeated layer, or the child of the model that it belongs to."""
    return (module.unit, module.number) if module.number >= 0 else (module.unit.partition(".")[0], -1)


def _cut(nodes: Nodes, cuts: Iterable[int]) -> _Steps:
    starts, names, layer = unit_changes(nodes.phase, nodes.stream, nodes.module, nodes.modules)
    all_starts = np.union1d(starts, np.array(sorted(cuts), np.int64))
    of_start = np.searchsorted(starts, all_starts, side="right") - 1
    ptr = np.append(all_starts, len(nodes)).astype(np.int64)
    of_node = np.repeat(np.arange(len(all_starts)), np.diff(ptr))
    return _Steps(ptr, of_node, [names[k] for k in of_start.tolist()], layer[of_start])


# -- waits and tensors ---------------------------------------------------------------------------------------------


def _waits(nodes: Nodes, steps: _Steps, module: I32) -> tuple[I32, I16]:
    """Returns predecessors as Block stores them, and the slot that each node records."""
    waiter = np.repeat(np.arange(len(nodes)), np.diff(nodes.pred_ptr))
    far = steps.of_node[waiter] != steps.of_node[nodes.pred]
    local = nodes.pred - steps.ptr[steps.of_node[nodes.pred]]
    last = np.full(len(nodes), -1, np.int64)
    np.maximum.at(last, nodes.pred[far], waiter[far])
    awaited = np.flatnonzero(last >= 0)
    columns = np.stack([nodes.stream[awaited], nodes.op[awaited], module[awaited]]).astype(np.int64)
    _, kinds = np.unique(columns, axis=1, return_inverse=True)
    slots = _slots(awaited.tolist(), last[awaited].tolist(), kinds.reshape(-1).tolist())
    if max(slots, default=0) >= _MOST_SLOTS:
        slots = _slots(awaited.tolist(), last[awaited].tolist(), [0] * len(awaited))
    if max(slots, default=0) >= _MOST_SLOTS:
        raise ForerunError(f"trace: more than {_MOST_SLOTS} events are pending at the same time; trace fewer layers")
    record = np.full(len(nodes), -1, np.int16)
    record[awaited] = slots
    local[far] = -1 - record[nodes.pred[far]].astype(np.int64)
    return local.astype(np.int32), record


def _slots(nodes: list[int], last: list[int], kinds: list[int]) -> list[int]:
    """Returns the slot of each of the `nodes` (rising), which is in use up to the node `last`; each kind has slots of
    its own."""
    of_kind: dict[int, list[list[int]]] = {}
    n_slots = 0
    out = []
    for node, end, kind in zip(nodes, last, kinds, strict=True):
        mine = of_kind.setdefault(kind, [])
        free = next((entry for entry in mine if entry[1] <= node), None)
        if free is None:
            free = [n_slots, end]
            n_slots += 1
            mine.append(free)
        free[1] = end
        out.append(free[0])
    return out


def _tensors(nodes: Nodes, steps: _Steps) -> tuple[I64, I64]:
    """Returns rows (bytes, category, alloc, free) in order of blocks, (entries, 4), and where each block's begin.

    A tensor that outlives its block has an entry where it is allocated and one where it is freed.
    """
    alloc, free = nodes.tensor_alloc.astype(np.int64), nodes.tensor_free.astype(np.int64)
    step_a = np.where(alloc >= 0, steps.of_node[alloc], -1)
    step_f = np.where(free >= 0, steps.of_node[free], -1)
    local_a, local_f = alloc - steps.ptr[step_a], free - steps.ptr[step_f]  # where there is a step
    within = (step_a == step_f) & (step_a >= 0)
    opens, closes = (step_a >= 0) & ~within, (step_f >= 0) & ~within
    none = np.full(len(alloc), -1, np.int64)
    parts = [
        (
            step_a[mask] if mask is not closes else step_f[mask],
            nodes.tensor_bytes[mask],
            nodes.tensor_category[mask],
            a[mask],
            f[mask],
        )
        for mask, a, f in ((within, local_a, local_f), (opens, local_a, none), (closes, none, local_f))
    ]
    step, size, category, a, f = (np.concatenate(column).astype(np.int64) for column in zip(*parts, strict=True))
    order = np.lexsort((size, category, f, a, step))
    table = np.stack([size, category, a, f], axis=1)[order]
    return table, np.searchsorted(step[order], np.arange(len(steps.ptr)))
