"""Places the communication groups of a Program on the nodes of another cluster."""

from __future__ import annotations

from dataclasses import replace

from forerun.core.program.groups import CommGroup
from forerun.core.program.origin import Origin
from forerun.core.program.types import Program


def laid_out(program: Program, node_size: int) -> Program:
    """Returns `program` with its groups on nodes of `node_size` ranks.

    The ranks in `meta["group_ranks"]` decide where given, else the distance between the members of a group.

    Raises:
        ForerunError: an entry of `meta` has the wrong type or value.
    """
    origin = Origin.of(program)
    groups = []
    for number, group in enumerate(program.groups):
        ranks = origin.group_ranks[number] if origin.group_ranks is not None else ()
        groups.append(
            CommGroup.of_ranks(group.axis, ranks, node_size, group.borders) if ranks else _by_spacing(group, node_size)
        )
    return replace(program, groups=tuple(groups))


def _by_spacing(group: CommGroup, node_size: int) -> CommGroup:
    if group.borders:  # where ends of a border share a node, only the maker of the group knows which ones
        if group.inner >= node_size:
            return replace(group, nodes=2, ranks_per_node=1)
        return replace(group, nodes=1, ranks_per_node=2) if group.inner * (group.borders + 1) <= node_size else group
    if group.runs:
        return CommGroup.on_runs(group.axis, group.runs, node_size)
    return CommGroup.on_mesh(group.axis, group.size, group.inner, node_size)
