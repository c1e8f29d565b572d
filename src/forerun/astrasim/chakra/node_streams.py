"""The engine's stream on which each node of a trace runs."""

from __future__ import annotations

import numpy as np

from forerun.astrasim.chakra.meetings import RankNodes
from forerun.astrasim.chakra.trace import NodeKind, RankTrace
from forerun.common.errors import ForerunError
from forerun.core.program.types import I8, N_STREAMS, Stream

HOST_STREAM = N_STREAMS - 1
"""the stream of nodes that run on the host"""
_COMM = (NodeKind.SEND, NodeKind.RECV, NodeKind.COLLECTIVE)


def names_streams(trace: RankTrace) -> bool:
    """Returns whether any device node names its stream."""
    return trace.stream is not None and bool((trace.stream[~trace.is_cpu] >= 0).any())


def node_streams(one: RankNodes) -> I8:
    """Returns the engine's stream of every row of a trace.

    Raises ForerunError if the trace names more streams than the engine has.
    """
    trace = one.trace
    kind, on_host = trace.kind, trace.is_cpu
    if not names_streams(trace):
        up = trace.peer > one.rank
        stream = np.full(len(trace), int(Stream.COMPUTE))
        stream[kind == NodeKind.COLLECTIVE] = Stream.GATHER
        stream[np.isin(kind, (NodeKind.MEM_LOAD, NodeKind.MEM_STORE))] = Stream.COPY
        stream[kind == NodeKind.SEND] = np.where(up, Stream.PP_SEND, Stream.PP_SEND_GRAD)[kind == NodeKind.SEND]
        stream[kind == NodeKind.RECV] = np.where(up, Stream.PP_RECV_GRAD, Stream.PP_RECV)[kind == NodeKind.RECV]
        stream[on_host] = HOST_STREAM
        return stream.astype(np.int8)
    assert trace.stream is not None
    # Device nodes that name no stream share two: one for compute, one for communication.
    named = np.where(trace.stream < 0, np.where(np.isin(kind, _COMM), -2, -1), trace.stream).astype(np.int64)
    found, number = np.unique(named[~on_host], return_inverse=True)
    if len(found) > HOST_STREAM:
        raise ForerunError(
            f"rank {one.rank}: its device nodes run on {len(found)} streams, but at most {HOST_STREAM} can be simulated"
        )
    number = number.reshape(-1)
    busiest = np.argmax(np.bincount(number, weights=kind[~on_host] == NodeKind.COMP, minlength=len(found)))
    stream_of = np.where(np.arange(len(found)) < busiest, np.arange(len(found)) + 1, np.arange(len(found)))
    stream_of[busiest] = Stream.COMPUTE
    stream = np.full(len(trace), HOST_STREAM, np.int8)
    stream[~on_host] = stream_of[number]
    return stream
