"""Finds the dependencies of every kernel of a step (its launch, its stream, other streams' events), and the host's
work.

Dependencies that the file does not state are inferred from times, if the measured times allow them: no kernel waits for
work that ended after it started. The remaining time between the last dependency and the start of a kernel is its delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.sources.profile.event_keys import Key
from forerun.sources.profile.profile import I64, Mask, Profile
from forerun.sources.profile.step import NONE, Step

_STREAM_WAITS = frozenset(("cudaStreamWaitEvent", "hipStreamWaitEvent", "cuStreamWaitEvent"))
_RECORDS = frozenset(("cudaEventRecord", "hipEventRecord", "cudaEventRecordWithFlags", "cuEventRecord"))
_ALL_STREAMS = frozenset(("cudaDeviceSynchronize", "hipDeviceSynchronize", "cuCtxSynchronize"))
_ONE_STREAM = frozenset(
    (
        *("cudaStreamSynchronize", "hipStreamSynchronize", "cuStreamSynchronize"),
        *("cudaEventSynchronize", "hipEventSynchronize", "cuEventSynchronize"),
    )
)
_WAIT = "Stream Wait Event"
_FULL_QUEUE = 1000
"""work on a stream from which on a launch may wait; CUDA's queues hold 1,024 (queue lengths of HTA's profiles end at
1,022)"""
_COPIES = ("Memcpy DtoH", "Memcpy HtoD")
"""copies whose calls may return only when they have ended"""


@dataclass(frozen=True)
class HostWait:
    """A call in which the host waits for work of the device."""

    begin_ns: int
    end_ns: int
    until: tuple[int, ...]
    """places of the work in the step; none for work of the step before"""
    own_ns: int = 0
    """the time of the call without waiting"""


@dataclass(frozen=True)
class Schedule:
    """The waits of a step; work is named by its place in the step."""

    step: Step
    after: tuple[tuple[int, ...], ...]
    """the work on other streams for which each item waits"""
    ready_ns: I64
    """the moment at which each item could have started: it was issued, and its dependencies, or the work issued before
    the step, had ended
    """
    host_waits: tuple[HostWait, ...]
    """in order of time; while one lasts the host issues nothing"""
    lead_ns: int
    """work of the host in the step while the device still ran the step before"""
    measured_ns: int
    """the time of the step: the longer of the host's own, without waiting for the step before, and the time from the
    end of the step before to its own"""
    n_stated: int
    """waits between streams that the file states"""
    n_inferred: int
    """waits between streams that follow from the order of calls"""


def schedule_of(step: Step) -> Schedule:
    """Returns the waits of a step."""
    stated, waiting_calls = _stated_waits(step)
    inferred = _inferred_waits(step, waiting_calls)
    start, finish = step.start_ns, step.finish_ns
    after: list[set[int]] = [set() for _ in range(len(step))]
    counts = []
    leads = step.leads
    for pairs in (stated, inferred):
        allowed = {
            (one, other) for one, other in pairs if other < one and finish[other] <= start[one] and not leads[other]
        }
        counts.append(len(allowed))
        for one, other in allowed:
            after[one].add(other)
    before = _before_on_stream(step.stream, leads)
    ready = np.maximum(step.issue_ns, np.minimum(start, step.backlog_ns))
    for place, others in enumerate(after):
        if before[place] != NONE:
            ready[place] = max(ready[place], int(finish[before[place]]))
        for other in others:
            ready[place] = max(ready[place], int(finish[other]))
    ordered = tuple(tuple(sorted(one)) for one in after)
    waits = (*_synchronisations(step), *_full_queues(step))
    lead_ns = _lead_ns(step, waits)
    host_ns = lead_ns + max(0, step.end_ns - step.before_ns)
    return Schedule(
        step=step,
        after=ordered,
        ready_ns=ready,
        host_waits=tuple(_one_by_one(step, waits)),
        lead_ns=lead_ns,
        measured_ns=max(host_ns, step.done_ns - step.before_ns),
        n_stated=counts[0],
        n_inferred=counts[1],
    )


def typical(schedules: Sequence[Schedule]) -> Schedule:
    """Returns the step whose time is the (lower) median of all but the last, whose work is often cut off."""
    whole = schedules[:-1] or schedules
    return sorted(whole, key=lambda one: one.measured_ns)[(len(whole) - 1) // 2]


def _before_on_stream(stream: I64, leads: Mask) -> list[int]:
    """Returns the place of the item before each item on its stream, NONE for the first. Items that lead have a separate
    stream.
    """
    last: dict[tuple[int, bool], int] = {}
    before = []
    for place, one in enumerate(zip(stream.tolist(), leads.tolist(), strict=True)):
        before.append(last.get(one, NONE))
        last[one] = place
    return before


def _calls_named(profile: Profile, names: frozenset[str], step: Step) -> I64:
    """Returns the rows of the step's calls of these names, in order of time."""
    rows = profile.rows
    named = profile.text_mask(names.__contains__)[rows.name] & profile.is_call
    chosen = np.flatnonzero(named & (rows.ts_ns >= step.begin_ns) & (rows.ts_ns < step.end_ns))
    return np.asarray(chosen[np.argsort(rows.ts_ns[chosen], kind="stable")])


