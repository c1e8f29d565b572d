"""Places the tracks of a recording on the engine's streams.

Tracks share a stream only where their nodes would run one after the other anyway. Each takes the stream of its purpose,
or one of the same kind of traffic, or else an unused one (whose name then says little, but which keeps the overlap).
Only when all streams are taken do tracks share one that could overlap, and a note says so.
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
"""The streams to take for tracks of other purposes, the least needed first."""


@dataclass(frozen=True, slots=True)
class StreamPlacement:
    """The engine's stream of every node of one recording."""

    of_node: I8
    named: I8
    """(N,) 1 if the stream is that of the node's own kind of traffic."""
    notes: tuple[str, ...]


def place_on_streams(recording: Recording, tracks: Tracks) -> StreamPlacement:
    """Returns the engine's stream of every node."""
    clock, _ = last_ended(tracks.of_node, tracks.pred_ptr, tracks.pred, recording.sync, len(tracks.tracks))
    stream, notes = _Placing(tracks, clock).place()
    wanted = np.array([track.wanted for track in tracks.tracks], np.int8)
    return StreamPlacement(stream[tracks.of_node], (stream == wanted).astype(np.int8)[tracks.of_node], notes)


class _Placing:
    """Places tracks on streams, the most important ones first."""

    def __init__(self, tracks: Tracks, clock: I32) -> None:
        self.tracks, self.clock = tracks.tracks, clock
        self.of_node = tracks.of_node
        order = np.argsort(self.of_node, kind="stable")
        ends = np.cumsum(np.bincount(self.of_node, minlength=len(self.tracks)))
        self.nodes: list[I64] = np.split(order, ends[:-1])
        self.on_stream: list[list[int]] = [[] for _ in range(N_STREAMS)]
        self.stream = np.full(len(self.tracks), -1, np.int8)
        waits_of_compute = np.repeat(self.of_node == 0, np.diff(tracks.pred_ptr))
        awaited = np.bincount(self.of_node[tracks.pred[waits_of_compute]], minlength=len(self.tracks))
        told = awaited > 0
        """Exposed time gets the name of the stream that compute waits for, so these tracks come first."""
        rank = [(not (track.message or told[t]), t) for t, track in enumerate(self.tracks)]
        self.first = [t for _, t in sorted(rank) if t]

    def place(self) -> tuple[I8, tuple[str, ...]]:
        self._put(0, Stream.COMPUTE)
        for track in self.first:
            self._try(track, (self.tracks[track].wanted,))
        for joins in (False, True):
            for track in self.first:
                mine = self.tracks[track]
                if self.stream[track] < 0 and mine.joins == joins:
                    self._try(track, (*_FAMILIES.get(mine.wanted, ()), *_SPARE))
        return self.stream, tuple(dict.fromkeys(self._share(t) for t in self.first if self.stream[t] < 0))

    def _put(self, track: int, stream: Stream) -> None:
        self.on_stream[stream].append(track)
        self.stream[track] = stream

    def _try(self, track: int, streams: Sequence[Stream]) -> bool:
        for stream in streams:
            if all(self._ordered(track, other) for other in self.on_stream[stream]):
                self._put(track, stream)
                return True
        return False

    def _ordered(self, one: int, other: int) -> bool:
        """Returns whether the nodes of two tracks run one after the other in issue order on whatever streams they
        are."""
        nodes = np.sort(np.concatenate([self.nodes[one], self.nodes[other]]))
        track = self.of_node[nodes]
        change = np.flatnonzero(track[1:] != track[:-1])
        return bool((self.clock[nodes[change + 1], track[change]] >= nodes[change]).all())

    def _share(self, track: int) -> str:
        """Places a track that no stream is left for on that of its purpose, and returns a note."""
        stream = Stream.COPY if self.tracks[track].wanted == Stream.COMPUTE else self.tracks[track].wanted
        self._put(track, stream)
        return f"more streams than can be simulated: some that could overlap share {stream.name.lower()}"
