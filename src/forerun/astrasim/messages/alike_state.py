"""The state of ranks that are simulated together (`alike`): histories, classes, rings of groups, types of groups."""

from __future__ import annotations

from typing import Any, NamedTuple

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
        ("tail_ns", np.int64),
    ]
)
_HISTORY = np.dtype(
    [
        ("n_ranks", np.int64),
        ("of_class", np.int64),
        ("following", np.int64),  # the next history of the class; -1 for none
        ("now_ns", np.int64),  # when its class last issued nodes, or the end of its next node
        ("begin_ns", np.int64),  # of the ring under way
        ("end_ns", np.int64),  # the first known end of the ring on any of its ranks
        ("n_known", np.int64),  # ranks whose end is known
        ("is_mixed", np.int64),  # whether known ends differ
        ("finish_ns", np.int64),
    ]
)
_CLASS = np.dtype(
    [
        ("history", np.int64),  # the first one
        ("n_done", np.int64),  # nodes
        ("n_running", np.int64),
        ("n_issued", np.int64),
        ("call", np.int64),  # the ring under way; -1 for none
    ]
)

HISTORIES = 0
CLASSES = 1
SPARE = 2
"""rows of histories and classes beyond the known ones, to try what another order changes"""
_FIRST_BYTES = 1 << 26
"""of a column with all nodes of all histories; the operating system gives memory only to rows that are used"""
_FIRST_CLASSES = 8
_MORE_ROOM = 4


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
    """(axes, histories) the first of the list of a history's shares in types, -1 for none"""
    next_share: I64
    """(axes, shares)"""
    share_type: I64
    """(axes, shares)"""
    share_members: I64
    """(axes, shares) how many members of the type have the history"""


class Alike(NamedTuple):
    """The state of histories and their classes."""

    of_rank: I64
    """(ranks,) the history of each rank"""
    known: I64
    """(2,) how many histories and how many classes there are"""
    history: Records
    """(histories,)"""
    until_ns: I64
    """(histories, slots) when the node in each slot ends, `NEVER` for a ring"""
    start_ns: I64
    """(histories, nodes)"""
    end_ns: I64
    one: Records
    """(classes,)"""
    pred_left: I32
    """(classes, nodes)"""
    ready: I32
    """(classes, slots, nodes) heaps of nodes that are ready"""
    n_ready: I64
    running: I64
    """(classes, slots) the node in each slot, -1 for none"""
    number: I64
    """(classes, slots) how many nodes were issued before it"""
    n_begun: I64
    """(classes, axes) rings begun so far"""
    done_order: I64
    """(classes, nodes)"""


class Scratch(NamedTuple):
    fresh: I64
    """(nodes,)"""
    ring: I64
    """(4, ranks)"""
    is_tied: Mask
    """(nodes,) nodes that end with another one of their rank, where either may be the first"""
    timed: I64
    """(slots,) slots of a class that hold a node of known duration"""


_OF_HISTORIES = "history", "until_ns", "start_ns", "end_ns"
_OF_CLASSES = "one", "pred_left", "ready", "n_ready", "running", "number", "n_begun", "done_order"


