"""The event calendar of the message-level engine.

Events of one tick run in the order in which they were scheduled. Every actor (a simulated rank) also keeps *wakes*: all
callbacks that it registers for a tick run together, in the order of registration, in the place of the first one. Both
rules are those of ASTRA-sim's event queue and `Sys::try_register_event`; they decide ties.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.common.jit import inlined, kernel
from forerun.core.program.types import I64

Records = npt.NDArray[np.void]

_EVENT = np.dtype([("time", np.int64), ("sequence", np.int64), ("kind", np.int64), ("arg", np.int64)])
_WAKE = np.dtype([("time", np.int64), ("actor", np.int64), ("head", np.int64), ("tail", np.int64), ("next", np.int64)])
_CALLBACK = np.dtype(
    [("kind", np.int64), ("arg", np.int64), ("extra", np.int64), ("since", np.int64), ("next", np.int64)]
)

NOW = 0
_N_EVENTS = 1
SEQUENCE = 2
"""number of events scheduled so far"""
OVERFLOW = 3
"""1 once a table is full: the run has to start again with larger tables; `TIE` or `UNEQUAL` if the run is void"""
TIE = 2
"""two messages came to a link of a block of ranks at the same time, so ranks one block apart may differ"""
UNEQUAL = 3
"""members of a communicator meet in different collectives of equal messages, which only messages can simulate"""
_FREE_WAKE = 4
_FREE_CALLBACK = 5
_USED_WAKE = 6
_USED_CALLBACK = 7
"""first record that was never used; the operating system gives memory only to records that are used"""

WAKE = np.int64(0)
"""kind of the event that runs a wake; callers define all other kinds"""


class Calendar(NamedTuple):
    clock: I64
    """counters: NOW, SEQUENCE and the others above"""
    event: Records
    """binary heap by (time, sequence)"""
    wake: Records
    first_wake: I64
    """(actors,) first wake of each actor, -1 for none"""
    callback: Records


def new_calendar(n_actors: int, capacity: int) -> Calendar:
    """Returns an empty calendar for `capacity` events and as many callbacks."""
    clock = np.zeros(8, np.int64)
    clock[_FREE_WAKE] = clock[_FREE_CALLBACK] = -1
    event, wake, callback = (np.zeros(capacity, kind) for kind in (_EVENT, _WAKE, _CALLBACK))
    return Calendar(clock, event, wake, np.full(n_actors, -1, np.int64), callback)


@kernel
def open_slot(event: Records, n: int, time: int, sequence: int) -> int:
    """Opens a place for a record in a heap of `n` records by (time, sequence), and returns that place."""
    i = n
    while i > 0:
        parent = (i - 1) >> 1
        if event[parent].time < time or (event[parent].time == time and event[parent].sequence < sequence):
            break
        event[i] = event[parent]
        i = parent
    return i


@kernel
def drop_first(event: Records, n: int) -> int:
    """Removes the first of `n` records of a heap by (time, sequence). Returns the number of records left."""
    n -= 1
    time, sequence = event[n].time, event[n].sequence
    i = 0
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        right = child + 1
        if right < n and (
            event[right].time < event[child].time
            or (event[right].time == event[child].time and event[right].sequence < event[child].sequence)
        ):
            child = right
        if time < event[child].time or (time == event[child].time and sequence < event[child].sequence):
            break
        event[i] = event[child]
        i = child
    event[i] = event[n]
    return n


@kernel
def schedule(calendar: Calendar, time: int, kind: int, arg: int) -> None:
    """Schedules event `kind` at `time`, after all events of that tick so far."""
    clock, event = calendar.clock, calendar.event
    i = clock[_N_EVENTS]
    if i == len(event):
        clock[OVERFLOW] = 1
        return
    clock[_N_EVENTS] = i + 1
    sequence = clock[SEQUENCE]
    clock[SEQUENCE] = sequence + 1
    i = open_slot(event, i, time, sequence)
    event[i].time = time
    event[i].sequence = sequence
    event[i].kind = kind
    event[i].arg = arg


@inlined
def next_event(calendar: Calendar) -> tuple[int, int]:
    """Removes the next event and moves the clock to it. Returns (kind, arg); kind is -1 if there is none."""
    clock, event = calendar.clock, calendar.event
    n = clock[_N_EVENTS]
    if n == 0:
        return -1, -1
    clock[NOW] = event[0].time
    kind, arg = event[0].kind, event[0].arg
    clock[_N_EVENTS] = drop_first(event, n)
    return kind, arg


@kernel
def register(calendar: Calendar, actor: int, delay: int, kind: int, arg: int, extra: int) -> None:
    """Registers callback `kind` of `actor` in `delay` ticks, together with its other callbacks of that tick."""
    clock, wake, callback = calendar.clock, calendar.wake, calendar.callback
    time = clock[NOW] + delay
    w = calendar.first_wake[actor]
    while w >= 0 and wake[w].time != time:
        w = wake[w].next
    c = clock[_FREE_CALLBACK]
    if c >= 0:
        clock[_FREE_CALLBACK] = callback[c].next
    else:
        c = clock[_USED_CALLBACK]
        if c == len(callback):
            clock[OVERFLOW] = 1
            return
        clock[_USED_CALLBACK] = c + 1
    if w < 0:
        w = clock[_FREE_WAKE]
        if w >= 0:
            clock[_FREE_WAKE] = wake[w].next
        else:
            w = clock[_USED_WAKE]
            if w == len(wake):
                clock[OVERFLOW] = 1
                return
            clock[_USED_WAKE] = w + 1
        wake[w].time = time
        wake[w].actor = actor
        wake[w].head = -1
        wake[w].tail = -1
        wake[w].next = calendar.first_wake[actor]
        calendar.first_wake[actor] = w
        schedule(calendar, time, WAKE, w)
    callback[c].kind = kind
    callback[c].arg = arg
    callback[c].extra = extra
    callback[c].since = clock[NOW]
    callback[c].next = -1
    if wake[w].tail < 0:
        wake[w].head = c
    else:
        callback[wake[w].tail].next = c
    wake[w].tail = c


@inlined
def take_callback(calendar: Calendar, w: int) -> tuple[int, int, int, int]:
    """Removes the next callback of wake `w`. Returns (kind, arg, extra, time of registration); kind -1 ends the wake.

    A wake stays open while its callbacks run, so callbacks that they register for the same tick join it.
    """
    clock, wake, callback = calendar.clock, calendar.wake, calendar.callback
    c = wake[w].head
    if c >= 0:
        wake[w].head = callback[c].next
        if callback[c].next < 0:
            wake[w].tail = -1
        callback[c].next = clock[_FREE_CALLBACK]
        clock[_FREE_CALLBACK] = c
        return callback[c].kind, callback[c].arg, callback[c].extra, callback[c].since
    actor = wake[w].actor
    if calendar.first_wake[actor] == w:
        calendar.first_wake[actor] = wake[w].next
    else:
        before = calendar.first_wake[actor]
        while wake[before].next != w:
            before = wake[before].next
        wake[before].next = wake[w].next
    wake[w].next = clock[_FREE_WAKE]
    clock[_FREE_WAKE] = w
    return -1, -1, -1, -1
