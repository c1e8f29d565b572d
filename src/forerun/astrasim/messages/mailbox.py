"""Which messages of collectives have come without a receive, and which receives wait for a message.

A hash table with linear probing, keyed by (communicator, stream, lane). Messages of one key match receives in order, so
a count tells it all: above zero messages wait, below zero receives do. Entries leave the table at zero.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.astrasim.messages.calendar import OVERFLOW
from forerun.common.jit import kernel
from forerun.core.program.types import I64

_MIX_LANE = np.int64(-7046029254386353131)
_MIX_STREAM = np.int64(-4417276706812531889)
_MIX_COMMUNICATOR = np.int64(1609587929392839161)
"""odd numbers without structure (those of xxHash), as signed integers that wrap around"""


_MESSAGE = np.int64(1)
_RECEIVE = np.int64(-1)


class Mailbox(NamedTuple):
    key: I64
    """(slots, 3)"""
    waiting: I64
    """(slots,), 0 for an empty slot"""
    used: I64


def new_mailbox(capacity: int) -> Mailbox:
    """A mailbox of a power of two of slots, at least `capacity`."""
    slots = 1 << max(4, (capacity - 1).bit_length())
    return Mailbox(np.zeros((slots, 3), np.int64), np.zeros(slots, np.int64), np.zeros(1, np.int64))


@kernel
def _home(mailbox: Mailbox, communicator: int, stream: int, lane: int) -> int:
    h = lane * _MIX_LANE ^ stream * _MIX_STREAM ^ communicator * _MIX_COMMUNICATOR
    return int((h ^ (h >> 29)) & (len(mailbox.waiting) - 1))


@kernel
def _change(mailbox: Mailbox, clock: I64, communicator: int, stream: int, lane: int, by: int) -> bool:
    """Count a message (+1) or a receive (-1); whether it met its counterpart."""
    mask = len(mailbox.waiting) - 1
    at = _home(mailbox, communicator, stream, lane)
    key, waiting = mailbox.key, mailbox.waiting
    while waiting[at] != 0:
        if key[at, 0] == communicator and key[at, 1] == stream and key[at, 2] == lane:
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
    key[at, 2] = lane
    waiting[at] = by
    mailbox.used[0] += 1
    return False


@kernel
def _close_gap(mailbox: Mailbox, gap: int) -> None:
    """Move entries that probing would no longer find into the slot that became empty."""
    mask = len(mailbox.waiting) - 1
    mailbox.used[0] -= 1
    at = gap
    while True:
        at = (at + 1) & mask
        if mailbox.waiting[at] == 0:
            return
        home = _home(mailbox, mailbox.key[at, 0], mailbox.key[at, 1], mailbox.key[at, 2])
        if ((at - home) & mask) >= ((at - gap) & mask):
            mailbox.key[gap, 0] = mailbox.key[at, 0]
            mailbox.key[gap, 1] = mailbox.key[at, 1]
            mailbox.key[gap, 2] = mailbox.key[at, 2]
            mailbox.waiting[gap] = mailbox.waiting[at]
            mailbox.waiting[at] = 0
            gap = at


@kernel
def arrive(mailbox: Mailbox, clock: I64, communicator: int, stream: int, lane: int) -> bool:
    """A message has come; whether a receive waited for it."""
    return _change(mailbox, clock, communicator, stream, lane, _MESSAGE)


@kernel
def post(mailbox: Mailbox, clock: I64, communicator: int, stream: int, lane: int) -> bool:
    """A receive is posted; whether its message had come already."""
    return _change(mailbox, clock, communicator, stream, lane, _RECEIVE)
