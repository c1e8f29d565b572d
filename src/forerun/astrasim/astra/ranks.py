"""The lowered traces of all ranks; ranks whose traces have equal columns share the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from forerun.astrasim.astra.lower import IssueOrder, LoweredTrace, in_hashed_order, lower_trace
from forerun.astrasim.astra.remote_memory import RemoteMemory
from forerun.astrasim.astra.system import System
from forerun.astrasim.chakra.trace import CommGroups, RankTrace, TracesByClass, same_columns
from forerun.common.arrays import positions
from forerun.core.program.types import I64


@dataclass(frozen=True)
class LoweredRanks:
    """The lowered trace of each rank, made on use, and the classes of ranks whose traces have equal columns."""

    traces: Sequence[RankTrace] | TracesByClass
    of_class: tuple[LoweredTrace, ...]
    """the lowered trace of the first rank of each class"""
    class_of_rank: I64
    order: IssueOrder

    def __len__(self) -> int:
        return len(self.class_of_rank)

    def __iter__(self) -> Iterator[LoweredTrace]:
        return (self[rank] for rank in range(len(self)))

    def __getitem__(self, rank: int) -> LoweredTrace:
        trace, found = self.traces[rank], self.of_class[self.class_of_rank[rank]]
        of_rank = found if found.trace is trace else replace(found, trace=trace)
        return in_hashed_order(of_rank) if self.order == "march-2025" else of_rank

    @cached_property
    def group_names(self) -> Sequence[tuple[str, ...]]:
        """Returns the names of the communicator groups of each rank, as column `group` of its trace numbers them."""
        traces = self.traces
        return traces.group_names_of_ranks if isinstance(traces, TracesByClass) else [one.group_names for one in traces]


def lower_ranks(
    traces: Sequence[RankTrace] | TracesByClass, system: System, memory: RemoteMemory, order: IssueOrder
) -> LoweredRanks:
    """Lowers the trace of every rank.

    Raises ForerunError if a node can't be simulated.
    """
    if isinstance(traces, TracesByClass):
        class_of_rank = traces.class_of_rank.astype(np.int64)
        examples = list(zip(np.unique(class_of_rank, return_index=True)[1].tolist(), traces.classes, strict=True))
    else:
        class_of_rank, examples = np.arange(len(traces)), list(enumerate(traces))
    of_class: list[LoweredTrace] = []
    numbers = np.empty(len(examples), np.int64)
    for k, (rank, trace) in enumerate(examples):
        found = next((c for c, one in enumerate(of_class) if same_columns(trace, one.trace, one.row)), None)
        if found is None:
            found = len(of_class)
            of_class.append(lower_trace(trace, system, memory, f"rank {rank}"))
        numbers[k] = found
    return LoweredRanks(traces, tuple(of_class), numbers[class_of_rank], order)


def groups_of_all(lowered: LoweredRanks, comm_groups: CommGroups, g: int) -> I64 | None:
    """Returns the groups `g` of all ranks, (groups, members); None unless each rank is in one, all of one size."""
    n_ranks = len(lowered)
    if g < 0:
        return np.arange(n_ranks)[None]
    names = [names[g] for names in lowered.group_names]
    number = {name: k for k, name in enumerate(dict.fromkeys(names))}
    groups: Sequence[tuple[int, ...]] = [comm_groups.get(name, ()) for name in number]
    if len({len(group) for group in groups}) != 1:
        return None
    table = np.array(groups, np.int64)
    if not np.array_equal(np.sort(table, axis=None), np.arange(n_ranks)):
        return None
    own = positions(table.reshape(-1)) // table.shape[1]
    return table if np.array_equal(own, [number[name] for name in names]) else None
