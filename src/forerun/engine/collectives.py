"""Collective algorithms as state machines that send messages: one machine per chunk and rank.

A collective is cut into *chunks*; a chunk runs through *phases*, each an algorithm on a logical ring of ranks; a phase
waits in the queue of its dimension, which runs a few at a time. The machines, their queues and their rounding are those
of ASTRA-sim's system layer (`Sys`, `Ring`, `AllToAll`, `HalvingDoubling`, `DoubleBinaryTreeAllReduce`).

A machine alternates between *bundles* (a packet on its way between processor and memory, `endpoint_ns` and, where it
is reduced, the time of a write and two reads) and messages. It posts a receive for every message that it sends.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from forerun.engine.calendar import NOW, Calendar, Records, register, schedule
from forerun.engine.fabric import Fabric, Traffic, new_message, send
from forerun.engine.mailbox import Mailbox, post
from forerun.jit import inlined, kernel
from forerun.program.types import I8, I32, I64

RING = 0
DIRECT = 1
HALVING_DOUBLING = 2
DOUBLE_BINARY_TREE = 3
CUSTOM = 4
"""each rank runs a program of steps (`custom`)"""

ALL_REDUCE = 0
ALL_GATHER = 1
REDUCE_SCATTER = 2
ALL_TO_ALL = 3
BROADCAST = 4

PICK_NEXT = 0
PICK_FIRST_HALF = 1
PICK_LAST_HALF = 2

BUNDLE = np.int64(1)
"""callback: a bundle is through; `arg` the stream, `extra` the reduction time that is still to come"""
RECEIVE = np.int64(3)
"""event: a receive was posted after its message had arrived"""
STEP = np.int64(5)
"""callback: `extra` is the step of a custom algorithm that has ended, -1 before the first; `arg` the stream"""

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
        ("stride", np.int64),  # distance of ring neighbours in rank numbers; 0: the ring is the communicator
        ("message", np.int64),  # bytes of every message
        ("n_messages", np.int64),  # that one rank sends
        ("window", np.int64),  # packets that start at once
        ("unreduced", np.int64),  # packets of a round after the first `window` that are reduced or not together
        ("level", np.int64),  # whose queues it uses
        ("pick", np.int64),
        ("endpoint_ns", np.int64),
        (
            "steps",
            np.int64,
        ),  # halving-doubling: where its messages' sizes and distances start; custom: its first program
        ("tree", np.int64),  # double binary tree: where its pair of trees starts in the tree table
        ("tree_counter", np.int64),  # which counter alternates between the two
    ]
)

STREAM = np.dtype(
    [
        ("node", np.int64),  # -1: free
        ("call", np.int64),
        ("number", np.int64),  # in its communicator, equal on all its ranks
        ("position", np.int64),  # of this rank in the communicator
        ("step", np.int64),  # phase that runs, -1 before the first
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
        ("plain_left", np.int64),  # packets of this round that are surely not reduced
        ("round_left", np.int64),
        ("first_round", np.int64),  # toggles from round to round
        ("state", np.int64),
        ("reductions", np.int64),
    ]
)

_WAIT_TWO = 1
_WAIT_ONE = 2
_SEND_UP = 3
_WAIT_PARENT = 4
_SEND_DOWN = 5
_END = 6
_OVER = 7
_MOVE_NOTHING = 0
_MOVE_POST = 1  # receives from the children
_MOVE_BUNDLE = 2
_MOVE_REDUCE = 3
_MOVE_UP = 4
_MOVE_DOWN = 5
_NOBODY = np.int64(-1)
_REDUCED = np.int64(1)
_PLAIN = np.int64(0)
_RECEIVED = np.int64(1)
_BUNDLE_DONE = np.int64(0)


class Steps(NamedTuple):
    """Programs of custom algorithms. A phase has one for each place in its ring."""

    program_ptr: I64
    """(programs + 1,) first step of each program"""
    action: I8
    other: I32
    """place of the peer in the ring"""
    amount: I64
    """bytes of a message, ns of a wait"""
    match: I64
    """number of the message"""
    n_pred: I32
    child_ptr: I64
    child: I32
    """steps of the same program, counted from its first"""
    sending: I32
    """(messages,): step of its program that sends it"""
    receiving: I32


class Collectives(NamedTuple):
    """What the collectives of a program are made of; nothing here changes while it runs."""

    call: Records
    phase: Any
    member_ptr: I64
    member: I64
    """ranks of each communicator, in ring order"""
    step_size: I64
    step_distance: I64
    tree: I64
    """(rows, 3): parent, left and right child of each ring position, -1 for none"""
    reduce_bytes_per_s: float
    """memory bandwidth that reductions run at"""
    n_queues: int
    """queues of each dimension"""
    active: int
    """chunks that a queue runs at the same time"""
    steps: Steps
    policy: int
    """+1: newer collectives first, -1: older first, 0: by the call's priority"""


