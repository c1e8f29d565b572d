"""A single collective of all ranks, or of all groups of a kind at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.astra.collectives import CollectiveTables
from forerun.astra.fabric import fabric_of
from forerun.astra.lower import lower_program, lower_trace
from forerun.astra.remote_memory import RemoteMemory
from forerun.astra.run import SlotRun, run_program
from forerun.astra.symmetry import is_symmetric
from forerun.astra.system import System
from forerun.chakra.trace import CommType, NodeKind, RankTrace
from forerun.network.network_file import Network
from forerun.program.types import I64


def one_node(kind: CommType, size: int, group: str | None = None) -> RankTrace:
    """The trace of a rank that takes part in one collective."""
    nothing, pointer = np.zeros(0, np.int32), np.zeros(2, np.int64)
    return RankTrace(
        node_id=np.array([1], np.int64),
        kind=np.array([NodeKind.COLLECTIVE], np.int8),
        is_cpu=np.zeros(1, np.bool_),
        duration_us=np.zeros(1, np.int64),
        num_ops=np.zeros(1, np.int64),
        tensor_size=np.zeros(1, np.int64),
        comm_type=np.array([kind], np.int8),
        comm_size=np.array([size], np.int64),
        comm_tag=np.zeros(1, np.int64),
        peer=np.full(1, -1, np.int32),
        group=np.array([-1 if group is None else 0], np.int32),
        priority=np.zeros(1, np.int32),
        data_ptr=pointer,
        data=nothing,
        ctrl_ptr=pointer,
        ctrl=nothing,
        input_ptr=pointer,
        input_tensor=nothing,
        output_ptr=pointer,
        output_tensor=nothing,
        tensor_bytes=np.zeros(0, np.int64),
        group_names=() if group is None else (group,),
    )


def collective_times(
    network: Network,
    system: System,
    kind: CommType,
    size: int,
    groups: Sequence[tuple[int, ...]] = (),
    aware: bool = False,
) -> tuple[I64, SlotRun]:
    """When each rank ends a collective that all begin at 0, in ns (n_npus,).

    `size` is the full local buffer, for an all-gather the local shard. With `groups`, each runs a collective of its
    own at the same time; ranks in none of them end at 0. Where all ranks are alike, one is simulated.
    """
    system = system.model_copy(update={"roofline_enabled": False, "replay_only": False, "track_local_mem": False})
    tables = CollectiveTables(system, [dim.n_npus for dim in network.dims])
    world = tuple(range(network.n_npus))
    names = {str(k): tuple(group) for k, group in enumerate(groups)}
    ranks = sorted(rank for group in groups or [world] for rank in group)
    name_of = {rank: name for name, group in names.items() for rank in group}
    lowered = lower_trace(one_node(kind, size, "0" if groups else None), system, RemoteMemory())
    communicator = tables.communicator("0" if groups else "", tuple(groups[0]) if groups else world)
    call = tables.call(kind, size, communicator)
    mirrored = not aware and is_symmetric(network, tables.phases_of(call), list(names.values()))
    if mirrored:
        ranks = ranks[:1]
    members = [(name_of.get(rank, ""),) for rank in ranks]
    program = lower_program([lowered] * len(ranks), ranks, members, names, tables)
    run = run_program(program, tables, fabric_of(network, aware, mirrored))
    ends = np.zeros(network.n_npus, np.int64)
    if mirrored and not groups:
        ends[:] = run.result.end_ns[0]
    elif mirrored:
        ends[[rank for group in groups for rank in group]] = run.result.end_ns[0]
    else:
        ends[ranks] = run.result.end_ns
    return ends, run
