"""Makes one Program of the recordings of a run, one recording for each role.

A role is a set of ranks that do the same work; one of them is recorded, and the role becomes a rank class of the
Program. The recorded streams become streams of the engine (`tracks`, `stream_placement`), and the nodes are cut into
blocks (`blocks`). Messages between roles and collectives over several roles become meetings: the k-th send of one role
to another over a process group meets the k-th receive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from forerun.common.errors import ForerunError
from forerun.core.memory.workspaces import configured_bytes, workspace_count
from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.types import (
    I16,
    I32,
    I64,
    N_CATEGORIES,
    Category,
    Channel,
    OpRow,
    Program,
    RankClass,
)
from forerun.describe.stacks.catalog import imported_by
from forerun.sources.trace.blocks import Blocks, Module, Nodes
from forerun.sources.trace.recording import Recording
from forerun.sources.trace.roles import Groups, Roles
from forerun.sources.trace.stream_placement import StreamPlacement, place_on_streams
from forerun.sources.trace.tracks import Tracks, tracks_of

_NODE_SIZE = 8
"""The ranks of a node where recordings don't say."""


def to_program(recordings: Sequence[Recording], cuts: Sequence[Iterable[int]] = ()) -> Program:
    """Returns the Program of a run from one recorded step of each role: one recording for SPMD, one per stage for
    pipelines.

    `cuts` are, for each recording, nodes before which a block begins, besides those where phase or layer change.
    Memory, order and waits are those of the recordings exactly, as long as a role has no more overlapping streams than
    the engine; otherwise `meta["notes"]` says so.

    Raises:
        ForerunError: no recording, an empty one, two of one rank or of runs of different size, or roles that send each
        other other numbers of messages than they receive.
    """
    roles = Roles.of(recordings)
    tracks = [tracks_of(roles, role) for role in range(len(roles))]
    placements = [place_on_streams(one, mine) for one, mine in zip(roles.recordings, tracks, strict=True)]
    meetings = _Meetings(roles)
    groups = Groups(roles, int(roles.recordings[0].meta.get("gpus_per_node") or _NODE_SIZE))
    merged = _Ops(roles, groups, meetings.borders)
    blocks, classes = Blocks(), []
    for role, (name, count) in enumerate(zip(roles.names(), roles.counts(), strict=True)):
        nodes = _nodes(roles, role, merged.of_node[role], meetings.channel[role], tracks[role], placements[role])
        block, layer = blocks.add(nodes, cuts[role] if cuts else ())
        resident = _resident_bytes(roles.recordings[role])
        classes.append(RankClass(name, count, block, np.zeros(len(block), np.int32), layer, resident))
    notes = [note for one in placements for note in one.notes] + meetings.notes
    return Program(
        ops=merged.ops.build(),
        blocks=tuple(blocks.blocks),
        rank_classes=tuple(classes),
        groups=tuple(groups.entries),
        channels=tuple(meetings.channels),
        modules=blocks.modules,
        meta=_meta(roles, groups, sorted(merged.compiled), notes),
    )


def _resident_bytes(recording: Recording) -> I64:
    out = np.zeros(N_CATEGORIES, np.int64)
    there = recording.tensor_alloc < 0
    np.add.at(out, recording.tensor_category[there], recording.tensor_bytes[there])
    return out


def _workspaces(recording: Recording) -> int:
    products = recording.ops.is_gemm[recording.op]
    return workspace_count(products, recording.phase, recording.stream)


def _state_tensors(recording: Recording) -> int:
    """Returns the number of parameters and optimizer states that exist before the step."""
    kept = np.isin(recording.tensor_category, (Category.PARAMETER, Category.OPTIMIZER))
    return int((kept & (recording.tensor_alloc < 0)).sum())


def _nodes(roles: Roles, role: int, op: I32, channel: I16, tracks: Tracks, placement: StreamPlacement) -> Nodes:
    """Returns the columns of one role. Predecessors on the same stream are left out: the stream's order implies
    them."""
    one, n = roles.recordings[role], len(roles.recordings[role])
    waiter = np.repeat(np.arange(n), np.diff(tracks.pred_ptr))
    says = placement.of_node[waiter] != placement.of_node[tracks.pred]
    waiter, pred = waiter[says], tracks.pred[says]
    # Where several end together, exposed time goes to the last one in the list: one on a stream of its own kind.
    order = np.lexsort((pred, placement.named[pred], waiter))
    ptr = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(waiter, minlength=n), out=ptr[1:])
    return Nodes(
        op=op,
        stream=placement.of_node,
        phase=one.phase,
        module=one.module,
        pred_ptr=ptr,
        pred=pred[order],
        channel=channel,
        sync=one.sync,
        tensor_bytes=one.tensor_bytes,
        tensor_category=one.tensor_category,
        tensor_alloc=one.tensor_alloc,
        tensor_free=one.tensor_free,
        modules=tuple(Module.of(path) for path in one.modules),
    )


