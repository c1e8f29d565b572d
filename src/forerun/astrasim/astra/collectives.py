"""What ASTRA-sim makes of a collective: chunks, phases, algorithms, queues; as tables for the engine.

The rounding and the habits are the reference's: sizes that don't divide make an extra chunk, a chunk is at least as
many bytes as there are ranks, a group smaller than the system always runs the ring algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.astrasim.astra.custom import Algorithm, Costs
from forerun.astrasim.astra.custom_steps import RankSteps, StepTable, steps_of_algorithm, steps_of_trace
from forerun.astrasim.astra.system import System, window
from forerun.astrasim.chakra.trace import CommType
from forerun.astrasim.chakra.traces import open_traces
from forerun.astrasim.messages import state as machine
from forerun.astrasim.messages.state import CALL, PHASE, Collectives
from forerun.common.errors import ForerunError

SUBGROUP_ENDPOINT_NS = 10
"""ASTRA-sim's `Fast` memory bus, whatever the system file says"""
_POLICY = {"LIFO": 1, "FIFO": -1, "EXPLICIT": 0}
_KINDS = {
    CommType.ALL_REDUCE: machine.ALL_REDUCE,
    CommType.ALL_GATHER: machine.ALL_GATHER,
    CommType.REDUCE_SCATTER: machine.REDUCE_SCATTER,
    CommType.ALL_TO_ALL: machine.ALL_TO_ALL,
    CommType.BROADCAST: machine.BROADCAST,
}
_NAMES = {
    machine.ALL_REDUCE: "all_reduce",
    machine.ALL_GATHER: "all_gather",
    machine.REDUCE_SCATTER: "reduce_scatter",
    machine.ALL_TO_ALL: "all_to_all",
    machine.BROADCAST: "broadcast",
}
_MOST_CHUNKS = 1_000_000

Phase = dict[str, int]


