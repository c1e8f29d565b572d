"""Replays execution traces with CUDA-stream semantics, which predicts real training on another machine.

Nodes run in order on their streams, streams overlap, and the host has its own stream (see `chakra.program`). Compute
takes the time that the trace measured, or that of the system file's roofline. A collective starts on all ranks together
and ends on all together, with the slowest rank. A broadcast takes as long as an all-gather of the same buffer, which
brings as many bytes to the last rank. Collectives and messages that run at the same time don't slow each other.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from forerun.astrasim.astra.lower import LoweredTrace
from forerun.astrasim.astra.replay import Machine
from forerun.astrasim.astra.single import collective_times
from forerun.astrasim.astra.statistics import Mask, Observer, RankStatistics, union_ns
from forerun.astrasim.astra.symmetry import delays_ns, distances
from forerun.astrasim.chakra.meetings import RankNodes
from forerun.astrasim.chakra.program import COMM_TYPES, TracedProgram, traced_program
from forerun.astrasim.chakra.trace import CommGroups, CommType, NodeKind, RankTrace
from forerun.common.arrays import positions
from forerun.common.errors import ForerunError
from forerun.common.units import PS_PER_NS
from forerun.core.engine.simulate import Timeline, simulate
from forerun.core.network.network_file import Network, bytes_per_ns
from forerun.core.program.types import F64, I64, Collective, OpTable
from forerun.core.program.unfold import unfold

_MOST_NS = 1 << 52


@dataclass(frozen=True)
class StreamReplay:
    """The result of a run with stream semantics."""

    statistics: tuple[RankStatistics, ...]
    """statistics of each rank"""
    traced: TracedProgram
    timeline: Timeline
    kernels: int
    """compute nodes on the devices of all ranks"""
    untimed: int
    """those of them that take no time, because the trace has neither their duration nor their operations"""


def replay_streams(
    traces: Sequence[RankTrace], comm_groups: CommGroups, machine: Machine, measured: bool = True
) -> tuple[RankStatistics, ...]:
    """Returns the statistics of every rank; without `measured`, device nodes with num_ops take their roofline time.

    `exposed_communication` is the time in which a rank communicates while no compute node runs on its device.

    Raises ForerunError as `run_streams` does.
    """
    return run_streams(traces, comm_groups, machine, measured).statistics


def run_streams(
    traces: Sequence[RankTrace], comm_groups: CommGroups, machine: Machine, measured: bool = True
) -> StreamReplay:
    """Does the same as `replay_streams`, and returns the Program and its timeline too.

    Raises ForerunError if the numbers of traces and of the network's ranks differ, a node can't be simulated, or ranks
    wait for each other for ever; the nodes are named.
    """
    n_ranks = machine.network.n_npus
    if len(traces) != n_ranks:
        raise ForerunError(f"the network has {n_ranks} ranks, but there are traces of {len(traces)}")
    times = _Times(machine)
    traced = traced_program(traces, comm_groups, measured, times.seen_by, times.durations_ns)
    duration_ps = PS_PER_NS * times.durations_ns(traced.program.ops, traced.members)
    flat, n_ops = unfold(traced.program), len(duration_ps)
    nothing, no_op = np.zeros(n_ops), np.zeros(n_ops, np.bool_)
    timeline = simulate(
        flat,
        duration_ps,
        np.zeros(n_ops, np.int64),
        nothing,
        nothing,
        no_op,
        describe=lambda number, node: traced.classes[number].text(node),
    )
    of_class, kernels, untimed = [], 0, 0
    ranks_of = np.bincount(traced.class_of_rank, minlength=len(traced.classes))
    for c, one in enumerate(traced.classes):
        nodes = slice(flat.class_ptr[c], flat.class_ptr[c + 1])
        start, end = timeline.start_ps[nodes] // PS_PER_NS, timeline.end_ps[nodes] // PS_PER_NS
        estimated = traced.program.ops.is_memory_bound[flat.op[nodes]]
        of_class.append(_statistics(one, estimated, machine, start, end))
        kernel = _kernels(one)
        kernels += int(ranks_of[c] * kernel.sum())
        untimed += int(ranks_of[c] * (kernel & (end == start) & (one.trace.num_ops[one.row] == 0)).sum())
    return StreamReplay(tuple(of_class[c] for c in traced.class_of_rank), traced, timeline, kernels, untimed)


def _kernels(one: RankNodes) -> Mask:
    """Returns the mask of a rank's nodes, in issue order, that compute on its device."""
    kernels: Mask = (one.trace.kind[one.row] == NodeKind.COMP) & ~one.trace.is_cpu[one.row]
    return kernels


