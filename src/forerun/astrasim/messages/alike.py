"""Ranks that run one trace, simulated once for each history: ranks are a class until something happens to them apart.

All ranks begin as one class. A collective is a ring in closed form (`closed_form`) on one of several *axes*; an axis
has a group of each rank. Groups with the same classes and delays in the same order are of one *type*, and are computed
once. Members of a class may end a ring at unlike times: those that end first stay the class, and the others become a
new one, which takes over all that has happened so far. So the answer is that of every rank by itself.

A rank's nodes run by the slot policy (`slots`), at most one in each slot at a time. Classes are independent but for
rings, whose ends follow from all begins. The class with the earliest event comes first, so no end that is not known yet
can come before that event. It then goes on until it waits for a ring.
"""

from __future__ import annotations

import numpy as np

from forerun.astrasim.messages.alike_state import (
    NEVER,
    Classes,
    Mask,
    Rings,
    Scratch,
    Types,
    copy_class,
    first_class,
    first_types,
    refine,
)
from forerun.astrasim.messages.calendar import TIE, UNEQUAL
from forerun.astrasim.messages.closed_form import ring_ends
from forerun.astrasim.messages.ready import N_SLOTS, SLOT_COMM, pop_lowest, push
from forerun.astrasim.messages.slots import IN_CLOSED_FORM, INSTANT, Nodes
from forerun.common.jit import inlined, kernel
from forerun.core.program.types import I64

FULL = 1
"""more classes than there is room for"""


def run_alike(nodes: Nodes, rings: Rings, kinds: I64, capacity: int) -> tuple[Classes, Mask, int]:
    """Runs the trace `nodes` of one rank on all ranks. `kinds` (axes, groups) tells groups with unlike delays apart.

    The second answer, (nodes,), are nodes that end at the same time as another one of their rank: which one ends first
    is not known, but changes no time. The third is not 0 if the result is void: `FULL`, `TIE` or `UNEQUAL`.
    """
    n, (n_axes, n_ranks) = len(nodes.action), rings.member.shape
    state, types = first_class(nodes, n_ranks, n_axes, capacity), first_types(rings, kinds, capacity)
    scratch = Scratch(np.zeros(n, np.int64), np.zeros((4, n_ranks), np.int64), np.zeros(n, np.bool_))
    code = _run(nodes, rings, types, state, scratch)
    return state, scratch.is_tied, code


@kernel
def _run(nodes: Nodes, rings: Rings, types: Types, state: Classes, scratch: Scratch) -> int:
    for k in range(len(nodes.root)):
        node = nodes.root[k]
        push(state.ready[0, nodes.slot[node]], state.n_ready[0, nodes.slot[node]], node)
        state.n_ready[0, nodes.slot[node]] += 1
    code = _look(nodes, rings, types, state, scratch, 0, np.int64(0), True)
    _set_next(state, 0)
    while code == 0:
        c, time = 0, NEVER
        for k in range(state.known[0]):
            if state.next_ns[k] < time:
                c, time = k, state.next_ns[k]
        if time == NEVER:
            break
        while code == 0 and state.next_ns[c] < NEVER:
            code = _step(nodes, rings, types, state, scratch, c)
            _set_next(state, c)
            one = state.one[c]
            if one.call >= 0 and (one.is_mixed != 0 or one.n_known < one.n_ranks):
                break
    return code


@inlined
def _set_next(state: Classes, c: int) -> None:
    time = state.one[c].end_ns if state.one[c].call >= 0 else NEVER
    for slot in range(N_SLOTS):
        if state.running[c, slot] >= 0:
            time = min(time, state.until_ns[c, slot])
    state.next_ns[c] = time


@inlined
def _step(nodes: Nodes, rings: Rings, types: Types, state: Classes, scratch: Scratch, c: int) -> int:
    """Ends the node of class `c` that ends first, and issues the nodes that are ready then."""
    slot, time, number = -1, NEVER, np.int64(0)
    for k in range(N_SLOTS):
        if state.running[c, k] >= 0 and state.until_ns[c, k] < NEVER:
            until = state.until_ns[c, k]
            if slot < 0 or until < time or (until == time and state.number[c, k] < number):
                slot, time, number = k, until, state.number[c, k]
    call, end = state.one[c].call, state.one[c].end_ns
    if call >= 0 and end <= time:
        last_ns = end - rings.call[call].tail_ns  # when the last event before the end is
        is_tie = False
        if slot >= 0 and end == time:
            started = state.start_ns[c, state.running[c, slot]]
            is_tie = rings.call[call].tail_ns == 0 or started == last_ns
        if is_tie or slot < 0 or end < time or started > last_ns:
            if state.known[0] + 2 >= len(state.one):
                return FULL
            if state.one[c].is_mixed != 0 or state.one[c].n_known < state.one[c].n_ranks:
                _split(rings, types, state, c)
            if not is_tie:
                slot = SLOT_COMM
            elif _order_matters(nodes, rings, types, state, scratch, c, slot, end):
                return TIE
        time = end
    _end(nodes, state, c, slot, time)
    return _look(nodes, rings, types, state, scratch, c, time, True)


