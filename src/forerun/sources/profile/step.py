"""One step of a profile: the launches of the host, and the start and end of each kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.common.errors import ForerunError
from forerun.sources.profile.profile import I64, Mask, Profile

NONE = -1
_LONGEST_NS = 86_400 * 10**9
"""a day; picoseconds of a hundred do not fit 64 bits"""


@dataclass(frozen=True)
class Step:
    """The work of one step, in the order in which the host issues it. Times are nanoseconds."""

    profile: Profile
    name: str
    begin_ns: int
    """when the host begins the step"""
    end_ns: int
    """when the host ends it"""
    before_ns: int
    """when the step before is done, on the host and on the device; `begin_ns` where there is none"""
    row: I64
    """rows of kernels, copies and fills"""
    call: I64
    """row of the call that launched each, NONE if the file lacks it"""
    issue_ns: I64
    """when the host issues each; never after a later one of its stream"""
    backlog_ns: int
    """when the device is done with all that was issued before the step"""
    queued: I64
    """work that is issued on the stream of each and has not started when it is issued"""

    def __len__(self) -> int:
        return len(self.row)

    @property
    def start_ns(self) -> I64:
        return self.profile.rows.ts_ns[self.row]

    @property
    def finish_ns(self) -> I64:
        return np.asarray(self.start_ns + self.profile.rows.dur_ns[self.row])

    @property
    def stream(self) -> I64:
        return self.profile.rows.stream[self.row]

    @property
    def leads(self) -> Mask:
        """Returns the mask (work,) of the work that began while the step before was still running, such as copies of
        the next batch.
        """
        return np.asarray(self.start_ns < self.before_ns)

    @property
    def done_ns(self) -> int:
        """Returns when host and device have done the step."""
        return max(self.end_ns, int(self.finish_ns.max(initial=self.end_ns)))


def steps_of(profile: Profile) -> list[Step]:
    """Returns every step of a profile, in order of time; the whole file is one where it names none.

    A step holds the work of its launches, whenever that work runs. Work without a launch belongs to the step in which
    it starts.

    Raises ForerunError for a profile without work of a device.
    """
    rows = profile.rows
    work = np.flatnonzero(profile.is_gpu_work)
    if len(work) == 0:
        raise ForerunError(f"{profile.path}: holds no work of a device, so there is no step to import")
    call = _calls(profile, work)
    issued = np.where(call == NONE, rows.ts_ns[work], rows.ts_ns[call])
    finish = rows.ts_ns[work] + rows.dur_ns[work]
    queued = _queued(issued, rows.ts_ns[work], rows.stream[work])
    found: list[Step] = []
    for name, begin, end in _windows(profile, work):
        chosen = np.flatnonzero((issued >= begin) & (issued < end))
        if len(chosen) == 0:
            continue
        order, issue = _in_order(rows.ts_ns[work[chosen]], rows.stream[work[chosen]], issued[chosen])
        places = chosen[order]
        backlog = int(finish[issued < begin].max(initial=begin))
        before = max(begin, found[-1].done_ns) if found else begin
        columns = (work[places], call[places], issue, backlog, queued[places])
        found.append(Step(profile, name, begin, end, before, *columns))
    longest = max((one.done_ns - one.begin_ns for one in found), default=0)
    if longest > _LONGEST_NS:
        raise ForerunError(f"{profile.path}: a step takes {longest / _LONGEST_NS:.0f} days; are its times damaged?")
    if not found:
        raise ForerunError(f"{profile.path}: no profiler step launches work of a device")
    return found


def _windows(profile: Profile, work: I64) -> list[tuple[str, int, int]]:
    rows = profile.rows
    if len(profile.steps):
        starts, lasting = rows.ts_ns[profile.steps].tolist(), rows.dur_ns[profile.steps].tolist()
        names = [profile.texts[number] for number in rows.name[profile.steps].tolist()]
        return [(name, start, start + dur) for name, start, dur in zip(names, starts, lasting, strict=True)]
    host = np.flatnonzero(profile.is_call | profile.is_operator)
    every = np.concatenate((work, host))
    return [("the whole file", int(rows.ts_ns[every].min()), int((rows.ts_ns[every] + rows.dur_ns[every]).max()) + 1)]


def _calls(profile: Profile, work: I64) -> I64:
    rows = profile.rows
    calls = np.flatnonzero(profile.is_call & (rows.correlation >= 0))
    if len(calls) == 0:
        return np.full(len(work), NONE, np.int64)
    calls = calls[np.argsort(rows.correlation[calls], kind="stable")]
    keys = rows.correlation[calls]
    place = np.minimum(np.searchsorted(keys, rows.correlation[work]), len(calls) - 1)
    return np.where(keys[place] == rows.correlation[work], calls[place], NONE)


def _queued(issued: I64, start: I64, stream: I64) -> I64:
    out = np.zeros(len(issued), np.int64)
    for one in np.unique(stream).tolist():
        on_it = np.flatnonzero(stream == one)
        begun = np.searchsorted(np.sort(start[on_it]), issued[on_it], side="right")
        out[on_it] = np.searchsorted(np.sort(issued[on_it]), issued[on_it], side="left") - begun
    return out


def _in_order(start: I64, stream: I64, issued: I64) -> tuple[I64, I64]:
    """Returns the order of issue and its times, in which each stream keeps the order in which its work ran."""
    issued = np.minimum(issued, start)
    for one in np.unique(stream).tolist():
        on_it = np.flatnonzero(stream == one)
        on_it = on_it[np.argsort(start[on_it], kind="stable")]
        issued[on_it] = np.minimum.accumulate(issued[on_it][::-1])[::-1]
    order = np.lexsort((start, issued))
    return order, issued[order]
