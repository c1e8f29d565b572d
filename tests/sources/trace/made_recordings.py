"""Recordings made by hand, random ones, and what their semantics are, written as slowly and plainly as can be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.kinds import Direction, OpKind
from forerun.core.program.types import N_CATEGORIES, Category, Collective, OpRow, Phase
from forerun.sources.trace.recording import Recording

LAUNCH_PS = 3


class Recorder:
    """Writes one recording, node by node. The time of an op is its FLOPs, in picoseconds."""

    def __init__(self, rank=0, groups=(), **meta):
        self.rank, self.groups = rank, tuple(groups)
        self.meta = {"name": "made", "world_size": 8, "gpus_per_node": 4, **meta}
        self.ops, self.modules = OpTableBuilder(), {"": 0}
        self.nodes, self.waits, self.tensors = [], [], []

    def __len__(self):
        return len(self.nodes)

    def node(self, op, stream=0, phase=Phase.FORWARD, module="", peer=-1, sync=0, compiled=0, waits=()):
        number = self.modules.setdefault(module, len(self.modules))
        self.nodes.append((op, stream, int(phase), number, peer, int(sync), compiled))
        self.waits.append(sorted(set(waits)))
        return len(self.nodes) - 1

    def kernel(self, name, time_ps, stream=0, **where):
        op = self.ops.memory(name, 8.0 * time_ps, 8.0, flops=float(time_ps))
        return self.node(op, stream, **where)

    def collective(self, kind, group, size_bytes, time_ps, stream=0, name="collective", **where):
        comm = {"collective": int(kind), "group": group, "bytes_comm": float(size_bytes)}
        op = self.ops.add(OpRow(name, OpKind.COLLECTIVE, "bf16", flops=float(time_ps), **comm))
        return self.node(op, stream, **where)

    def message(self, sends, peer, group, size_bytes, time_ps, stream=0, **where):
        way = (Direction.OUT if sends else Direction.IN,)
        comm = {"collective": int(Collective.SEND_RECV), "group": group, "bytes_comm": float(size_bytes)}
        row = OpRow("send" if sends else "recv", OpKind.P2P, "bf16", details=way, flops=float(time_ps), **comm)
        op = self.ops.add(row)
        return self.node(op, stream, peer=peer, **where)

    def tensor(self, size_bytes, category, alloc, free):
        self.tensors.append([size_bytes, int(category), alloc, free])
        return len(self.tensors) - 1

    def recording(self):
        nodes = np.array(self.nodes, np.int64).reshape(-1, 7)
        tensors = np.array(self.tensors, np.int64).reshape(-1, 4)
        return Recording(
            rank=self.rank,
            ops=self.ops.build(),
            op=nodes[:, 0].astype(np.int32),
            stream=nodes[:, 1].astype(np.int32),
            phase=nodes[:, 2].astype(np.int8),
            module=nodes[:, 3].astype(np.int32),
            peer=nodes[:, 4].astype(np.int32),
            sync=nodes[:, 5].astype(np.int8),
            compiled=nodes[:, 6].astype(np.int8),
            line=np.full(len(nodes), -1, np.int32),
            wait_ptr=np.concatenate([[0], np.cumsum([len(w) for w in self.waits])]).astype(np.int64),
            wait=np.array([w for row in self.waits for w in row], np.int32),
            tensor_bytes=tensors[:, 0].copy(),
            tensor_category=tensors[:, 1].astype(np.int8),
            tensor_alloc=tensors[:, 2].astype(np.int32),
            tensor_free=tensors[:, 3].astype(np.int32),
            groups=self.groups,
            modules=tuple(self.modules),
            meta=self.meta,
        )


# -- what a recording means --------------------------------------------------------------------------------------------


def peak_bytes(recording: Recording) -> int:
    """Highest sum of living tensors: node i allocates, then frees."""
    return max(sum(levels.values()) for levels in memory_levels(recording))


def memory_levels(recording: Recording) -> list[dict[int, int]]:
    """Bytes by category after the allocations of every node, from before the first one on."""
    level = dict.fromkeys(range(N_CATEGORIES), 0)
    change: dict[tuple[int, int], list[tuple[int, int]]] = {}
    columns = (recording.tensor_bytes, recording.tensor_category, recording.tensor_alloc, recording.tensor_free)
    for size, category, alloc, free in zip(*(column.tolist() for column in columns), strict=True):
        if alloc < 0:
            level[category] += size
        else:
            change.setdefault((alloc, 0), []).append((category, size))
        if free >= 0:
            change.setdefault((free, 1), []).append((category, -size))
    out = [dict(level)]
    for node in range(len(recording)):
        for category, size in change.get((node, 0), ()):
            level[category] += size
        out.append(dict(level))
        for category, size in change.get((node, 1), ()):
            level[category] += size
    return out


def ends_ps(recordings: Sequence[Recording], issue_ps: int = LAUNCH_PS) -> list[list[int]]:
    """End of every node, by relaxation until nothing changes.

    Streams run in order, but neighbours in issue order that are messages of one stream run together (those in one
    direction to one peer in order); nodes wait for what they were told to; the host issues in order and waits after a
    node with sync. The k-th send from one recorded rank to another and the k-th receive start together.
    """
    before = [_before(one) for one in recordings]
    time = [one.ops.flops[one.op].astype(int).tolist() for one in recordings]
    start = [[0] * len(one) for one in recordings]
    meetings = _meetings(recordings)
    changed = True
    while changed:
        changed = False
        for r, one in enumerate(recordings):
            host = 0
            for i in range(len(one)):
                host += issue_ps * int(one.ops.launches[one.op[i]])
                ready = max([host, *(start[r][p] + time[r][p] for p in before[r][i])])
                changed |= ready > start[r][i]
                start[r][i] = max(ready, start[r][i])
                if one.sync[i]:
                    host = max(host, start[r][i] + time[r][i])
        for members in meetings:
            together = max(start[r][i] for r, i in members)
            for r, i in members:
                changed |= start[r][i] != together
                start[r][i] = together
    return [[s + t for s, t in zip(starts, times, strict=True)] for starts, times in zip(start, time, strict=True)]


def _before(one: Recording) -> list[set[int]]:
    """What each node waits for on the device."""
    kind = one.ops.kind[one.op].tolist()
    waits = [one.wait[one.wait_ptr[i] : one.wait_ptr[i + 1]].tolist() for i in range(len(one))]
    out = [set(wait) for wait in waits]
    for stream in set(one.stream.tolist()):
        nodes = np.flatnonzero(one.stream == stream).tolist()
        batches: list[list[int]] = []
        for node in nodes:
            message = kind[node] == OpKind.P2P
            last = batches[-1][-1] if batches else -2
            if message and last == node - 1 and kind[last] == OpKind.P2P and not one.sync[last]:
                batches[-1].append(node)
            else:
                batches.append([node])
        for k, batch in enumerate(batches):
            for at, node in enumerate(batch):
                out[node] |= set(batches[k - 1]) if k else set()
                for other in batch[:at]:
                    out[node] |= set(waits[other])
                    same_op = one.ops.sends[one.op[other]] == one.ops.sends[one.op[node]]
                    out[node] |= {other} if same_op and one.peer[other] == one.peer[node] else set()
    return out


def _meetings(recordings: Sequence[Recording]) -> list[list[tuple[int, int]]]:
    of_rank = {one.rank: r for r, one in enumerate(recordings)}
    found: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for r, one in enumerate(recordings):
        count: dict[tuple[object, ...], int] = {}
        for i in range(len(one)):
            op, peer = int(one.op[i]), int(one.peer[i])
            group = one.groups[one.ops.group[op]] if one.ops.group[op] >= 0 else ("", ())
            if one.ops.kind[op] == OpKind.P2P and peer in of_rank:
                ends = (one.rank, peer) if one.ops.sends[op] else (peer, one.rank)
            elif one.ops.kind[op] == OpKind.COLLECTIVE and sum(rank in of_rank for rank in group[1]) > 1:
                ends = group[1]
            else:
                continue
            count[ends, group[0]] = k = count.get((ends, group[0]), -1) + 1
            found.setdefault((ends, group[0], k), []).append((r, i))
    return list(found.values())


# -- random recordings -------------------------------------------------------------------------------------------------

GROUPS = (("mesh_dp_shard", (0, 1, 2, 3)), ("mesh_tp", (0, 4)), ("0", (0, 1, 2, 3, 4, 5, 6, 7)))
PATHS = ("", "embed", "layers.0.attn", "layers.0.mlp", "layers.1.attn", "layers.1.mlp", "head.norm")


@st.composite
def recordings(draw: st.DrawFn, max_streams: int = 6) -> Recording:
    """One rank's step: kernels and collectives on some streams, waits, host waits, tensors."""
    made = Recorder(groups=GROUPS, data_parallel=["mesh_dp_shard"])
    streams = st.sampled_from([0, 0, 0, *range(1, max_streams)])
    phase = Phase.FORWARD
    for i in range(draw(st.integers(1, 24))):
        phase = Phase(max(phase, draw(st.sampled_from([0, 0, 0, 1, 1, 3])))) if draw(st.integers(0, 4)) == 0 else phase
        where = {
            "phase": Phase.RECOMPUTE if phase == Phase.BACKWARD and draw(st.integers(0, 3)) == 0 else phase,
            "module": draw(st.sampled_from(PATHS)),
            "sync": draw(st.integers(0, 9)) == 0,
            "compiled": draw(st.integers(0, 1)),
            "waits": draw(st.lists(st.integers(0, i - 1), max_size=2)) if i and draw(st.booleans()) else (),
        }
        time = draw(st.integers(0, 20))
        if draw(st.integers(0, 3)) == 0:
            kind = draw(st.sampled_from([Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.ALL_TO_ALL]))
            made.collective(kind, draw(st.integers(0, 2)), 64 * time, time, draw(streams), **where)
        else:
            made.kernel(f"kernel {draw(st.integers(0, 3))}", time, draw(streams), **where)
    _random_tensors(draw, made)
    return made.recording()