def first_state(nodes: Nodes, n_ranks: int, n_axes: int) -> Alike:
    """Returns the state before a run, in which all ranks have one history."""
    n, classes = len(nodes.action), min(_FIRST_CLASSES, _most_room(n_ranks))
    room = min(max(_FIRST_CLASSES, _FIRST_BYTES // (8 * max(1, n))), _most_room(n_ranks))
    state = Alike(
        of_rank=np.zeros(n_ranks, np.int64),
        known=np.ones(2, np.int64),
        history=np.zeros(room, _HISTORY),
        until_ns=np.full((room, N_SLOTS), NEVER),
        start_ns=np.empty((room, n), np.int64),  # rows of histories to come are copies of those of other ones
        end_ns=np.empty((room, n), np.int64),
        one=np.zeros(classes, _CLASS),
        pred_left=np.empty((classes, n), np.int32),
        ready=np.empty((classes, N_SLOTS, n), np.int32),
        n_ready=np.zeros((classes, N_SLOTS), np.int64),
        running=np.full((classes, N_SLOTS), -1, np.int64),
        number=np.zeros((classes, N_SLOTS), np.int64),
        n_begun=np.zeros((classes, n_axes), np.int64),
        done_order=np.empty((classes, n), np.int64),
    )
    state.pred_left[0] = nodes.n_pred
    state.start_ns[0] = state.end_ns[0] = -1
    state.done_order[0] = 0
    state.history[0] = (n_ranks, 0, -1, 0, 0, NEVER, 0, 0, -1)
    state.one[0] = (0, 0, 0, 0, -1)
    return state


def grow(state: Alike, types: Types, n_ranks: int) -> tuple[Alike, Types]:
    """Returns the state with room for more histories or classes, at most for those that ranks can have."""
    names = _OF_CLASSES if state.known[CLASSES] + SPARE >= len(state.one) else _OF_HISTORIES
    room = min(_MORE_ROOM * len(getattr(state, names[0])), _most_room(n_ranks))
    state = state._replace(**{name: _longer(getattr(state, name), room) for name in names})
    share = np.full((len(types.share), len(state.history)), -1)
    share[:, : types.share.shape[1]] = types.share
    return state, types._replace(share=share)


def _most_room(n_ranks: int) -> int:
    """Returns the histories that there is room for if each rank has its own, so that `has_no_room` does not hold."""
    return n_ranks + SPARE + 1


def _longer(column: Any, room: int) -> Any:
    more = np.empty((room, *column.shape[1:]), column.dtype)
    more[: len(column)] = column
    return more


@inlined
def has_no_room(state: Alike) -> bool:
    """Returns whether there is no room for another history or class."""
    no_history = state.known[HISTORIES] + SPARE >= len(state.history)
    return bool(no_history or state.known[CLASSES] + SPARE >= len(state.one))


def first_types(rings: Rings, kinds: I64, n_histories: int) -> Types:
    """Returns the types of groups before a run: those of equal number in `kinds`, (axes, groups), are of one type.

    There is room for `n_histories`.
    """
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
        share=np.full((n_axes, n_histories), -1),
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
def copy_history(state: Alike, h: int) -> int:
    """Makes a history like `h`, in the same class, and returns its number."""
    new = state.known[HISTORIES]
    state.known[HISTORIES] = new + 1
    state.history[new] = state.history[h]
    for k in range(N_SLOTS):
        state.until_ns[new, k] = state.until_ns[h, k]
    for k in range(state.start_ns.shape[1]):
        state.start_ns[new, k], state.end_ns[new, k] = state.start_ns[h, k], state.end_ns[h, k]
    return int(new)


@kernel
def copy_class(state: Alike, c: int) -> int:
    """Makes a class like `c`, without histories, and returns its number."""
    new = state.known[CLASSES]
    state.known[CLASSES] = new + 1
    state.one[new] = state.one[c]
    state.one[new].history = -1
    for k in range(N_SLOTS):
        state.n_ready[new, k] = state.n_ready[c, k]
        state.running[new, k] = state.running[c, k]
        state.number[new, k] = state.number[c, k]
        for i in range(state.n_ready[c, k]):
            state.ready[new, k, i] = state.ready[c, k, i]
    for k in range(state.n_begun.shape[1]):
        state.n_begun[new, k] = state.n_begun[c, k]
    for k in range(state.pred_left.shape[1]):
        state.pred_left[new, k] = state.pred_left[c, k]
        state.done_order[new, k] = state.done_order[c, k]
    return int(new)


@kernel
def move(state: Alike, h: int, c: int, new: int) -> None:
    """Moves history `h` from class `c` to class `new`."""
    following = state.history[h].following
    if state.one[c].history == h:
        state.one[c].history = following
    else:
        before = state.one[c].history
        while state.history[before].following != h:
            before = state.history[before].following
        state.history[before].following = following
    state.history[h].of_class = new
    state.history[h].following = state.one[new].history
    state.one[new].history = h


@inlined
def refine(rings: Rings, types: Types, state: Alike, axis: int) -> None:
    """Gives groups whose histories now differ from the example of their type a type of their own."""
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
def _share_out(rings: Rings, types: Types, state: Alike, axis: int) -> None:
    """Lists anew how many members of each type have each history."""
    size, known = rings.size[axis], 0
    for h in range(state.known[HISTORIES]):
        types.share[axis, h] = -1
    for t in range(types.number[axis]):
        first = types.example[axis, t] * size
        for k in range(first, first + size):
            h = state.of_rank[rings.member[axis, k]]
            share = types.share[axis, h]
            if share >= 0 and types.share_type[axis, share] == t:
                types.share_members[axis, share] += 1
                continue
            types.share_type[axis, known], types.share_members[axis, known] = t, 1
            types.next_share[axis, known] = share
            types.share[axis, h] = known
            known += 1


@inlined
def _is_like(rings: Rings, state: Alike, axis: int, group: int, other: int) -> bool:
    """Returns whether two groups have the same histories in the same order."""
    size, answer = rings.size[axis], True
    for k in range(size):
        a, b = rings.member[axis, group * size + k], rings.member[axis, other * size + k]
        if state.of_rank[a] != state.of_rank[b]:
            answer = False
            break
    return answer
