"""Collectives of a rank, cut into chunks that wait in the queues of dimensions and go from phase to phase.

ASTRA-sim calls a chunk on a rank a stream. Chunks, queues and their order are those of its system layer (`Sys`).
"""

from __future__ import annotations

from typing import Any

from forerun.astrasim.messages.algorithms import begin
from forerun.astrasim.messages.state import DOUBLE_BINARY_TREE, PICK_FIRST_HALF, PICK_LAST_HALF, PICK_NEXT, Engine
from forerun.common.jit import inlined, kernel


@inlined
def find_stream(engine: Engine, actor: int, communicator: int, number: int) -> int:
    """Returns the stream of `actor` with this number in the communicator."""
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
def _start(engine: Engine, actor: int, s: int) -> None:
    """Begins the phase for which stream `s` has waited."""
    stream = engine.streams.stream[s]
    stream.started = 1
    phase = engine.collectives.phase[engine.collectives.call[stream.call].first_phase + stream.step]
    begin(engine, actor, s, phase)


@kernel
def _fill_queue(engine: Engine, actor: int, queue: int) -> None:
    """Starts the next streams while the queue may run more."""
    streams = engine.streams
    at = streams.n_running[actor, queue]
    while at < streams.n_queued[actor, queue] and streams.n_running[actor, queue] < engine.collectives.active:
        _start(engine, actor, streams.queued[actor, queue, at])
        streams.n_running[actor, queue] += 1
        at += 1


@kernel
def _enqueue(engine: Engine, actor: int, s: int) -> None:
    """Moves stream `s` to its next phase and queues it: behind running streams, by priority, then by arrival."""
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
    """Moves stream `s` to its next phase. Returns False after the last phase: `retire` the stream then."""
    actor = s // engine.streams.capacity
    stream = engine.streams.stream[s]
    if stream.step + 1 == engine.collectives.call[stream.call].n_phases:
        return False
    before = stream.queue
    _leave_queue(engine, actor, s)
    _enqueue(engine, actor, s)
    engine.streams.n_running[actor, before] -= 1
    _fill_queue(engine, actor, before)
    _fill_queue(engine, actor, stream.queue)
    return True


@kernel
def retire(engine: Engine, s: int) -> None:
    """Removes a stream that has ended from its queue, and starts the next one."""
    actor = s // engine.streams.capacity
    stream = engine.streams.stream[s]
    queue = stream.queue
    _leave_queue(engine, actor, s)
    stream.node = -1
    engine.streams.n_running[actor, queue] -= 1
    _fill_queue(engine, actor, queue)


@kernel
def _pick_queue(engine: Engine, actor: int, phase: Any) -> int:
    """Returns queue and direction of a phase, packed in a number. The queues of a dimension take turns."""
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
    """Makes `actor` take part in call `c`: cuts it into chunks and queues them."""
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
        _enqueue(engine, actor, s)
        _fill_queue(engine, actor, stream.queue)
