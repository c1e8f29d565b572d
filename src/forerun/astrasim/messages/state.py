"""The tables of the collectives of a program, and the progress of each chunk.

A collective is cut into *chunks*. A chunk runs through *phases*. Each phase is an algorithm on a logical ring of ranks.
A phase waits in the queue of its dimension, which runs a few phases at a time. The module `algorithms` runs phases,
`collectives` runs queues.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.astrasim.messages.calendar import Calendar, Records
from forerun.astrasim.messages.closed_form import ClosedForms
from forerun.astrasim.messages.fabric import Fabric, Traffic
from forerun.astrasim.messages.mailbox import Mailbox
from forerun.core.program.types import I8, I32, I64

RING = 0
DIRECT = 1
HALVING_DOUBLING = 2
DOUBLE_BINARY_TREE = 3
CUSTOM = 4
"""every rank runs its own steps (see `custom`)"""

ALL_REDUCE = 0
ALL_GATHER = 2
BROADCAST = 5
ALL_TO_ALL = 6
REDUCE_SCATTER = 7
"""the numbers of Chakra's CollectiveCommType"""

PICK_NEXT = 0
PICK_FIRST_HALF = 1
PICK_LAST_HALF = 2

BUNDLE = np.int64(1)
"""callback: a bundle has ended; `arg` is the stream, `extra` the reduction time that follows, -1 for none"""
RECEIVE = np.int64(3)
"""event: a receive was posted after its message had arrived"""
STEP = np.int64(5)
"""callback: a step of a custom algorithm has ended; `arg` is the stream, `extra` the step, -1 before the first"""

CALL = np.dtype(
    [
        ("communicator", np.int64),
        ("first_phase", np.int64),
        ("n_phases", np.int64),
        ("n_chunks", np.int64),
        ("priority", np.int64),
    ]
)
PHASE = np.dtype(
    [
        ("algorithm", np.int64),
        ("collective", np.int64),
        ("n", np.int64),  # ranks in the logical ring
        ("stride", np.int64),  # distance of ring neighbours in rank numbers; 0 if the ring is the communicator
        ("message", np.int64),  # bytes of every message
        ("n_messages", np.int64),  # messages that one rank sends
        ("window", np.int64),  # packets that start at once
        ("unreduced", np.int64),  # packets of a round, behind the first `window`, that are all reduced or not
        ("level", np.int64),  # dimension whose queues it uses
        ("pick", np.int64),
        ("endpoint_ns", np.int64),
        # halving-doubling: start of the sizes and distances of its messages; custom: its first program
        ("steps", np.int64),
        ("tree", np.int64),  # double binary tree: start of its pair of trees in the tree table
        ("tree_counter", np.int64),  # the counter that alternates between the two
    ]
)

STREAM = np.dtype(
    [
        ("node", np.int64),  # -1 if the slot is free
        ("call", np.int64),
        ("number", np.int64),  # in its communicator, the same on all ranks
        ("position", np.int64),  # of this rank in the communicator
        ("step", np.int64),  # the current phase, -1 before the first
        ("queue", np.int64),
        ("direction", np.int64),
        ("started", np.int64),
        ("priority", np.int64),
        ("index", np.int64),  # of this rank in the ring of the phase
        ("tree", np.int64),
        ("inserted", np.int64),
        ("sent", np.int64),
        ("received", np.int64),
        ("free", np.int64),
        ("to_send", np.int64),
        ("plain_left", np.int64),  # packets of this round that are not reduced in any case
        ("round_left", np.int64),
        ("first_round", np.int64),  # toggles from round to round
        ("state", np.int64),
        ("reductions", np.int64),
    ]
)


class Steps(NamedTuple):
    """The steps of custom algorithms: a phase has one program for each position of its ring."""

    program_ptr: I64
    """(programs + 1,) first step of each program"""
    action: I8
    other: I32
    """ring position of the peer"""
    amount: I64
    """bytes of a message, ns of a wait"""
    match: I64
    """number of the message"""
    n_pred: I32
    child_ptr: I64
    child: I32
    """steps of the same program, counted from its first"""
    sending: I32
    """(messages,) step of the sender's program that sends each message"""
    receiving: I32


class Collectives(NamedTuple):
    """The collectives of a program. Nothing here changes during a run."""

    call: Records
    phase: Records
    member_ptr: I64
    member: I64
    """ranks of each communicator, in ring order"""
    step_size: I64
    step_distance: I64
    tree: I64
    """(rows, 3): parent, left and right child of each ring position, -1 for none"""
    reduce_bytes_per_s: float
    """memory bandwidth of reductions"""
    n_queues: int
    """queues of each dimension"""
    active: int
    """chunks that a queue runs at a time"""
    steps: Steps
    policy: int
    """+1: newer collectives first (LIFO); -1: older first (FIFO); 0: by the priority of the call"""


class Streams(NamedTuple):
    """The chunks (streams) of every actor."""

    stream: Records
    """(actors * capacity,) the slots of an actor are consecutive"""
    capacity: int
    queue_of: I64
    """(streams, phases) queue, direction and tree of each phase, packed in a number"""
    queued: I64
    """(actors, queues, capacity) streams in order"""
    n_queued: I64
    n_running: I64
    allocator: I64
    """(actors, levels, 3) next queue by pick"""
    tree_counter: I64
    """(actors, counters)"""
    n_made: I64
    """(members of all communicators,) streams that the rank has started there"""
    priority: I64
    """(actors,)"""
    chunks_left: I64
    """(nodes,)"""
    steps_left: I32
    """(streams, 1 + steps of a custom algorithm) number of steps for which each step still waits"""


class Engine(NamedTuple):
    """The whole state of a message-level run."""

    calendar: Calendar
    fabric: Fabric
    traffic: Traffic
    mailbox: Mailbox
    collectives: Collectives
    streams: Streams
    forms: ClosedForms