def _random_tensors(draw: st.DrawFn, made: Recorder) -> None:
    for _ in range(draw(st.integers(0, 12))):
        alloc = draw(st.integers(-1, len(made) - 1))
        free = draw(st.one_of(st.just(-1), st.integers(max(alloc, 0), len(made) - 1)))
        made.tensor(512 * draw(st.integers(1, 9)), draw(st.sampled_from(list(Category))), alloc, free)


@st.composite
def pipelines(draw: st.DrawFn) -> list[Recording]:
    """Stages that hand activations on and gradients back, some messages in batches, some alone, kernels around them."""
    n_stages = draw(st.integers(2, 4))
    ranks = tuple(2 * stage for stage in range(n_stages))
    stages = [Recorder(rank, groups=(("mesh_pp", ranks),), world_size=2 * n_stages) for rank in ranks]
    streams = st.sampled_from([0, 7])
    for turn in range(draw(st.integers(1, 5))):
        backward = draw(st.booleans())
        order = stages[::-1] if backward else stages
        size, time = 512 * draw(st.integers(1, 4)), draw(st.integers(1, 30))
        stream = draw(streams)
        for place, stage in enumerate(order):
            where = {"phase": Phase.BACKWARD if backward else Phase.FORWARD, "module": f"layers.{turn}"}
            at = ranks.index(stage.rank)
            step = -1 if backward else 1
            got = ()
            if place:
                here = [len(stage) - 1] if len(stage) else []
                got = (stage.message(False, ranks[at - step], 0, size, time, stream, waits=here, **where),)
            done = stage.kernel("work", draw(st.integers(0, 40)), waits=got, **where)
            if place < n_stages - 1:
                stage.message(True, ranks[at + step], 0, size, time, stream, waits=(done,), **where)
    if draw(st.booleans()):
        for stage in stages:
            stage.collective(Collective.ALL_REDUCE, 0, 8, 5, 0, phase=Phase.OPTIMIZER)
    return [stage.recording() for stage in stages]
