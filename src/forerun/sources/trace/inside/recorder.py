"""Recorder: collects the kernels, streams, events and memory of a running program in one list of nodes.

Every event of the virtual device is reported to the one Recorder of the process: kernels by the dispatch mode, streams
and events by `torch.cuda`, collectives by the process group. `start` begins a step and `finish` makes its Recording;
before `start` only memory is followed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.kinds import Direction
from forerun.core.program.types import Category, Phase
from forerun.sources.trace.inside import sizes
from forerun.sources.trace.inside.allocations import Allocations
from forerun.sources.trace.inside.unseen import PACKAGE
from forerun.sources.trace.inside.workload import Workload
from forerun.sources.trace.recording import Recording

_FORWARD, _BACKWARD, _RECOMPUTE, _OPTIMIZER = (int(p) for p in Phase)


@dataclass(frozen=True, slots=True)
class Event:
    """The work that a stream had been given when an event was recorded on it."""

    nodes: dict[int, int]
    """The last node of each stream."""
    step: int
    """The step that the event belongs to; in another step it has no effect."""


class Stream:
    """One stream: its last node, and the nodes of other streams that its next node has to wait for."""

    __slots__ = ("last", "waits")

    def __init__(self) -> None:
        self.last = -1
        self.waits: dict[int, int] = {}


class Recorder:
    """The recorder of one rank. Stream numbers are those of the virtual device; process groups have the numbers from
    `COMM_STREAMS` on."""

    COMM_STREAMS = 1 << 16
    HOST_STREAM = 1 << 17
    """The stream of the host's waits, which delays no kernel."""

    def __init__(self, rank: int, world_size: int, gpus_per_node: int, lines: bool = False) -> None:
        self.rank, self.world_size, self.gpus_per_node = rank, world_size, gpus_per_node
        self.ops = OpTableBuilder()
        self.paused = 0
        self.recording = False
        self.in_optimizer = 0
        self.compiled = 0
        """How many regions under torch.compile are running inside each other."""
        self.recomputing = False
        """Whether compiled code computes values of the forward pass again. `phase` tells other recomputation itself."""
        self.current_stream: Any = lambda: 0
        """Returns this thread's stream number; set by the virtual device."""
        self.module_of_node: Any = lambda: 0
        """Returns the index of the module that runs or whose backward pass runs; set by `World`."""
        self.module_depth: Any = lambda: 0
        """Returns how many modules run inside each other; set by `World`."""
        self.backward_pass = -1
        """The number of the last backward pass in which something was allocated or recorded."""
        self._task_depth = 0
        self.update_begins: Any = lambda _optimizer: None
        self.update_ends: Any = lambda _optimizer: None
        """Called around the steps of optimizers that are part of a graph; set by `Steps`."""
        self.groups: dict[str, tuple[int, ...]] = {}
        self._group_numbers: dict[str, int] = {}
        self.averages: dict[str, None] = {}
        """The groups over which DistributedDataParallel averages gradients."""
        self.starts_processes = False
        """Whether the program has started a `multiprocessing.Process`."""
        self.joined: Any = lambda _rank, _size: None
        """Called with rank and number of ranks when the program makes its process group; set by `Processes`."""
        self.notes: dict[str, None] = {}
        self.fallbacks: dict[str, None] = {}
        """The code that ran uncompiled because torch.compile failed on it."""
        self.workload = Workload()
        self._lines: dict[str, int] | None = {} if lines else None
        self._streams: dict[int, Stream] = {}
        self._comm_streams: dict[str, int] = {}
        self.memory = Allocations(lambda: (len(self._nodes), self.phase()))
        self._step = 0
        self._clear()

    # -- a step ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts a step: nodes from here on belong to it."""
        self._clear()
        self.recording = True

    def _clear(self) -> None:
        self._step += 1
        self.workload.clear()
        self._nodes: list[tuple[int, int, int, int, int, int, int, int]] = []
        self._waits: list[tuple[int, ...]] = []
        self._streams = {}
        self.memory.start()

    @contextmanager
    def beforehand(self, category: Category) -> Iterator[None]:
        """Treats the work of its block as done once in a run: it records no nodes, and its allocations, of `category`,
        count as made before the step.
        """
        recording, self.recording = self.recording, False
        try:
            with self.memory.beforehand(category):
                yield
        finally:
            self.recording = recording

    @property
    def n_nodes(self) -> int:
        return len(self._nodes)

    # -- streams and events ------------------------------------------------------------------------------------

    def _stream(self, number: int) -> Stream:
        found = self._streams.get(number)
        if found is None:
            found = self._streams[number] = Stream()
        return found

    def record_event(self, stream: int | None = None) -> Event:
        """Returns the event that everything given to `stream` so far (this thread's by default) has ended."""
        number = self.current_stream() if stream is None else stream
        state = self._stream(number)
        return Event(state.waits | ({number: state.last} if state.last >= 0 else {}), self._step)

    def wait_event(self, event: Event | None, stream: int | None = None) -> None:
        """Makes the next node of `stream` (this thread's by default) wait for `event`."""
        if event is None or event.step != self._step:
            return
        number = self.current_stream() if stream is None else stream
        waits = self._stream(number).waits
        for awaited, node in event.nodes.items():
            if awaited != number and node > waits.get(awaited, -1):
                waits[awaited] = node

    def wait_stream(self, waiting: int, awaited: int) -> None:
        """Makes the next node of stream `waiting` wait for all of stream `awaited` so far."""
        self.wait_event(self.record_event(awaited), waiting)

    def host_waits(self, event: Event | None = None) -> None:
        """Makes the host wait for `event`, or for the whole device."""
        if event is None:
            event = Event({number: s.last for number, s in self._streams.items() if s.last >= 0}, self._step)
        self.wait_event(event, self.HOST_STREAM)
        self.node(self.ops.delay("synchronize", 0), self.HOST_STREAM, sync=True)

    def comm_stream(self, group: str) -> int:
        """Returns the number of the stream on which process group `group` runs its asynchronous work."""
        return self._comm_streams.setdefault(group, self.COMM_STREAMS + len(self._comm_streams))

    # -- nodes -------------------------------------------------------------------------------------------------

    def phase(self) -> int:
        """Returns the current phase: the optimizer's inside its step, otherwise the phase of autograd.

        During the backward pass, grad mode is on or a module's forward runs only to recompute.
        """
        if self.in_optimizer:
            return _OPTIMIZER
        if self.recomputing:
            return _RECOMPUTE
        task = torch._C._current_graph_task_id()
        if task == -1:
            return _FORWARD
        depth = self.module_depth()
        if task != self.backward_pass:
            self.backward_pass, self._task_depth = task, depth
        return _RECOMPUTE if torch.is_grad_enabled() or depth > self._task_depth else _BACKWARD

    def node(self, op: int, stream: int | None = None, peer: int = -1, sync: bool = False) -> int:
        """Appends a node of row `op` on `stream` (this thread's by default) and returns its number; -1 outside a
        step."""
        if self.paused or not self.recording:
            return -1
        number = self.current_stream() if stream is None else stream
        state = self._stream(number)
        index = len(self._nodes)
        self._waits.append(tuple(sorted(state.waits.values())))
        if state.waits:
            state.waits = {}
        line = -1 if self._lines is None else self._lines.setdefault(_user_line(), len(self._lines))
        compiled = 1 if self.compiled else 0
        self._nodes.append((op, number, self.phase(), self.module_of_node(), peer, int(sync), compiled, line))
        state.last = index
        return index

    def host_time(self, name: str, launches: int) -> None:
        """Appends work of the host alone to this thread's stream; it takes as long as `launches` kernels to launch."""
        self.node(self.ops.delay(name, 0, launches))

    def collective(
        self, name: str, kind: int, group: str, ranks: Sequence[int], bytes_comm: float, dtype: str, asynchronous: bool
    ) -> Event:
        """Records a collective over process group `group` with global `ranks` and returns the event of its end.

        `bytes_comm` is the full buffer (nccl-tests). An asynchronous collective runs on the group's own stream after
        everything on this thread's stream, another one on this thread's stream, as in ProcessGroupNCCL.
        """
        number = self.group(group, ranks)
        return self._communicate(self.ops.collective(name, kind, number, bytes_comm, dtype), group, asynchronous, -1)

    def transfer(
        self, send: bool, group: str, ranks: Sequence[int], peer: int, bytes_comm: float, dtype: str, asynchronous: bool
    ) -> Event:
        """Records a send to or a receive from global rank `peer`, and returns the event of its end."""
        number = self.group(group, ranks)
        name, direction = ("send", Direction.OUT) if send else ("recv", Direction.IN)
        row = self.ops.p2p(name, number, bytes_comm, dtype, direction=direction)
        return self._communicate(row, group, asynchronous, peer)

    def _communicate(self, op: int, group: str, asynchronous: bool, peer: int) -> Event:
        here = self.current_stream()
        stream = here
        if asynchronous:
            stream = self.comm_stream(group)
            self.wait_stream(stream, here)
        node = self.node(op, stream, peer)
        return Event({stream: node} if node >= 0 else {}, self._step)

    def group(self, name: str, ranks: Sequence[int]) -> int:
        """Returns the number of process group `name`."""
        number = self._group_numbers.get(name)
        if number is None:
            number = self._group_numbers[name] = len(self.groups)
            self.groups[name] = tuple(ranks)
        return number

    def looked_up(self, weight: torch.Tensor, n_tokens: int) -> None:
        """Counts the tokens of an embedding lookup with gradients, also inside a fused kernel."""
        seen = self.compiled or (not self.paused and torch.is_grad_enabled())
        if self.recording and seen and self.phase() == _FORWARD:
            storage = weight.untyped_storage()
            lasting = self.memory.is_older(storage)
            key = storage._cdata if lasting else (self.module_of_node(), tuple(weight.shape))
            self.workload.looked_up(key, n_tokens, tuple(weight.shape))

    def trained(self, shape: tuple[int, ...], n_tokens: int) -> None:
        """Counts the tokens of an embedding whose gradient is computed."""
        if self.recording and not self.paused:
            self.workload.trained(shape, n_tokens)

    def note(self, text: str) -> None:
        """Adds a note for the reader of the trace, once."""
        self.notes.setdefault(text)

    # -- the result --------------------------------------------------------------------------------------------

    def finish(self, modules: Sequence[str], meta: dict[str, Any]) -> Recording:
        """Returns the step since `start`. `modules` are the paths of the module indices.

        Raises:
            ForerunError: a recorded size is impossible.
        """
        self.recording = False
        self._optimizer_from_last_backward()
        ops = self.ops.build()
        sizes.check_ops(ops)
        made_by = [ops.name[node[0]] for node in self._nodes]
        sizes.check_lives(self.memory.alive(made_by), self.memory.allocated_bytes)
        n = len(self._nodes)
        table = np.array(self._nodes, np.int64).reshape(-1, 8)
        rows = self.memory.of_step()
        waits = [len(w) for w in self._waits]
        return Recording(
            rank=self.rank,
            ops=ops,
            op=table[:, 0].astype(np.int32),
            stream=table[:, 1].astype(np.int32),
            phase=table[:, 2].astype(np.int8),
            module=table[:, 3].astype(np.int32),
            peer=table[:, 4].astype(np.int32),
            sync=table[:, 5].astype(np.int8),
            compiled=table[:, 6].astype(np.int8),
            line=table[:, 7].astype(np.int32),
            wait_ptr=np.concatenate([[0], np.cumsum(waits)]).astype(np.int64),
            wait=np.array([node for w in self._waits for node in w], np.int32),
            tensor_bytes=np.array([row.size for row in rows], np.int64),
            tensor_category=np.array([row.purpose() for row in rows], np.int8),
            tensor_alloc=np.array([min(row.alloc, n - 1) for row in rows], np.int32),
            tensor_free=np.array([-1 if row.free is None else row.free for row in rows], np.int32),
            groups=tuple(self.groups.items()),
            modules=tuple(modules),
            lines=tuple(self._lines or ()),
            meta={
                "world_size": self.world_size,
                "gpus_per_node": self.gpus_per_node,
                "notes": list(self.notes),
                "fallbacks": list(self.fallbacks),
                "averages": list(self.averages),
                "torch": torch.__version__,
                **meta,
            },
        )

    def _optimizer_from_last_backward(self) -> None:
        """Gives everything between the last backward pass and the end of the step (clipping, unscaling) to the
        optimizer."""
        phases = [node[2] for node in self._nodes]
        stop = len(phases) - (phases[::-1].index(_OPTIMIZER) + 1 if _OPTIMIZER in phases else 0)
        before = [i for i in range(stop) if phases[i] in (_BACKWARD, _RECOMPUTE)]
        for i in range(before[-1] + 1 if before else stop, stop):
            node = self._nodes[i]
            self._nodes[i] = (*node[:2], _OPTIMIZER, *node[3:])


def _user_line() -> str:
    """Returns file and line of the innermost frame outside torch and Forerun."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and not name.startswith((PACKAGE, "<")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