class Streams(NamedTuple):
    """The chunks that every actor works on."""

    stream: Records
    """(actors * capacity,), the slots of an actor one after the other"""
    capacity: int
    queue_of: I64
    """(streams, phases): queue, direction and tree of each phase, packed"""
    queued: I64
    """(actors, queues, capacity): streams in order"""
    n_queued: I64
    n_running: I64
    allocator: I64
    """(actors, levels, 3): next queue by pick"""
    tree_counter: I64
    """(actors, counters)"""
    n_made: I64
    """(members of all communicators,): streams that the rank has started there"""
    priority: I64
    """(actors,)"""
    chunks_left: I64
    """(nodes,)"""
    steps_left: I32
    """(streams, 1 + steps of a custom algorithm): for how many others each step waits"""


class Engine(NamedTuple):
    calendar: Calendar
    fabric: Fabric
    traffic: Traffic
    mailbox: Mailbox
    collectives: Collectives
    streams: Streams


@kernel
def reduction_ns(size: int, bytes_per_s: float) -> int:
    """One write and two reads of a reduced message."""
    return 3 * int(size / bytes_per_s * 1e9)


@kernel
def ring_member(collectives: Collectives, stream: Any, phase: Any, rank: int, index: int) -> int:
    """Rank at ring position `index`."""
    if phase.stride == 0:
        first = collectives.member_ptr[collectives.call[stream.call].communicator]
        return int(collectives.member[first + index])
    return int(rank + (index - stream.index) * phase.stride)


@inlined
def _send_and_post(engine: Engine, actor: int, s: int, to_index: int, from_index: int, size: int) -> None:
    """Send to one ring position (-1: none) and post the receive of a message from another (-1: none)."""
    fabric = engine.fabric
    stream = engine.streams.stream[s]
    call = engine.collectives.call[stream.call]
    phase = engine.collectives.phase[call.first_phase + stream.step]
    rank = fabric.rank[actor]
    source = ring_member(engine.collectives, stream, phase, rank, from_index) if from_index >= 0 else -1
    if to_index >= 0:
        target = ring_member(engine.collectives, stream, phase, rank, to_index)
        to = target
        lane = rank * fabric.n_ranks + target
        if fabric.mirrored:
            to = actor
            lane = source * fabric.n_ranks + rank
        m = new_message(engine.calendar, engine.traffic, to, target, call.communicator, stream.number, lane, size)
        if m > 0:
            send(engine.calendar, fabric, engine.traffic, m, rank)
    if source >= 0:
        lane = source * fabric.n_ranks + rank
        if post(engine.mailbox, engine.calendar.clock, call.communicator, stream.number, lane):
            m = new_message(engine.calendar, engine.traffic, actor, actor, call.communicator, stream.number, lane, size)
            schedule(engine.calendar, engine.calendar.clock[NOW], RECEIVE, m)


@inlined
def find_stream(engine: Engine, actor: int, communicator: int, number: int) -> int:
    """The stream of `actor` with that number in the communicator."""
    streams = engine.streams
    first = actor * streams.capacity
    for k in range(streams.capacity):
        s = first + (number + k) % streams.capacity
        stream = streams.stream[s]
        if (
            stream.node >= 0
            and stream.number == number
            and engine.collectives.call[stream.call].communicator == communicator
        ):
            return int(s)
    return -1


@kernel
def _bundle(engine: Engine, actor: int, s: int, phase: Any, size: int, reduced: int) -> None:
    later = reduction_ns(size, engine.collectives.reduce_bytes_per_s) if reduced else np.int64(0)
    register(engine.calendar, actor, phase.endpoint_ns, BUNDLE, s, later if reduced else _NOBODY)


