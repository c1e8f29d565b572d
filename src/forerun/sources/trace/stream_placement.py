"""StreamPlacement: which stream of the engine every node of a recording runs on.

Tracks share a lane only where their nodes would run one after the other anyway; each takes the lane of its purpose, or
one of the same kind of traffic, or else one that nothing uses (its name then says little: what it does is to keep the
overlap). Only when all lanes are taken do tracks share one that could overlap; that is noted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.core.program.types import I8, I32, I64, N_STREAMS, Stream
from forerun.sources.trace.order import last_ended
from forerun.sources.trace.recording import Recording
from forerun.sources.trace.tracks import Tracks

_PIPELINE = tuple(stream for stream in Stream if stream.name.startswith("PP_"))
_FAMILIES = {
    Stream.GATHER: (Stream.REDUCE,),
    Stream.REDUCE: (Stream.GATHER,),
    Stream.PP_SEND: (Stream.PP_SEND_BACK, Stream.PP_SEND_GRAD_BACK, *_PIPELINE),
    Stream.PP_SEND_GRAD: (Stream.PP_SEND_GRAD_BACK, Stream.PP_SEND_BACK, *_PIPELINE),
    Stream.PP_RECV: (Stream.PP_RECV_BACK, Stream.PP_RECV_GRAD_BACK, *_PIPELINE),
    Stream.PP_RECV_GRAD: (Stream.PP_RECV_GRAD_BACK, Stream.PP_RECV_BACK, *_PIPELINE),
}
_SPARE = (
    Stream.PP_SEND_BACK,
    Stream.PP_RECV_BACK,
    Stream.PP_SEND_GRAD_BACK,
    Stream.PP_RECV_GRAD,
    Stream.PP_SEND_GRAD,
    Stream.PP_RECV,
    Stream.PP_SEND,
    Stream.CP,
    Stream.EP,
    Stream.TP,
    Stream.COPY,
    Stream.PP_RECV_GRAD_BACK,
    Stream.REDUCE,
    Stream.GATHER,
)
"""lanes without a use of their own, the ones least missed first"""


@dataclass(frozen=True, slots=True)
class StreamPlacement:
    """The engine's stream of every node of one recording."""

    of_node: I8
    named: I8
    """(N,) 1 where the lane is of the node's own kind of traffic"""
    notes: tuple[str, ...]


def place_on_streams(recording: Recording, tracks: Tracks) -> StreamPlacement:
    """The lane of every node."""
    clock, _ = last_ended(tracks.of_node, tracks.pred_ptr, tracks.pred, recording.sync, len(tracks.tracks))
    lane, notes = _Placing(tracks, clock).place()
    wanted = np.array([track.lane for track in tracks.tracks], np.int8)
    return StreamPlacement(lane[tracks.of_node], (lane == wanted).astype(np.int8)[tracks.of_node], notes)


class _Placing:
    """Tracks going to lanes, the most important first."""

    def __init__(self, tracks: Tracks, clock: I32) -> None:
        self.tracks, self.clock = tracks.tracks, clock
        self.of_node = tracks.of_node
        order = np.argsort(self.of_node, kind="stable")
        ends = np.cumsum(np.bincount(self.of_node, minlength=len(self.tracks)))
        self.nodes: list[I64] = np.split(order, ends[:-1])
        self.on_lane: list[list[int]] = [[] for _ in range(N_STREAMS)]
        self.lane = np.full(len(self.tracks), -1, np.int8)
        waits_of_compute = np.repeat(self.of_node == 0, np.diff(tracks.pred_ptr))
        awaited = np.bincount(self.of_node[tracks.pred[waits_of_compute]], minlength=len(self.tracks))
        told = awaited > 0
        """tracks that compute waits for give their lane's name to exposed time"""
        rank = [(not (track.message or told[t]), t) for t, track in enumerate(self.tracks)]
        self.first = [t for _, t in sorted(rank) if t]

    def place(self) -> tuple[I8, tuple[str, ...]]:
        self._put(0, Stream.COMPUTE)
        for track in self.first:
            self._try(track, (self.tracks[track].lane,))
        for joins in (False, True):
            for track in self.first:
                mine = self.tracks[track]
                if self.lane[track] < 0 and mine.joins == joins:
                    self._try(track, (*_FAMILIES.get(mine.lane, ()), *_SPARE))
        return self.lane, tuple(dict.fromkeys(self._share(t) for t in self.first if self.lane[t] < 0))

    def _put(self, track: int, lane: Stream) -> None:
        self.on_lane[lane].append(track)
        self.lane[track] = lane

    def _try(self, track: int, lanes: Sequence[Stream]) -> bool:
        for lane in lanes:
            if all(self._ordered(track, other) for other in self.on_lane[lane]):
                self._put(track, lane)
                return True
        return False

    def _ordered(self, one: int, other: int) -> bool:
        """Whether the nodes of two tracks run one after the other in issue order whatever their lanes."""
        nodes = np.sort(np.concatenate([self.nodes[one], self.nodes[other]]))
        track = self.of_node[nodes]
        change = np.flatnonzero(track[1:] != track[:-1])
        return bool((self.clock[nodes[change + 1], track[change]] >= nodes[change]).all())

    def _share(self, track: int) -> str:
        """Put a track that no lane is left for on that of its purpose; what is lost, in words."""
        lane = Stream.COPY if self.tracks[track].lane == Stream.COMPUTE else self.tracks[track].lane
        self._put(track, lane)
        return f"more streams than can be simulated: some that could overlap share {lane.name.lower()}"
