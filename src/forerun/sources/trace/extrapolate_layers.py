"""Extrapolates recordings of few layers to the recording of many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from forerun.common.errors import ForerunError
from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.types import I32, I64, OpRow
from forerun.sources.trace.align import NotPeriodic, align
from forerun.sources.trace.described import Described, Node, Tensors, Waits, absolute_waits
from forerun.sources.trace.recording import Recording

_TOLERANCE = 1e-9
_MOST_LAUNCHES = 32767
"""The op table's column has 16 bits."""


class LayerExtrapolation:
    """Holds the additions of every further layer to the step of one role, computed from its recordings at three evenly
    spaced depths.
    """

    def __init__(self, shallow: Sequence[Described]) -> None:
        """Compares the recordings.

        Raises:
            ForerunError: they don't differ by layers that are all equal.
        """
        self.x, self.y, self.z = shallow
        if any(one.recording.groups != self.z.recording.groups for one in shallow):
            raise self._not_periodic(0, "process groups")
        sequences = [one.nodes for one in shallow]
        tokens = _tokens(sequences, by_distance=True)
        try:
            self.runs = align(*tokens)
        except NotPeriodic as difference:
            # How far back waits reach may depend on the depth: all gathers may be issued before the first is used.
            tokens = _tokens(sequences, by_distance=False)
            try:
                self.runs = align(*tokens)
            except NotPeriodic:
                raise self._not_periodic(difference.node, "what comes next") from None
        self._tokens = tokens[2]
        self.start_bytes = self._start_bytes()
        self._check_layers()
        self._outside = self._outside_changes()
        self._base_ops = self.z.recording.ops.rows()
        self._numbers = self._path_numbers()

    def _not_periodic(self, node: int, what: str) -> ForerunError:
        return ForerunError(
            f"trace: the step of rank {self.z.recording.rank} doesn't grow by the same work with every layer: {what}"
            f" at {self.z.where(node)}; trace the whole model (fold=False)"
        )

    # -- checks and slopes -----------------------------------------------------------------------------------------

    def _start_bytes(self) -> Callable[[int], I64]:
        x, y, z = (one.start_bytes for one in (self.x, self.y, self.z))
        if not np.array_equal(z - y, y - x):
            raise self._not_periodic(0, "bytes that are there before the step")
        return lambda n: x + n * (y - x)

    def _check_layers(self) -> None:
        """Checks that the nodes of added layers are the same in every way."""
        for run in self.runs:
            _, j, k = (start + run.common for start in run.first)
            for at in range(run.added):
                mine = (self.y.nodes[j + at], self.z.nodes[k + at], self.z.nodes[k + run.added + at])
                if len({id(node) for node in mine}) > 1 and len({node.without_distances() for node in mine}) > 1:
                    raise self._not_periodic(k + at, _difference(mine))

    def _outside_changes(self) -> dict[int, Callable[[int], Node]]:
        """Returns for each node outside the layers that depends on the depth, by its number in the third recording, a
        function of the depth."""
        out = {}
        for run in self.runs:
            i, j, k = run.first
            for at in range(run.common):
                three = (self.x.nodes[i + at], self.y.nodes[j + at], self.z.nodes[k + at])
                if three[0] is not three[1] or three[1] is not three[2]:
                    try:
                        out[k + at] = _linear_node(three)
                    except _NotLinear as change:
                        raise self._not_periodic(k + at, change.what) from None
        return out

    def _path_numbers(self) -> tuple[I64, I64, I64]:
        """Returns the numbers in the paths of all nodes of the third recording, (N, most): value, slope in depth, slope
        in layer."""
        most = max(len(path.numbers) for path in self.z.paths)
        value, by_depth, by_layer = (np.zeros((len(self.z.nodes), most), np.int64) for _ in range(3))
        for run in self.runs:
            i, j, k = run.first
            for at in range(run.common + run.added):
                outside = at < run.common
                one = self.z.paths[k + at].numbers
                less = self.y.paths[j + at].numbers
                other = self.x.paths[i + at].numbers if outside else self.z.paths[k + at + run.added].numbers
                width = len(one)
                value[k + at, :width] = one
                by_depth[k + at, :width] = np.subtract(one, less)
                if not outside:
                    by_layer[k + at, :width] = np.subtract(other, one)
                elif np.any(np.subtract(less, other) != np.subtract(one, less)):
                    raise self._not_periodic(k + at, "the module")
        return value, by_depth, by_layer

    # -- the deep recording ----------------------------------------------------------------------------------------

    def recording(self, n: int) -> tuple[Recording, list[range]]:
        """Returns the recording with `n` layers more than the first of the three, and the ranges of its added layers. A
        range goes from the first added node to the one after the last, in steps of one layer.
        """
        node, layer, added = self._expand(n)
        base = self.z.recording
        rows, op = self._ops(node, n)
        modules, module = self._modules(node, layer, n)
        changed = {at: change(n) for at, change in self._outside.items()}
        ptr, wait = self._waits(node, layer, n, changed)
        tensors = self._tensors(node, changed, self.start_bytes(n))
        deep = replace(
            base,
            ops=rows.build(),
            op=op,
            stream=base.stream[node],
            phase=base.phase[node],
            module=module,
            peer=base.peer[node],
            sync=base.sync[node],
            compiled=base.compiled[node],
            line=base.line[node],
            wait_ptr=ptr,
            wait=wait,
            tensor_bytes=tensors[0],
            tensor_category=tensors[1].astype(np.int8),
            tensor_alloc=tensors[2].astype(np.int32),
            tensor_free=tensors[3].astype(np.int32),
            modules=modules,
        )
        return deep, added

    def _expand(self, n: int) -> tuple[I64, I64, list[range]]:
        """Returns for every node the node of the third recording and the number of the added layer (0 outside), and the
        ranges of layers."""
        nodes, layers, added, at = [], [], [], 0
        for run in self.runs:
            start = run.first[2]
            nodes.append(np.arange(start, start + run.common))
            layers.append(np.zeros(run.common, np.int64))
            at += run.common
            if run.added:
                nodes.append(np.tile(np.arange(start + run.common, start + run.common + run.added), n))
                layers.append(np.repeat(np.arange(n), run.added))
                added.append(range(at, at + n * run.added + 1, run.added))
                at += n * run.added
        return np.concatenate(nodes), np.concatenate(layers), added

    def _ops(self, node: I64, n: int) -> tuple[OpTableBuilder, I32]:
        rows = OpTableBuilder()
        number = [rows.add(row) for row in self._base_ops]
        of_node = np.array(number, np.int32)[self.z.recording.op]
        for at, change in self._outside.items():
            of_node[at] = rows.add(change(n).row)
        return rows, of_node[node]

    def _modules(self, node: I64, layer: I64, n: int) -> tuple[tuple[str, ...], I32]:
        value, by_depth, by_layer = self._numbers
        numbers = value[node] + (n - 2) * by_depth[node] + layer[:, None] * by_layer[node]
        texts: dict[str, int] = {}
        text = np.array([texts.setdefault(path.text, len(texts)) for path in self.z.paths], np.int64)[node]
        key = np.column_stack([text, numbers])
        _, first, inverse = np.unique(_row_numbers(key), return_index=True, return_inverse=True)
        modules = [self.z.paths[node[i]].with_numbers(numbers[i].tolist()) for i in first.tolist()]
        return tuple(modules), inverse.reshape(-1).astype(np.int32)

    def _waits(self, node: I64, layer: I64, n: int, changed: dict[int, Node]) -> tuple[I64, I32]:
        stream = self.z.recording.stream[node].astype(np.int64)
        waits = [changed[at].waits if at in changed else one.waits for at, one in enumerate(self.z.nodes)]
        pairs, entry, waiter = _pairs_of_nodes(waits, node)
        by_depth, by_layer = (
            np.array([slope for row in rows for slope in row], np.int64) for rows in self._distance_slopes(waits)
        )
        between = pairs[entry, 1] + (n - 2) * by_depth[entry] + layer[waiter] * by_layer[entry]
        found = absolute_waits(stream, waiter, pairs[entry, 0], between)
        kind = self._tokens[node[np.maximum(found, 0)]]
        # Three depths determine the distances. They are right if all layers then wait for the same kind of node.
        moves = (by_depth[entry] != 0) | (by_layer[entry] != 0)
        first = np.full(len(pairs), -1, np.int64)
        first[entry[::-1]] = kind[::-1]
        wrong = (found < 0) | (between < 0) | (moves & (kind != first[entry]))
        if wrong.any():
            raise self._not_periodic(int(node[waiter[np.argmax(wrong)]]), "what is waited for")
        order = np.lexsort((found, waiter))
        ptr = np.zeros(len(node) + 1, np.int64)
        np.cumsum(np.bincount(waiter, minlength=len(node)), out=ptr[1:])
        return ptr, found[order].astype(np.int32)

    def _distance_slopes(self, waits: Sequence[Waits]) -> tuple[list[list[int]], list[list[int]]]:
        """Returns the growth of the distances of `waits` inside added layers with the depth, and with the layer's
        number.
        """
        by_depth, by_layer = ([[0] * len(row) for row in waits] for _ in range(2))
        for run in self.runs:
            _, j, k = (start + run.common for start in run.first)
            for at in range(k, k + run.added):
                here, less, following = (
                    [between for _, between in node.waits]
                    for node in (self.z.nodes[at], self.y.nodes[j + at - k], self.z.nodes[at + run.added])
                )
                by_depth[at] = [a - b for a, b in zip(here, less, strict=True)]
                by_layer[at] = [b - a for a, b in zip(here, following, strict=True)]
        return by_depth, by_layer

    def _tensors(self, node: I64, changed: dict[int, Node], start: I64) -> I64:
        """Returns rows (bytes, category, alloc, free) of tensors that are allocated and freed as in the recordings."""
        now = [changed.get(at, one) for at, one in enumerate(self.z.nodes)]
        made, entry, at = _pairs_of_nodes([one.allocates for one in now], node)
        gone, gone_entry, gone_at = _pairs_of_nodes([one.frees for one in now], node)
        pairs = np.concatenate([made[entry], gone[gone_entry]])
        time = np.concatenate([2 * at, 2 * gone_at + 1])
        tensors = _allocations_with_frees(pairs, time)
        early = tensors[2] < 0
        left = start.copy()
        np.subtract.at(left, tensors[1][early], tensors[0][early])
        category = np.flatnonzero(left)
        stays = np.full(len(category), -1, np.int64)
        return np.concatenate([tensors, np.stack([left[category], category, stays, stays])], axis=1)