def _last_issued(step: Step, places: I64, time_ns: int) -> int:
    """Returns the last of `places`, in order, that is issued by `time_ns`; NONE if there is none."""
    found = int(np.searchsorted(step.issue_ns[places], time_ns, side="right")) - 1
    return int(places[found]) if found >= 0 else NONE


def _stated_waits(step: Step) -> tuple[list[tuple[int, int]], frozenset[int]]:
    """Returns pairs (waits, is waited for) that synchronisation events state, and the rows of their calls."""
    profile, rows = step.profile, step.profile.rows
    waits = np.flatnonzero(profile.text_mask(lambda text: text == _WAIT)[rows.name])
    stream_of = profile.values(Key.WAIT_STREAM, NONE)[waits].astype(np.int64)
    record_of = profile.values(Key.WAIT_RECORD, NONE)[waits].astype(np.int64)
    calls = _calls_named(profile, _STREAM_WAITS, step)
    call_of = {int(rows.correlation[row]): int(row) for row in calls}
    recorded = {int(rows.correlation[row]): int(rows.ts_ns[row]) for row in _calls_named(profile, _RECORDS, step)}
    pairs, seen = [], set()
    for wait, source, record in zip(waits.tolist(), stream_of.tolist(), record_of.tolist(), strict=True):
        call = call_of.get(int(rows.correlation[wait]), NONE)
        if call == NONE or source == NONE or record not in recorded:
            continue
        seen.add(call)
        on_source = np.flatnonzero(step.stream == source)
        on_target = np.flatnonzero(step.stream == rows.stream[wait])
        other = _last_issued(step, on_source, recorded[record])
        following = on_target[step.issue_ns[on_target] >= rows.ts_ns[call]]
        if other != NONE and len(following):
            pairs.append((int(following[0]), other))
    return pairs, frozenset(seen)


def _inferred_waits(step: Step, known: frozenset[int]) -> list[tuple[int, int]]:
    """Returns pairs (waits, is waited for) that the order of calls suggests.

    The next launch of a thread, after it made a stream wait, counts as the work that waits. It waits for the last work
    of another stream that was issued before the event was recorded, or before the wait where no record is in the file.
    """
    profile, rows = step.profile, step.profile.rows
    calls = [row for row in _calls_named(profile, _STREAM_WAITS, step).tolist() if row not in known]
    records = _calls_named(profile, _RECORDS, step)
    launched = np.flatnonzero(step.call != NONE)
    thread = rows.tid[step.call[launched]]
    pairs = []
    for row in calls:
        on_thread = launched[thread == rows.tid[row]]
        following = on_thread[step.issue_ns[on_thread] >= rows.ts_ns[row]]
        if len(following) == 0:
            continue
        target = int(following[0])
        earlier = records[(rows.tid[records] == rows.tid[row]) & (rows.ts_ns[records] <= rows.ts_ns[row])]
        until = int(rows.ts_ns[earlier[-1]]) if len(earlier) else int(rows.ts_ns[row])
        elsewhere = np.flatnonzero(step.stream != step.stream[target])
        other = _last_issued(step, elsewhere, until)
        if other != NONE:
            pairs.append((target, other))
    return pairs


