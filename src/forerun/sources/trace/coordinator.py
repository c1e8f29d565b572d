"""Coordinator: passes real data between the traced processes of one program, and starts the processes that are needed.

Ranks are traced one by one. When one asks for data of another rank, or sends data to it, the coordinator starts that
rank's process. Messages wait here until they are asked for; the protocol is that of `inside/ranks/mailbox.py`.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from forerun.common.errors import ForerunError

VARIABLE = "FORERUN_MAILBOX"
"""The environment variable with the file descriptor of a rank's connection."""
HEADER = struct.Struct("<cqqII")
"""The message's kind, source rank, destination rank, and the bytes of its key and of its payload."""
SEND, RECEIVE, DATA, FAILED = b"s", b"r", b"d", b"f"
MOST_RANKS = 256
_EVERYBODY = -1
_Key = tuple[int, int, str]


@dataclass
class _Rank:
    """One connected rank."""

    connection: socket.socket
    child_end: int
    read: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    wanted: _Key | None = None
    """The key of the message that it waits for."""
    ended: bool = False


class Coordinator:
    """The parent's side of the connections. `start_rank(rank)` must start that rank's process after `connect(rank)`,
    unless it runs.

    At most `most_ranks` ranks are traced: a program where one rank receives from all others can't be traced rank by
    rank.
    """

    def __init__(self, start_rank: Callable[[int], None], most_ranks: int = MOST_RANKS) -> None:
        self._start, self._most_ranks = start_rank, most_ranks
        self._ranks: dict[int, _Rank] = {}
        self._messages: dict[_Key, bytes] = {}
        self._selector = selectors.DefaultSelector()

    def connect(self, rank: int) -> int:
        """Returns a file descriptor for the process of `rank`: pass it on and close it."""
        here, there = socket.socketpair()
        here.setblocking(False)
        descriptor = there.detach()
        self._ranks[rank] = _Rank(here, descriptor)
        self._selector.register(here, selectors.EVENT_READ, rank)
        return descriptor

    def environment(self, rank: int) -> dict[str, str]:
        """Returns the environment variables that the process of `rank` needs."""
        return {VARIABLE: str(self._ranks[rank].child_end)}

    def poll(self, timeout_s: float) -> None:
        """Passes messages on for at most about `timeout_s`, and returns after the first ones.

        Raises:
            ForerunError: too many ranks exchange data, or a rank sends an invalid message.
        """
        for key, events in self._selector.select(timeout_s):
            rank = key.data
            if events & selectors.EVENT_WRITE:
                self._flush(rank)
            if events & selectors.EVENT_READ:
                self._read(rank)
        self._look_for_deadlock()

    def ended(self, rank: int) -> None:
        """Notes that the process of `rank` has ended: ranks that still wait for it get an error."""
        known = self._ranks.get(rank)
        if known is None or known.ended:
            return
        self._read(rank)
        known.ended = True
        self._disconnect(known)
        for waiting, other in self._ranks.items():
            if other.wanted is not None and other.wanted[0] == rank:
                self._fail(waiting, f"receive from rank {rank}: that rank's program ended without sending it")

    def close(self) -> None:
        """Closes all connections."""
        for rank in self._ranks.values():
            self._disconnect(rank)
        self._selector.close()

    # -- messages ---------------------------------------------------------------------------------------------

    def _disconnect(self, rank: _Rank) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(rank.connection)
        rank.connection.close()
        rank.wanted = None

    def _read(self, number: int) -> None:
        rank = self._ranks[number]
        try:
            while data := rank.connection.recv(1 << 20):
                rank.read += data
        except BlockingIOError:
            self._take(number)
            return
        except OSError:
            pass
        self._take(number)
        self._disconnect(rank)

    def _take(self, number: int) -> None:
        """Handles all messages that have arrived completely."""
        buffer = self._ranks[number].read
        while len(buffer) >= HEADER.size:
            kind, source, destination, name_bytes, data_bytes = HEADER.unpack_from(buffer)
            end = HEADER.size + name_bytes + data_bytes
            if len(buffer) < end:
                return
            body = bytes(buffer[HEADER.size : end])
            del buffer[:end]
            key = (source, destination, body[:name_bytes].decode())
            if kind == SEND:
                self._sent(key, body[name_bytes:])
            elif kind == RECEIVE:
                self._asked(number, key)
            else:
                raise ForerunError(f"rank {number}: sent a message that can't be read")

    def _sent(self, key: _Key, data: bytes) -> None:
        source, destination, name = key
        self._messages[key] = data
        if destination != _EVERYBODY:
            self._need(destination)
        for number, rank in self._ranks.items():
            wanted = rank.wanted
            if wanted is not None and wanted[0] == source and wanted[2] == name:
                self._answer(number, wanted)

    def _asked(self, number: int, key: _Key) -> None:
        self._ranks[number].wanted = key
        if self._answer(number, key):
            return
        source = key[0]
        self._need(source)
        if self._ranks[source].ended:
            self._fail(number, f"receive from rank {source}: that rank's program ended without sending it")

    def _need(self, number: int) -> None:
        if number in self._ranks:
            return
        if len(self._ranks) >= self._most_ranks:
            raise ForerunError(f"rank {number}: more than {self._most_ranks} ranks exchange data with each other")
        self._start(number)

    def _answer(self, number: int, key: _Key) -> bool:
        """Gives rank `number` the message that it waits for, and returns whether it was there."""
        source, _, name = key
        data = self._messages.pop(key, None)
        if data is None:
            data = self._messages.get((source, _EVERYBODY, name))
        if data is None:
            return False
        self._reply(number, DATA, data)
        return True

    def _fail(self, number: int, text: str) -> None:
        self._reply(number, FAILED, text.encode())

    def _reply(self, number: int, kind: bytes, data: bytes) -> None:
        rank = self._ranks[number]
        rank.wanted = None
        rank.unsent += HEADER.pack(kind, 0, number, 0, len(data)) + data
        self._flush(number)

    def _flush(self, number: int) -> None:
        rank = self._ranks[number]
        try:
            while rank.unsent:
                del rank.unsent[: rank.connection.send(rank.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            rank.unsent.clear()
        with contextlib.suppress(KeyError, ValueError):
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank.unsent else 0)
            self._selector.modify(rank.connection, events, number)

    def _look_for_deadlock(self) -> None:
        """Sends an error to each rank if all that still run wait for each other."""
        running = {number: rank for number, rank in self._ranks.items() if not rank.ended}
        if not running or any(rank.wanted is None for rank in running.values()):
            return
        waits = {number: rank.wanted[0] for number, rank in running.items() if rank.wanted is not None}
        told = ", ".join(f"rank {number} for rank {source}" for number, source in sorted(waits.items()))
        for number in waits:
            self._fail(number, f"receive from rank {waits[number]}: all traced ranks wait: {told}")