@inlined
def _end(nodes: Nodes, state: Classes, c: int, slot: int, time: int) -> None:
    """Ends the node in a slot, and makes its children ready."""
    node = state.running[c, slot]
    if slot == SLOT_COMM:
        state.one[c].call = -1
    state.running[c, slot] = -1
    state.end_ns[c, node] = time
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
    nodes: Nodes, rings: Rings, types: Types, state: Classes, scratch: Scratch, c: int, slot: int, time: int
) -> bool:
    """Returns whether another node starts if the ring of class `c` ends before or after the node in `slot`.

    Both end at `time`, and the order may follow from other ranks. The rows after those of the known classes serve to
    try both.
    """
    for k in range(N_SLOTS):
        if k != slot and state.running[c, k] >= 0 and state.until_ns[c, k] == time:
            return True
    scratch.is_tied[state.running[c, slot]] = scratch.is_tied[state.running[c, SLOT_COMM]] = True
    one, other = state.known[0], state.known[0] + 1
    copy_class(state, c, one)
    copy_class(state, c, other)
    _end(nodes, state, one, slot, time)
    _look(nodes, rings, types, state, scratch, one, time, False)
    _end(nodes, state, one, SLOT_COMM, time)
    _look(nodes, rings, types, state, scratch, one, time, False)
    _end(nodes, state, other, SLOT_COMM, time)
    _look(nodes, rings, types, state, scratch, other, time, False)
    _end(nodes, state, other, slot, time)
    _look(nodes, rings, types, state, scratch, other, time, False)
    differs = False
    for k in range(N_SLOTS):
        differs = differs or state.running[one, k] != state.running[other, k]
        for j in range(N_SLOTS):
            if state.running[one, k] >= 0 and state.running[one, j] >= 0 and j != k:
                differs = differs or state.until_ns[one, j] == state.until_ns[one, k]
        differs = differs or (state.running[one, k] >= 0 and state.until_ns[one, k] == time)
    for k in range(len(nodes.action)):
        differs = differs or state.end_ns[one, k] != state.end_ns[other, k]
    return differs


@kernel
def _look(
    nodes: Nodes, rings: Rings, types: Types, state: Classes, scratch: Scratch, c: int, now: int, begins: bool
) -> int:
    """Issues the nodes of a class that are ready and whose slot is free, by rising number.

    Rings among them begin only if `begins`.
    """
    n_fresh, code = 0, 0
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
        state.start_ns[c, node] = now
        if nodes.action[node] == INSTANT:
            state.end_ns[c, node] = now
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
        if nodes.action[node] == IN_CLOSED_FORM:
            state.until_ns[c, slot] = NEVER
            if begins:
                code = max(code, _begin(rings, types, state, scratch, c, np.int64(nodes.target[node]), now))
        else:
            state.until_ns[c, slot] = now + nodes.duration_ns[node]
    for k in range(n_fresh):
        child = scratch.fresh[k]
        push(state.ready[c, nodes.slot[child]], state.n_ready[c, nodes.slot[child]], child)
        state.n_ready[c, nodes.slot[child]] += 1
    if state.one[c].n_running == 0 and state.n_ready[c].sum() == 0:
        state.one[c].finish_ns = now
    return code


@kernel
def _begin(rings: Rings, types: Types, state: Classes, scratch: Scratch, c: int, call: int, now: int) -> int:
    """Lets a class begin a ring. Where it is the last of a group to do so, the ends of all members follow."""
    one = state.one[c]
    one.call, one.begin_ns, one.end_ns, one.n_known, one.is_mixed = call, now, NEVER, 0, 0
    axis = rings.call[call].axis
    state.n_begun[c, axis] += 1
    share = types.share[axis, c]
    while share >= 0:
        t = types.share_type[axis, share]
        types.n_missing[axis, t] -= types.share_members[axis, share]
        if types.n_missing[axis, t] == 0 and not _fire(rings, types, state, scratch, axis, t, call):
            return UNEQUAL
        share = types.next_share[axis, share]
    return 0


@inlined
def _fire(rings: Rings, types: Types, state: Classes, scratch: Scratch, axis: int, t: int, call: int) -> bool:
    """Finds when the members of a type end a ring that all have begun; False if these are not the same ring."""
    size = rings.size[axis]
    first = types.example[axis, t] * size
    end_ns = types.end_ns[axis, t * size : (t + 1) * size]
    delay_ns, ring = scratch.ring[0, :size], rings.call[call]
    for k in range(size):
        rank = rings.member[axis, first + k]
        if state.one[state.of_rank[rank]].call != call:
            return False
        end_ns[k] = state.one[state.of_rank[rank]].begin_ns
        delay_ns[k] = rings.delay_ns[ring.delays, rank]
    for _ in range(ring.rounds):
        ring_ends(end_ns, delay_ns, ring.n_messages, ring.packets_ns, end_ns, scratch.ring[1:])
    types.n_fired[axis, t] += 1
    types.n_missing[axis, t] = size
    for k in range(size):
        c = state.of_rank[rings.member[axis, first + k]]
        one = state.one[c]
        if one.n_known > 0 and end_ns[k] != one.end_ns:
            one.is_mixed = 1
        one.n_known += types.n_groups[axis, t]
        if end_ns[k] < one.end_ns:
            one.end_ns = end_ns[k]
            state.next_ns[c] = min(state.next_ns[c], end_ns[k])
    return True


@kernel
def _split(rings: Rings, types: Types, state: Classes, c: int) -> None:
    """Moves the ranks of class `c` whose ring ends later than its first end, or at no known time, to a new class."""
    new = state.known[0]
    state.known[0] = new + 1
    copy_class(state, c, new)
    first, rest = state.one[c], state.one[new]
    axis = rings.call[first.call].axis
    size = rings.size[axis]
    rest.n_ranks, rest.n_known, rest.is_mixed, rest.end_ns = 0, 0, 0, NEVER
    for rank in range(len(state.of_rank)):
        if state.of_rank[rank] != c:
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
    _set_next(state, new)
    for k in range(len(rings.size)):
        refine(rings, types, state, k)
