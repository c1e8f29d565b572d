"""Messages of collectives that wait for a receive, and receives that wait for a message.

They are counts in a hash table with linear probing, keyed by (communicator, stream, route, size). As messages of one
key match receives in order, a count is enough: above 0 messages wait, below 0 receives do. An entry of 0 leaves the
table. The size is part of the key as in ASTRA-sim's `CallbackTracker`: members of a group that meet in collectives of
unlike sizes wait for ever.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.astrasim.messages.calendar import OVERFLOW
from forerun.common.jit import kernel
from forerun.core.program.types import I64

_MIX_ROUTE = np.int64(-7046029254386353131)
_MIX_STREAM = np.int64(-4417276706812531889)
_MIX_COMMUNICATOR = np.int64(1609587929392839161)
_MIX_SIZE = np.int64(-8796714831421723037)
"""multipliers of the hash: the primes of xxHash as signed integers that wrap around"""
_MESSAGE = np.int64(1)
_RECEIVE = np.int64(-1)


class Mailbox(NamedTuple):
    key: I64
    """(slots, 4)"""
    waiting: I64
    """(slots,), 0 for an empty slot"""
    used: I64


def new_mailbox(capacity: int) -> Mailbox:
    """Returns an empty mailbox; the number of slots is a power of two and at least `capacity`."""
    slots = 1 << max(4, (capacity - 1).bit_length())
    return Mailbox(np.zeros((slots, 4), np.int64), np.zeros(slots, np.int64), np.zeros(1, np.int64))


@kernel
def _home(mailbox: Mailbox, communicator: int, stream: int, route: int, size: int) -> int:
    h = route * _MIX_ROUTE ^ stream * _MIX_STREAM ^ communicator * _MIX_COMMUNICATOR ^ size * _MIX_SIZE
    return int((h ^ (h >> 29)) & (len(mailbox.waiting) - 1))


@kernel
def _change(mailbox: Mailbox, clock: I64, communicator: int, stream: int, route: int, size: int, by: int) -> bool:
    """Counts a message (+1) or a receive (-1). Returns whether it meets its counterpart."""
    mask = len(mailbox.waiting) - 1
    at = _home(mailbox, communicator, stream, route, size)
    key, waiting = mailbox.key, mailbox.waiting
    while waiting[at] != 0:
        if key[at, 0] == communicator and key[at, 1] == stream and key[at, 2] == route and key[at, 3] == size:
            met = bool(waiting[at] * by < 0)
            waiting[at] += by
            if waiting[at] == 0:
                _close_gap(mailbox, at)
            return met
        at = (at + 1) & mask
    if 2 * mailbox.used[0] > mask:
        clock[OVERFLOW] = 1
        return False
    key[at, 0] = communicator
    key[at, 1] = stream
    key[at, 2] = route
    key[at, 3] = size
    waiting[at] = by
    mailbox.used[0] += 1
    return False


@kernel
def _close_gap(mailbox: Mailbox, gap: int) -> None:
    """Moves entries that probing would no longer find into the slot that became empty."""
    mask = len(mailbox.waiting) - 1
    mailbox.used[0] -= 1
    at = gap
    while True:
        at = (at + 1) & mask
        if mailbox.waiting[at] == 0:
            return
        home = _home(mailbox, mailbox.key[at, 0], mailbox.key[at, 1], mailbox.key[at, 2], mailbox.key[at, 3])
        if ((at - home) & mask) >= ((at - gap) & mask):
            mailbox.key[gap, 0] = mailbox.key[at, 0]
            mailbox.key[gap, 1] = mailbox.key[at, 1]
            mailbox.key[gap, 2] = mailbox.key[at, 2]
            mailbox.key[gap, 3] = mailbox.key[at, 3]
            mailbox.waiting[gap] = mailbox.waiting[at]
            mailbox.waiting[at] = 0
            gap = at


@kernel
def arrive(mailbox: Mailbox, clock: I64, communicator: int, stream: int, route: int, size: int) -> bool:
    """Counts a message. Returns whether a receive waited for it."""
    return _change(mailbox, clock, communicator, stream, route, size, _MESSAGE)


@kernel
def post(mailbox: Mailbox, clock: I64, communicator: int, stream: int, route: int, size: int) -> bool:
    """Counts a receive. Returns whether its message had arrived before."""
    return _change(mailbox, clock, communicator, stream, route, size, _RECEIVE)
