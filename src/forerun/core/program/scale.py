"""Scales a Program to another number of ranks by changing its data parallelism only.

A rank is `a + s (i + d b)`: i counts along the data-parallel axis of d ranks, s apart; a and b are its place inside and
outside of the axis. At another size the axis has d' ranks, and everything else stays. A group along the whole axis
grows or shrinks with it, as does a data-parallel group of evenly spaced ranks of the axis (data parallelism of
experts). A group at one place of the axis, or along a part of it (expert parallelism), stays as it is.

Where the axis shards state (FSDP), a rank's share scales by d / d': resident parameters, gradients and optimizer state,
gradients that a step makes, the optimizer's kernels and their temporaries. The buffers of collectives stay, because
they hold whole tensors; so do unsharded gradients that wait for a reduce-scatter. Kernels beside the compute stream
that read or write only a rank's share of such a buffer (copies into a gather, out of a scatter) scale too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd

import numpy as np
import numpy.typing as npt

from forerun.common.errors import ForerunError
from forerun.core.program.layout import laid_out
from forerun.core.program.origin import Origin
from forerun.core.program.types import (
    Block,
    Category,
    Collective,
    Mask,
    OpTable,
    Phase,
    Program,
    RankClass,
    Stream,
    joined_ops,
)

_STATE = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER)
_ROUNDING = 1e-3
"""tolerance between two sizes of a share, which frameworks round up to whole elements and align"""


def scaled(program: Program, n_ranks: int, node_size: int) -> Program:
    """Returns `program` on `n_ranks` ranks in nodes of `node_size`.

    The outermost replicated data-parallel axis is scaled if there is one, else the outermost sharded axis: HSDP gets
    more replicas.

    Raises:
        ForerunError: the data-parallel groups are unknown or unevenly spaced, or can't have the size that `n_ranks`
            needs.
    """
    origin = Origin.of(program)
    if n_ranks == origin.world_size:
        return laid_out(program, node_size)
    if n_ranks < 1:
        raise ForerunError(f"gpus must be at least 1, got {n_ranks}")
    if not origin.data_parallel:
        named = origin.data_parallel is not None
        known = "has no data parallelism" if named else "does not name its data-parallel groups"
        raise ForerunError(
            f"the Program of {origin.world_size} ranks {known}, so it can't be scaled to {n_ranks} GPUs; make it at"
            " that size"
        )
    ranks = _members(program, origin)
    axis, is_sharded = _axis(program, origin, ranks, n_ranks)
    moved = [
        _moved(axis, ranks[i], i in origin.data_parallel, group.axis) if group.size > 1 else ranks[i]
        for i, group in enumerate(program.groups)
    ]
    meta: dict[str, object] = {**program.meta, "world_size": n_ranks}
    if origin.group_ranks is not None:
        meta["group_ranks"] = [list(one) for one in moved]
    if origin.roles is not None:
        own = [axis.rank(inside, along % axis.to, outer) for inside, along, outer in map(axis.place, origin.roles)]
        meta["roles"] = {"ranks": own, "world_size": n_ranks}
    for key, amount in (("tokens_per_step", origin.tokens_per_step), ("samples_per_step", origin.samples_per_step)):
        if amount is not None:
            meta[key] = max(1, round(amount * axis.to / axis.size))
    out = replace(
        program,
        groups=tuple(
            replace(group, size=len(moved[i]), inner=_step(moved[i])) if group.size > 1 else group
            for i, group in enumerate(program.groups)
        ),
        rank_classes=_class_sizes(program.rank_classes, origin.world_size, n_ranks),
        meta=meta,
    )
    if is_sharded:
        out = _with_shares(out, origin, _shard_copies(program, origin), axis.size / axis.to)
    return laid_out(out, node_size)


# -- ranks -------------------------------------------------------------------------------------------------------------

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Axis:
    """The data-parallel axis: `size` ranks, `inner` ranks apart, that become `to` ranks."""

    inner: int
    size: int
    to: int

    def place(self, rank: int) -> tuple[int, int, int]:
        """Returns the place of `rank` inside, along and outside the axis."""
        outer, rest = divmod(rank, self.inner * self.size)
        along, inside = divmod(rest, self.inner)
        return inside, along, outer

    def rank(self, inside: int, along: int, outer: int) -> int:
        return inside + self.inner * (along + self.to * outer)


def _members(program: Program, origin: Origin) -> list[Ranks]:
    if origin.group_ranks is not None:
        return [
            ranks or tuple(range(0, group.inner * group.size, group.inner))
            for ranks, group in zip(origin.group_ranks, program.groups, strict=True)
        ]
    return [tuple(range(0, group.inner * group.size, group.inner)) for group in program.groups]


def _spacing(ranks: Ranks) -> int | None:
    """Returns the distance between ranks that are evenly spaced; None for other ranks and for one alone."""
    steps = {b - a for a, b in pairwise(ranks)}
    return steps.pop() if len(steps) == 1 else None


def _step(ranks: Ranks) -> int:
    """Returns the greatest common divisor of the distances between neighbours of a group."""
    return gcd(*(b - a for a, b in pairwise(ranks))) or 1


def _axis(program: Program, origin: Origin, ranks: Sequence[Ranks], n_ranks: int) -> tuple[_Axis, bool]:
    """Finds the axis that changes, and whether it shards state."""
    assert origin.data_parallel is not None
    even = [i for i in origin.data_parallel if _spacing(ranks[i]) is not None]
    shards = [set(ranks[i]) for i in origin.sharded if len(ranks[i]) > 1]
    copies = [i for i in even if all(len(shard & set(ranks[i])) <= 1 for shard in shards)]
    candidates = copies or [i for i in even if i in origin.sharded]
    if not candidates:
        names = ", ".join(program.groups[i].axis for i in origin.data_parallel)
        raise ForerunError(
            f"data-parallel groups ({names}) have one rank, or uneven ranks, so the Program can't be scaled to"
            f" {n_ranks} GPUs; make it at that size"
        )
    chosen = max(candidates, key=lambda i: ((_spacing(ranks[i]) or 0) * len(ranks[i]), len(ranks[i])))
    group, size = program.groups[chosen], len(ranks[chosen])
    if size * n_ranks % origin.world_size:
        fixed = origin.world_size // size
        raise ForerunError(
            f"{n_ranks} GPUs are not a multiple of {fixed}: only data parallelism ({group.axis}, {size} of"
            f" {origin.world_size} ranks) can change without tracing again"
        )
    return _Axis(_step(ranks[chosen]), size, size * n_ranks // origin.world_size), chosen not in copies


def _moved(axis: _Axis, ranks: Ranks, is_data_parallel: bool, name: str) -> Ranks:
    """Returns the ranks that a group has once the axis has changed."""
    along: dict[tuple[int, int], list[int]] = {}
    for rank in ranks:
        inside, i, outer = axis.place(rank)
        along.setdefault((inside, outer), []).append(i)
    out = []
    for (inside, outer), places in along.items():
        for i in _places(axis, sorted(places), is_data_parallel, name):
            out.append(axis.rank(inside, i, outer))
    return tuple(sorted(out))


def _places(axis: _Axis, places: list[int], is_data_parallel: bool, name: str) -> Sequence[int]:
    """Returns the places along the changed axis of the members at `places` of the present axis."""
    if len(places) == axis.size:
        return range(axis.to)
    if len(places) == 1:
        return [places[0] % axis.to]
    step = _spacing(tuple(places))
    if is_data_parallel and step is not None and step * len(places) == axis.size:
        if axis.to % step == 0:
            return range(places[0] % step, axis.to, step)
        raise ForerunError(f"group {name}: every {step}th of {axis.to} data-parallel ranks is not an even split")
    span = places[-1] - places[0] + 1
    if axis.to % span:
        raise ForerunError(f"group {name} of {span} neighbours does not divide {axis.to} data-parallel ranks")
    return [i - places[0] for i in places]


def _class_sizes(classes: tuple[RankClass, ...], before: int, now: int) -> tuple[RankClass, ...]:
    """Gives each class its share of `now` ranks, at least one."""
    sizes = [max(1, round(cls.n_ranks * now / before)) for cls in classes]
    largest = max(range(len(sizes)), key=lambda i: sizes[i])
    sizes[largest] = max(1, sizes[largest] + now - sum(sizes))
    return tuple(replace(cls, n_ranks=size) for cls, size in zip(classes, sizes, strict=True))


# -- shares of sharded state -------------------------------------------------------------------------------------------


def _with_shares(program: Program, origin: Origin, copies: Mask, share: float) -> Program:
    """Returns `program` with `share` times the sharded state on each rank; `copies` (n_ops,) move such shares."""
    mine = [_works_on_share(block, program.ops, copies) for block in program.blocks]
    ops, twin = _with_twins(program, mine, share)
    whole = _unreduced(program, origin)
    blocks = tuple(_block(block, nodes, twin, whole, share) for block, nodes in zip(program.blocks, mine, strict=True))
    classes = tuple(
        replace(cls, resident_bytes=_times(cls.resident_bytes, _of_state(np.arange(len(cls.resident_bytes))), share))
        for cls in program.rank_classes
    )
    compiled = {*origin.compiled_ops, *(twin[i] for i in origin.compiled_ops if i in twin)}
    meta = {**program.meta, "compiled_ops": sorted(compiled)} if compiled else program.meta
    return replace(program, ops=ops, blocks=blocks, rank_classes=classes, meta=meta)


def _shard_copies(program: Program, origin: Origin) -> Mask:
    """Finds the ops that move only one rank's share of a gathered or scattered buffer, (n_ops,)."""
    ops = program.ops
    over = np.isin(ops.group, origin.sharded) & np.isin(
        ops.collective, [int(Collective.ALL_GATHER), int(Collective.REDUCE_SCATTER)]
    )
    ranks = np.array([program.groups[group].size for group in ops.group[over]], np.float64)
    shares = np.unique(ops.bytes_comm[over] / ranks)
    moved = np.stack([ops.bytes_read, ops.bytes_written])
    near = np.zeros(len(ops), np.bool_)
    for size in shares[shares > 0]:
        near |= (np.abs(moved - size) <= _ROUNDING * size).any(axis=0)
        host = np.minimum(np.abs(ops.bytes_comm - size), np.abs(ops.bytes_comm - 2 * size)) <= _ROUNDING * size
        near |= host & ops.is_host_copy
    out: Mask = near & _scales(ops)
    return out


