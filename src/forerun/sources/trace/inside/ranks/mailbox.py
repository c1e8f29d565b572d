"""Mailbox: passes real data from one traced rank to another through the process that started both.

The parent gives the file descriptor of an open socket in the environment. A message is a header of fixed size and the
payload; `coordinator.py` is the parent's side.
"""

from __future__ import annotations

import os
import socket
import threading

from forerun.common.errors import ForerunError
from forerun.sources.trace.coordinator import FAILED, HEADER, RECEIVE, SEND, VARIABLE


class Mailbox:
    """This rank's side of the connection. It handles one request at a time."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self._connection = rank, connection
        self._lock = threading.Lock()

    @classmethod
    def from_environment(cls, rank: int) -> Mailbox | None:
        """Returns the mailbox whose descriptor the environment names; None without one."""
        descriptor = os.environ.get(VARIABLE)
        return None if not descriptor else cls(rank, socket.socket(fileno=int(descriptor)))

    def send(self, peer: int, key: str, data: bytes) -> None:
        """Leaves `data` for rank `peer` under `key` and does not wait.

        Raises:
            ForerunError: the parent has ended.
        """
        with self._lock:
            self._write(SEND, self.rank, peer, key, data)

    def receive(self, peer: int, key: str) -> bytes:
        """Returns the data that rank `peer` leaves under `key`, waiting for it.

        Raises:
            ForerunError: the peer failed, ended without sending it, or all ranks wait for each other.
        """
        with self._lock:
            self._write(RECEIVE, peer, self.rank, key, b"")
            try:
                kind, _, _, _, data = read(self._connection)
            except (OSError, EOFError) as error:
                raise ForerunError(f"receive from rank {peer}: the tracing process is gone ({error})") from error
        if kind == FAILED:
            raise ForerunError(data.decode("utf-8", errors="replace"))
        return data

    def _write(self, kind: bytes, source: int, destination: int, key: str, data: bytes) -> None:
        try:
            self._connection.sendall(packed(kind, source, destination, key, data))
        except OSError as error:
            raise ForerunError(f"message to rank {destination}: the tracing process is gone ({error})") from error


def packed(kind: bytes, source: int, destination: int, key: str, data: bytes) -> bytes:
    """Returns a message as bytes."""
    name = key.encode()
    return HEADER.pack(kind, source, destination, len(name), len(data)) + name + data


def read(connection: socket.socket) -> tuple[bytes, int, int, str, bytes]:
    """Reads the next message, blocking: its kind, source, destination, key and payload.

    Raises:
        EOFError: the other side is closed.
    """
    kind, source, destination, name_bytes, data_bytes = HEADER.unpack(_exactly(connection, HEADER.size))
    name = _exactly(connection, name_bytes)
    return kind, source, destination, name.decode(), _exactly(connection, data_bytes)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(1 << 20, count - len(data)))
        if not part:
            raise EOFError("closed")
        data += part
    return bytes(data)
