"""Ranks that run one trace, simulated once for each history: ranks are together until something happens to them apart.

A *history* is the times at which nodes of a rank start and end. All ranks begin with one. A collective is a ring in
closed form (`closed_form`) on one of several *axes*; an axis has a group of each rank. Groups with the same histories
and delays in the same order are of one *type*, and are computed once. Ranks of a history may end a ring at unlike
times: those that end first keep the history, and the others get a new one with all that has happened so far. So the
answer is that of every rank by itself.

A rank's nodes run by the slot policy (`slots`), at most one in each slot at a time. Histories whose nodes start and end
in one order are a *class*: what is ready and what runs is known once, and only times differ. A class whose histories
have their next events in unlike slots becomes two.

Classes are independent but for rings, whose ends follow from all begins. A class goes on while it knows when the ring
of each of its histories ends. If no class does, the earliest event of all comes first: no unknown end comes before it.
"""

from __future__ import annotations

import numpy as np

from forerun.astrasim.messages.alike_state import (
    CLASSES,
    HISTORIES,
    NEVER,
    SPARE,
    Alike,
    Mask,
    Rings,
    Scratch,
    Types,
    copy_class,
    copy_history,
    first_state,
    first_types,
    grow,
    has_no_room,
    move,
    refine,
)
from forerun.astrasim.messages.calendar import TIE, UNEQUAL
from forerun.astrasim.messages.closed_form import ring_ends
from forerun.astrasim.messages.ready import N_SLOTS, SLOT_COMM, pop_lowest, push
from forerun.astrasim.messages.slots import IN_CLOSED_FORM, INSTANT, Nodes
from forerun.common.jit import inlined, kernel
from forerun.core.program.types import I64

_FULL = 1
"""no room for another history or class"""
_STEPPED = -1
_BLOCKED = -2
_NO_SLOT = -1
_NOT_KNOWN = -3


def run_alike(nodes: Nodes, rings: Rings, kinds: I64) -> tuple[Alike, Mask, int]:
    """Runs the trace `nodes` of one rank on all ranks. `kinds` (axes, groups) tells groups with unlike delays apart.

    The second answer, (nodes,), are nodes that end at the same time as another one of their rank: which one ends first
    is not known, but changes no time. The third is not 0 if the result is void: `TIE` or `UNEQUAL`.
    """
    n, (n_axes, n_ranks) = len(nodes.action), rings.member.shape
    state = first_state(nodes, n_ranks, n_axes)
    types = first_types(rings, kinds, len(state.history))
    is_tied, timed = np.zeros(n, np.bool_), np.zeros(N_SLOTS, np.int64)
    scratch = Scratch(np.zeros(n, np.int64), np.zeros((4, n_ranks), np.int64), is_tied, timed)
    code = _run(nodes, rings, types, state, scratch, True)
    while code == _FULL:
        state, types = grow(state, types, n_ranks)
        code = _run(nodes, rings, types, state, scratch, False)
    return state, is_tied, code


@kernel
def _run(nodes: Nodes, rings: Rings, types: Types, state: Alike, scratch: Scratch, begins: bool) -> int:
    code = 0
    if begins:
        for k in range(len(nodes.root)):
            node = nodes.root[k]
            push(state.ready[0, nodes.slot[node]], state.n_ready[0, nodes.slot[node]], node)
            state.n_ready[0, nodes.slot[node]] += 1
        code = _look(nodes, rings, types, state, scratch, 0, True)
    while code == 0:
        has_stepped = False
        c = 0
        while c < state.known[CLASSES] and code <= 0:
            code = _STEPPED
            while code == _STEPPED:
                code = _advance(nodes, rings, types, state, scratch, c, False)
                has_stepped = has_stepped or code == _STEPPED
            c += 1
        code = max(code, 0)
        if code == 0 and not has_stepped:
            code = _go_on_with_earliest(nodes, rings, types, state, scratch)
            if code == _BLOCKED:
                return 0
            code = max(code, 0)
    return code


