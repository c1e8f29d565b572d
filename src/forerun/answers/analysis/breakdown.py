"""Divides the time of a step on every rank class: kernels by kind, idle gaps of the compute stream by cause.

The last dependency of the next compute node causes a gap. It is a collective or transfer on another stream (exposed
communication), the other side of a rendezvous (pipeline bubble), or the host. Where GPUs of several kinds share a
collective, the part of the gap before the last of them joins counts as waiting for slower GPUs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.common.jit import njit
from forerun.core.engine.actors import Nodes, nodes_of
from forerun.core.engine.simulate import Timeline
from forerun.core.program.causes import EXPOSED, N_CAUSES, Cause
from forerun.core.program.kinds import KINDS, OpKind
from forerun.core.program.origin import PROFILE, Origin
from forerun.core.program.types import F64, I8, I32, I64, FlatProgram, Mask, Phase, Program, Stream
from forerun.sources.profile.kernel_names import work_of

_STREAM_CAUSE = np.zeros(len(Stream), np.int64)
for _stream, _cause in (
    (Stream.GATHER, Cause.EXPOSED_DATA_PARALLEL),
    (Stream.REDUCE, Cause.EXPOSED_DATA_PARALLEL),
    (Stream.TP, Cause.EXPOSED_TENSOR_PARALLEL),
    (Stream.CP, Cause.EXPOSED_CONTEXT_PARALLEL),
    (Stream.EP, Cause.EXPOSED_EXPERT_PARALLEL),
    *((stream, Cause.EXPOSED_PIPELINE_TRANSFER) for stream in Stream if stream.name.startswith("PP_")),
    (Stream.COPY, Cause.EXPOSED_HOST_COPY),
):
    _STREAM_CAUSE[_stream] = _cause
_CAUSE_OF_KIND = np.array([KINDS[kind].cause for kind in OpKind], np.int64)
_CAUSE_OF_WORK: dict[str, Cause] = {
    "product": Cause.MATMUL,
    "attention": Cause.ATTENTION,
    "attention_backward": Cause.ATTENTION,
    "optimizer": Cause.OPTIMIZER,
}
"""Cause of a profiled kernel by the work that its name implies; that of all others is MEMORY_BOUND"""
# Code compiled by numba reads plain numbers.
_COMPUTE_STREAM, _RECOMPUTING, _UPDATING = int(Stream.COMPUTE), int(Phase.RECOMPUTE), int(Phase.OPTIMIZER)
_RECOMPUTE, _OPTIMIZER, _HOST = int(Cause.RECOMPUTE), int(Cause.OPTIMIZER), int(Cause.HOST)
_BUBBLE, _WAITING, _DATA_PARALLEL = int(Cause.BUBBLE), int(Cause.WAITING), int(Cause.EXPOSED_DATA_PARALLEL)
_PIPELINE_STREAMS = np.flatnonzero(_STREAM_CAUSE == Cause.EXPOSED_PIPELINE_TRANSFER)


class Times(NamedTuple):
    """Picoseconds at which each node of a run is issued, starts and ends, (nodes,) each."""

    issued: I64
    start: I64
    end: I64


def times_of(timeline: Timeline) -> Times:
    """Returns the times of the nodes of `timeline`."""
    return Times(timeline.issue_end_ps, timeline.start_ps, timeline.end_ps)


class _Counts(NamedTuple):
    """The Cause that the time of each op counts as."""

    running: I64
    """Cause of each op while it runs on the compute stream, (n_ops,)"""
    waiting: I64
    """Cause of the time that the compute stream waits for each op on each stream, (n_ops, n_streams)"""
    split_ps: I64
    """picoseconds by Cause inside ops that stand for a run of blocks, 0 for all others, (n_ops, N_CAUSES)"""
    divided: Mask
    """whether an op stands for such a run, (n_ops,)"""
    phase: I8
    """Phase of each node, (nodes,)"""


def breakdown_ps(
    flat: FlatProgram, program: Program, timeline: Timeline, split_ps: I64 | None = None, alone: bool = False
) -> I64:
    """Returns picoseconds by rank class and Cause, (n_classes, N_CAUSES); every row sums to the end of the step.

    `flat` and `timeline` are of `program`. `split_ps` (n_ops, N_CAUSES) divides ops that stand for a run of blocks.
    With `alone` every class is a program of its own: its row sums to the end of the class.
    """
    ops = program.ops
    joint = np.zeros(len(program.channels) + 1, np.bool_)
    origin = Origin.of(program)
    joint[list(origin.joint_channels)] = True
    has_pipeline = len(program.channels) > joint.sum() if joint.any() else len(program.rank_classes) > 1
    if split_ps is None:
        split_ps = np.zeros((len(ops), N_CAUSES), np.int64)
    divided: Mask = np.any(split_ps > 0, axis=1)
    counts = _Counts(running_causes(program, origin), waiting_causes(program, origin), split_ps, divided, flat.phase)
    class_end = np.zeros(0, np.int64) if alone else timeline.class_end_ps
    return _breakdown(nodes_of(flat), times_of(timeline), counts, joint[flat.meeting_channel], class_end, has_pipeline)


def waiting_causes(program: Program, origin: Origin) -> I64:
    """Returns the Cause of waiting for each op on each stream, (n_ops, n_streams); `origin` is that of `program`.

    The purpose of the stream decides. Traces have more streams than there are purposes: in them a collective over a
    data-parallel group counts as data parallelism on any stream, and so does a kernel on a stream of pipelines.
    Profiles use those streams for any kernel that runs beside the compute stream, so there its own kind decides.
    """
    causes = np.tile(_STREAM_CAUSE, (len(program.ops), 1))
    parallel = origin.data_parallel
    if parallel:
        ops = program.ops
        causes[np.isin(ops.group, parallel) & ops.is_collective] = Cause.EXPOSED_DATA_PARALLEL
        kernels = np.flatnonzero(ops.is_compute)
        causes[np.ix_(kernels, _PIPELINE_STREAMS)] = Cause.EXPOSED_DATA_PARALLEL
    if origin.source == PROFILE:
        alone = np.flatnonzero(program.ops.is_compute | program.ops.is_delay)
        causes[np.ix_(alone, _PIPELINE_STREAMS)] = running_causes(program, origin)[alone, None]
    return causes


def running_causes(program: Program, origin: Origin) -> I64:
    """Returns the Cause of each op while it runs on the compute stream, (n_ops,); `origin` is that of `program`.

    The kind of the op decides. Kernels of a profile whose sizes the file does not tell are memory-bound ops, so there
    the name of the kernel decides.
    """
    ops = program.ops
    causes = _CAUSE_OF_KIND[ops.kind]
    if origin.source == PROFILE:
        for row in np.flatnonzero(ops.is_memory_bound).tolist():
            causes[row] = _CAUSE_OF_WORK.get(work_of(ops.name[row]).kind, Cause.MEMORY_BOUND)
    return causes


def node_causes(flat: FlatProgram, program: Program, nodes: I64) -> I64:
    """Returns the Cause of the time in which each of `nodes` runs, (n,); off the compute stream, of waiting for it."""
    op, stream, phase = flat.op[nodes], flat.stream[nodes], flat.phase[nodes]
    origin = Origin.of(program)
    causes: I64 = waiting_causes(program, origin)[op, stream]
    compute = stream == Stream.COMPUTE
    causes[compute] = running_causes(program, origin)[op[compute]]
    causes[compute & (phase == Phase.OPTIMIZER) & (causes != Cause.HOST)] = Cause.OPTIMIZER
    causes[compute & (phase == Phase.RECOMPUTE)] = Cause.RECOMPUTE
    return causes


@njit
def _waited_ps(blocker: int, now: int, nodes: Nodes, times: Times, joint: Mask, before: I32) -> int:
    """Returns the picoseconds after `now` that the chain up to node `blocker` waited for GPUs to join a collective.

    `before` (nodes,) is the previous node on the stream of each node, -1 for none.
    """
    waited = 0
    node = blocker
    while node >= 0 and times.start[node] > now:
        ready, last = times.issued[node], -1
        for e in range(nodes.pred_ptr[node], nodes.pred_ptr[node + 1]):
            if times.end[nodes.pred[e]] >= ready:
                ready, last = times.end[nodes.pred[e]], nodes.pred[e]
        if before[node] >= 0 and times.end[before[node]] >= ready:
            ready, last = times.end[before[node]], before[node]
        if nodes.meeting[node] >= 0 and joint[nodes.meeting[node]]:
            waited += times.start[node] - max(ready, now)
        node = last if last >= 0 and nodes.stream[last] != _COMPUTE_STREAM else -1
    return waited


@njit
def stream_before(class_ptr: I64, stream: I8) -> I32:
    """Returns the previous node on the stream of each node, (nodes,), -1 for none."""
    before = np.full(len(stream), -1, np.int32)
    for c in range(len(class_ptr) - 1):
        last = np.full(128, -1, np.int32)
        for i in range(class_ptr[c], class_ptr[c + 1]):
            before[i] = last[stream[i]]
            last[stream[i]] = i
    return before


def ready_ps(flat: FlatProgram, timeline: Timeline, nodes: I64) -> I64:
    """Returns when each of `nodes` could start by itself, in ps, (n,): issued, stream free, predecessors done."""
    before = stream_before(flat.class_ptr, flat.stream)[nodes]
    ready: I64 = np.maximum(timeline.issue_end_ps[nodes], np.where(before >= 0, timeline.end_ps[before], 0))
    for place, node in enumerate(nodes.tolist()):
        earlier = flat.pred[flat.pred_ptr[node] : flat.pred_ptr[node + 1]]
        if len(earlier):
            ready[place] = max(int(ready[place]), int(timeline.end_ps[earlier].max()))
    return np.minimum(ready, timeline.start_ps[nodes])


@njit
def _breakdown(nodes: Nodes, times: Times, counts: _Counts, joint: Mask, class_end: I64, has_pipeline: bool) -> I64:
    """Returns `breakdown_ps`, compiled.

    `joint` (meetings,) tells the meetings of several kinds of GPUs; `class_end` (n_classes,) is in ps, and empty if
    classes are programs of their own.
    """
    class_ptr, op, stream, meeting, end = nodes.class_ptr, nodes.op, nodes.stream, nodes.meeting, times.end
    n_classes = len(class_ptr) - 1
    step_end = -1
    for c in range(len(class_end)):
        step_end = max(step_end, class_end[c])
    before = stream_before(class_ptr, stream) if joint.any() else np.empty(0, np.int32)
    out = np.zeros((n_classes, N_CAUSES), np.int64)
    for c in range(n_classes):
        now = np.int64(0)
        for i in range(class_ptr[c], class_ptr[c + 1]):
            if stream[i] != _COMPUTE_STREAM:
                continue
            if times.start[i] > now:
                gap = times.start[i] - now
                cause, waited, blocker = _HOST, times.issued[i], -1
                for e in range(nodes.pred_ptr[i], nodes.pred_ptr[i + 1]):
                    p = nodes.pred[e]
                    if stream[p] != _COMPUTE_STREAM and end[p] > now and end[p] >= waited:
                        cause, waited, blocker = counts.waiting[op[p], stream[p]], end[p], p
                if blocker >= 0 and len(before):
                    waited = _waited_ps(blocker, now, nodes, times, joint, before)
                    out[c, _WAITING] += waited
                    gap -= waited
                if (
                    blocker >= 0 and meeting[blocker] >= 0 and not joint[meeting[blocker]]
                ):  # only the transfer itself is communication
                    moving = min(gap, end[blocker] - max(now, times.start[blocker]))
                    out[c, cause] += moving
                    out[c, _BUBBLE] += gap - moving
                else:
                    out[c, cause] += gap
            busy = end[i] - max(times.start[i], now)
            if busy > 0 and counts.divided[op[i]]:
                for k in range(N_CAUSES):
                    out[c, k] += counts.split_ps[op[i], k]
            elif busy > 0:
                cause = counts.running[op[i]]
                if counts.phase[i] == _RECOMPUTING:
                    cause = _RECOMPUTE
                elif counts.phase[i] == _UPDATING and cause != _HOST:
                    cause = _OPTIMIZER
                out[c, cause] += busy
            now = max(now, end[i])
        if step_end > now and len(before) and not has_pipeline:
            own_end = max(now, class_end[c])
            out[c, _DATA_PARALLEL] += own_end - now
            out[c, _WAITING] += step_end - own_end
        elif step_end > now:
            out[c, _BUBBLE if has_pipeline else _DATA_PARALLEL] += step_end - now
    return out


def pace_setter(seconds: F64) -> int:
    """Returns the rank class that waits least for others; `seconds` is (n_classes, N_CAUSES)."""
    return int(np.argmin(seconds[:, Cause.BUBBLE] + seconds[:, Cause.WAITING]))


def exposed_s(row: F64) -> float:
    """Returns the seconds of exposed communication in `row`, seconds by Cause (N_CAUSES,)."""
    return float(sum(row[cause] for cause in EXPOSED))
