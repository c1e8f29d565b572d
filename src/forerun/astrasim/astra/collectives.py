"""The chunks, phases, algorithms and queues that ASTRA-sim makes of a collective, as tables for the engine.

All rounding is ASTRA-sim's: sizes that don't divide make an extra chunk, and a chunk has at least one byte for each
rank. A group smaller than the system runs the ring algorithm, or that of the system file in later builds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from forerun.astrasim.astra.custom import Algorithm, Costs
from forerun.astrasim.astra.custom_steps import RankSteps, StepTable, steps_of_algorithm, steps_of_trace
from forerun.astrasim.astra.reference import REFERENCE
from forerun.astrasim.astra.system import System, window
from forerun.astrasim.chakra.trace import CommType
from forerun.astrasim.chakra.traces import open_traces
from forerun.astrasim.messages import state as codes
from forerun.astrasim.messages.state import CALL, PHASE, Collectives
from forerun.common.arrays import pointers
from forerun.common.errors import ForerunError
from forerun.core.program.types import I64

_SUBGROUP_ENDPOINT_NS: int = REFERENCE.subgroup_endpoint_ns
_POLICY = {"LIFO": 1, "FIFO": -1, "EXPLICIT": 0}
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_MOST_CHUNKS = 1_000_000

Phase = dict[str, int]


class LogicalRing(NamedTuple):
    """The logical ring of one dimension, on which a phase of a collective runs."""

    implementation: str
    n: int
    """ranks"""
    stride: int
    """distance of neighbours in rank numbers; 0 if the ring is the communicator"""


@dataclass
class CollectiveTables:
    """The collectives that a program calls. Equal calls share a row."""

    system: System
    dims: Sequence[int]
    """ranks in each dimension of the network; dimension 0 varies fastest"""
    n_queues: int = 1
    injection_scale: float = 1.0
    algorithms: Mapping[CommType, Algorithm] = field(default_factory=dict)
    """custom algorithms by collective, for groups of any size"""
    own_group_algorithms: bool = False
    """whether groups smaller than the system run the algorithm of the system file (`System.group_implementation`)"""
    _calls: dict[tuple[object, ...], int] = field(default_factory=dict)
    _call_rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    _phases: list[Phase] = field(default_factory=list)
    _shapes: dict[tuple[object, ...], tuple[int, int, int]] = field(default_factory=dict)
    _communicators: dict[str, int] = field(default_factory=dict)
    _members: list[tuple[int, ...]] = field(default_factory=list)
    _places: dict[int, dict[int, int]] = field(default_factory=dict)
    _sizes: list[int] = field(default_factory=list)
    _distances: list[int] = field(default_factory=list)
    _trees: dict[int, int] = field(default_factory=dict)
    _tree_rows: list[tuple[int, int, int]] = field(default_factory=list)
    _counters: dict[tuple[int, int], int] = field(default_factory=dict)
    _steps: StepTable = field(default_factory=StepTable)

    @property
    def n_ranks(self) -> int:
        return int(np.prod(self.dims))

    def communicator(self, name: str, members: tuple[int, ...]) -> int:
        """Returns the index of a communicator; `name` tells groups with equal members apart."""
        if name not in self._communicators:
            self._communicators[name] = len(self._members)
            self._members.append(members)
        return self._communicators[name]

    def call(
        self,
        kind: CommType,
        size: int,
        communicator: int,
        priority: int = 0,
        involved: tuple[bool, ...] | None = None,
        custom: str = "",
    ) -> int:
        """Returns the index of a call; `size` is the bytes of the full local buffer, of an all-gather the local shard.

        `custom` is the prefix of the traces that the call runs; "" leaves that to the system file.

        Raises ForerunError if ASTRA-sim can't run a collective of this kind, size or algorithm.
        """
        custom = custom or self.system.custom_implementation(_name(int(kind)))
        key = (kind, size, communicator, priority, involved, custom)
        if key not in self._calls:
            n = len(self._members[communicator])
            shape = (kind, size, n if n < self.n_ranks else 0, involved, custom)
            if shape not in self._shapes:
                uncut = self._uncut(kind, size, n, custom) if custom else None
                self._shapes[shape] = uncut or self._shape(kind, size, n, involved)
            first, n_phases, n_chunks = self._shapes[shape]
            self._calls[key] = len(self._call_rows)
            self._call_rows.append((communicator, first, n_phases, n_chunks, priority))
        return self._calls[key]

    def n_phases(self, call: int) -> int:
        return self._call_rows[call][2]

    def n_messages(self, call: int) -> int:
        """Returns an upper bound of the messages that a rank sends in a call."""
        of_chunk = (
            self.most_steps if phase["algorithm"] == codes.CUSTOM else max(phase["n_messages"], 2)
            for phase in self.phases_of(call)
        )
        return self.n_chunks(call) * sum(of_chunk)

    def n_chunks(self, call: int) -> int:
        return self._call_rows[call][3]

    def set_chunks(self, call: int, n_chunks: int) -> None:
        """Makes a call run so many of its equal chunks."""
        communicator, first, n_phases, _, priority = self._call_rows[call]
        self._call_rows[call] = communicator, first, n_phases, n_chunks, priority

    def position(self, call: int, rank: int) -> int:
        """Returns the position of `rank` in the communicator of a call."""
        communicator = self._call_rows[call][0]
        if communicator not in self._places:
            self._places[communicator] = {member: k for k, member in enumerate(self._members[communicator])}
        return self._places[communicator][rank]

    def communicator_of(self, call: int) -> int:
        return self._call_rows[call][0]

    def members_of(self, call: int) -> tuple[int, ...]:
        """Returns the ranks of the communicator of a call, in the order of its ring."""
        return self._members[self._call_rows[call][0]]

    def phases_of(self, call: int) -> list[Phase]:
        _, first, n_phases, _, _ = self._call_rows[call]
        return self._phases[first : first + n_phases]

    def exchanges(self) -> tuple[I64, I64]:
        """Returns the sizes and distances of the messages of halving-doubling, to which phases point by `steps`."""
        return np.array(self._sizes, np.int64), np.array(self._distances, np.int64)

    def tables(self) -> Collectives:
        """Returns the engine's tables."""
        return Collectives(
            call=np.array([tuple(row) for row in self._call_rows], CALL),
            phase=np.array([tuple(phase[name] for name in PHASE.names or ()) for phase in self._phases], PHASE),
            member_ptr=pointers([len(members) for members in self._members]),
            member=np.array([rank for members in self._members for rank in members], np.int64),
            step_size=np.array(self._sizes or [0], np.int64),
            step_distance=np.array(self._distances or [0], np.int64),
            tree=np.array(self._tree_rows or [(-1, -1, -1)], np.int64),
            reduce_bytes_per_s=self.system.memory_bytes_per_s,
            n_queues=self.n_queues,
            active=-(-self.system.active_chunks_per_dimension // self.n_queues),
            steps=self._steps.table(),
            policy=_POLICY[self.system.scheduling_policy],
        )

    @property
    def most_chunks(self) -> int:
        return max((row[3] for row in self._call_rows), default=0)

    @property
    def most_phases(self) -> int:
        return max((row[2] for row in self._call_rows), default=1)

    @property
    def most_steps(self) -> int:
        return self._steps.most_steps

    @property
    def largest_step(self) -> int:
        """Returns the most bytes or ns of any step of a custom algorithm."""
        return self._steps.largest

    @property
    def n_counters(self) -> int:
        return max(1, len(self._counters))

    def _shape(self, kind: CommType, size: int, n: int, involved: tuple[bool, ...] | None) -> tuple[int, int, int]:
        collective = int(kind)
        if _name(collective) not in _COLLECTIVES:
            raise ForerunError(f"collective {kind.name.lower()} is not simulated; known: {', '.join(_COLLECTIVES)}")
        chunk, n_chunks = self.chunking(collective, size)
        first = len(self._phases)
        if kind in self.algorithms:
            costs = Costs(self._endpoint_ns(n), self.system.memory_bytes_per_s)
            algorithm = self.algorithms[kind]
            self._custom(collective, steps_of_algorithm(algorithm, n, chunk, costs), type(algorithm).__name__, n)
        elif kind == CommType.BROADCAST:
            raise ForerunError("broadcast has no algorithm of its own; give a custom one")
        elif n < self.n_ranks:
            self._subgroup(collective, chunk, n)
        else:
            self._whole_system(collective, chunk, involved)
        return first, len(self._phases) - first, n_chunks

    def chunking(self, collective: int, size: int) -> tuple[int, int]:
        """Returns the size and the number of chunks (`Sys::determine_chunk_size`, `Sys::generate_collective`)."""
        splits = self.system.preferred_dataset_splits
        chunk = size // splits
        if collective != codes.ALL_GATHER and self.n_ranks > chunk:
            chunk = self.n_ranks
            size = splits * chunk
        if chunk == 0:
            raise ForerunError(f"{_name(collective)} of {size} bytes: too small for {splits} preferred-dataset-splits")
        n_chunks = -(-size // chunk)
        if n_chunks > _MOST_CHUNKS:
            raise ForerunError(f"{_name(collective)} of {size} bytes: {n_chunks} chunks are too many")
        return chunk, n_chunks

    def _subgroup(self, collective: int, data: int, n: int) -> None:
        if n == 1:
            return
        in_halves = collective == codes.ALL_REDUCE and self.system.collective_optimization == "localBWAware"
        pick = codes.PICK_FIRST_HALF if in_halves else codes.PICK_NEXT
        own = self.system.group_implementation(_name(collective)) if self.own_group_algorithms else "ring"
        if own == "doubleBinaryTree":
            raise ForerunError(f"a group of {n} ranks has no doubleBinaryTree in ASTRA-sim; use ring or direct")
        ring = LogicalRing(own, n, 0)
        self._phases.append(self._phase(ring, collective, data, 0, pick, _SUBGROUP_ENDPOINT_NS, collective))

    def _uncut(self, kind: CommType, size: int, n: int, prefix: str) -> tuple[int, int, int]:
        """Appends the phase of a collective whose ranks run the traces `prefix` once, whatever its size.

        ASTRA-sim still waits for all the chunks that the system file cuts it into, although it runs only one.
        """
        _, n_chunks = self.chunking(int(kind), size)
        if n_chunks > 1:
            raise ForerunError(
                f"ASTRA-sim never ends a custom {_name(int(kind))} of {n_chunks} chunks;"
                " set preferred-dataset-splits to 1"
            )
        first = len(self._phases)
        self._custom(int(kind), self._traced_steps(prefix, n), prefix, n)
        return first, 1, 1

    def _whole_system(self, collective: int, data: int, involved: tuple[bool, ...] | None) -> None:
        """Appends the phases of a collective of all ranks, dimension by dimension."""
        prefixes = getattr(self.system, f"{_name(collective)}_implementation_chakra", ())
        if prefixes:
            if involved is None or involved[:1] == (True,):
                self._custom(collective, self._traced_steps(prefixes[0], self.n_ranks), prefixes[0], self.n_ranks)
            return
        rings = self._rings(collective)
        takes_part = [True] * len(rings) if involved is None else [*involved, *[False] * len(rings)]
        taken = [d for d, ring in enumerate(rings) if ring.n > 1 and takes_part[d]]
        plan = [(collective, d, codes.PICK_NEXT) for d in taken]
        if collective == codes.ALL_GATHER:
            plan.reverse()
        elif collective == codes.ALL_REDUCE and self.system.collective_optimization == "localBWAware" and taken:
            plan = [(codes.REDUCE_SCATTER, d, codes.PICK_FIRST_HALF) for d in taken[:-1]]
            plan += [(codes.ALL_REDUCE, taken[-1], codes.PICK_FIRST_HALF)]
            plan += [(codes.ALL_GATHER, d, codes.PICK_LAST_HALF) for d in reversed(taken[:-1])]
        endpoint_ns = self._endpoint_ns(self.n_ranks)
        for part, d, pick in plan:
            n = rings[d].n
            phase = self._phase(rings[d], part, data, d, pick, endpoint_ns, collective)
            self._phases.append(phase)
            if phase["algorithm"] != codes.DOUBLE_BINARY_TREE:
                data = {codes.REDUCE_SCATTER: data // n, codes.ALL_GATHER: data * n}.get(part, data)

    def _endpoint_ns(self, n: int) -> int:
        return int(self.system.endpoint_delay * self.injection_scale) if n == self.n_ranks else _SUBGROUP_ENDPOINT_NS

    def _custom(self, collective: int, programs: Sequence[RankSteps], place: str, n: int) -> None:
        """Appends one phase in which every rank runs its own steps."""
        phase = dict.fromkeys(PHASE.names or (), 0)
        phase.update(algorithm=codes.CUSTOM, collective=collective, n=n, stride=int(n == self.n_ranks))
        phase["steps"] = self._steps.add(programs, place)
        self._phases.append(phase)

    def _traced_steps(self, prefix: str, n: int) -> list[RankSteps]:
        """Reads the steps of `n` ranks from traces, whose sizes hold whatever the size of the collective."""
        traces = open_traces(prefix, n, tensors=False)
        return [steps_of_trace(traces[rank], f"{prefix}, rank {rank}") for rank in range(n)]

    def _rings(self, collective: int) -> list[LogicalRing]:
        """Returns the ring of each logical dimension (`GeneralComplexTopology`)."""
        name = _name(collective)
        implementations: tuple[str, ...] = getattr(self.system, f"{name}_implementation")
        if not implementations:
            raise ForerunError(f"the system file has no {name.replace('_', '-')}-implementation")
        if len(implementations) > len(self.dims):
            raise ForerunError(
                f"{name.replace('_', '-')}-implementation names {len(implementations)} dimensions, "
                f"the network has {len(self.dims)}"
            )
        rings, stride = [], 1
        for implementation, n in zip(implementations, self.dims, strict=False):
            if implementation.startswith("one"):
                rings.append(LogicalRing(implementation[3].lower() + implementation[4:], self.n_ranks, 1))
                break
            rings.append(LogicalRing(implementation, n, stride))
            stride *= n
        return rings

    def _phase(
        self, ring: LogicalRing, collective: int, data: int, level: int, pick: int, endpoint_ns: int, outer: int
    ) -> Phase:
        """Returns a phase on `ring`; `outer` is the whole collective; `collective` may be a part of it."""
        implementation, n, stride = ring
        phase = dict.fromkeys(PHASE.names or (), 0)
        phase.update(collective=collective, n=n, stride=stride, level=level, pick=pick, endpoint_ns=endpoint_ns)
        phase["message"] = data if collective == codes.ALL_GATHER else data // n
        reduces = collective in (codes.ALL_REDUCE, codes.REDUCE_SCATTER)
        if implementation == "ring":
            phase.update(algorithm=codes.RING, window=1, unreduced=n - 1, n_messages=_ring_messages(collective, n))
        elif implementation.startswith("direct"):
            at_once = n - 1 if window(implementation) < 0 else min(window(implementation), n - 1)
            if at_once < 1:
                raise ForerunError(f"{implementation}: a window of 0 packets never sends anything; use direct1 or more")
            n_messages = (n - 1) * (2 if collective == codes.ALL_REDUCE else 1)
            phase.update(algorithm=codes.DIRECT, window=at_once, unreduced=at_once, n_messages=n_messages)
        elif implementation == "halvingDoubling":
            self._halving_doubling(phase, data)
        else:
            if n & (n - 1):
                raise ForerunError(f"doubleBinaryTree needs a power of two of ranks in its dimension, not {n}")
            counter = self._counters.setdefault((outer, level), len(self._counters))
            phase.update(algorithm=codes.DOUBLE_BINARY_TREE, collective=codes.ALL_REDUCE, message=data, window=1)
            phase.update(tree=self._tree(n), tree_counter=counter)
            reduces = True
        if phase["message"] == 0 and phase["algorithm"] != codes.HALVING_DOUBLING:
            raise ForerunError(f"{_name(collective)}: a chunk of {data} bytes over {n} ranks makes messages of 0 bytes")
        if reduces and not self.system.local_mem_bw:
            raise ForerunError(f"{_name(collective)} reduces in memory: the system file needs local-mem-bw above 0")
        return phase

    def _halving_doubling(self, phase: Phase, data: int) -> None:
        """Appends sizes and distances of the exchanges in the order of `HalvingDoubling`."""
        n, collective = phase["n"], phase["collective"]
        if collective == codes.ALL_TO_ALL:
            raise ForerunError("halvingDoubling has no all-to-all; use ring or direct")
        if n & (n - 1):
            raise ForerunError(f"halvingDoubling needs a power of two of ranks in its dimension, not {n}")
        rounds = n.bit_length() - 1
        n_messages = 2 * rounds if collective == codes.ALL_REDUCE else rounds
        size, distance, doubling = data // 2, 1, False
        if collective == codes.ALL_GATHER:
            size, distance, doubling = data, n // 2, True
        phase.update(algorithm=codes.HALVING_DOUBLING, window=1, unreduced=rounds - 1, n_messages=n_messages)
        phase["steps"] = len(self._sizes)
        for step in range(n_messages + 1):
            if size == 0 and step < n_messages:
                raise ForerunError(f"halvingDoubling: a chunk of {data} bytes over {n} ranks makes messages of 0 bytes")
            self._sizes.append(size)
            self._distances.append(distance)
            size, distance = (size * 2, distance // 2) if doubling else (size // 2, distance * 2)
            if distance == n and collective == codes.ALL_REDUCE:
                doubling = True
                size, distance = size * 2, distance // 2

    def _tree(self, n: int) -> int:
        """Returns the first row of the two trees of `BinaryTree`, with the last and the first position as roots."""
        if n not in self._trees:
            self._trees[n] = len(self._tree_rows)
            for root, base in ((n - 1, 0), (0, 1)):
                rows = [[-1, -1, -1] for _ in range(n)]
                child = _perfect_tree(rows, base, base + n - 1, root)
                rows[root][1 if root else 2] = child
                self._tree_rows.extend((row[0], row[1], row[2]) for row in rows)
        return self._trees[n]


def _name(collective: int) -> str:
    return CommType(collective).name.lower()


def _ring_messages(collective: int, n: int) -> int:
    if collective == codes.ALL_REDUCE:
        return 2 * (n - 1)
    return n * (n - 1) // 2 if collective == codes.ALL_TO_ALL else n - 1


def _perfect_tree(rows: list[list[int]], low: int, high: int, parent: int) -> int:
    """Fills in a perfect binary tree over positions [low, high) in order. Returns its root, -1 for no position."""
    if low >= high:
        return -1
    middle = (low + high - 1) // 2
    rows[middle] = [parent, _perfect_tree(rows, low, middle, middle), _perfect_tree(rows, middle + 1, high, middle)]
    return middle