@kernel
def _advance(
    nodes: Nodes, rings: Rings, types: Types, state: Alike, scratch: Scratch, c: int, is_earliest: bool
) -> int:
    """Lets each history of class `c` end the node that ends first, and issues the nodes that are ready then.

    Returns `_STEPPED`, `_BLOCKED` if there is no such node or none is known to be the first, or a code of `run_alike`.
    """
    n_timed, call = 0, state.one[c].call
    for k in range(N_SLOTS):
        if state.running[c, k] >= 0 and (call < 0 or k != SLOT_COMM):
            scratch.timed[n_timed] = k
            n_timed += 1
    if n_timed == 0 and call < 0:
        return _BLOCKED
    slot, new, h = _NO_SLOT, np.int64(-1), state.one[c].history
    while h >= 0:
        one = state.history[h]
        if call >= 0 and one.n_known < one.n_ranks:
            if not is_earliest:
                return _BLOCKED
        elif call >= 0 and one.is_mixed != 0:
            if has_no_room(state):
                return _FULL
            _split(rings, types, state, h)
        of_history = _next(nodes, rings, types, state, scratch, c, h, n_timed)
        if of_history == _NOT_KNOWN:
            return TIE
        if slot == _NO_SLOT:
            slot = of_history
        following = one.following
        if of_history != slot:
            if new < 0:
                if has_no_room(state):
                    return _FULL
                new = copy_class(state, c)
            move(state, h, c, new)
        h = following
    _end(nodes, state, c, slot)
    code = _look(nodes, rings, types, state, scratch, c, True)
    return code if code > 0 else _STEPPED


@inlined
def _next(
    nodes: Nodes, rings: Rings, types: Types, state: Alike, scratch: Scratch, c: int, h: int, n_timed: int
) -> int:
    """Returns the slot of the node of history `h` that ends first, and notes when it does; a step may not follow.

    Returns `_NOT_KNOWN` if the order of two ends matters and follows from other ranks.
    """
    slot, time, number = _NO_SLOT, NEVER, np.int64(0)
    for j in range(n_timed):
        k = scratch.timed[j]
        until = state.until_ns[h, k]
        if slot < 0 or until < time or (until == time and state.number[c, k] < number):
            slot, time, number = k, until, state.number[c, k]
    call, end = state.one[c].call, state.history[h].end_ns
    if call >= 0 and end <= time:
        last_ns = end - rings.call[call].tail_ns  # when the last event before the end is
        is_tie, started = False, NEVER
        if slot >= 0 and end == time:
            started = state.start_ns[h, state.running[c, slot]]
            is_tie = rings.call[call].tail_ns == 0 or started == last_ns
        if is_tie:
            if _order_matters(nodes, rings, types, state, scratch, c, h, slot, end):
                return _NOT_KNOWN
        elif end < time or started > last_ns:
            slot = SLOT_COMM
        time = end
    state.history[h].now_ns = time
    state.end_ns[h, state.running[c, slot]] = time
    return slot


@kernel
def _go_on_with_earliest(nodes: Nodes, rings: Rings, types: Types, state: Alike, scratch: Scratch) -> int:
    """Advances the histories of a class that have the earliest event of all; the answer is that of `_advance`."""
    earliest, c = NEVER, np.int64(-1)
    for h in range(state.known[HISTORIES]):
        time = _first_ns(state, h)
        if time < earliest:
            earliest, c = time, state.history[h].of_class
    if c < 0:
        return _BLOCKED
    new = np.int64(-1)
    h = state.one[c].history
    while h >= 0:
        if has_no_room(state):
            return _FULL
        one = state.history[h]
        if state.one[c].call >= 0 and one.n_known < one.n_ranks and one.end_ns == earliest:
            _split(rings, types, state, h)
        following = state.history[h].following
        if one.n_known < one.n_ranks and _first_ns(state, h) > earliest:
            if new < 0:
                new = copy_class(state, c)
            move(state, h, c, new)
        h = following
    return _advance(nodes, rings, types, state, scratch, c, True)


@inlined
def _first_ns(state: Alike, h: int) -> int:
    """Returns the first known end of what runs in history `h`, `NEVER` for none."""
    c = state.history[h].of_class
    time = state.history[h].end_ns if state.one[c].call >= 0 else NEVER
    for slot in range(N_SLOTS):
        if state.running[c, slot] >= 0:
            time = min(time, state.until_ns[h, slot])
    return int(time)


