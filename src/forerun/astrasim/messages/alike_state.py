"""The state of ranks that are simulated by classes (`alike`): the classes, the rings of groups, and types of groups."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.astrasim.messages.calendar import Records
from forerun.astrasim.messages.ready import N_SLOTS
from forerun.astrasim.messages.slots import Nodes
from forerun.common.jit import inlined, kernel
from forerun.core.program.types import I32, I64

Mask = npt.NDArray[np.bool_]

NEVER = np.int64(1 << 62)

ALIKE_CALL = np.dtype(
    [
        ("axis", np.int64),
        ("delays", np.int64),  # row of `Rings.delay_ns`
        ("n_messages", np.int64),  # this and the following as in `closed_form.RING_CALL`
        ("packets_ns", np.int64),
        ("rounds", np.int64),
        ("tail_ns", np.int64),
    ]
)
_CLASS = np.dtype(
    [
        ("n_ranks", np.int64),
        ("n_done", np.int64),  # nodes
        ("n_running", np.int64),
        ("n_issued", np.int64),
        ("finish_ns", np.int64),
        ("call", np.int64),  # the ring under way; -1 for none
        ("begin_ns", np.int64),
        ("end_ns", np.int64),  # the first known end of the ring on any of its ranks
        ("n_known", np.int64),  # ranks whose end is known
        ("is_mixed", np.int64),  # whether known ends differ
    ]
)


class Rings(NamedTuple):
    """The rings of all axes. Nothing here changes during a run."""

    call: Records
    """(calls,)"""
    delay_ns: I64
    """(rows, ranks) how long a message of each rank to the next one of its group is under way"""
    member: I64
    """(axes, ranks) the groups of each axis one after the other, each in the order of its ring"""
    size: I64
    """(axes,) ranks of each group"""
    place: I64
    """(axes, ranks) where each rank stands in `member`"""


class Types(NamedTuple):
    """The types of groups of each axis."""

    of_group: I64
    """(axes, groups)"""
    number: I64
    """(axes,) how many types there are"""
    example: I64
    """(axes, types) a group of each type"""
    parent: I64
    """(axes, types) the type that a type was a part of"""
    n_groups: I64
    """(axes, types)"""
    n_fired: I64
    """(axes, types) rings that all members have begun so far"""
    n_missing: I64
    """(axes, types) members that have yet to begin the next one"""
    end_ns: I64
    """(axes, ranks) when the members of the last one end, type by type"""
    share: I64
    """(axes, classes) the first of the list of a class's shares in types, -1 for none"""
    next_share: I64
    """(axes, shares)"""
    share_type: I64
    """(axes, shares)"""
    share_members: I64
    """(axes, shares) how many members of the type are of the class"""


class Classes(NamedTuple):
    """The state of the classes of ranks."""

    of_rank: I64
    one: Records
    """(classes,)"""
    next_ns: I64
    """(classes,) the next event of each; `NEVER` for none"""
    known: I64
    """(1,) how many there are"""
    pred_left: I32
    """(classes, nodes)"""
    ready: I32
    """(classes, slots, nodes) heaps of nodes that are ready"""
    n_ready: I64
    running: I64
    """(classes, slots) the node in each slot, -1 for none"""
    until_ns: I64
    """(classes, slots) when it ends"""
    number: I64
    """(classes, slots) how many nodes were issued before it"""
    n_begun: I64
    """(classes, axes) rings begun so far"""
    start_ns: I64
    """(classes, nodes)"""
    end_ns: I64
    done_order: I64


class Scratch(NamedTuple):
    fresh: I64
    """(nodes,)"""
    ring: I64
    """(4, ranks)"""
    is_tied: Mask
    """(nodes,) nodes that end with another one of their rank, where either may be the first"""


def first_class(nodes: Nodes, n_ranks: int, n_axes: int, capacity: int) -> Classes:
    """Returns the state before a run, in which all ranks are one class."""
    n = len(nodes.action)
    state = Classes(
        of_rank=np.zeros(n_ranks, np.int64),
        one=np.zeros(capacity, _CLASS),
        next_ns=np.full(capacity, NEVER),
        known=np.ones(1, np.int64),
        pred_left=np.empty((capacity, n), np.int32),
        ready=np.empty((capacity, N_SLOTS, n), np.int32),
        n_ready=np.zeros((capacity, N_SLOTS), np.int64),
        running=np.full((capacity, N_SLOTS), -1, np.int64),
        until_ns=np.zeros((capacity, N_SLOTS), np.int64),
        number=np.zeros((capacity, N_SLOTS), np.int64),
        n_begun=np.zeros((capacity, n_axes), np.int64),
        start_ns=np.empty((capacity, n), np.int64),  # rows of classes to come are copies of those of other ones
        end_ns=np.empty((capacity, n), np.int64),
        done_order=np.empty((capacity, n), np.int64),
    )
    state.pred_left[0] = nodes.n_pred
    state.start_ns[0] = state.end_ns[0] = -1
    state.done_order[0] = 0
    state.one[0] = (n_ranks, 0, 0, 0, -1, -1, 0, NEVER, 0, 0)
    return state