def _scales(ops: OpTable) -> Mask:
    """Finds the ops whose bytes moved scale with a share, (n_ops,)."""
    return ops.is_memory_bound | ops.is_host_copy


def _works_on_share(block: Block, ops: OpTable, copies: Mask) -> Mask:
    """Finds the nodes of `block` that work on a rank's share of the state, (nodes,)."""
    update = (block.phase == Phase.OPTIMIZER) & _scales(ops)[block.op]
    out: Mask = update | (copies[block.op] & (block.stream != Stream.COMPUTE))
    return out


def _with_twins(program: Program, mine: Sequence[Mask], share: float) -> tuple[OpTable, dict[int, int]]:
    """Adds scaled rows for the ops of nodes in `mine`, a mask for each block. Returns the table, and old -> new row."""
    ops = program.ops
    used = [np.unique(block.op[nodes]) for block, nodes in zip(program.blocks, mine, strict=True)]
    rows = np.unique(np.concatenate([*used, np.zeros(0, np.int32)])).astype(np.int64)
    twin = {int(row): len(ops) + i for i, row in enumerate(rows)}
    twins = ops.take(rows)
    smaller = replace(
        twins,
        flops=twins.flops * share,
        bytes_read=twins.bytes_read * share,
        bytes_written=twins.bytes_written * share,
        bytes_comm=twins.bytes_comm * share,
    )
    return joined_ops([ops, smaller]), twin


