"""One rank's step, measured or predicted: its work in lines, and the part of the step to which each moment belongs.

Both sides are Timelines of Programs, so both are read by the same rules. Each moment of the step belongs to exactly one
part: to the first part of `PARTS`, or else of the collectives, that runs at that moment; to waiting for other ranks; or
to the host, if nothing runs. The parts therefore add up to the time of the step. Kernels that run beside collectives
are slower in the prediction. The time of this slowdown is a separate part on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forerun.answers.analysis.breakdown import ready_ps
from forerun.common.arrays import union
from forerun.common.units import PS_PER_S, PS_PER_US
from forerun.core.engine.simulate import Timeline
from forerun.core.program.kinds import Attention, Gemm, Scan, Work
from forerun.core.program.origin import PROFILE, Origin
from forerun.core.program.types import F64, I64, Collective, FlatProgram, OpTable, Phase, Program, Stream
from forerun.sources.profile.kernel_names import memory_work_of, work_of

HOST, WAITING, COPIES, HELD = "host", "waiting", "copies", "held"
EXCHANGE = "exchange"
"""the kind of work of kernels that communicate without NCCL"""
PARTS = {
    "product": "matrix products",
    "attention": "attention",
    "attention_backward": "attention's backward pass",
    "recurrence": "recurrences",
    "optimizer": "optimizer",
    "memory": "memory-bound kernels",
}
"""parts of kernels in the order in which they count where several run at once, with their names"""
LAST_PARTS = {
    HELD: "kernels held up by collectives beside them",
    COPIES: "copies to and from the host",
    WAITING: "transfers between stages and waiting for other ranks",
    HOST: "host, while the GPU runs nothing",
}
"""parts that count where no kernel and no collective runs"""
_COLLECTIVES = {
    Collective.ALL_REDUCE: "all-reduces",
    Collective.ALL_GATHER: "all-gathers",
    Collective.REDUCE_SCATTER: "reduce-scatters",
    Collective.ALL_TO_ALL: "all-to-alls",
    Collective.BROADCAST: "broadcasts",
}
EXCHANGES = "kernels that exchange without NCCL"
ALL_TO_ALLS = _COLLECTIVES[Collective.ALL_TO_ALL]
_LONGEST_GAP_PS = 10 * PS_PER_US
"""a gap between two kernels up to this long is that of the GPU, which counts with the kernel after it: predictions
include it too (stacks' `kernel_gap_us` are 1 to 4 us)"""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])|_\d+(?=\.|$)")
_NONE = -1


@dataclass(frozen=True, slots=True)
class Line:
    """All runs of the same work of a rank."""

    part: str
    work: str
    """the kind of work: norm, moving, product, ..."""
    name: str
    shape: tuple[int, ...]
    """of a product (batch, smaller and larger of m and n, k), of attention (batch, heads, queries, keys, head size), of
    a collective (kind, ranks, bytes); else empty"""
    module: str
    """path with stars in place of numbers"""
    phase: str
    ops: tuple[int, ...]
    """rows of the op table"""
    count: int
    time_s: float
    waiting_s: float
    """time in which collectives wait for other ranks, beside `time_s`"""
    late_s: float
    """part of `time_s` of work that starts as soon as the host has launched it"""
    held_s: float
    """part of `time_s` by which collectives beside them slow kernels"""
    flops: float
    moved_bytes: float
    """bytes of the full buffers of collectives, or that kernels read and write"""
    between: tuple[str, ...] = ()
    """of a memory-bound kernel: the work with sizes, or attention, that runs before and after it; empty for others"""


@dataclass(frozen=True)
class RanStep:
    """A RanStep holds the work of one rank in a step."""

    name: str
    step_s: float
    parts: dict[str, float]
    """seconds that count as each part; they add up to step_s"""
    lines: tuple[Line, ...]
    hidden_s: float
    """time of collectives and transfers that runs beside kernels"""
    communicating_s: float
    """time in which a collective or transfer runs"""
    idle_before: dict[str, float] = field(default_factory=dict)
    """seconds in which the GPU runs nothing, by the module of the next kernel"""
    launches: int = 0
    """kernels, copies, collectives and transfers"""


def ran_step(program: Program, flat: FlatProgram, timeline: Timeline, rank_class: int, slowing: float) -> RanStep:
    """Returns the step of a rank class of a simulated Program.

    The Timeline must not be folded. Beside a collective a kernel takes longer by `slowing`, a share of its time alone.
    """
    nodes = slice(int(flat.class_ptr[rank_class]), int(flat.class_ptr[rank_class + 1]))
    view = _View(program, flat, timeline, nodes, slowing)
    step_ps, done_ps = timeline.end_of_step_ps, int(timeline.class_end_ps[rank_class])
    parts_ps = _parts_ps(view, done_ps, step_ps)
    talks, works = view.talks, view.is_kernel
    together = _length(*union(view.start[talks | works], view.end[talks | works]))
    talking = _length(*union(view.start[talks], view.end[talks]))
    working = _length(*union(view.start[works], view.end[works]))
    return RanStep(
        name=program.rank_classes[rank_class].name,
        step_s=step_ps / PS_PER_S,
        parts={name: time_ps / PS_PER_S for name, time_ps in parts_ps.items()},
        lines=_lines(view),
        hidden_s=(talking + working - together) / PS_PER_S,
        communicating_s=talking / PS_PER_S,
        idle_before=_idle_before(view, done_ps),
        launches=int((~program.ops.is_delay[view.op]).sum()),
    )


class _View:
    """The nodes of one rank class as columns."""

    def __init__(self, program: Program, flat: FlatProgram, timeline: Timeline, nodes: slice, slowing: float) -> None:
        ops = program.ops
        self.program, self.nodes = program, nodes
        self.op = flat.op[nodes].astype(np.int64)
        self.stream = flat.stream[nodes]
        self.phase = flat.phase[nodes].astype(np.int64)
        self.module = np.clip(flat.module[nodes], _NONE, len(program.modules) - 1).astype(np.int64)
        self.start, self.end = timeline.start_ps[nodes].copy(), timeline.end_ps[nodes]
        self.late = timeline.start_ps[nodes] - timeline.issue_end_ps[nodes] <= _LONGEST_GAP_PS
        self.ready = _ready_ps(flat, timeline, nodes)
        self.paths = [_NUMBER.sub(_star, path) for path in program.modules] + [""]
        works = [_part_and_work(program, row) for row in range(len(ops))]
        self.work = [work for _, work in works]
        names = list(dict.fromkeys([*PARTS, *(part for part, _ in works), *LAST_PARTS]))
        self.part_names = names
        self.part_of_op = np.array([names.index(part) for part, _ in works], np.int64)
        self.part = self.part_of_op[self.op]
        updates = (self.phase == Phase.OPTIMIZER) & np.isin(self.part, self._numbers(("memory", "product")))
        self.part[updates] = names.index("optimizer")
        fixed = ops.is_delay[self.op]
        self.is_kernel = np.isin(self.part, self._numbers(PARTS)) & ~fixed
        self.talks = ~fixed & ~self.is_kernel & ~np.isin(self.part, self._numbers((COPIES, HOST)))
        self._gaps_to_kernels(fixed)
        beside = self._beside_collectives()
        slowed = self.is_kernel & (self.stream == Stream.COMPUTE)
        self.held = np.where(slowed, beside * slowing / (1.0 + slowing), 0.0)
        """picoseconds by which collectives slow each node"""

    def _numbers(self, names: object) -> list[int]:
        return [self.part_names.index(name) for name in names]  # type: ignore[attr-defined]

    def _gaps_to_kernels(self, fixed: npt.NDArray[np.bool_]) -> None:
        """Lets a kernel begin with the short delay right before it, if that began when the kernel before ended.

        While another rank or the host sends data, the kernel waits for that instead.
        """
        busy = _time_before(*union(self.start[self.talks], self.end[self.talks]))
        for stream in np.unique(self.stream[fixed]).tolist():
            mine = np.flatnonzero(self.stream == stream)
            gap, before, after = mine[1:-1], mine[:-2], mine[2:]
            short = (
                fixed[gap]
                & self.is_kernel[after]
                & ~fixed[before]
                & (self.end[gap] - self.start[gap] <= _LONGEST_GAP_PS)
            )
            chosen = short & (self.start[gap] == self.end[before]) & (self.start[after] == self.end[gap])
            chosen &= busy(self.end[gap]) == busy(self.start[gap])
            self.start[after[chosen]] = self.start[gap[chosen]]

    def _beside_collectives(self) -> F64:
        """Returns the picoseconds of each node in which a collective runs, (nodes,)."""
        network = self.program.ops.is_collective[self.op]
        start, end = union(self.start[network], self.end[network])
        busy = _time_before(start, end)
        return busy(self.end) - busy(self.start)


def _star(found: re.Match[str]) -> str:
    return "_*" if found.group().startswith("_") else "*"


def _part_and_work(program: Program, row: int) -> tuple[str, str]:
    """Returns the part that an op counts as, and its kind of work."""
    ops = program.ops
    work, details, name = int(ops.work[row]), ops.details_of(row), ops.name[row]
    if work == Work.COMMUNICATION:
        collective = Collective(int(ops.collective[row]))
        if collective == Collective.SEND_RECV:
            return WAITING, "transfer"
        return f"{_COLLECTIVES[collective]} over {program.groups[ops.group[row]].size} ranks", "collective"
    if work == Work.COPY:
        return COPIES, "copy"
    if work == Work.DELAY:
        return HOST, "delay"
    if isinstance(details, Gemm):
        return "product", "product"
    if isinstance(details, Attention):
        return ("attention_backward" if details.backward else "attention"), "attention"
    if isinstance(details, Scan):
        return "recurrence", "recurrence"
    if Origin.of(program).source != PROFILE:  # only names of profiled kernels tell more than their kind of op
        return "memory", memory_work_of(name)
    found = work_of(name)
    return (EXCHANGES, EXCHANGE) if found.kind == "communication" else (found.kind, found.work)


def _ready_ps(flat: FlatProgram, timeline: Timeline, nodes: slice) -> I64:
    """Returns when each node could have started if no other rank had held it up; its start for those that meet none."""
    ready: I64 = timeline.start_ps[nodes].copy()
    meets = np.flatnonzero(flat.meeting[nodes] >= 0)
    ready[meets] = ready_ps(flat, timeline, meets + nodes.start)
    return ready


# -- parts -------------------------------------------------------------------------------------------------------------


def _parts_ps(view: _View, done_ps: int, step_ps: int) -> dict[str, int]:
    """Returns the picoseconds of every part that takes any; they add up to `step_ps`.

    After `done_ps` the rank waits for those that are not done.
    """
    collectives = sorted(name for name in view.part_names if name not in PARTS and name not in LAST_PARTS)
    fixed = view.program.ops.is_delay[view.op]
    covered, out = 0, {}
    start, end = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for name in (*PARTS, *collectives, COPIES, WAITING):
        mine = (view.part == view.part_names.index(name)) & ~fixed
        more_start, more_end = view.start[mine], view.end[mine]
        if name == WAITING:
            more_start = np.concatenate((more_start, view.ready, [done_ps]))
            more_end = np.concatenate((more_end, view.start, [step_ps]))
        start, end = union(np.append(start, more_start), np.append(end, np.maximum(more_start, more_end)))
        length = _length(start, end)
        if length > covered:
            out[name] = length - covered
        covered = length
    out[HOST] = step_ps - covered
    for name in list(PARTS):
        held_ps = min(out.get(name, 0), round(float(view.held[view.part == view.part_names.index(name)].sum())))
        if held_ps:
            out[name] -= held_ps
            out[HELD] = out.get(HELD, 0) + held_ps
    return out


def _time_before(start: I64, end: I64) -> Callable[[I64], F64]:
    """Returns a function of times: how much of the given intervals, which do not overlap, is before each."""
    time = np.stack((start, end), axis=1).reshape(-1)
    gone = np.stack((np.zeros(len(start)), (end - start).astype(np.float64)), axis=1).reshape(-1).cumsum()

    def before(moment: I64) -> F64:
        return np.interp(moment, time, gone) if len(time) else np.zeros(len(moment))

    return before


def _length(start: I64, end: I64) -> int:
    return int((end - start).sum())


def _idle_before(view: _View, done_ps: int) -> dict[str, float]:
    """Returns the seconds in which nothing runs on the device until `done_ps`, by the module of the work that runs
    next.
    """
    runs = np.flatnonzero(~view.program.ops.is_delay[view.op] & (view.end > view.start))
    if len(runs) == 0:
        return {"": done_ps / PS_PER_S}
    runs = runs[np.argsort(view.start[runs], kind="stable")]
    begin, until = view.start[runs], np.maximum.accumulate(view.end[runs])
    idle = np.maximum(0, np.append(begin, done_ps) - np.insert(until, 0, 0))
    out: dict[str, float] = {}
    for module, time_ps in zip([*view.module[runs].tolist(), None], idle.tolist(), strict=True):
        where = "the end of the step" if module is None else view.paths[module]
        if time_ps:
            out[where] = out.get(where, 0.0) + time_ps / PS_PER_S
    return out


# -- lines -------------------------------------------------------------------------------------------------------------


def _lines(view: _View) -> tuple[Line, ...]:
    """Returns the work that takes time or moves anything, one line for each op, module, phase and place between
    products and attention."""
    ops = view.program.ops
    chosen = np.flatnonzero(~ops.is_delay[view.op])
    between, landmarks = _between(view)
    columns = np.stack((view.op, view.module, view.phase, view.part, *between))[:, chosen]
    keys, place, counts = np.unique(columns, axis=1, return_inverse=True, return_counts=True)
    place, width = place.reshape(-1), keys.shape[1]
    spent = np.bincount(place, weights=(view.end - view.start)[chosen], minlength=width)
    late = np.bincount(place, weights=((view.end - view.start) * view.late)[chosen], minlength=width)
    held = np.bincount(place, weights=view.held[chosen], minlength=width)
    waited = np.bincount(place, weights=np.maximum(0, view.start - view.ready)[chosen], minlength=width)
    found = []
    sums = np.stack((counts, spent, waited, held, late), axis=1).tolist()
    for (row, module, phase, part, before, after), (count, time_ps, *others_ps) in zip(
        keys.T.tolist(), sums, strict=True
    ):
        communicates = bool(ops.is_communication[row] or ops.is_host_copy[row])
        moved = ops.bytes_comm[row] if communicates else ops.bytes_read[row] + ops.bytes_written[row]
        if view.work[row] == EXCHANGE:  # no file says what it sends
            moved = 0.0
        if time_ps == 0 and moved == 0:
            continue
        found.append(
            Line(
                part=view.part_names[part],
                work=view.work[row],
                name=ops.name[row],
                shape=shape_of(view.program, row),
                module=view.paths[module],
                phase=Phase(phase).name.lower(),
                ops=(row,),
                count=int(count),
                time_s=time_ps / PS_PER_S,
                waiting_s=others_ps[0] / PS_PER_S,
                held_s=others_ps[1] / PS_PER_S,
                late_s=others_ps[2] / PS_PER_S,
                flops=count * float(ops.flops[row]),
                moved_bytes=count * float(moved),
                between=(landmarks[before], landmarks[after]) if before or after else (),
            )
        )
    return tuple(found)


def _between(view: _View) -> tuple[I64, list[str]]:
    """Returns the numbers of the landmarks that run before and after each memory-bound kernel, (2, nodes), and their
    names.

    Landmarks are products of known sizes, and attention. Number 0 is none.
    """
    names, number_of = [""], np.zeros(len(view.work), np.int64)
    for row in np.unique(view.op[view.is_kernel]).tolist():
        part, shape = view.part_names[view.part_of_op[row]], shape_of(view.program, row)
        if part.startswith("attention") or (part == "product" and shape):
            name = part if part.startswith("attention") else f"{part} {shape}"
            if name not in names:
                names.append(name)
            number_of[row] = names.index(name)
    order = np.argsort(view.start, kind="stable")
    number = np.where(view.is_kernel, number_of[view.op], 0)[order]
    at = np.flatnonzero(number)
    found = np.zeros((2, len(order)), np.int64)
    if len(at):
        following = np.searchsorted(at, np.arange(len(order)))
        found[0, order] = np.append(number[at], 0)[following - 1]
        found[1, order] = np.append(number[at], 0)[following]
    found[:, view.part != view.part_names.index("memory")] = 0
    return found, names


def shape_of(program: Program, row: int) -> tuple[int, ...]:
    """Returns the key that identifies an op together with its name: the sizes of a product or of attention, or the
    kind, ranks and bytes of a collective.
    """
    ops: OpTable = program.ops
    if ops.is_attention[row]:
        shape = ops.details_of(row)
        assert isinstance(shape, Attention)
        return (shape.batch, shape.heads, shape.seq_q, shape.seq_kv, shape.head_dim)
    if ops.is_gemm[row]:
        details = ops.details_of(row)
        assert isinstance(details, Gemm)
        return (details.batch, *sorted((details.m, details.n)), details.k)
    if ops.is_communication[row]:
        return (int(ops.collective[row]), program.groups[ops.group[row]].size, round(float(ops.bytes_comm[row])))
    return ()
