"""One message from a rank to another, while all other ranks compute."""

from __future__ import annotations

import numpy as np

from forerun.astrasim.astra.collectives import CollectiveTables
from forerun.astrasim.astra.fabric import fabric_of
from forerun.astrasim.astra.limits import MOST_RANKS
from forerun.astrasim.astra.lower import UNKNOWN_NS, LoweredProgram, empty_matches
from forerun.astrasim.astra.run import run_program
from forerun.astrasim.astra.system import System
from forerun.astrasim.messages.ready import SLOT_COMM, SLOT_COMPUTE, SLOT_NONE
from forerun.astrasim.messages.slots import RECV, SEND, TIMED, Nodes
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import Network
from forerun.core.program.types import I64

IDLE_NS = int(2e9 / 900e12 * 1e9)
"""what the other ranks compute: 2e9 operations at 900 TFLOPS, bound by compute"""


def message_times(network: Network, sender: int, receiver: int, size: int, aware: bool = False) -> I64:
    """When each rank is through with one message of `size` bytes sent at 0, in ns (ranks,).

    Sender and receiver end when it arrives, the others after IDLE_NS.

    Raises:
        ForerunError: sender or receiver is no rank, or both are the same.
    """
    n = network.n_npus
    for what, rank in (("sender", sender), ("receiver", receiver)):
        if not 0 <= rank < n:
            raise ForerunError(f"{what} {str(rank)[:20]} is no rank; the network has ranks 0 to {n - 1}")
    if n > MOST_RANKS:
        raise ForerunError(f"{n:,} ranks are more than the {MOST_RANKS:,} that are simulated")
    if sender == receiver:
        raise ForerunError(f"rank {sender} can't send to itself")
    if size < 1:
        raise ForerunError("a message needs a size above 0")
    action, slot = np.full(n, TIMED, np.int8), np.full(n, SLOT_COMPUTE, np.int8)
    action[sender], slot[sender] = SEND, SLOT_COMM
    action[receiver], slot[receiver] = RECV, SLOT_NONE
    duration_ns = np.where(action == SEND, UNKNOWN_NS, IDLE_NS)
    target = np.where(action == TIMED, -1, 0).astype(np.int32)
    position = np.where(action == SEND, receiver, 0).astype(np.int32)
    nothing = np.zeros(n, np.int64)
    nodes = Nodes(
        first=np.arange(n + 1),
        action=action,
        slot=slot,
        duration_ns=duration_ns,
        tail_ns=nothing,
        target=target,
        position=position,
        size=np.full(n, size, np.int64),
        n_pred=np.zeros(n, np.int32),
        child_ptr=np.zeros(n + 1, np.int64),
        child=np.zeros(0, np.int32),
        root=np.arange(n),
        root_ptr=np.arange(n + 1),
    )
    text = f"{size} bytes from rank {sender} to rank {receiver}"
    program = LoweredProgram(nodes, empty_matches((1,)), np.zeros(0, np.int64), (), (text,))
    tables = CollectiveTables(System.model_validate({}), [dim.n_npus for dim in network.dims])
    return run_program(program, tables, fabric_of(network, aware)).result.end_ns
