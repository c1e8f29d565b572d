"""The events of a profile as HolisticTraceAnalysis (HTA 0.5.0) sees them: its clock, its links and its window.

Every table under HTA's name comes from this view, so that its figures are equal. The rules, wrong ones too, are listed
in docs/profiles.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from forerun.sources.profile.event_keys import Key
from forerun.sources.profile.profile import F64, I64, STEP, Mask, Profile

NONE = -1
_UNLINKED = 0
_SYNCHRONISATIONS = frozenset(("Event Sync", "Context Sync"))
"""waits of the device; they count as work of the device even without a stream"""
_DROPPED = "Trace"


@dataclass(frozen=True)
class Window:
    """Events of one rank in HTA's order: work of the device, then the rest."""

    profile: Profile
    row: I64
    """row in the profile"""
    index: I64
    """place in `traceEvents`, HTA's name of an event"""
    ts_us: F64
    """whole microseconds where the file has fractions, since the first event of all ranks"""
    dur_us: F64
    linked: I64
    """place of the launch of a kernel, or of the kernel of a launch; 0 without one, NONE without a correlation"""
    last_step_dropped: bool

    def __len__(self) -> int:
        return len(self.row)

    def take(self, rows: I64 | Mask) -> Window:
        """Returns the window of these rows alone."""
        return replace(
            self,
            row=self.row[rows],
            index=self.index[rows],
            ts_us=self.ts_us[rows],
            dur_us=self.dur_us[rows],
            linked=self.linked[rows],
        )

    @property
    def rank(self) -> int:
        return self.profile.rank

    @cached_property
    def end_us(self) -> F64:
        return np.asarray(self.ts_us + self.dur_us)

    @cached_property
    def stream(self) -> I64:
        return self.profile.rows.stream[self.row]

    @cached_property
    def correlation(self) -> I64:
        return self.profile.rows.correlation[self.row]

    @cached_property
    def name(self) -> npt.NDArray[np.int32]:
        """Returns the number of the name of every event in the profile's texts, (events,)"""
        return self.profile.rows.name[self.row]

    @cached_property
    def on_stream(self) -> Mask:
        """Returns the mask (events,) of the events that HTA takes for kernels: all that state a stream."""
        return np.asarray(self.stream != NONE)

    def named(self, names: frozenset[str]) -> Mask:
        """Returns the mask (events,) of the events with these names."""
        return np.asarray(self.profile.text_mask(names.__contains__)[self.name])

    def in_categories(self, categories: frozenset[str]) -> Mask:
        """Returns the mask (events,) of the events of these categories."""
        return np.asarray(self.profile.text_mask(categories.__contains__)[self.profile.rows.cat[self.row]])

    def values(self, key: Key, missing: float) -> F64:
        """Returns an argument of every event, (events,). Events without it get `missing`."""
        return np.asarray(self.profile.values(key, missing)[self.row])

    @cached_property
    def _places(self) -> I64:
        """Returns the first row of every place in `traceEvents`, NONE if the window lacks it."""
        places = np.full(self.profile.n_events + 1, NONE, np.int64)
        places[self.index[::-1]] = np.arange(len(self) - 1, -1, -1)
        return places

    def rows_at(self, index: I64) -> I64:
        """Returns the row of every place in `traceEvents`, NONE if the window lacks it or the place is NONE."""
        return np.where(index >= 0, self._places[np.maximum(index, 0)], NONE)


def windows(profiles: Sequence[Profile]) -> list[Window]:
    """Returns the view of every rank.

    Where the ranks name several profiler steps, the last one of each rank is left out, and with it all that its
    launches run.
    """
    whole = [_loaded(one) for one in profiles]
    first_us = min((float(one.ts_us.min()) for one in whole if len(one)), default=0.0)
    aligned = [replace(one, ts_us=one.ts_us - first_us) for one in whole]
    steps = {name for one in aligned for name in _step_names(one)}
    return [_without_last_step(one) for one in aligned] if len(steps) > 1 else aligned


def _loaded(profile: Profile) -> Window:
    rows = profile.rows
    dropped = profile.text_mask(lambda text: text == _DROPPED)[rows.cat]
    kept = np.flatnonzero((rows.dur_ns >= 0) & ~dropped)
    ts_us, dur_us = _microseconds(rows.ts_ns[kept]), _microseconds(rows.dur_ns[kept])
    if profile.fractional:
        begins, ends = np.ceil(ts_us), np.floor(ts_us + dur_us)
        ts_us, dur_us = begins, ends - begins
    unlinked = np.full(len(kept), NONE, np.int64)
    found = Window(profile, kept, rows.place[kept], ts_us, dur_us, unlinked, last_step_dropped=False)
    return replace(found, linked=_links(found))


def _microseconds(nanoseconds: I64) -> F64:
    """Rounds as a reader of decimal microseconds does: to the nearest 64-bit real number."""
    whole, rest = np.divmod(nanoseconds, 1000)
    return np.asarray(whole.astype(np.float64) + rest / 1000.0)


def _is_gpu(window: Window) -> Mask:
    on_stream = (window.stream >= 0) & (window.correlation >= 0)
    return np.asarray(on_stream | window.named(_SYNCHRONISATIONS))


def _links(window: Window) -> I64:
    correlated = window.correlation != NONE
    on_gpu = _is_gpu(window)
    gpu, cpu = np.flatnonzero(correlated & on_gpu), np.flatnonzero(correlated & ~on_gpu)
    linked = np.minimum(window.correlation, _UNLINKED)
    for rows, others in ((cpu, gpu), (gpu, cpu)):
        partner = last_with(window.correlation[others], window.correlation[rows])
        found = partner >= 0
        linked[rows[found]] = window.index[others[partner[found]]]
    return linked


def last_with(keys: I64, wanted: I64) -> I64:
    """Returns for every wanted key the last place at which `keys` has it, NONE if it does not."""
    if len(keys) == 0:
        return np.full(len(wanted), NONE, np.int64)
    order = np.argsort(keys, kind="stable")
    place = np.searchsorted(keys[order], wanted, side="right") - 1
    candidate = order[np.maximum(place, 0)]
    return np.where((place >= 0) & (keys[candidate] == wanted), candidate, NONE)


def counts_of(keys: I64, wanted: I64) -> I64:
    """Returns the number of times that `keys` contains each wanted key."""
    ordered = np.sort(keys)
    return np.searchsorted(ordered, wanted, side="right") - np.searchsorted(ordered, wanted, side="left")


def _step_names(window: Window) -> set[str]:
    used = np.unique(window.name)
    return {text for number in used.tolist() if STEP in (text := window.profile.texts[number])}


def _without_last_step(window: Window) -> Window:
    on_gpu = _is_gpu(window)
    gpu, cpu = np.flatnonzero(on_gpu), np.flatnonzero(~on_gpu)
    is_step = window.profile.text_mask(lambda text: STEP in text)[window.name[cpu]]
    starts = window.ts_us[cpu[is_step]]
    kept = cpu[window.ts_us[cpu] < starts.max()] if len(starts) else cpu[:0]
    launches = window.correlation[kept]
    times = counts_of(launches[launches >= 0], window.correlation[gpu])
    chosen = window.take(np.concatenate((np.repeat(gpu, times), kept)))
    return replace(chosen, last_step_dropped=True)


def by_time(time_us: F64) -> I64:
    """Returns the order by time. Events of one time come in the order that numpy's quicksort, which HTA uses, gives."""
    whole = time_us.astype(np.int64)
    return np.asarray(np.argsort(whole if np.array_equal(whole, time_us) else time_us, kind="quicksort"))
