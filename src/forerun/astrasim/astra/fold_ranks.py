"""Folding by classes: ranks that do the same at the same distances are simulated once.

The ranks of a class have equal traces, except for peers and group members. One rank stands for a class if all groups of
the class look alike from inside (`symmetry`), and if all its ranks send equally far to ranks of one class. Each
distinct collective then takes a fixed time, which the engine finds once on a mirrored fabric, and a message has a known
delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from forerun.astrasim.astra.collectives import CollectiveTables
from forerun.astrasim.astra.fabric import fabric_of
from forerun.astrasim.astra.lower import (
    IssueOrder,
    LoweredProgram,
    Messages,
    lower_program,
    match_messages,
)
from forerun.astrasim.astra.ranks import LoweredRanks
from forerun.astrasim.astra.run import run_program
from forerun.astrasim.astra.single import chain_of
from forerun.astrasim.astra.symmetry import delays_ns, distances, is_symmetric
from forerun.astrasim.astra.system import System
from forerun.astrasim.chakra.trace import CommGroups
from forerun.astrasim.messages.slots import COLLECTIVE, TIMED, Result
from forerun.core.network.network_file import Network
from forerun.core.program.types import I64

Signature = tuple[object, ...]
"""everything that the time of a collective depends on, on one machine"""


@dataclass
class CollectiveTimes:
    """A cache of the (time, tail) in ns of collectives on a machine, which several replays can share."""

    system: System
    network: Network
    known: dict[Signature, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Folded:
    """A program in which collectives take known times, and the simulated rank that stands for each rank."""

    program: LoweredProgram
    tables: CollectiveTables
    actor_of_rank: I64
    joined: I64 | None = None
    """(collective nodes, 2) node and group, if the run has to show that the members of a group start together"""
    group_size: I64 | None = None
    """the number of ranks of each of those groups"""

    def holds(self, result: Result) -> bool:
        """Returns whether the run confirms the assumption that the k-th collectives of a group start together on its
        ranks."""
        if self.joined is None or self.group_size is None:
            return True
        node, group = self.joined[:, 0], self.joined[:, 1]
        if not len(node):
            return True
        nodes = self.program.nodes
        rank = np.searchsorted(nodes.first, node, side="right") - 1
        order = np.lexsort((result.start_ns[node], rank, group))
        what = np.stack([result.start_ns[node], nodes.duration_ns[node], nodes.tail_ns[node]], axis=1)[order]
        group, rank = group[order], rank[order]
        of_group = np.flatnonzero(np.diff(group, prepend=-1))
        for first, last in zip(of_group, [*of_group[1:], len(group)], strict=True):
            members = int(self.group_size[group[first]])
            if len(np.unique(rank[first:last])) != members:
                return False
            calls = what[first:last].reshape(members, -1, 3) if (last - first) % members == 0 else np.zeros((0, 0, 3))
            if not calls.size or not (calls == calls[0]).all():
                return False
        return True


def fold_classes(
    lowered: LoweredRanks, comm_groups: CommGroups, times: CollectiveTimes, order: IssueOrder
) -> Folded | None:
    """Returns the program of one rank of each class, or None if ranks of a class see different distances.

    No two ranks are alike under the hashed issue policy, as it depends on node ids, which differ from rank to rank.
    """
    classes = lowered.class_of_rank
    if order == "march-2025" or len(lowered.of_class) == len(lowered):
        return None
    network = times.network
    leaders = np.unique(classes, return_index=True)[1]
    messages = _fold_messages(lowered, classes, leaders, network)
    signatures = _signatures(lowered, classes, leaders, comm_groups, times) if messages is not None else None
    if signatures is None:
        return None
    tables = CollectiveTables(times.system, [dim.n_npus for dim in network.dims])
    of_leaders = [lowered[rank] for rank in leaders]
    groups = [trace.trace.group_names for trace in of_leaders]
    program = lower_program(of_leaders, leaders.tolist(), groups, comm_groups, tables, order, messages)
    timed = with_times(program, tables, leaders, signatures, times)
    return None if timed is None else Folded(timed, tables, classes)


def fold_collectives(
    lowered: LoweredRanks, comm_groups: CommGroups, times: CollectiveTimes, order: IssueOrder
) -> Folded | None:
    """Returns the program of all ranks with known collectives, or None if a group's ranks see different distances.

    It assumes that all members of a group start together, which the run has to confirm.
    """
    signatures: dict[tuple[int, int], Signature] = {}
    numbers: dict[str, int] = {}
    group_of: list[I64] = []
    of_ranks = list(lowered)
    for rank, one in enumerate(of_ranks):
        trace = one.trace
        if trace.involved_dims:
            return None
        names = [*trace.group_names, ""]
        for g, name in enumerate(names):
            group = comm_groups.get(name, ())
            alike = ("all",) if name == "" else ring_signature([group], times.network)
            if alike is None:
                return None
            signatures[rank, g if name else -1] = alike
        number = np.array([numbers.setdefault(name, len(numbers)) for name in names])
        group_of.append(number[trace.group[one.row]])
    dims = [dim.n_npus for dim in times.network.dims]
    tables = CollectiveTables(times.system, dims)
    ranks = np.arange(len(lowered))
    groups = [one.trace.group_names for one in of_ranks]
    program = lower_program(of_ranks, ranks.tolist(), groups, comm_groups, tables, order)
    joined = np.flatnonzero(program.nodes.action == COLLECTIVE)
    timed = with_times(program, tables, ranks, signatures, times)
    if timed is None:
        return None
    sizes = np.array([len(comm_groups[name]) if name else len(lowered) for name in numbers])
    return Folded(timed, tables, ranks, np.stack([joined, np.concatenate(group_of)[joined]], axis=1), sizes)


def _fold_messages(lowered: LoweredRanks, classes: I64, leaders: I64, network: Network) -> Messages | None:
    """Returns the sends and receives of the leaders; None if a class sends to several classes or distances."""
    talking = list(lowered) if any(one.has_messages for one in lowered.of_class) else []
    full = match_messages(talking, range(len(talking)), network.n_npus)
    n_leaders = len(leaders)
    if not len(full.node):
        return full
    order = np.argsort(full.match * 2 + full.is_send, kind="stable")
    receives, sends = order[0::2], order[1::2]
    if len(receives) != len(sends) or not np.array_equal(full.match[receives], full.match[sends]):
        return None
    if full.is_send[receives].any() or not full.is_send[sends].all():
        return None
    sender, receiver = full.actor[sends], full.actor[receives]
    senders = [lowered[rank] for rank in sender.tolist()]
    size = np.array([one.trace.comm_size[one.row[i]] for one, i in zip(senders, full.node[sends], strict=True)])
    delay = delays_ns(network, sender, receiver, size)
    ends = np.stack([classes[sender], full.node[sends], classes[receiver], full.node[receives], delay], axis=1)
    kinds, example, counts = np.unique(ends, axis=0, return_index=True, return_counts=True)
    members = np.bincount(classes, minlength=n_leaders)
    alike = (counts == members[kinds[:, 0]]) & (counts == members[kinds[:, 2]])
    if not alike.all():  # a node has one message, so that no node of a class can be in two kinds
        return None
    number = np.arange(len(kinds))
    is_send = np.repeat([True, False], len(kinds))
    return Messages(
        actor=np.concatenate([kinds[:, 0], kinds[:, 2]]),
        node=np.concatenate([kinds[:, 1], kinds[:, 3]]),
        is_send=is_send,
        match=np.concatenate([number, number]),
        receiver=np.concatenate([kinds[:, 2], kinds[:, 2]]),
        peer=np.concatenate([leaders[kinds[:, 2]], leaders[kinds[:, 0]]]),
        delay_ns=np.concatenate([kinds[:, 4], np.zeros(len(kinds), np.int64)]),
        texts=tuple(full.texts[match] for match in full.match[sends[example]]),
    )


def _signatures(
    lowered: LoweredRanks, classes: I64, leaders: I64, comm_groups: CommGroups, times: CollectiveTimes
) -> dict[tuple[int, int], Signature] | None:
    """Returns the signature of each (class, group); None if a group spans classes or its ranks differ in distances."""
    signatures: dict[tuple[int, int], Signature] = {}
    for c, leader in enumerate(leaders.tolist()):
        of_leader = lowered[leader]
        trace = of_leader.trace
        used = np.unique(trace.group[of_leader.row[of_leader.action == COLLECTIVE]])
        if trace.involved_dims:
            return None
        for g in used.tolist():
            if g < 0:
                if len(leaders) > 1:
                    return None
                signatures[c, g] = ("all",)
                continue
            names = {lowered.group_names[rank][g] for rank in np.flatnonzero(classes == c).tolist()}
            groups = [comm_groups.get(name, ()) for name in sorted(names)]
            members = sorted(rank for group in groups for rank in group)
            inside = np.array_equal(members, np.flatnonzero(classes == c))
            signature = ring_signature(groups, times.network) if inside else None
            if signature is None:
                return None
            signatures[c, g] = signature
    return signatures


def ring_signature(groups: Sequence[tuple[int, ...]], network: Network) -> Signature | None:
    """Returns the signature of rings of one size; None if some rank is farther from its neighbour than others."""
    sizes = {len(group) for group in groups}
    flat = np.array([rank for group in groups for rank in group], np.int64)
    if len(sizes) != 1 or not len(flat) or flat.max() >= network.n_npus:
        return None
    n = sizes.pop()
    if n == network.n_npus:
        return ("all",)
    if n == 1:
        return ("alone",)
    ahead = np.roll(flat.reshape(-1, n), -1, axis=1).reshape(-1)
    seen = np.unique(distances(network, flat, ahead), axis=0)
    return ("ring", n, *seen[0].tolist()) if len(seen) == 1 else None


def with_times(
    program: LoweredProgram, tables: CollectiveTables, leaders: I64, signatures: dict[tuple[int, int], Signature],
    times: CollectiveTimes,
) -> LoweredProgram | None:  # fmt: skip
    """Gives each collective with a signature the time that it takes. Returns None if one is not symmetric."""
    nodes = program.nodes
    action, duration_ns, tail_ns = nodes.action.copy(), nodes.duration_ns.copy(), nodes.tail_ns.copy()
    at = np.flatnonzero(action == COLLECTIVE)
    actor = np.searchsorted(nodes.first, at, side="right") - 1
    calls, example = np.unique(nodes.target[at], return_index=True)
    keys: list[Signature] = []
    is_known = np.zeros(len(calls), bool)
    for c, k in enumerate(example.tolist()):
        lowered = program.traces[actor[k]]
        row = lowered.row[at[k] - nodes.first[actor[k]]]
        trace = lowered.trace
        signature = signatures.get((int(actor[k]), int(trace.group[row])))
        if signature is not None:
            keys.append((*signature, int(trace.comm_type[row]), int(trace.comm_size[row])))
            is_known[c] = True
    owner = {int(call): leaders[actor[k]] for call, k in zip(calls, example, strict=True)}
    calls = calls[is_known]
    missing = {key: int(call) for key, call in zip(keys, calls, strict=True) if key not in times.known}
    for key, call in missing.items():
        if not tables.n_phases(call) or not (
            key[0] == "ring" or is_symmetric(times.network, tables.phases_of(call), [])
        ):
            return None
    if missing:
        _measure(missing, owner, tables, times)
    of_call = np.zeros((int(calls.max(initial=-1)) + 1, 2), np.int64)
    of_call[calls] = [times.known[key] for key in keys] if keys else np.zeros((0, 2), np.int64)
    at = at[np.isin(nodes.target[at], calls)]
    action[at] = TIMED
    duration_ns[at], tail_ns[at] = of_call[nodes.target[at], 0], of_call[nodes.target[at], 1]
    changed = nodes._replace(action=action, duration_ns=duration_ns, tail_ns=tail_ns)
    return replace(program, nodes=changed)


def _measure(
    missing: dict[Signature, int], owner: dict[int, int], tables: CollectiveTables, times: CollectiveTimes
) -> None:
    """Runs the collectives one after the other on mirrored ranks and stores their times."""
    ranks = sorted({int(owner[call]) for call in missing.values()})
    of_rank = {rank: [(key, call) for key, call in missing.items() if owner[call] == rank] for rank in ranks}
    program = chain_of([[call for _, call in of_rank[rank]] for rank in ranks], ranks, tables)
    fabric = fabric_of(times.network, aware=False, mirrored_ranks=ranks)
    result = run_program(program, tables, fabric).result
    k = 0
    for rank in ranks:
        for key, _ in of_rank[rank]:
            times.known[key] = int(result.end_ns[k] - result.start_ns[k]), int(result.last_tail_ns[k])
            k += 1