def _synchronisations(step: Step) -> list[HostWait]:
    """Returns the calls that synchronise, and the copies that return when they have ended."""
    profile, rows = step.profile, step.profile.rows
    finish = step.finish_ns
    found: list[HostWait] = []
    for names, every in ((_ALL_STREAMS, True), (_ONE_STREAM, False)):
        for row in _calls_named(profile, names, step).tolist():
            begin, end = int(rows.ts_ns[row]), int(rows.ts_ns[row] + rows.dur_ns[row])
            found.append(HostWait(begin, end, _ended_inside(step, begin, end, every)))
    crosses = profile.text_mask(lambda text: text.startswith(_COPIES))[rows.name[step.row]]
    for place in np.flatnonzero((step.call != NONE) & crosses).tolist():
        row = int(step.call[place])
        begin, end = int(rows.ts_ns[row]), int(rows.ts_ns[row] + rows.dur_ns[row])
        if finish[place] <= end:
            found.append(HostWait(begin, end, (place,)))
    return found


def _full_queues(step: Step) -> list[HostWait]:
    """Returns the launches that wait because the stream's queue is full, until work of the stream has ended.

    They wait for the work that ended last before they return. What a launch takes without waiting is the median of the
    others.
    """
    launched = np.flatnonzero(step.call != NONE)
    rows = step.profile.rows
    lasting = rows.dur_ns[step.call[launched]]
    full = step.queued[launched] >= _FULL_QUEUE
    if not full.any():
        return []
    usual = int(np.median(lasting[~full])) if not full.all() else int(lasting.min())
    finish, found = step.finish_ns, []
    for place, dur in zip(launched[full].tolist(), lasting[full].tolist(), strict=True):
        begin = int(rows.ts_ns[step.call[place]])
        if dur <= 2 * usual:
            continue
        ended = np.flatnonzero((step.stream == step.stream[place]) & (finish <= begin + dur))
        until = (int(ended[-1]),) if len(ended) and ended[-1] < place else ()
        found.append(HostWait(begin, begin + dur, until, usual))
    return found


def _one_by_one(step: Step, waits: Sequence[HostWait]) -> list[HostWait]:
    """Returns the waits for the step's own work, in order of time; of those that overlap, the first.

    While another thread launches, a thread that waits does not hold the host up.
    """
    alone: list[HostWait] = []
    for one in sorted(waits, key=lambda wait: wait.begin_ns):
        inside = (step.issue_ns > one.begin_ns) & (step.issue_ns < one.end_ns)
        free = not alone or one.begin_ns >= alone[-1].end_ns
        if free and (one.until or one.own_ns) and not inside.any():
            alone.append(one)
    return alone


def _lead_ns(step: Step, waits: Sequence[HostWait]) -> int:
    """Returns how long the host worked before the step before was done: without the calls in which it waited."""
    until = min(step.before_ns, step.end_ns)
    waiting = sum(max(0, min(one.end_ns, until) - one.begin_ns - one.own_ns) for one in waits)
    return max(0, until - step.begin_ns - waiting)


def _ended_inside(step: Step, begin_ns: int, end_ns: int, every_stream: bool) -> tuple[int, ...]:
    """Returns the last work of each stream that is issued before a call and ends in it; of one stream, the latest."""
    finish = step.finish_ns
    found = []
    for stream in np.unique(step.stream).tolist():
        last = _last_issued(step, np.flatnonzero(step.stream == stream), begin_ns)
        if last != NONE and begin_ns < finish[last] <= end_ns:
            found.append(last)
    if every_stream or not found:
        return tuple(found)
    return (max(found, key=lambda place: int(finish[place])),)
