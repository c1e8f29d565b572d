"""The state that all process groups of a traced process share."""

from __future__ import annotations

from forerun.sources.trace.inside.ranks.mailbox import Mailbox
from forerun.sources.trace.inside.ranks.symmetric import Values
from forerun.sources.trace.inside.recorder import Recorder


class Transport:
    """The recorder, the known values of tensors, and the connection to other ranks' processes; set once."""

    recorder: Recorder
    values = Values(None, None)
    mailbox: Mailbox | None = None


def no_peer(operation: str, peer: int) -> str:
    """Returns the error message for data that only another rank's process has."""
    return f"{operation}: only rank {peer} has this data, and it is not traced; trace without --rank"
