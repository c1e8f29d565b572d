"""simulate: when every node of a Program starts and ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from forerun.common.errors import ForerunError
from forerun.core.engine.actors import OpCosts, nodes_of
from forerun.core.engine.contention import run_contended
from forerun.core.engine.dataflow import run_dataflow
from forerun.core.engine.sharing import FULL, LinkDemand, crowded_links, links_of, used_pairs
from forerun.core.program.types import F64, I64, FlatProgram

_LISTED = 4
"""how many stuck nodes a deadlock message names"""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The start and end of every node of a FlatProgram, in integer picoseconds from the start of the step."""

    start_ps: I64
    end_ps: I64
    issue_end_ps: I64
    """when the host has issued the node"""
    class_end_ps: I64
    """when the last node of each rank class has ended and its host is done"""

    @property
    def end_of_step_ps(self) -> int:
        """Returns the time at which the last rank class is done, in picoseconds."""
        return int(self.class_end_ps.max(initial=0))


def simulate(
    flat: FlatProgram,
    duration_ps: I64,
    issue_ps: I64,
    slow_compute: F64,
    slow_network: F64,
    network_op: npt.NDArray[np.bool_],
    describe: Callable[[int, int], str] | None = None,
    demand: LinkDemand | None = None,
) -> Timeline:
    """Runs every rank class of `flat`. All other columns have one entry per op, `(flat.n_ops,)`.

    * The host of a rank class issues its nodes in order, one after the other, `issue_ps` each. After a node with
      sync = 1 it goes on only when that node has ended.
    * A node is ready when it is issued, its predecessors have ended, and the node before it on its stream has ended.
      It starts at once, and takes `duration_ps` if nothing slows it.
    * The nodes of a meeting start together, when the last of them is ready. From then on each is a node of its own rank
      class like any other, and ends by itself.
    * Inside a rank class, compute and network slow each other. A *network node* has `network_op`, whether it meets or
      not; a *compute node* is on Stream.COMPUTE, is no `network_op` and has no meeting. While at least one network node
      runs, a compute node progresses at rate 1 / (1 + slow_compute[op]); while a compute node runs, a network node
      progresses at rate 1 / (1 + slow_network[op]). All other nodes neither slow nor are slowed. So equal rank classes
      whose collectives meet take exactly the times of one of them alone, and so does a class that others wait for.
    * Inside a rank class, nodes share links. While the shares that running nodes ask of a link (`demand`) sum to more
      than all of it, each of these nodes progresses at 1 / that sum. It is slower if another link of its own is fuller.
      So a link never carries more than it can. The nodes of a meeting are one transfer: a full link that slows one of
      them slows all.
    * Remaining work is whole picoseconds: the work done in an interval is rounded down, the time still needed up.
    * Events at the same time are taken in order of (rank class, stream), and rates change after the last of them;
      nothing in the result depends on that order.

    `describe` returns the name of a node in errors, from its rank class and its number there.

    Slowing by company and by links multiply.

    Raises:
        ForerunError: a column has the wrong length or a negative entry, or nodes wait for each other for ever.
    """
    costs = OpCosts(duration_ps, issue_ps, slow_compute, slow_network, network_op)
    _check_costs(flat.n_ops, costs, demand)
    crowded = None if demand is None else crowded_links(demand, used_pairs(flat.op, flat.stream, flat.n_ops))
    nodes = nodes_of(flat)
    if crowded is not None or bool(network_op.any() and (slow_compute.any() or slow_network.any())):
        links = links_of(crowded, flat.n_ops, len(flat.class_names))
        start, end, issued, class_end, stuck = run_contended(nodes, costs, links)
    else:
        start, end, issued, class_end, stuck = run_dataflow(nodes, costs)
    if stuck:
        _raise_deadlock(flat, end, describe)
    return Timeline(start, end, issued, class_end)


def _check_costs(n_ops: int, costs: OpCosts, demand: LinkDemand | None) -> None:
    """Raises ForerunError if a column does not have one entry, not negative, for each of `n_ops` ops."""
    for name, column in zip(OpCosts._fields, costs, strict=True):
        if len(column) != n_ops:
            raise ForerunError(f"engine: {name} has {len(column)} entries, the program has {n_ops} ops")
        if n_ops and column is not costs.network_op and not column.min() >= 0:
            worst = int(np.argmin(column))
            raise ForerunError(f"engine: {name} of op {worst} is {column[worst]}, must be at least 0")
    if demand is not None and len(demand.share) != n_ops:
        raise ForerunError(f"engine: demand has {len(demand.share)} rows, the program has {n_ops} ops")
    if demand is not None and demand.share.size and not 0 <= demand.share.min() <= demand.share.max() <= FULL:
        raise ForerunError(f"engine: demand must be between 0 and {FULL}, the whole of a link")


def _raise_deadlock(flat: FlatProgram, end_ps: I64, describe: Callable[[int, int], str] | None) -> NoReturn:
    """Names the first node that never ran on each stream of each class, those at a meeting before the others."""
    first: dict[tuple[int, int], int] = {}
    for node in np.flatnonzero(end_ps < 0).tolist():
        owner = int(np.searchsorted(flat.class_ptr, node, side="right")) - 1
        first.setdefault((owner, int(flat.stream[node])), node)
    stuck = sorted(first.items(), key=lambda item: (flat.meeting[item[1]] < 0, item[1]))
    texts = []
    for (owner, stream), node in stuck[:_LISTED]:
        place = node - int(flat.class_ptr[owner])
        text = f"class {flat.class_names[owner]!r} step {flat.step[node]} node {place}"
        text += f" (op {flat.op[node]}, stream {stream})"
        if describe is not None:
            text = describe(owner, place)
        elif flat.meeting[node] >= 0:
            text += f" on channel {flat.channel_names[flat.meeting_channel[flat.meeting[node]]]!r}"
        texts.append(text)
    more = f" and {len(stuck) - _LISTED} more streams" if len(stuck) > _LISTED else ""
    raise ForerunError(f"deadlock: these nodes never run: {'; '.join(texts)}{more}")