# -- figures that grow with the depth --------------------------------------------------------------------------------


class _NotLinear(Exception):
    """Raised where something doesn't grow by the same amount with every layer."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def _difference(nodes: Sequence[Node]) -> str:
    """Returns the first difference between nodes that should be equal."""
    told = {"row": "the operation", "place": "the stream, phase or peer", "waits": "what is waited for"}
    for name, text in told.items():
        if len({getattr(node, name) for node in nodes}) > 1:
            return text
    return "the memory"


def _linear_node(three: Sequence[Node]) -> Callable[[int], Node]:
    """Returns the node as a function of the number of layers; at 0, 1 and 2 it is one of the `three`. Raises
    _NotLinear."""
    if len({node.place for node in three}) > 1:
        raise _NotLinear(_difference(three))
    row = _linear_row([node.row for node in three])
    streams = {tuple(stream for stream, _ in node.waits) for node in three}
    if len(streams) > 1:
        raise _NotLinear("what is waited for")
    between = _linear([[n for _, n in node.waits] for node in three], "what is waited for")
    allocates = _linear_tensors([node.allocates for node in three])
    frees = _linear_tensors([node.frees for node in three])
    (of_stream,) = streams
    return lambda n: Node(
        row(n),
        three[0].place,
        tuple((stream, int(k)) for stream, k in zip(of_stream, between(n), strict=True)),
        allocates(n),
        frees(n),
    )


def _linear(three: Sequence[Sequence[float]], what: str) -> Callable[[int], list[float]]:
    """Returns numbers as a function of the number of layers, if they grow evenly. Raises _NotLinear."""
    for x, y, z in zip(*three, strict=True):
        if abs((z - y) - (y - x)) > _TOLERANCE * max(abs(x), abs(z)):
            raise _NotLinear(what)
    return lambda n: [x + n * (y - x) for x, y in zip(three[0], three[1], strict=True)]


def _linear_row(three: Sequence[OpRow]) -> Callable[[int], OpRow]:
    if len({row.without_sizes() for row in three}) > 1:
        raise _NotLinear("the operation")
    what = f"the size of {three[0].name}"
    details = _linear([row.details for row in three], what)
    amounts = _linear([row.amounts() for row in three], what)

    def at(n: int) -> OpRow:
        flops, read, written, moved, launches = amounts(n)
        return three[0]._replace(
            details=tuple(int(size) for size in details(n)),
            flops=flops,
            bytes_read=read,
            bytes_written=written,
            bytes_comm=moved,
            launches=min(int(launches), _MOST_LAUNCHES),
        )

    return at


def _linear_tensors(three: Sequence[Tensors]) -> Callable[[int], Tensors]:
    """Returns tensors as a function of the number of layers: their number grows, or their size. Raises _NotLinear."""
    counts = [Counter(tensors) for tensors in three]
    even = {
        kind for kind in set().union(*counts) if counts[2][kind] - counts[1][kind] == counts[1][kind] - counts[0][kind]
    }
    numbers = {kind: (counts[0][kind], counts[1][kind] - counts[0][kind]) for kind in even}
    # The other tensors have a different size at every depth.
    others = [
        sorted((category, size) for size, category in tensors if (size, category) not in even) for tensors in three
    ]
    categories = {tuple(category for category, _ in tensors) for tensors in others}
    if len(categories) > 1:
        raise _NotLinear("the memory")
    sizes = _linear([[size for _, size in tensors] for tensors in others], "the memory")
    (of_category,) = categories

    def at(n: int) -> Tensors:
        growing = [(int(size), category) for category, size in zip(of_category, sizes(n), strict=True)]
        many = [kind for kind, (first, more) in numbers.items() for _ in range(first + n * more)]
        return tuple(sorted(growing + many))

    return at


def _tokens(sequences: Sequence[Sequence[Node]], by_distance: bool) -> list[I64]:
    """Returns a number for each node; equal nodes have equal numbers, without `by_distance` apart from the distances of
    waits.

    A node that only one sequence has is compared without its sizes, which may depend on the depth.
    """
    names: dict[int, object] = {}
    for nodes in sequences:
        names |= {id(node): node if by_distance else node.without_distances() for node in nodes}
    seen = Counter(name for nodes in sequences for name in {names[id(node)] for node in nodes})
    numbers: dict[object, int] = {}
    of_node = {
        id(node): numbers.setdefault(name if seen[name := names[id(node)]] > 1 else node.loosely(), len(numbers))
        for nodes in sequences
        for node in nodes
    }
    return [np.array([of_node[id(node)] for node in nodes], np.int64) for nodes in sequences]


# -- columns -----------------------------------------------------------------------------------------------------------


def _row_numbers(rows: I64) -> I64:
    """Returns one number for each distinct row."""
    out = np.zeros(len(rows), np.int64)
    for column in rows.T:
        _, dense = np.unique(column, return_inverse=True)
        _, out = np.unique(out * (int(dense.max(initial=0)) + 1) + dense.reshape(-1), return_inverse=True)
        out = out.reshape(-1).astype(np.int64)
    return out


def _pairs_of_nodes(values: Sequence[Sequence[tuple[int, int]]], node: I64) -> tuple[I64, I64, I64]:
    """Returns the pairs of all template nodes, and for the nodes `node` the entries of their pairs and whose they
    are."""
    pairs = np.array([pair for row in values for pair in row], np.int64).reshape(-1, 2)
    counts = np.array([len(row) for row in values], np.int64)
    first = np.cumsum(counts) - counts
    mine = counts[node]
    owner = np.repeat(np.arange(len(node)), mine)
    offset = np.arange(len(owner)) - np.repeat(np.cumsum(mine) - mine, mine)
    return pairs, first[node][owner] + offset, owner


def _allocations_with_frees(pairs: I64, time: I64) -> I64:
    """Returns (4, tensors) from allocations (even times 2 x node) and frees (odd): of equal tensors the last one made
    is freed first.

    Which of equal tensors is freed first makes no difference to the memory in use. A free without an allocation belongs
    to a tensor from before the step.
    """
    kind = _row_numbers(pairs)
    order = np.lexsort((time, kind))
    rise = np.where(time[order] % 2 == 0, 1, -1)
    starts = np.flatnonzero(np.diff(kind[order], prepend=-1))
    level = np.cumsum(rise)
    level -= np.repeat((level - rise)[starts], np.diff(np.append(starts, len(order))))
    level += rise < 0  # Allocation and free of one tensor now have the same level.
    again = np.lexsort((time[order], level, kind[order]))
    order, level = order[again], level[again]
    made = time[order] % 2 == 0
    node = time[order] // 2
    freed = np.append(made[:-1] & ~made[1:] & (np.diff(kind[order]) == 0) & (np.diff(level) == 0), False)
    free = np.where(freed, np.roll(node, -1), -1)
    alone = ~made & ~np.roll(freed, 1)
    sizes = pairs[order]
    here = np.stack([sizes[made, 0], sizes[made, 1], node[made], free[made]])
    early = np.stack([sizes[alone, 0], sizes[alone, 1], np.full(int(alone.sum()), -1), node[alone]])
    return np.concatenate([here, early], axis=1).astype(np.int64)