def _unreduced(program: Program, origin: Origin) -> list[int]:
    """Finds the sizes, in bytes, of unsharded gradients that a block with a reduce-scatter frees."""
    ops, sizes = program.ops, set[int]()
    scatters = (ops.collective == Collective.REDUCE_SCATTER) & np.isin(ops.group, origin.sharded)
    for block in program.blocks:
        if scatters[block.op].any():
            brought = (block.tensor_alloc < 0) & (block.tensor_free >= 0) & (block.tensor_category == Category.GRADIENT)
            sizes |= set(block.tensor_bytes[brought].tolist())
    return sorted(sizes)


def _block(block: Block, mine: Mask, twin: dict[int, int], whole: list[int], share: float) -> Block:
    if mine.any():
        op = block.op.copy()
        op[mine] = [twin[int(i)] for i in block.op[mine]]
    else:
        op = block.op
    in_step = (block.tensor_alloc >= 0) & (block.tensor_free >= 0)
    inside = np.zeros(len(block.tensor_bytes), np.bool_)
    inside[in_step] = block.phase[np.minimum(block.tensor_alloc[in_step], len(block) - 1)] == Phase.OPTIMIZER
    state = _of_state(block.tensor_category) & ~np.isin(block.tensor_bytes, whole)
    work = inside & (block.tensor_category == Category.TEMPORARY)
    return replace(block, op=op, tensor_bytes=_times(block.tensor_bytes, state | work, share))


def _of_state(category: npt.NDArray[np.integer]) -> Mask:
    return np.isin(category, [int(one) for one in _STATE])


def _times(size_bytes: npt.NDArray[np.int64], where: npt.NDArray[np.bool_], share: float) -> npt.NDArray[np.int64]:
    return np.where(where, np.ceil(size_bytes * share).astype(np.int64), size_bytes)