@dataclass
class CollectiveTables:
    """The collectives that a program calls; a call that was met before is not made again."""

    system: System
    dims: Sequence[int]
    """ranks of each dimension of the network, dimension 0 fastest"""
    n_queues: int = 1
    injection_scale: float = 1.0
    algorithms: Mapping[CommType, Algorithm] = field(default_factory=dict)
    """custom ones, of any group"""
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
        """Index of a communicator; `name` tells groups with equal members apart."""
        if name not in self._communicators:
            self._communicators[name] = len(self._members)
            self._members.append(members)
        return self._communicators[name]

    def call(
        self, kind: CommType, size: int, communicator: int, priority: int = 0, involved: tuple[bool, ...] | None = None
    ) -> int:
        """Index of the call of a collective of `size` bytes: the full local buffer, for an all-gather the local shard.

        Raises:
            ForerunError: the reference can't run it (its size, its algorithm, its kind).
        """
        key = (kind, size, communicator, priority, involved)
        if key not in self._calls:
            n = len(self._members[communicator])
            shape = (kind, size, n if n < self.n_ranks else 0, involved)
            if shape not in self._shapes:
                self._shapes[shape] = self._shape(kind, size, n, involved)
            first, n_phases, n_chunks = self._shapes[shape]
            self._calls[key] = len(self._call_rows)
            self._call_rows.append((communicator, first, n_phases, n_chunks, priority))
        return self._calls[key]

    def n_phases(self, call: int) -> int:
        return self._call_rows[call][2]

    def n_messages(self, call: int) -> int:
        """Messages, at the most, that a rank sends in a call."""
        of_chunk = (
            self.most_steps if phase["algorithm"] == machine.CUSTOM else max(phase["n_messages"], 2)
            for phase in self.phases_of(call)
        )
        return self.n_chunks(call) * sum(of_chunk)

    def n_chunks(self, call: int) -> int:
        return self._call_rows[call][3]

    def position(self, call: int, rank: int) -> int:
        """Place of `rank` in the communicator of a call."""
        communicator = self._call_rows[call][0]
        if communicator not in self._places:
            self._places[communicator] = {member: k for k, member in enumerate(self._members[communicator])}
        return self._places[communicator][rank]

    def phases_of(self, call: int) -> list[Phase]:
        _, first, n_phases, _, _ = self._call_rows[call]
        return self._phases[first : first + n_phases]

    def tables(self) -> Collectives:
        """The tables, as the engine reads them."""
        counts = [len(members) for members in self._members]
        return Collectives(
            call=np.array([tuple(row) for row in self._call_rows], CALL),
            phase=np.array([tuple(phase[name] for name in PHASE.names or ()) for phase in self._phases], PHASE),
            member_ptr=np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64),
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
        """Bytes or ns of any step of a custom algorithm."""
        return self._steps.largest

    @property
    def n_counters(self) -> int:
        return max(1, len(self._counters))

    def _shape(self, kind: CommType, size: int, n: int, involved: tuple[bool, ...] | None) -> tuple[int, int, int]:
        if kind not in _KINDS:
            raise ForerunError(f"collective {kind.name.lower()} is not simulated; known: {', '.join(_NAMES.values())}")
        collective = _KINDS[kind]
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
        """Size of a chunk and number of chunks (`Sys::determine_chunk_size`, `Sys::generate_collective`)."""
        splits = self.system.preferred_dataset_splits
        chunk = size // splits
        if collective != machine.ALL_GATHER and self.n_ranks > chunk:
            chunk = self.n_ranks
            size = splits * chunk
        if chunk == 0:
            raise ForerunError(f"{_NAMES[collective]} of {size} bytes: too small for {splits} preferred-dataset-splits")
        n_chunks = -(-size // chunk)
        if n_chunks > _MOST_CHUNKS:
            raise ForerunError(f"{_NAMES[collective]} of {size} bytes: {n_chunks} chunks are too many")
        return chunk, n_chunks

    def _subgroup(self, collective: int, data: int, n: int) -> None:
        if n == 1:
            return
        in_halves = collective == machine.ALL_REDUCE and self.system.collective_optimization == "localBWAware"
        pick = machine.PICK_FIRST_HALF if in_halves else machine.PICK_NEXT
        phase = self._phase("ring", collective, data, n, 0, 0, pick, SUBGROUP_ENDPOINT_NS, collective)
        self._phases.append(phase)

    def _whole_system(self, collective: int, data: int, involved: tuple[bool, ...] | None) -> None:
        """The phases of a collective over all ranks, dimension by dimension."""
        prefixes = getattr(self.system, f"{_NAMES[collective]}_implementation_chakra", ())
        if prefixes:
            if involved is None or involved[:1] == (True,):
                self._custom(collective, self._traced_steps(prefixes[0]), prefixes[0], self.n_ranks)
            return
        rings = self._rings(collective)
        taken = [
            d
            for d, (_, n, _) in enumerate(rings)
            if n > 1 and (involved is None or (d < len(involved) and involved[d]))
        ]
        plan = [(collective, d, machine.PICK_NEXT) for d in taken]
        if collective == machine.ALL_GATHER:
            plan.reverse()
        elif collective == machine.ALL_REDUCE and self.system.collective_optimization == "localBWAware" and taken:
            plan = [(machine.REDUCE_SCATTER, d, machine.PICK_FIRST_HALF) for d in taken[:-1]]
            plan += [(machine.ALL_REDUCE, taken[-1], machine.PICK_FIRST_HALF)]
            plan += [(machine.ALL_GATHER, d, machine.PICK_LAST_HALF) for d in reversed(taken[:-1])]
        endpoint_ns = self._endpoint_ns(self.n_ranks)
        for part, d, pick in plan:
            implementation, n, stride = rings[d]
            phase = self._phase(implementation, part, data, n, stride, d, pick, endpoint_ns, collective)
            self._phases.append(phase)
            if phase["algorithm"] != machine.DOUBLE_BINARY_TREE:
                data = {machine.REDUCE_SCATTER: data // n, machine.ALL_GATHER: data * n}.get(part, data)

    def _endpoint_ns(self, n: int) -> int:
        return int(self.system.endpoint_delay * self.injection_scale) if n == self.n_ranks else SUBGROUP_ENDPOINT_NS

    def _custom(self, collective: int, programs: Sequence[RankSteps], place: str, n: int) -> None:
        """One phase in which every rank runs a program of its own."""
        phase = dict.fromkeys(PHASE.names or (), 0)
        phase.update(algorithm=machine.CUSTOM, collective=collective, n=n, stride=int(n == self.n_ranks))
        phase["steps"] = self._steps.add(programs, place)
        self._phases.append(phase)

    def _traced_steps(self, prefix: str) -> list[RankSteps]:
        """The steps of all ranks, from traces (`ChakraImpl`: chunks of any size send what the trace says)."""
        traces = open_traces(prefix, self.n_ranks, tensors=False)
        return [steps_of_trace(traces[rank], f"{prefix}, rank {rank}") for rank in range(self.n_ranks)]

    def _rings(self, collective: int) -> list[tuple[str, int, int]]:
        """(implementation, ranks, stride) of each logical dimension (`GeneralComplexTopology`)."""
        name = _NAMES[collective]
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
                rings.append((implementation[3].lower() + implementation[4:], self.n_ranks, 1))
                break
            rings.append((implementation, n, stride))
            stride *= n
        return rings

    def _phase(
        self, implementation: str, collective: int, data: int, n: int, stride: int, level: int, pick: int,
        endpoint_ns: int, outer: int,
    ) -> Phase:  # fmt: skip
        phase = dict.fromkeys(PHASE.names or (), 0)
        phase.update(collective=collective, n=n, stride=stride, level=level, pick=pick, endpoint_ns=endpoint_ns)
        phase["message"] = data if collective == machine.ALL_GATHER else data // n
        reduces = collective in (machine.ALL_REDUCE, machine.REDUCE_SCATTER)
        if implementation == "ring":
            phase.update(algorithm=machine.RING, window=1, unreduced=n - 1, n_messages=_ring_messages(collective, n))
        elif implementation.startswith("direct"):
            at_once = n - 1 if window(implementation) < 0 else min(window(implementation), n - 1)
            if at_once < 1:
                raise ForerunError(f"{implementation}: a window of 0 packets never sends anything; use direct1 or more")
            n_messages = (n - 1) * (2 if collective == machine.ALL_REDUCE else 1)
            phase.update(algorithm=machine.DIRECT, window=at_once, unreduced=at_once, n_messages=n_messages)
        elif implementation == "halvingDoubling":
            self._halving_doubling(phase, data)
        else:
            if n & (n - 1):
                raise ForerunError(f"doubleBinaryTree needs a power of two of ranks in its dimension, not {n}")
            counter = self._counters.setdefault((outer, level), len(self._counters))
            phase.update(algorithm=machine.DOUBLE_BINARY_TREE, collective=machine.ALL_REDUCE, message=data, window=1)
            phase.update(tree=self._tree(n), tree_counter=counter)
            reduces = True
        if phase["message"] == 0 and phase["algorithm"] != machine.HALVING_DOUBLING:
            raise ForerunError(
                f"{_NAMES[collective]}: a chunk of {data} bytes over {n} ranks makes messages of 0 bytes"
            )
        if reduces and not self.system.local_mem_bw:
            raise ForerunError(f"{_NAMES[collective]} reduces in memory: the system file needs local-mem-bw above 0")
        return phase

    def _halving_doubling(self, phase: Phase, data: int) -> None:
        """Sizes and distances of the exchanges, as `HalvingDoubling` steps through them."""
        n, collective = phase["n"], phase["collective"]
        if collective == machine.ALL_TO_ALL:
            raise ForerunError("halvingDoubling has no all-to-all; use ring or direct")
        if n & (n - 1):
            raise ForerunError(f"halvingDoubling needs a power of two of ranks in its dimension, not {n}")
        rounds = n.bit_length() - 1
        n_messages = 2 * rounds if collective == machine.ALL_REDUCE else rounds
        size, distance, doubling = data // 2, 1, False
        if collective == machine.ALL_GATHER:
            size, distance, doubling = data, n // 2, True
        phase.update(algorithm=machine.HALVING_DOUBLING, window=1, unreduced=rounds - 1, n_messages=n_messages)
        phase["steps"] = len(self._sizes)
        for step in range(n_messages + 1):
            if size == 0 and step < n_messages:
                raise ForerunError(f"halvingDoubling: a chunk of {data} bytes over {n} ranks makes messages of 0 bytes")
            self._sizes.append(size)
            self._distances.append(distance)
            size, distance = (size * 2, distance // 2) if doubling else (size // 2, distance * 2)
            if distance == n and collective == machine.ALL_REDUCE:
                doubling = True
                size, distance = size * 2, distance // 2

    def _tree(self, n: int) -> int:
        """Rows of the two trees over n ring positions (`BinaryTree`): the root is the last one, or the first one."""
        if n not in self._trees:
            self._trees[n] = len(self._tree_rows)
            for root, base in ((n - 1, 0), (0, 1)):
                rows = [[-1, -1, -1] for _ in range(n)]
                child = _perfect_tree(rows, base, base + n - 1, root)
                rows[root][1 if root else 2] = child
                self._tree_rows.extend((row[0], row[1], row[2]) for row in rows)
        return self._trees[n]


def _ring_messages(collective: int, n: int) -> int:
    if collective == machine.ALL_REDUCE:
        return 2 * (n - 1)
    return n * (n - 1) // 2 if collective == machine.ALL_TO_ALL else n - 1


def _perfect_tree(rows: list[list[int]], low: int, high: int, parent: int) -> int:
    """Number a perfect binary tree over positions [low, high) in order; its root, -1 for no position."""
    if low >= high:
        return -1
    middle = (low + high - 1) // 2
    rows[middle] = [parent, _perfect_tree(rows, low, middle, middle), _perfect_tree(rows, middle + 1, high, middle)]
    return middle
