"""Ring collectives in closed form: when the members of a ring end follows from when they begin.

On a ring without contention each member sends its message k + 1 once it has sent message k and has that of the member
before it. If x(i, k) is when member i sends message k, d(i) how long a message of i is under way, and c(k) the time of
the packet before message k, then

    x(i, k + 1) = max(x(i - 1, k) + d(i - 1), x(i, k)) + c(k + 1).

So x(i, K) is the sum of all c plus the longest way from some start: K steps, each of which goes on to the next member
or stays. As no d is below 0, of the ways from one member that goes farthest round the ring is the longest, and these
are n ways to each member. Prefix and suffix maxima give all ends in one pass (`ring_ends`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.astrasim.messages.calendar import NOW, OVERFLOW, UNEQUAL, Calendar, Records, register, schedule
from forerun.common.jit import kernel
from forerun.core.program.types import I64

RING_CALL = np.dtype(
    [
        ("communicator", np.int64),
        ("first_delay", np.int64),  # of `delay_ns`, one for each member; differs where sizes of messages do
        ("n_messages", np.int64),  # that a member sends one after the other, at least one less than there are members
        ("packets_ns", np.int64),  # the time of all packets of a member one after the other
        ("tail_ns", np.int64),  # the time between the last event before an end and the end
    ]
)

TAIL = np.int64(4)
"""event: the last event of a node before its end"""
NODE_DONE = np.int64(2)
"""callback: a node has ended"""

_NEVER = np.int64(-(1 << 62))


class ClosedForms(NamedTuple):
    """The collectives in closed form, and which of their members have begun."""

    call: Records
    """(calls,)"""
    delay_ns: I64
    """how long a message of each member to the next one is under way"""
    member_ptr: I64
    """(communicators + 1,) the members of each communicator in `start_ns` and `node`"""
    start_ns: I64
    """(members of all communicators,) when each has begun the collective that is open"""
    node: I64
    """(members of all communicators,) its node"""
    n_begun: I64
    """(communicators,) how many have begun it"""
    open_call: I64
    """(communicators,) the call of the first of them"""
    scratch: I64
    """(3, members of the largest communicator)"""


def closed_forms(
    call: Records | None = None, delay_ns: I64 | None = None, member_ptr: I64 | None = None
) -> ClosedForms:
    """Returns tables of these calls, of none by default, in which no collective has begun."""
    call = np.zeros(0, RING_CALL) if call is None else call
    delay_ns = np.zeros(0, np.int64) if delay_ns is None else delay_ns
    member_ptr = np.zeros(1, np.int64) if member_ptr is None else member_ptr
    n, largest = len(member_ptr) - 1, int(np.diff(member_ptr).max(initial=0))
    start_ns, node = (np.zeros(int(member_ptr[-1]), np.int64) for _ in range(2))
    n_begun, open_call = (np.zeros(n, np.int64) for _ in range(2))
    scratch = np.zeros((3, largest), np.int64)
    return ClosedForms(call, delay_ns, member_ptr, start_ns, node, n_begun, open_call, scratch)


@kernel
def ring_ends(start_ns: I64, delay_ns: I64, n_messages: int, packets_ns: int, end_ns: I64, scratch: I64) -> None:
    """Writes when each of n members of a ring ends to `end_ns`, which may be `start_ns` itself.

    Chunks one after the other are one long chunk, with the messages and the packets of all of them.

    Args:
        start_ns: (n,) when each member begins.
        delay_ns: (n,) how long a message of each member to the next one is under way.
        n_messages: that each member sends, n - 1 at least.
        packets_ns: the time of all packets of a member.
        scratch: (3, n) or more.
    """
    n = len(start_ns)
    before, first, last = scratch[0], scratch[1], scratch[2]
    round_ns = np.int64(0)
    for i in range(n):
        before[i] = round_ns
        round_ns += delay_ns[i]
        lead = start_ns[i] - before[i]
        last[i] = lead
        first[i] = lead if i == 0 else max(first[i - 1], lead)
    for i in range(n - 2, -1, -1):
        last[i] = max(last[i], last[i + 1])
    laps = -n_messages // n
    j = -n_messages - laps * n  # the farthest member from which a way of this many hops leads to member i
    way_ns = packets_ns - laps * round_ns
    for i in range(n):
        lead = last[j]
        if j > 0:
            lead = max(lead, first[j - 1] - round_ns)
        end_ns[i] = way_ns + before[i] + lead
        j += 1
        if j == n:
            j = 0
            way_ns -= round_ns


@kernel
def begin_ring(
    calendar: Calendar, forms: ClosedForms, first_node: I64, actor: int, node: int, c: int, position: int
) -> None:
    """Lets `actor` begin call `c` at node `node`; the last member to begin schedules the ends of all."""
    now = calendar.clock[NOW]
    call = forms.call[c]
    members = forms.member_ptr[call.communicator]
    n = forms.member_ptr[call.communicator + 1] - members
    if forms.n_begun[call.communicator] == 0:
        forms.open_call[call.communicator] = c
    elif forms.open_call[call.communicator] != c:
        if forms.call[forms.open_call[call.communicator]].first_delay == call.first_delay:
            calendar.clock[OVERFLOW] = UNEQUAL
        forms.n_begun[call.communicator] = _NEVER  # messages of unlike sizes don't meet receives
        return
    forms.start_ns[members + position] = now
    forms.node[members + position] = node
    forms.n_begun[call.communicator] += 1
    if forms.n_begun[call.communicator] < n:
        return
    forms.n_begun[call.communicator] = 0
    end_ns = forms.start_ns[members : members + n]
    delay_ns = forms.delay_ns[call.first_delay : call.first_delay + n]
    ring_ends(end_ns, delay_ns, call.n_messages, call.packets_ns, end_ns, forms.scratch)
    for k in range(n):
        other = forms.node[members + k]
        if call.tail_ns > 0:
            schedule(calendar, end_ns[k] - call.tail_ns, TAIL, other)
        else:
            owner = np.int64(np.searchsorted(first_node, other, side="right") - 1)
            register(calendar, owner, end_ns[k] - now, NODE_DONE, other, np.int64(-1))
