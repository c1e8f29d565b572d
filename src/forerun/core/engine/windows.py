"""simulate_in_windows: as `simulate`, in memory that does not grow with the number of nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.core.engine.actors import Records, new_state
from forerun.core.engine.contention import continue_contended
from forerun.core.engine.dataflow import continue_dataflow
from forerun.core.engine.refill import (
    Mask,
    Window,
    empty_window,
    first_left,
    look_ahead,
    refill,
    streams_with_more,
)
from forerun.core.engine.sharing import LinkDemand, crowded_links, links_of, pairs_of_program
from forerun.core.engine.simulate import check_costs, raise_deadlock, slows
from forerun.core.program.types import F64, I8, I32, I64, N_STREAMS, FlatProgram, Program
from forerun.core.program.unfold import block_tables, check_channels, step_sequence

WINDOW_NODES = 2**16
"""nodes that are expanded ahead, over all rank classes"""


@dataclass(frozen=True, slots=True)
class Finished:
    """Nodes of one rank class that follow each other in issue order and have ended.

    Columns are as of FlatProgram and Timeline. They are views of the window: who keeps them should keep copies.
    """

    rank_class: int
    first: int
    """number of the first of them in its rank class"""
    op: I32
    stream: I8
    phase: I8
    step: I32
    module: I32
    start_ps: I64
    end_ps: I64
    issue_end_ps: I64

    def __len__(self) -> int:
        return len(self.op)


@dataclass(frozen=True, slots=True)
class WindowedRun:
    """What is left when all nodes have been handed on."""

    class_end_ps: I64
    """when the last node of each rank class has ended and its host is done"""
    n_nodes: int
    most_nodes: int
    """that were in memory at once"""

    @property
    def end_of_step_ps(self) -> int:
        """When the last rank class is done."""
        return int(self.class_end_ps.max(initial=0))


def simulate_in_windows(
    program: Program,
    duration_ps: I64,
    issue_ps: I64,
    slow_compute: F64,
    slow_network: F64,
    network_op: npt.NDArray[np.bool_],
    finished: Callable[[Finished], object] | None = None,
    window_nodes: int = WINDOW_NODES,
    demand: LinkDemand | None = None,
) -> WindowedRun:
    """Run `program` as `simulate(unfold(program), ...)` does, with the same times for every node.

    Blocks are expanded as the run gets to them, `window_nodes` ahead, and nodes are forgotten when they, and all that
    their rank class issued before, have ended; `finished` is told of them first. Memory holds the steps of the
    rank classes, the window, and how far streams and rank classes are apart: a stream that starts its last node while
    another one has yet to do its first brings the whole Program between them into memory.

    Raises:
        ForerunError: as `unfold` and `simulate`.
    """
    check_costs(len(program.ops), duration_ps, issue_ps, slow_compute, slow_network, network_op, demand)
    times, contention = (duration_ps, issue_ps), (slow_compute, slow_network, network_op)
    return _Run(program, times, contention, window_nodes, demand).all(finished)


class _Run:
    """A run that is under way."""

    def __init__(
        self,
        program: Program,
        times: tuple[I64, I64],
        contention: tuple[F64, F64, npt.NDArray[np.bool_]],
        window_nodes: int,
        demand: LinkDemand | None,
    ) -> None:
        self.program, self.times = program, times
        crowded = None if demand is None else crowded_links(demand, pairs_of_program(program))
        self.contended = crowded is not None or slows(*contention)
        self.contention = (*contention, links_of(crowded, len(program.ops), len(program.rank_classes)))
        self.tables = block_tables(program)
        check_channels(program, self.tables)
        self.class_step, self.steps = step_sequence(program)
        n_classes, n_channels = len(program.rank_classes), len(program.channels)
        self.chunk = max(1, window_nodes // n_classes)
        self.member: Mask = np.zeros((n_classes, n_channels), np.bool_)
        for number, channel in enumerate(program.channels):
            self.member[list(channel.members), number] = True
        self.window: Window = empty_window(self.class_step, self.tables.n_slots, n_channels)
        self.ahead = look_ahead(self.tables, n_classes, N_STREAMS, n_channels)
        start, end, issued, actors, host = new_state(self.window.class_ptr, 0, N_STREAMS)
        self.window = self.window._replace(start=start, end=end, issued=issued)
        self.actors: Records = actors
        self.host: Records = host
        self.now = 0
        self.class_end = np.zeros(n_classes, np.int64)
        self.most_nodes = 0

    def all(self, finished: Callable[[Finished], object] | None) -> WindowedRun:
        """Run to the end."""
        left = first_left(self.window)
        want = np.full(len(left), self.chunk)
        while want.any():
            self.window = refill(
                self.window, left, self.class_step, self.steps, self.tables, self.member, want, self.host
            )
            self.most_nodes = max(self.most_nodes, len(self.window.op))
            self._go_on()
            left = first_left(self.window)
            self._hand_on(left, finished)
            want = self._wanted(left)
        if (left < self.window.class_ptr[1:]).any():
            self._raise_deadlock()
        n_nodes = int((self.window.n_dropped + left - self.window.class_ptr[:-1] - self.window.n_ghosts).sum())
        return WindowedRun(np.maximum(self.class_end, self.host["time"]), n_nodes, self.most_nodes)

    def _go_on(self) -> None:
        """Run the window as far as its nodes allow."""
        window = self.window
        program = (window.class_ptr, window.op, window.stream, window.pred_ptr, window.pred, window.meeting)
        columns = (*program, window.meeting_size, window.sync, *self.times)
        times = (window.start, window.end, window.issued)
        if self.contended:
            more = streams_with_more(window, self.ahead, self.class_step, self.steps, self.tables, self.member)
            columns_and_rates = (*columns, *self.contention, N_STREAMS)
            self.now = continue_contended(*columns_and_rates, *times, self.actors, self.host, self.now, more)
        else:
            continue_dataflow(*columns, N_STREAMS, *times, self.actors, self.host)

    def _wanted(self, left: I64) -> I64:
        """How many more nodes each class is to get; none at all when nothing is left to expand."""
        pending = self.window.class_ptr[1:] - left
        to_come = self.window.next_step < self.class_step[1:]
        lacking = (self.host["n_dry"] > 0) & (self.host["next"] == self.window.class_ptr[1:])
        want = np.where(pending < self.chunk // 2 + 1, self.chunk, 0)
        want = np.where(lacking, np.maximum(self.chunk, pending), want) * to_come
        if not want.any():
            want = np.maximum(self.chunk, pending) * to_come
        return want

    def _hand_on(self, left: I64, finished: Callable[[Finished], object] | None) -> None:
        window = self.window
        for c in range(len(left)):
            first = int(window.class_ptr[c] + window.n_ghosts[c])
            nodes = slice(first, int(left[c]))
            if nodes.start == nodes.stop:
                continue
            self.class_end[c] = max(self.class_end[c], window.end[nodes].max())
            if finished is not None:
                finished(
                    Finished(
                        rank_class=c,
                        first=int(window.n_dropped[c]),
                        op=window.op[nodes],
                        stream=window.stream[nodes],
                        phase=window.phase[nodes],
                        step=window.step[nodes],
                        module=window.module[nodes],
                        start_ps=window.start[nodes],
                        end_ps=window.end[nodes],
                        issue_end_ps=window.issued[nodes],
                    )
                )

    def _raise_deadlock(self) -> None:
        window, program = self.window, self.program
        flat = FlatProgram(
            n_ops=len(program.ops),
            class_ptr=window.class_ptr,
            op=window.op,
            stream=window.stream,
            phase=window.phase,
            step=window.step,
            module=window.module,
            pred_ptr=window.pred_ptr,
            pred=window.pred,
            meeting=window.meeting,
            meeting_size=window.meeting_size,
            sync=window.sync,
            meeting_channel=window.meeting_channel,
            class_names=tuple(one.name for one in program.rank_classes),
            channel_names=tuple(one.name for one in program.channels),
        )
        raise_deadlock(flat, window.end, before=window.n_dropped - window.n_ghosts)