# -- ops -----------------------------------------------------------------------------------------------------------


class _Ops:
    """The ops of all recordings in one table."""

    def __init__(self, roles: Roles, groups: Groups, borders: int) -> None:
        self.ops = OpTableBuilder()
        self._roles, self._groups, self._borders = roles, groups, borders
        self._rows = [one.ops.rows() for one in roles.recordings]
        self._eager: set[OpRow] = set()
        for one, rows in zip(roles.recordings, self._rows, strict=True):
            self._eager |= {rows[op] for op in set(one.op[one.compiled == 0].tolist())}
        self.compiled: set[int] = set()
        self.of_node = [self._of_role(role) for role in range(len(roles))]

    def _of_role(self, role: int) -> I32:
        """Returns the row of every node."""
        one = self._roles.recordings[role]
        peer = np.where(one.ops.is_transfer[one.op], one.peer, -1)
        key = (peer.astype(np.int64) + 1) * 2 * len(one.ops) + 2 * one.op + one.compiled
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        columns = (one.op[first].tolist(), one.compiled[first].tolist(), peer[first].tolist())
        numbers = np.array([self._add(role, *each) for each in zip(*columns, strict=True)], np.int32)
        of_node: I32 = numbers[inverse.reshape(-1)]
        return of_node

    def _add(self, role: int, number: int, compiled: int, peer: int) -> int:
        """Adds an op. A message between roles belongs to its two ranks, not to their process group."""
        row = self._rows[role][number]
        name, group = row.name, row.group
        merged = self._groups.numbers[role][group] if group >= 0 else -1
        if peer >= 0 and (group < 0 or self._roles.of_peer(role, group, peer) != role):
            merged = self._groups.border(self._roles.recordings[role].rank, peer, self._borders)
        # Launching compiled code costs the host another time, so a kernel that runs compiled and eagerly is two ops.
        name += " (compiled)" if compiled and row in self._eager else ""
        op = self.ops.add(row._replace(name=name, group=merged))
        if compiled:
            self.compiled.add(op)
        return op


# -- meetings ------------------------------------------------------------------------------------------------------


