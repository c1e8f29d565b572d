"""Divides a recording into tracks: sequences of nodes that run in order, beside the other tracks.

A recorded stream is one track, with two exceptions. Collectives on the compute stream have separate tracks, so that
they count as communication. Messages have one track for each direction and peer, because NCCL runs the messages of one
batch together. Predecessors keep the order that a recorded stream had across its tracks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from forerun.core.program.types import I32, I64, Collective, Phase, Stream
from forerun.sources.trace.roles import Roles, axis_of

_AXES = {
    Stream.REDUCE: {"dp", "ddp", "fsdp", "hsdp", "data", "shard", "replicate"},
    Stream.TP: {"tp", "tensor", "model", "etp"},
    Stream.CP: {"cp", "context", "seq", "sequence", "sp", "ulysses"},
    Stream.EP: {"ep", "expert", "experts", "moe"},
    Stream.PP_SEND: {"pp", "pipe", "pipeline", "stage"},
}
_STREAM_OF_WORD = {word: stream for stream, words in _AXES.items() for word in words}
COMPUTE_STREAM = 0
"""The number of the default stream in recordings."""


@dataclass(frozen=True, slots=True)
class Track:
    """The purpose of one track."""

    wanted: Stream
    """The engine's stream for this kind of work."""
    message: bool = False
    joins: bool = False
    """Whether it consists only of waits of the host."""


@dataclass(frozen=True, slots=True)
class Tracks:
    """The tracks of one recording."""

    of_node: I32
    """(N,); track 0 is compute."""
    tracks: tuple[Track, ...]
    pred_ptr: I64
    pred: I32
    """CSR: the waits of the recording, and predecessors on the same recorded stream but another track."""


def collective_stream(name: str, collective: int, phase: int, data_parallel: bool) -> Stream:
    """Returns the engine's stream for a collective over process group `name`: by the group's axis, or by its use where
    the name doesn't tell."""
    axis = axis_of(name).lower()
    words = (_STREAM_OF_WORD.get(word) for word in axis.split("_"))
    stream = next((stream for stream in words if stream is not None), None)
    if stream is None and data_parallel:
        stream = Stream.REDUCE
    if stream is None and collective == Collective.ALL_TO_ALL:
        return Stream.EP
    if stream is None:
        return Stream.REDUCE if phase == Phase.OPTIMIZER else Stream.TP
    if stream == Stream.REDUCE and collective in (Collective.ALL_GATHER, Collective.BROADCAST):
        return Stream.GATHER
    return stream


def tracks_of(roles: Roles, role: int) -> Tracks:
    """Returns the tracks of one recording."""
    return _Builder(roles, role).tracks()