@inlined
def _end(nodes: Nodes, state: Alike, c: int, slot: int) -> None:
    """Ends the node in a slot, whose time is noted, and makes its children ready."""
    node = state.running[c, slot]
    if slot == SLOT_COMM:
        state.one[c].call = -1
    state.running[c, slot] = -1
    state.done_order[c, node] = state.one[c].n_done
    state.one[c].n_done += 1
    state.one[c].n_running -= 1
    for k in range(nodes.child_ptr[node], nodes.child_ptr[node + 1]):
        child = nodes.child[k]
        state.pred_left[c, child] -= 1
        if state.pred_left[c, child] == 0:
            push(state.ready[c, nodes.slot[child]], state.n_ready[c, nodes.slot[child]], child)
            state.n_ready[c, nodes.slot[child]] += 1


@inlined
def _order_matters(
    nodes: Nodes, rings: Rings, types: Types, state: Alike, scratch: Scratch, c: int, h: int, slot: int, time: int
) -> bool:
    """Returns whether another node starts if the ring of history `h` ends before or after the node in `slot`.

    Both end at `time`, and the order may follow from other ranks. The spare rows serve to try both.
    """
    for k in range(N_SLOTS):
        if k != slot and state.running[c, k] >= 0 and state.until_ns[h, k] == time:
            return True
    scratch.is_tied[state.running[c, slot]] = scratch.is_tied[state.running[c, SLOT_COMM]] = True
    n_histories, n_classes = state.known[HISTORIES], state.known[CLASSES]
    for turn in range(SPARE):
        of_history, of_class = copy_history(state, h), copy_class(state, c)
        state.history[of_history].now_ns = time
        state.history[of_history].following = -1
        state.one[of_class].history = of_history
        state.end_ns[of_history, state.running[c, slot]] = state.end_ns[of_history, state.running[c, SLOT_COMM]] = time
        _end(nodes, state, of_class, slot if turn == 0 else SLOT_COMM)
        _look(nodes, rings, types, state, scratch, of_class, False)
        _end(nodes, state, of_class, SLOT_COMM if turn == 0 else slot)
        _look(nodes, rings, types, state, scratch, of_class, False)
    state.known[HISTORIES], state.known[CLASSES] = n_histories, n_classes
    differs = False
    for k in range(N_SLOTS):
        node = state.running[n_classes, k]
        differs = differs or node != state.running[n_classes + 1, k]
        until = state.until_ns[n_histories, k]
        for j in range(N_SLOTS):
            if node >= 0 and state.running[n_classes, j] >= 0 and j != k:
                differs = differs or state.until_ns[n_histories, j] == until
        differs = differs or (node >= 0 and until == time)
    for k in range(len(nodes.action)):
        differs = differs or state.end_ns[n_histories, k] != state.end_ns[n_histories + 1, k]
    return differs


@kernel
def _look(nodes: Nodes, rings: Rings, types: Types, state: Alike, scratch: Scratch, c: int, begins: bool) -> int:
    """Issues the nodes of a class that are ready and whose slot is free, by rising number.

    Rings among them begin only if `begins`.
    """
    n_fresh, code = 0, 0
    first = state.one[c].history
    while True:
        node = -1
        for slot in range(N_SLOTS):
            if state.running[c, slot] < 0 and state.n_ready[c, slot] > 0:
                other = state.ready[c, slot, 0]
                if node < 0 or other < node:
                    node = other
        if node < 0:
            break
        slot = nodes.slot[node]
        pop_lowest(state.ready[c, slot], state.n_ready[c, slot])
        state.n_ready[c, slot] -= 1
        is_ring = nodes.action[node] == IN_CLOSED_FORM
        h = first
        while h >= 0:
            now = state.history[h].now_ns
            state.start_ns[h, node] = now
            if nodes.action[node] == INSTANT:
                state.end_ns[h, node] = now
            else:
                state.until_ns[h, slot] = NEVER if is_ring else now + nodes.duration_ns[node]
            h = state.history[h].following
        if nodes.action[node] == INSTANT:
            state.done_order[c, node] = state.one[c].n_done
            state.one[c].n_done += 1
            for k in range(nodes.child_ptr[node], nodes.child_ptr[node + 1]):
                child = nodes.child[k]
                state.pred_left[c, child] -= 1
                if state.pred_left[c, child] == 0:
                    scratch.fresh[n_fresh] = child
                    n_fresh += 1
            continue
        state.running[c, slot] = node
        state.number[c, slot] = state.one[c].n_issued
        state.one[c].n_issued += 1
        state.one[c].n_running += 1
        if is_ring and begins:
            code = max(code, _begin(rings, types, state, scratch, c, np.int64(nodes.target[node])))
    for k in range(n_fresh):
        child = scratch.fresh[k]
        push(state.ready[c, nodes.slot[child]], state.n_ready[c, nodes.slot[child]], child)
        state.n_ready[c, nodes.slot[child]] += 1
    if state.one[c].n_running == 0 and state.n_ready[c].sum() == 0:
        h = first
        while h >= 0:
            state.history[h].finish_ns = state.history[h].now_ns
            h = state.history[h].following
    return code