@kernel
def _insert_packet(engine: Engine, actor: int, s: int, phase: Any) -> None:
    """Start a bundle; rounds of packets take turns in being reduced."""
    stream = engine.streams.stream[s]
    if stream.plain_left == 0 and stream.round_left == 0:
        stream.plain_left = phase.window
        stream.round_left = phase.unreduced
        stream.first_round = 1 - stream.first_round
    reduced = _PLAIN
    if stream.plain_left > 0:
        stream.plain_left -= 1
    else:
        stream.round_left -= 1
        if phase.collective == REDUCE_SCATTER or (phase.collective == ALL_REDUCE and stream.first_round == 1):
            reduced = _REDUCED
    size = phase.message
    if phase.algorithm == HALVING_DOUBLING:
        size = engine.collectives.step_size[phase.steps + stream.inserted]
    stream.inserted += 1
    _bundle(engine, actor, s, phase, size, reduced)


@inlined
def _ready(engine: Engine, actor: int, s: int, phase: Any) -> None:
    """Send the next packet if there is one and a bundle is free for it."""
    stream = engine.streams.stream[s]
    if stream.inserted == stream.sent or stream.to_send == 0 or stream.free == 0:
        return
    n = phase.n
    size = phase.message
    if phase.algorithm == RING:
        to_index = (stream.index + stream.direction) % n
        from_index = (stream.index - stream.direction) % n
    elif phase.algorithm == DIRECT:
        distance = (stream.sent % (n - 1) + 1) * stream.direction
        to_index = (stream.index + distance) % n
        from_index = (stream.index - distance) % n
    else:
        distance = engine.collectives.step_distance[phase.steps + stream.sent]
        size = engine.collectives.step_size[phase.steps + stream.sent]
        if (stream.index // distance) % 2 == 1:
            distance = -distance
        to_index = (stream.index + distance) % n
        from_index = to_index
    _send_and_post(engine, actor, s, to_index, from_index, size)
    stream.to_send -= 1
    stream.sent += 1
    stream.free -= 1


@kernel
def _tree_step(engine: Engine, actor: int, s: int, phase: Any, received: int) -> bool:
    """One step of the double binary tree all-reduce; whether the phase is over."""
    stream = engine.streams.stream[s]
    row = phase.tree + stream.tree * phase.n + stream.index
    tree = engine.collectives.tree
    parent, left, right = tree[row, 0], tree[row, 1], tree[row, 2]
    if parent < 0:
        move = _root_move(stream)
    elif left < 0 and right < 0:
        move = _leaf_move(stream)
    else:
        move = _inner_move(stream, received)
    if move in (_MOVE_BUNDLE, _MOVE_REDUCE):
        _bundle(engine, actor, s, phase, phase.message, _REDUCED if move == _MOVE_REDUCE else _PLAIN)
    elif move != _MOVE_NOTHING:
        for k in range(2):
            other = left if k == 0 else right
            to, source = _NOBODY, _NOBODY
            if move == _MOVE_POST:
                source = other
            elif move == _MOVE_DOWN:
                to = other
            elif k == 0:
                to, source = parent, parent
            _send_and_post(engine, actor, s, to, source, phase.message)
    return bool(move == _MOVE_DOWN or stream.state == _OVER)


@kernel
def _inner_move(stream: Any, received: int) -> int:
    """What a rank with parent and children does next."""
    if stream.state == 0:
        stream.state = _WAIT_TWO
        return _MOVE_POST
    if stream.state == _WAIT_TWO and received:
        stream.state = _WAIT_ONE
        return _MOVE_REDUCE
    if stream.state == _WAIT_ONE and received:
        stream.state = _SEND_UP
        return _MOVE_REDUCE
    if stream.reductions < 1 and not received:
        stream.reductions += 1
    elif stream.state == _SEND_UP:
        stream.state = _WAIT_PARENT
        return _MOVE_UP
    elif stream.state == _WAIT_PARENT and received:
        stream.state = _SEND_DOWN
        return _MOVE_REDUCE
    elif stream.state == _SEND_DOWN:
        return _MOVE_DOWN
    return _MOVE_NOTHING


@kernel
def _root_move(stream: Any) -> int:
    """What the root, which has one child, does next."""
    if stream.state == 0:
        stream.state = _WAIT_ONE
        return _MOVE_POST
    if stream.state == _WAIT_ONE:
        stream.state = _SEND_DOWN
        return _MOVE_REDUCE
    return _MOVE_DOWN


@kernel
def _leaf_move(stream: Any) -> int:
    """What a rank without children does next."""
    if stream.state == 0:
        stream.state = _SEND_UP
        return _MOVE_BUNDLE
    if stream.state == _SEND_UP:
        stream.state = _WAIT_PARENT
        return _MOVE_UP
    if stream.state == _WAIT_PARENT:
        stream.state = _END
        return _MOVE_BUNDLE
    stream.state = _OVER
    return _MOVE_NOTHING


@inlined
def bundle_done(engine: Engine, actor: int, s: int) -> bool:
    """A bundle of stream `s` is through; whether that ends its phase."""
    stream = engine.streams.stream[s]
    phase = engine.collectives.phase[engine.collectives.call[stream.call].first_phase + stream.step]
    if phase.algorithm == DOUBLE_BINARY_TREE:
        return _tree_step(engine, actor, s, phase, _BUNDLE_DONE)
    stream.free += 1
    if phase.algorithm == DIRECT and phase.collective == ALL_REDUCE and stream.to_send <= phase.n - 1:
        if stream.received < phase.n - 1:
            return False
        for _ in range(phase.window):
            _ready(engine, actor, s, phase)
    else:
        _ready(engine, actor, s, phase)
    return bool(stream.to_send == 0 and stream.free == phase.window)


@inlined
def packet_received(engine: Engine, actor: int, s: int) -> bool:
    """A message for stream `s` has come; whether that ends its phase."""
    stream = engine.streams.stream[s]
    phase = engine.collectives.phase[engine.collectives.call[stream.call].first_phase + stream.step]
    if phase.algorithm == DOUBLE_BINARY_TREE:
        return _tree_step(engine, actor, s, phase, _RECEIVED)
    stream.received += 1
    _insert_packet(engine, actor, s, phase)
    return False


@kernel
def _start(engine: Engine, actor: int, s: int) -> None:
    """Begin the phase that stream `s` has waited for."""
    stream = engine.streams.stream[s]
    stream.started = 1
    phase = engine.collectives.phase[engine.collectives.call[stream.call].first_phase + stream.step]
    if phase.algorithm == DOUBLE_BINARY_TREE:
        _tree_step(engine, actor, s, phase, _BUNDLE_DONE)
    elif phase.algorithm == CUSTOM:
        register(engine.calendar, actor, np.int64(0), STEP, s, _NOBODY)
    else:
        for _ in range(phase.window):
            _insert_packet(engine, actor, s, phase)


@kernel
def _fill_queue(engine: Engine, actor: int, queue: int) -> None:
    """Start the streams next in line while the queue may run more."""
    streams = engine.streams
    at = streams.n_running[actor, queue]
    while at < streams.n_queued[actor, queue] and streams.n_running[actor, queue] < engine.collectives.active:
        _start(engine, actor, streams.queued[actor, queue, at])
        streams.n_running[actor, queue] += 1
        at += 1


@kernel
def _line_up(engine: Engine, actor: int, s: int) -> None:
    """Move stream `s` to its next phase and put it into the queue: after what runs, by priority, then by arrival."""
    streams = engine.streams
    stream = streams.stream[s]
    stream.step += 1
    packed = streams.queue_of[s, stream.step]
    stream.queue = packed >> 2
    stream.direction = 1 - (packed & 2)
    stream.tree = packed & 1
    phase = engine.collectives.phase[engine.collectives.call[stream.call].first_phase + stream.step]
    stream.index = stream.position if phase.stride == 0 else (engine.fabric.rank[actor] // phase.stride) % phase.n
    stream.to_send = phase.n_messages
    stream.started = 0
    stream.inserted = 0
    stream.sent = 0
    stream.received = 0
    stream.free = 0
    stream.plain_left = 0
    stream.round_left = 0
    stream.first_round = 0
    stream.state = 0
    stream.reductions = 0
    queued = streams.queued[actor, stream.queue]
    n = streams.n_queued[actor, stream.queue]
    at = 0
    while at < n:
        other = streams.stream[queued[at]]
        if other.started == 0 and other.priority < stream.priority:
            break
        at += 1
    for k in range(n, at, -1):
        queued[k] = queued[k - 1]
    queued[at] = s
    streams.n_queued[actor, stream.queue] = n + 1


@kernel
def _leave_queue(engine: Engine, actor: int, s: int) -> None:
    streams = engine.streams
    queue = streams.stream[s].queue
    queued = streams.queued[actor, queue]
    n = streams.n_queued[actor, queue] - 1
    streams.n_queued[actor, queue] = n
    at = 0
    while queued[at] != s:
        at += 1
    for k in range(at, n):
        queued[k] = queued[k + 1]


@kernel
def next_phase(engine: Engine, s: int) -> bool:
    """Stream `s` has ended a phase: on to the next one. False if that was the last: `retire` it then."""
    actor = s // engine.streams.capacity
    stream = engine.streams.stream[s]
    if stream.step + 1 == engine.collectives.call[stream.call].n_phases:
        return False
    before = stream.queue
    _leave_queue(engine, actor, s)
    _line_up(engine, actor, s)
    engine.streams.n_running[actor, before] -= 1
    _fill_queue(engine, actor, before)
    _fill_queue(engine, actor, stream.queue)
    return True


@kernel
def retire(engine: Engine, s: int) -> None:
    """Take a stream that has ended out of its queue; the next in line starts."""
    actor = s // engine.streams.capacity
    stream = engine.streams.stream[s]
    queue = stream.queue
    _leave_queue(engine, actor, s)
    stream.node = -1
    engine.streams.n_running[actor, queue] -= 1
    _fill_queue(engine, actor, queue)


@kernel
def _pick_queue(engine: Engine, actor: int, phase: Any) -> int:
    """Queue and direction of a phase, packed; the queues of a dimension take turns."""
    n = engine.collectives.n_queues
    at = engine.streams.allocator[actor, phase.level]
    queue = at[phase.pick]
    clockwise = True
    if phase.pick == PICK_NEXT:
        clockwise = n == 1 or queue < n // 2
        at[PICK_NEXT] = (queue + 1) % n
    elif phase.pick == PICK_FIRST_HALF:
        at[PICK_FIRST_HALF] = queue + 1 if queue + 1 < n // 2 else 0
    else:
        clockwise = False
        at[PICK_LAST_HALF] = queue + 1 if queue + 1 < n else n // 2
    return int((phase.level * n + queue) * 4 + (0 if clockwise else 2))


@kernel
def start_collective(engine: Engine, actor: int, node: int, c: int, position: int) -> None:
    """Let `actor` take part in call `c`: cut it into chunks and line them up."""
    collectives, streams = engine.collectives, engine.streams
    call = collectives.call[c]
    priority = call.priority
    if collectives.policy != 0:
        priority = streams.priority[actor]
        streams.priority[actor] += collectives.policy
    streams.chunks_left[node] = call.n_chunks
    if call.n_phases == 0:
        return
    member = collectives.member_ptr[call.communicator] + position
    first = actor * streams.capacity
    for _ in range(call.n_chunks):
        s = first + streams.n_made[member] % streams.capacity
        while streams.stream[s].node >= 0:
            s = s + 1 if s + 1 < first + streams.capacity else first
        stream = streams.stream[s]
        stream.node = node
        stream.call = c
        stream.number = streams.n_made[member]
        streams.n_made[member] += 1
        stream.position = position
        stream.priority = priority
        stream.step = -1
        for k in range(call.n_phases):
            phase = collectives.phase[call.first_phase + k]
            packed = _pick_queue(engine, actor, phase)
            if phase.algorithm == DOUBLE_BINARY_TREE:
                packed += streams.tree_counter[actor, phase.tree_counter] % 2
                streams.tree_counter[actor, phase.tree_counter] += 1
            streams.queue_of[s, k] = packed
        _line_up(engine, actor, s)
        _fill_queue(engine, actor, stream.queue)