class _Meetings:
    """The channels between roles, and the channel of every node."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self.channels: list[Channel] = []
        self.notes: list[str] = []
        self.channel = [np.full(len(one), -1, np.int16) for one in roles.recordings]
        self.borders = 0
        if len(roles) > 1:
            self._messages()
            self._collectives()

    def _messages(self) -> None:
        """Joins the k-th send of a role to another over a process group with the k-th receive there."""
        ends: dict[tuple[int, int, str], dict[int, list[int]]] = {}
        for role, one in enumerate(self._roles.recordings):
            for node in np.flatnonzero(one.ops.is_transfer[one.op]).tolist():
                op = int(one.op[node])
                group = int(one.ops.group[op])
                peer = self._roles.of_peer(role, group, int(one.peer[node]))
                if peer != role:
                    key = (role, peer) if one.ops.sends[op] else (peer, role)
                    name = one.groups[group][0] if group >= 0 else ""
                    ends.setdefault((*key, name), {}).setdefault(role, []).append(node)
        names = self._roles.names()
        for (sender, receiver, group_name), nodes in ends.items():
            sent, got = len(nodes.get(sender, ())), len(nodes.get(receiver, ()))
            a, b = (self._roles.recordings[role].rank for role in (sender, receiver))
            if sent != got:
                over = f" over process group {group_name!r}" if group_name else ""
                raise ForerunError(
                    f"trace: rank {a} sends {sent} messages to rank {b}{over}, which receives {got} of them; record the"
                    " same step of every rank"
                )
            self._join(f"{names[sender]} to {names[receiver]}", (sender, receiver), nodes)
        self.borders = len({tuple(sorted(key[:2])) for key in ends})

    def _collectives(self) -> None:
        """Joins the k-th collectives of all roles that share a process group."""
        ends: dict[tuple[str, tuple[int, ...]], dict[int, list[int]]] = {}
        for role, one in enumerate(self._roles.recordings):
            shared = {
                number: (name, members)
                for number, (name, ranks) in enumerate(one.groups)
                if len(members := self._roles.in_group(role, ranks)) > 1
            }
            group = one.ops.group[one.op]
            wide = one.ops.is_collective[one.op] & np.isin(group, list(shared))
            for node in np.flatnonzero(wide).tolist():
                ends.setdefault(shared[int(group[node])], {}).setdefault(role, []).append(node)
        for (name, members), nodes in ends.items():
            counts = Counter({role: len(nodes.get(role, ())) for role in members})
            if len(set(counts.values())) == 1:
                self._join(f"{name} of {len(members)} roles", members, nodes)
            else:
                self.notes.append(
                    f"process group {name!r}: its ranks call different numbers of collectives "
                    f"({min(counts.values())} to {max(counts.values())}), so they don't wait for each other"
                )

    def _join(self, name: str, members: tuple[int, ...], nodes: dict[int, list[int]]) -> None:
        for role, mine in nodes.items():
            self.channel[role][mine] = len(self.channels)
        self.channels.append(Channel(name, tuple(sorted(members))))


# -- what readers are told -----------------------------------------------------------------------------------------


def _meta(roles: Roles, groups: Groups, compiled: list[int], notes: list[str]) -> dict[str, object]:
    first = roles.recordings[0].meta
    copies = first.get("data_parallel_size") or (1 if roles.world_size == 1 else None)
    told = _told(roles, "notes")
    return {
        "source": "trace",
        "name": str(first.get("name") or ""),
        "world_size": roles.world_size,
        "gpus_per_node": int(first.get("gpus_per_node") or _NODE_SIZE),
        "tokens_per_step": first.get("tokens_per_step") or _of_all_ranks(roles, "tokens", copies),
        "samples_per_step": _of_all_ranks(roles, "samples", copies),
        "torch": str(first.get("torch") or ""),
        "stack": imported_by(first.get("imported") or ()) or "",
        "group_ranks": groups.ranks,
        "roles": {"ranks": [one.rank for one in roles.recordings], "world_size": roles.world_size},
        "data_parallel": _numbers(roles, groups, "data_parallel"),
        "sharded": _numbers(roles, groups, "sharded"),
        "compiled_ops": compiled,
        "notes": list(dict.fromkeys([*told, *notes])),
        "fallbacks": list(dict.fromkeys(_told(roles, "fallbacks"))),
        "source_lines": _source_lines(roles),
        "loop": first.get("loop") or {},
        "stages": [list(stage) for stage in first.get("stages") or ()],
        "blas_workspaces": [_workspaces(one) for one in roles.recordings],
        "blas_workspace_bytes": configured_bytes(str(first.get("blas_workspace") or "")),
        "state_tensors": max(map(_state_tensors, roles.recordings)) or None,
    }


def _of_all_ranks(roles: Roles, key: str, copies: int | None) -> int | None:
    """Returns a figure of a step over all ranks. `copies` is the number of ranks with different data. Returns None if
    the figure is unknown.
    """
    figure = next((one.meta[key] for one in roles.recordings if one.meta.get(key)), None)
    return int(figure) * int(copies) if figure and copies else None


def _told(roles: Roles, key: str) -> list[str]:
    return [line for one in roles.recordings for line in one.meta.get(key) or ()]


def _source_lines(roles: Roles) -> dict[str, list[str]]:
    """Returns the lines of the program that launch the ops of each name, the most frequent first, where they were
    recorded."""
    found: dict[str, Counter[str]] = {}
    for one in roles.recordings:
        known = one.line >= 0
        pairs, count = np.unique(np.stack([one.op[known], one.line[known]]), axis=1, return_counts=True)
        for op, line, times in zip(*pairs.tolist(), count.tolist(), strict=True):
            found.setdefault(one.ops.name[op], Counter())[one.lines[line]] += times
    return {name: [line for line, _ in lines.most_common()] for name, lines in found.items()}


def _numbers(roles: Roles, groups: Groups, key: str) -> list[int] | None:
    """Returns the entries of the groups that recordings name under `key`, None if no recording does."""
    if all(one.meta.get(key) is None for one in roles.recordings):
        return None
    named = {name for one in roles.recordings for name in one.meta.get(key) or ()}
    return [number for number, name in enumerate(groups.names) if name and name in named]