@kernel
def _begin(rings: Rings, types: Types, state: Alike, scratch: Scratch, c: int, call: int) -> int:
    """Lets a class begin a ring. Where it has the last ranks of a group to do so, the ends of all members follow."""
    axis = rings.call[call].axis
    state.one[c].call = call
    state.n_begun[c, axis] += 1
    h = state.one[c].history
    while h >= 0:
        one = state.history[h]
        one.begin_ns, one.end_ns, one.n_known, one.is_mixed = one.now_ns, NEVER, 0, 0
        h = one.following
    h = state.one[c].history
    while h >= 0:
        share = types.share[axis, h]
        while share >= 0:
            t = types.share_type[axis, share]
            types.n_missing[axis, t] -= types.share_members[axis, share]
            if types.n_missing[axis, t] == 0 and not _fire(rings, types, state, scratch, axis, t, call):
                return UNEQUAL
            share = types.next_share[axis, share]
        h = state.history[h].following
    return 0


@inlined
def _fire(rings: Rings, types: Types, state: Alike, scratch: Scratch, axis: int, t: int, call: int) -> bool:
    """Finds when the members of a type end a ring that all have begun; False if these are not the same ring."""
    size = rings.size[axis]
    first = types.example[axis, t] * size
    end_ns = types.end_ns[axis, t * size : (t + 1) * size]
    delay_ns, ring = scratch.ring[0, :size], rings.call[call]
    for k in range(size):
        rank = rings.member[axis, first + k]
        one = state.history[state.of_rank[rank]]
        if state.one[one.of_class].call != call:
            return False
        end_ns[k] = one.begin_ns
        delay_ns[k] = rings.delay_ns[ring.delays, rank]
    ring_ends(end_ns, delay_ns, ring.n_messages, ring.packets_ns, end_ns, scratch.ring[1:])
    types.n_fired[axis, t] += 1
    types.n_missing[axis, t] = size
    for k in range(size):
        one = state.history[state.of_rank[rings.member[axis, first + k]]]
        if one.n_known > 0 and end_ns[k] != one.end_ns:
            one.is_mixed = 1
        one.n_known += types.n_groups[axis, t]
        one.end_ns = min(one.end_ns, end_ns[k])
    return True


@kernel
def _split(rings: Rings, types: Types, state: Alike, h: int) -> None:
    """Moves the ranks of history `h` whose ring ends later than its first end, or at no known time, to a new one."""
    new = copy_history(state, h)
    first, rest = state.history[h], state.history[new]
    first.following = new
    c = first.of_class
    axis = rings.call[state.one[c].call].axis
    size = rings.size[axis]
    rest.n_ranks, rest.n_known, rest.is_mixed, rest.end_ns = 0, 0, 0, NEVER
    for rank in range(len(state.of_rank)):
        if state.of_rank[rank] != h:
            continue
        place = rings.place[axis, rank]
        t = types.of_group[axis, place // size]
        end = NEVER
        if types.n_fired[axis, t] == state.n_begun[c, axis]:
            end = types.end_ns[axis, t * size + place % size]
        if end == first.end_ns:
            continue
        state.of_rank[rank] = new
        rest.n_ranks += 1
        if end < NEVER:
            rest.is_mixed = 1 if rest.is_mixed != 0 or (rest.n_known > 0 and end != rest.end_ns) else 0
            rest.n_known += 1
            rest.end_ns = min(rest.end_ns, end)
    first.n_ranks -= rest.n_ranks
    first.n_known, first.is_mixed = first.n_ranks, 0
    for k in range(len(rings.size)):
        refine(rings, types, state, k)
