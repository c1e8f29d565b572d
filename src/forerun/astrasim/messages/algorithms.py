"""Collective algorithms as state machines that send messages, one for each chunk and rank.

The machines and their rounding are those of ASTRA-sim's system layer (`Ring`, `AllToAll`, `HalvingDoubling`,
`DoubleBinaryTreeAllReduce`). A machine alternates between messages and *bundles*. A bundle is a packet on its way
between processor and memory: it takes `endpoint_ns`, and a reduced packet also the time of one write and two reads. A
machine posts a receive for every message that it sends.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from forerun.astrasim.messages.calendar import NOW, register, schedule
from forerun.astrasim.messages.fabric import new_message, send
from forerun.astrasim.messages.mailbox import post
from forerun.astrasim.messages.state import (
    ALL_REDUCE,
    BUNDLE,
    CUSTOM,
    DIRECT,
    DOUBLE_BINARY_TREE,
    HALVING_DOUBLING,
    RECEIVE,
    REDUCE_SCATTER,
    RING,
    STEP,
    Collectives,
    Engine,
)
from forerun.common.jit import inlined, kernel

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


@kernel
def reduction_ns(size: int, bytes_per_s: float) -> int:
    """Returns the time of one write and two reads of a reduced message."""
    return 3 * int(size / bytes_per_s * 1e9)


@kernel
def ring_member(collectives: Collectives, stream: Any, phase: Any, rank: int, index: int) -> int:
    """Returns the rank at ring position `index`."""
    if phase.stride == 0:
        first = collectives.member_ptr[collectives.call[stream.call].communicator]
        return int(collectives.member[first + index])
    return int(rank + (index - stream.index) * phase.stride)


@inlined
def _send_and_post(engine: Engine, actor: int, s: int, to_index: int, from_index: int, size: int) -> None:
    """Sends to one ring position (-1: none) and posts the receive of a message from another (-1: none)."""
    fabric = engine.fabric
    stream = engine.streams.stream[s]
    call = engine.collectives.call[stream.call]
    phase = engine.collectives.phase[call.first_phase + stream.step]
    rank = fabric.rank[actor]
    source = ring_member(engine.collectives, stream, phase, rank, from_index) if from_index >= 0 else -1
    if to_index >= 0:
        target = ring_member(engine.collectives, stream, phase, rank, to_index)
        to = target
        route = rank * fabric.n_ranks + target
        if fabric.mirrored:
            to = actor
            route = source * fabric.n_ranks + rank
        elif fabric.block > 0:  # the rank of the block that does what `target` does gets it
            to = target % fabric.block
            route = (rank - target + to) % fabric.n_ranks * fabric.n_ranks + to
        m = new_message(engine.calendar, engine.traffic, to, target, call.communicator, stream.number, route, size)
        if m > 0:
            send(engine.calendar, fabric, engine.traffic, m, rank)
    if source >= 0:
        route = source * fabric.n_ranks + rank
        if post(engine.mailbox, engine.calendar.clock, call.communicator, stream.number, route, size):
            m = new_message(
                engine.calendar, engine.traffic, actor, actor, call.communicator, stream.number, route, size
            )
            schedule(engine.calendar, engine.calendar.clock[NOW], RECEIVE, m)


@kernel
def _bundle(engine: Engine, actor: int, s: int, phase: Any, size: int, reduced: int) -> None:
    later = reduction_ns(size, engine.collectives.reduce_bytes_per_s) if reduced else np.int64(0)
    register(engine.calendar, actor, phase.endpoint_ns, BUNDLE, s, later if reduced else _NOBODY)


@kernel
def _insert_packet(engine: Engine, actor: int, s: int, phase: Any) -> None:
    """Starts a bundle. Rounds of packets are reduced in turns."""
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
    """Sends the next packet if there is one and a bundle is free for it."""
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
    """Makes one step of the double binary tree all-reduce. Returns whether the phase is over."""
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
    """Returns the next move of a rank with a parent and children."""
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
    """Returns the next move of the root, which has one child."""
    if stream.state == 0:
        stream.state = _WAIT_ONE
        return _MOVE_POST
    if stream.state == _WAIT_ONE:
        stream.state = _SEND_DOWN
        return _MOVE_REDUCE
    return _MOVE_DOWN


@kernel
def _leaf_move(stream: Any) -> int:
    """Returns the next move of a rank without children."""
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


@kernel
def begin(engine: Engine, actor: int, s: int, phase: Any) -> None:
    """Begins the phase of stream `s`."""
    if phase.algorithm == DOUBLE_BINARY_TREE:
        _tree_step(engine, actor, s, phase, _BUNDLE_DONE)
    elif phase.algorithm == CUSTOM:
        register(engine.calendar, actor, np.int64(0), STEP, s, _NOBODY)
    else:
        for _ in range(phase.window):
            _insert_packet(engine, actor, s, phase)


@inlined
def bundle_done(engine: Engine, actor: int, s: int) -> bool:
    """Handles the end of a bundle of stream `s`. Returns whether that ends its phase."""
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
    """Handles the arrival of a message for stream `s`. Returns whether that ends its phase."""
    stream = engine.streams.stream[s]
    phase = engine.collectives.phase[engine.collectives.call[stream.call].first_phase + stream.step]
    if phase.algorithm == DOUBLE_BINARY_TREE:
        return _tree_step(engine, actor, s, phase, _RECEIVED)
    stream.received += 1
    _insert_packet(engine, actor, s, phase)
    return False
