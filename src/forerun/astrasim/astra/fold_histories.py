"""Folding by histories: ranks that run one trace are simulated together until something happens to them apart.

A ring through a part of a larger ring has one hop that is longer than the others, so its members end apart. But most
ranks end as others do, at all times. `messages.alike` finds who does while it runs, whatever the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forerun.astrasim.astra.collectives import CollectiveTables
from forerun.astrasim.astra.lower import IssueOrder, LoweredTrace, lower_program
from forerun.astrasim.astra.queueless_rings import Ring, is_countable, ring_of
from forerun.astrasim.astra.ranks import LoweredRanks, groups_of_all
from forerun.astrasim.astra.run import SlotRun, is_void
from forerun.astrasim.astra.symmetry import delays_ns
from forerun.astrasim.astra.system import System
from forerun.astrasim.chakra.trace import CommGroups
from forerun.astrasim.messages.alike import run_alike
from forerun.astrasim.messages.alike_state import ALIKE_CALL, CLASSES, HISTORIES, Mask, Rings
from forerun.astrasim.messages.ready import SLOT_NONE
from forerun.astrasim.messages.slots import COLLECTIVE, IN_CLOSED_FORM, Nodes, Result
from forerun.common.arrays import positions
from forerun.core.network.network_file import Network
from forerun.core.program.types import I64


class Histories(NamedTuple):
    """The distinct histories of ranks, which all run one trace."""

    run: SlotRun
    of_rank: I64
    """(ranks,) the history of each rank"""


def run_histories(
    lowered: LoweredRanks, comm_groups: CommGroups, system: System, network: Network, order: IssueOrder
) -> Histories | None:
    """Runs one trace on all ranks.

    Returns None if traces differ, a node is a message, a collective has no closed form as a ring, the order of two
    events of a rank follows from those of other ranks, or some node never runs.
    """
    if order == "march-2025" or len(lowered.of_class) > 1:
        return None
    one = lowered[0]
    if (one.slot == SLOT_NONE).any() or one.trace.involved_dims:  # sends have receives, which need no slot
        return None
    at = np.flatnonzero(one.action == COLLECTIVE)
    group = one.trace.group[one.row[at]]
    members = [groups_of_all(lowered, comm_groups, g) for g in np.unique(group).tolist()]
    tables = CollectiveTables(system, [dim.n_npus for dim in network.dims])
    nodes = lower_program([one], [0], [one.trace.group_names], comm_groups, tables, order).nodes
    calls, example, call = np.unique(nodes.target[at], return_index=True, return_inverse=True)
    rings = [ring_of(tables, c) for c in calls.tolist()]
    axis = np.unique(group, return_inverse=True)[1].reshape(-1)[example]
    known = [ring for ring in rings if ring is not None and ring.packets_ns > 0 and is_countable(ring, network)]
    of_axis = [table for table in members if table is not None]
    if len(known) < len(rings) or len(of_axis) < len(members):
        return None
    action, target = nodes.action.copy(), nodes.target.copy()
    action[at], target[at] = IN_CLOSED_FORM, call.reshape(-1)
    return _run(one, nodes._replace(action=action, target=target), *_rings(known, axis, of_axis, network))


def _run(lowered: LoweredTrace, nodes: Nodes, rings: Rings, types: I64) -> Histories | None:
    state, is_tied, code = run_alike(nodes, rings, types)
    n, n_nodes = int(state.known[HISTORIES]), len(nodes.action)
    done_order = state.done_order[state.history["of_class"][:n]].reshape(-1)
    start, end, finish = state.start_ns[:n].reshape(-1), state.end_ns[:n].reshape(-1), state.history["finish_ns"][:n]
    result = Result(start, end, done_order, finish.copy(), np.zeros(n * n_nodes, np.int64))
    is_unfinished = (state.one["n_done"][: state.known[CLASSES]] < n_nodes).any()
    if code or is_unfinished or is_void(result) or _share_tensors(lowered, is_tied):
        return None
    nothing = np.zeros(0, np.int64)
    return Histories(SlotRun(result, nothing, nothing, 0), state.of_rank)


def _share_tensors(lowered: LoweredTrace, is_tied: Mask) -> bool:
    """Returns whether two of these nodes have a tensor in common, so that the order in which they end counts."""
    trace, seen = lowered.trace, set[int]()
    for row in lowered.row[is_tied].tolist():
        read = trace.input_tensor[trace.input_ptr[row] : trace.input_ptr[row + 1]]
        written = trace.output_tensor[trace.output_ptr[row] : trace.output_ptr[row + 1]]
        tensors = {*read.tolist(), *written.tolist()}
        if tensors & seen:
            return True
        seen |= tensors
    return False


def _rings(known: Sequence[Ring], axis: I64, of_axis: Sequence[I64], network: Network) -> tuple[Rings, I64]:
    """Returns the engine's tables of the calls, and (axes, groups) numbers that differ where delays do."""
    member = np.array([table.reshape(-1) for table in of_axis], np.int64).reshape(len(of_axis), network.n_npus)
    size = np.array([table.shape[1] for table in of_axis], np.int64)
    types = np.zeros((len(of_axis), network.n_npus), np.int64)
    delay_ns: dict[tuple[int, int], I64] = {}
    calls = np.zeros(len(known), ALIKE_CALL)
    for k, (ring, a) in enumerate(zip(known, axis.tolist(), strict=True)):
        key = a, ring.message_bytes
        if key not in delay_ns:
            source, target = of_axis[a].reshape(-1), np.roll(of_axis[a], -1, axis=1).reshape(-1)
            bytes_each = np.full(len(source), ring.message_bytes, np.int64)
            delay_ns[key] = delays_ns(network, source, target, bytes_each)[positions(source)]
        row = list(delay_ns).index(key)
        calls[k] = a, row, ring.rounds * ring.n_messages, ring.rounds * ring.packets_ns, ring.tail_ns
    for a, table in enumerate(of_axis):
        of_groups = np.concatenate([delay[table] for (of, _), delay in delay_ns.items() if of == a], axis=1)
        if (of_groups != of_groups[0]).any():
            types[a, : len(table)] = np.unique(of_groups, axis=0, return_inverse=True)[1].reshape(-1)
    place = np.array([positions(row) for row in member], np.int64).reshape(member.shape)
    table_ns = np.array(list(delay_ns.values()), np.int64).reshape(-1, network.n_npus)
    return Rings(calls, table_ns, member, size, place), types
