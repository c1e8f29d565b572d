"""Lists the kinds of a rank's nodes in the order in which ASTRA-sim prints their times.

It keeps a C++ `unordered_map` from nodes to their times. Nodes enter the map as they start, and ASTRA-sim lists kinds
in the order of their first node in the map. libstdc++ puts an element at the front of such a map if its bucket is
empty.
"""

from __future__ import annotations

import numpy as np

from forerun.astrasim.astra.lower import LoweredTrace
from forerun.astrasim.astra.replay import Replay
from forerun.astrasim.astra.statistics import RankStatistics
from forerun.astrasim.chakra.trace import NodeKind
from forerun.astrasim.messages.ready import BUCKETS
from forerun.core.program.types import I64

GPU, COMM = "gpu_time", "comm_time"
_NAMES = (GPU, COMM, "cpu_time", "remote_mem_time", "other")
"""names of the times of each kind in `RankStatistics`"""


def kinds_of_ranks(replay: Replay) -> list[tuple[str, ...]]:
    """Returns the kinds of nodes of every rank, by the names of their times.

    Compute and communication are in ASTRA-sim's order; builds that list kinds so have no others.
    """
    of_actor = []
    for actor, lowered in enumerate(replay.traces):
        of_actor.append(_kinds(lowered, replay.run.result.start_ns[replay.rows(actor)]))
    return [of_actor[actor] for actor in replay.actor_of_rank]


def overlap(of_rank: RankStatistics, kinds: tuple[str, ...]) -> int:
    """Returns compute plus communication minus wall time of a rank that has both, else 0.

    ASTRA-sim computes it in unsigned 64 bits, so that a rank that is idle for longer has a very large overlap.
    """
    return (of_rank.gpu_time + of_rank.comm_time - of_rank.wall_time) % 2**64 if {GPU, COMM} == {*kinds} else 0


def _kinds(lowered: LoweredTrace, start_ns: I64) -> tuple[str, ...]:
    kind, is_cpu = lowered.trace.kind[lowered.row], lowered.trace.is_cpu[lowered.row]
    comp = kind == NodeKind.COMP
    storage = (kind == NodeKind.MEM_LOAD) | (kind == NodeKind.MEM_STORE)
    number = np.select([comp & ~is_cpu, kind >= NodeKind.SEND, comp, storage], [0, 1, 2, 3], 4)
    found = np.unique(number).tolist()
    if found[:2] == [0, 1]:
        started = np.argsort(start_ns, kind="stable")
        front = started[_front(lowered.trace.node_id[lowered.row][started])]
        found.sort(key=lambda each: (each > 1, each != number[front], each))
    return tuple(_NAMES[each] for each in found)


def _front(keys: I64) -> int:
    """Returns the position in `keys` of the first element of a map into which they are inserted one by one.

    It is the last one whose bucket was empty since the map last grew, which the one that made it grow is at least.
    """
    level = int(np.searchsorted(BUCKETS, len(keys)))
    grew = int(BUCKETS[level - 1]) if level else 0
    _, first_in_bucket = np.unique(keys % BUCKETS[level], return_index=True)
    return int(max(first_in_bucket.max(), grew if grew < len(keys) else 0))