class _Builder:
    def __init__(self, roles: Roles, role: int) -> None:
        self.roles, self.role, self.recording = roles, role, roles.recordings[role]
        one = self.recording
        self.is_collective, self.is_transfer = one.ops.is_collective[one.op], one.ops.is_transfer[one.op]
        self.sends = one.ops.sends
        """Whether each op is a send."""
        self.recorded_stream: list[int] = one.stream.tolist()
        self._streams = self._collective_streams()
        self._numbers: dict[tuple[object, ...], int] = {}
        self._own: list[Track] = []
        """The tracks that are no recorded stream."""

    def tracks(self) -> Tracks:
        one = self.recording
        _, streams = np.unique(one.stream, return_inverse=True)
        number: I32 = (streams.reshape(-1) + 1).astype(np.int32)
        number[one.stream == COMPUTE_STREAM] = 0
        talks = one.ops.is_communication[one.op]
        moved = np.flatnonzero(self.is_transfer | (talks & (one.stream == COMPUTE_STREAM)))
        first = int(number.max(initial=0)) + 1
        for node in moved.tolist():
            number[node] = first + self._number(node)
        used, dense = np.unique(np.concatenate([[0], number]), return_inverse=True)
        track: I32 = dense.reshape(-1)[1:].astype(np.int32)
        extra = self._stream_order(track, set(one.stream[moved].tolist()))
        waiter = np.repeat(np.arange(len(one)), np.diff(one.wait_ptr))
        ptr, pred = _csr(len(one), waiter * len(one) + one.wait, extra)
        known = {k: self._own[n - first] for k, n in enumerate(used.tolist()) if n >= first}
        return Tracks(track, self._purposes(track, len(used), known, ptr, pred), ptr, pred)

    # -- which track -------------------------------------------------------------------------------------------

    def _collective_streams(self) -> dict[tuple[int, int], Stream]:
        """Returns the engine's stream of each collective by (op, phase)."""
        one = self.recording
        parallel = set(one.meta.get("data_parallel") or ())
        out = {}
        rows = np.flatnonzero(self.is_collective)
        for op, phase in {(int(one.op[i]), int(one.phase[i])) for i in rows}:
            group = int(one.ops.group[op])
            name = one.groups[group][0] if group >= 0 else ""
            out[op, phase] = collective_stream(name, int(one.ops.collective[op]), phase, name in parallel)
        return out

    def _number(self, node: int) -> int:
        """Returns the number among the tracks that are no recorded stream: a collective's by its stream, a message's by
        both ends."""
        one = self.recording
        op, phase = int(one.op[node]), int(one.phase[node])
        key = (op, int(one.peer[node]), self.recorded_stream[node], phase)
        if key not in self._numbers:
            if self.is_collective[node]:
                track = Track(self._streams[op, phase])
                ends: tuple[object, ...] = (track.wanted,)
            else:
                peer = self.roles.of_peer(self.role, int(one.ops.group[op]), int(one.peer[node]))
                track = Track(self._message_stream(op, peer), message=True)
                ends = (self.recorded_stream[node], bool(self.sends[op]), peer, track.wanted)
            if ends not in self._numbers:
                self._numbers[ends] = len(self._own)
                self._own.append(track)
            self._numbers[key] = self._numbers[ends]
        return self._numbers[key]

    def _message_stream(self, op: int, peer: int) -> Stream:
        one = self.recording
        group, sends = int(one.ops.group[op]), bool(self.sends[op])
        if peer == self.role:
            stream = _STREAM_OF_WORD.get(axis_of(one.groups[group][0]).lower()) if group >= 0 else None
            return stream if stream is not None else Stream.CP
        if peer > self.role:
            return Stream.PP_SEND if sends else Stream.PP_RECV_GRAD
        return Stream.PP_SEND_GRAD if sends else Stream.PP_RECV

    # -- order inside a stream ---------------------------------------------------------------------------------

    def _stream_order(self, track: I32, streams: set[int]) -> I64:
        """Returns the predecessors that the order of `streams`, which have several tracks, implies: waiter x N +
        node."""
        out = [np.zeros(0, np.int64)]
        for number in streams:
            nodes = np.flatnonzero(self.recording.stream == number)
            if self.is_transfer[nodes].any():
                out.append(np.array(self._batch_order(nodes, track[nodes].tolist()), np.int64))
            else:
                turns = np.flatnonzero(np.diff(track[nodes]))
                out.append(nodes[turns + 1] * len(track) + nodes[turns])
        return np.concatenate(out)

    def _batch_order(self, nodes: I64, tracks: list[int]) -> list[int]:
        """Returns the predecessors of one stream that has messages.

        Messages of one stream that are neighbours in issue order form a batch: they run together, and each waits for
        everything that the batch waited for so far.
        """
        one, n = self.recording, len(self.recording)
        out: list[int] = []
        waited_for: dict[int, int] = {}
        """The last node of each track in the preceding batch or node."""
        batch: dict[int, int] = {}
        waits: list[int] = []
        last, joins = -2, False
        is_message = self.is_transfer[nodes].tolist()
        for node, track, message in zip(nodes.tolist(), tracks, is_message, strict=True):
            if not (message and joins and last == node - 1):
                waited_for, batch, waits = batch, {}, []
            out += [node * n + p for t, p in waited_for.items() if t != track]
            out += [node * n + p for p in waits]
            if message:
                waits += one.wait[one.wait_ptr[node] : one.wait_ptr[node + 1]].tolist()
            batch[track] = node
            last, joins = node, message and not one.sync[node]
        return out

    # -- purposes ----------------------------------------------------------------------------------------------

    def _purposes(self, track: I32, n_tracks: int, known: dict[int, Track], ptr: I64, pred: I32) -> tuple[Track, ...]:
        """Returns the purpose of each track. A track of kernels has the purpose of the track that waits for it, or else
        of the track that it waits for.
        """
        one = self.recording
        known = {0: Track(Stream.COMPUTE), **known}
        idle = one.ops.is_delay[one.op] & (one.sync == 1) & (one.stream != COMPUTE_STREAM)
        for number in set(range(n_tracks)) - set(known):
            nodes = np.flatnonzero(track == number)
            mine = Track(Stream.COMPUTE, joins=True) if idle[nodes].all() else self._own_purpose(nodes)
            known |= {number: mine} if mine else {}
        waiter = np.repeat(track, np.diff(ptr))
        telling = {number: one.wanted for number, one in known.items() if number and not one.joins}
        for number in set(range(n_tracks)) - set(known):
            around = waiter[track[pred] == number].tolist() + track[pred][waiter == number].tolist()
            near = Counter(telling[t] for t in around if t in telling)
            known[number] = Track(near.most_common(1)[0][0] if near else Stream.COPY)
        return tuple(known[number] for number in range(n_tracks))

    def _own_purpose(self, nodes: I64) -> Track | None:
        """Returns the purpose of a track by the group of most of its communication."""
        one = self.recording
        talk = nodes[self.is_collective[nodes]]
        if len(talk):
            pairs = zip(one.op[talk].tolist(), one.phase[talk].tolist(), strict=True)
            return Track(Counter(self._streams[pair] for pair in pairs).most_common(1)[0][0])
        return Track(Stream.COPY) if one.ops.is_host_copy[one.op[nodes]].any() else None


def _csr(n: int, *pairs: I64) -> tuple[I64, I32]:
    """Returns CSR pointer and values of `pairs` (node x n + value), each once."""
    distinct = np.unique(np.concatenate(pairs))
    ptr = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(distinct // n, minlength=n), out=ptr[1:])
    return ptr, (distinct % n).astype(np.int32)