def first_types(rings: Rings, kinds: I64, capacity: int) -> Types:
    """Returns the types of groups before a run: those of equal number in `kinds`, (axes, groups), are of one type."""
    n_axes, n_ranks = rings.member.shape
    n_groups = kinds.shape[1]
    table = Types(
        of_group=np.zeros((n_axes, n_groups), np.int64),
        number=np.zeros(n_axes, np.int64),
        example=np.zeros((n_axes, n_groups), np.int64),
        parent=np.zeros((n_axes, n_groups), np.int64),
        n_groups=np.zeros((n_axes, n_groups), np.int64),
        n_fired=np.zeros((n_axes, n_groups), np.int64),
        n_missing=np.repeat(rings.size[:, None], n_groups, axis=1),
        end_ns=np.zeros((n_axes, n_ranks), np.int64),
        share=np.full((n_axes, capacity), -1),
        next_share=np.zeros((n_axes, n_ranks), np.int64),
        share_type=np.zeros((n_axes, n_ranks), np.int64),
        share_members=np.zeros((n_axes, n_ranks), np.int64),
    )
    for axis in range(n_axes):
        of_group = kinds[axis, : n_ranks // rings.size[axis]]
        _, example, kind, counts = np.unique(of_group, return_index=True, return_inverse=True, return_counts=True)
        table.of_group[axis, : len(of_group)] = kind.reshape(-1)
        table.number[axis] = len(example)
        table.example[axis, : len(example)] = example
        table.n_groups[axis, : len(example)] = counts
        table.share[axis, 0], table.next_share[axis, : len(example)] = 0, [*range(1, len(example)), -1]
        table.share_type[axis, : len(example)] = np.arange(len(example))
        table.share_members[axis, : len(example)] = rings.size[axis]
    return table


@kernel
def copy_class(state: Classes, c: int, new: int) -> None:
    """Gives row `new` the state of class `c`."""
    state.one[new] = state.one[c]
    for k in range(N_SLOTS):
        state.n_ready[new, k] = state.n_ready[c, k]
        state.running[new, k] = state.running[c, k]
        state.until_ns[new, k] = state.until_ns[c, k]
        state.number[new, k] = state.number[c, k]
        for i in range(state.n_ready[c, k]):
            state.ready[new, k, i] = state.ready[c, k, i]
    for k in range(state.n_begun.shape[1]):
        state.n_begun[new, k] = state.n_begun[c, k]
    for k in range(state.pred_left.shape[1]):
        state.pred_left[new, k] = state.pred_left[c, k]
        state.start_ns[new, k], state.end_ns[new, k] = state.start_ns[c, k], state.end_ns[c, k]
        state.done_order[new, k] = state.done_order[c, k]


@inlined
def refine(rings: Rings, types: Types, state: Classes, axis: int) -> None:
    """Gives groups whose classes now differ from the example of their type a type of their own."""
    size, known = rings.size[axis], types.number[axis]
    for group in range(len(state.of_rank) // size):
        old = types.of_group[axis, group]
        if _is_like(rings, state, axis, group, types.example[axis, old]):
            continue
        t = known
        while t < types.number[axis]:
            if types.parent[axis, t] == old and _is_like(rings, state, axis, group, types.example[axis, t]):
                break
            t += 1
        if t == types.number[axis]:
            types.number[axis] += 1
            types.example[axis, t] = group
            types.parent[axis, t] = old
            types.n_groups[axis, t] = 0
            types.n_fired[axis, t] = types.n_fired[axis, old]
            types.n_missing[axis, t] = types.n_missing[axis, old]
            for k in range(size):
                types.end_ns[axis, t * size + k] = types.end_ns[axis, old * size + k]
        types.of_group[axis, group] = t
        types.n_groups[axis, t] += 1
        types.n_groups[axis, old] -= 1
    _share_out(rings, types, state, axis)


@inlined
def _share_out(rings: Rings, types: Types, state: Classes, axis: int) -> None:
    """Lists anew how many members of each type each class has."""
    size, known = rings.size[axis], 0
    for c in range(state.known[0]):
        types.share[axis, c] = -1
    for t in range(types.number[axis]):
        first = types.example[axis, t] * size
        for k in range(first, first + size):
            c = state.of_rank[rings.member[axis, k]]
            share = types.share[axis, c]
            if share >= 0 and types.share_type[axis, share] == t:
                types.share_members[axis, share] += 1
                continue
            types.share_type[axis, known], types.share_members[axis, known] = t, 1
            types.next_share[axis, known] = share
            types.share[axis, c] = known
            known += 1


@inlined
def _is_like(rings: Rings, state: Classes, axis: int, group: int, other: int) -> bool:
    """Returns whether two groups have the same classes in the same order."""
    size, answer = rings.size[axis], True
    for k in range(size):
        a, b = rings.member[axis, group * size + k], rings.member[axis, other * size + k]
        if state.of_rank[a] != state.of_rank[b]:
            answer = False
            break
    return answer