@dataclass
class _Times:
    """The durations of ops on a machine; each distinct collective is simulated once."""

    machine: Machine
    known: dict[tuple[Hashable, ...], int] = field(default_factory=dict)

    def seen_by(self, members: tuple[int, ...]) -> Hashable:
        """Returns the key that determines the time of a collective over `members`."""
        network = self.machine.network
        if len(members) == network.n_npus or len(members) < 2 or self.machine.aware:
            return members if 1 < len(members) < network.n_npus else len(members)
        ring = np.array(members)
        return len(members), distances(network, ring, np.roll(ring, -1)).tobytes()

    def durations_ns(self, ops: OpTable, groups: Sequence[tuple[int, ...]]) -> I64:
        """Returns the duration of every op in whole ns; `groups` are the members of each group that ops name.

        Raises ForerunError if the system file or the network gives no time for an op.
        """
        machine = self.machine
        duration = np.zeros(len(ops), np.int64)
        delays = np.flatnonzero(ops.is_delay)
        duration[delays] = ops.delay(delays).duration_ps // PS_PER_NS
        compute = ops.is_memory_bound
        duration[compute] = _roofline_ns(ops.flops[compute], ops.bytes_read[compute], machine)
        storage = ops.is_host_copy
        if storage.any():
            duration[storage] = machine.memory.runtime_ns(ops.bytes_comm[storage].astype(np.int64))
        message = ops.is_transfer
        if message.any():
            ends = np.array([groups[group] for group in ops.group[message]])
            duration[message] = _message_ns(machine, ends[:, 0], ends[:, 1], ops.bytes_comm[message].astype(np.int64))
        for op in np.flatnonzero(ops.is_collective).tolist():
            members, kind = groups[ops.group[op]], COMM_TYPES[Collective(int(ops.collective[op]))]
            size = int(ops.bytes_comm[op]) // (len(members) if kind == CommType.ALL_GATHER else 1)
            try:
                duration[op] = self.collective_ns(kind, size, members)
            except ForerunError as error:
                ranks = ", ".join(map(str, members[:8])) + (", ..." if len(members) > 8 else "")
                raise ForerunError(f"{kind.name.lower()} of {size} bytes of ranks {ranks}: {error}") from None
        return duration

    def collective_ns(self, kind: CommType, size: int, members: tuple[int, ...]) -> int:
        """Returns the time from a common start until the last rank ends; `size` is comm_size in a trace."""
        if len(members) < 2:
            return 0
        if kind == CommType.BROADCAST:
            kind, size = CommType.ALL_GATHER, -(-size // len(members))
        size = max(size, self.machine.system.preferred_dataset_splits)
        key = (kind, size, self.seen_by(members))
        if key not in self.known:
            network, system = self.machine.network, self.machine.system
            groups = () if len(members) == network.n_npus else (members,)
            self.known[key] = int(
                collective_times(network, system, kind, size, groups, self.machine.aware).ends_ns.max()
            )
        return self.known[key]


def _roofline_ns(flops: F64, touched: F64, machine: Machine) -> I64:
    """Returns the time of compute nodes, in the order of operations of ASTRA-sim, so that it rounds alike."""
    if not len(flops):
        return np.zeros(0, np.int64)
    system = machine.system
    if not (system.peak_perf and system.local_mem_bw):
        raise ForerunError("compute nodes without durations need local-mem-bw and peak-perf above 0 in the system file")
    intensity = np.divide(flops, touched, out=np.full(len(flops), np.inf), where=touched > 0)
    performance = np.minimum(system.memory_bytes_per_s * intensity, system.peak_flops)
    at_rate = np.divide(flops, performance, out=np.zeros(len(flops)), where=flops > 0)
    seconds = np.where(flops > 0, at_rate, touched / system.memory_bytes_per_s)
    if (seconds * 1e9 > _MOST_NS).any():
        raise ForerunError(f"a compute node of {flops[np.argmax(seconds)]:g} operations takes longer than 2**52 ns")
    return (seconds * 1e9).astype(np.int64)


def _message_ns(machine: Machine, source: I64, sink: I64, size: I64) -> I64:
    """Returns the time of messages that share no link with others."""
    network = machine.network
    if not machine.aware:
        return delays_ns(network, source, sink, size)
    return _store_and_forward_ns(network, source, sink, size)


def _store_and_forward_ns(network: Network, source: I64, sink: I64, size: I64) -> I64:
    """Returns the time of messages that every link passes on as a whole."""
    topology = network.topology()
    links = topology.links()
    paths = topology.routes(source.astype(np.int32), sink.astype(np.int32))
    message = np.repeat(np.arange(len(size)), paths.hops)
    rate = bytes_per_ns(links.bandwidth_gbps, gib=network.gib)
    hop = (links.latency_ns[paths.link] + size[message] / rate[paths.link]).astype(np.int64)
    total = np.zeros(len(size), np.int64)
    np.add.at(total, message, hop)
    return total


def _statistics(one: RankNodes, estimated: Mask, machine: Machine, start_ns: I64, end_ns: I64) -> RankStatistics:
    """Returns the statistics of a rank; `estimated` marks nodes (in issue order) that the roofline timed."""
    trace, row, system = one.trace, one.row, machine.system
    n = len(row)
    gpu = _kernels(one)
    comm = trace.kind[row] >= NodeKind.SEND
    duration = end_ns - start_ns
    performance = np.zeros(n)
    worked = gpu & (duration > 0) & (trace.num_ops[row] > 0) & (trace.tensor_size[row] > 0)
    ops, size = trace.num_ops[row][worked].astype(np.float64), trace.tensor_size[row][worked]
    at_roofline = np.minimum(system.memory_bytes_per_s * (ops / size), system.peak_flops)
    performance[worked] = np.where(estimated[worked], at_roofline, ops / (duration[worked] * 1e-9))
    done_order = positions(np.lexsort((start_ns, end_ns)))
    nothing = np.zeros(0, np.int32)
    lowered = LoweredTrace(
        trace,
        row,
        action=np.zeros(n, np.int8),
        slot=np.zeros(n, np.int8),
        duration_ns=duration,
        performance=performance,
        n_pred=nothing,
        child_ptr=nothing.astype(np.int64),
        child=nothing,
        root=nothing.astype(np.int64),
    )
    end = int(end_ns.max(initial=0))
    found = Observer(lowered, system).statistics(start_ns, end_ns, done_order, end)
    both = gpu | comm
    exposed = union_ns(start_ns[both], end_ns[both]) - union_ns(start_ns[gpu], end_ns[gpu])
    return replace(found, exposed_communication=exposed)
