"""Tables of the time of a simulated rank: by kernel, by stream, by module."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.answers.analysis.reading import Simulation
from forerun.common.units import PS_PER_S
from forerun.core.program.kinds import OpKind
from forerun.core.program.origin import Origin
from forerun.core.program.types import I64, Phase, Stream

HOST = "host"


@dataclass(frozen=True, slots=True)
class KernelTime:
    """The time of all runs of the ops of one name and kind."""

    name: str
    kind: str
    count: int
    total_s: float
    share: float
    """share of the step"""
    lines: tuple[str, ...] = ()
    """file:line of the program that launches the kernels, the most frequent first; empty if the trace has none"""


@dataclass(frozen=True, slots=True)
class StreamTime:
    """The busy time of one stream; the host that issues kernels counts as a stream."""

    name: str
    count: int
    busy_s: float
    share: float
    """share of the step"""


@dataclass(frozen=True, slots=True)
class ModuleTime:
    """Device time of the nodes of one module and all below it. The phases add up to the total."""

    name: str
    count: int
    total_s: float
    share: float
    """share of the rank's device time"""
    by_phase_s: dict[str, float]


def kernel_times(simulation: Simulation, rank_class: int) -> list[KernelTime]:
    """Returns the device time by name of op, longest first, without joins that take no time."""
    nodes, spent = _spent(simulation, rank_class)
    ops, op = simulation.program.ops, simulation.flat.op[nodes]
    count = np.bincount(op, minlength=len(ops))
    total = np.bincount(op, weights=spent, minlength=len(ops))
    merged: dict[tuple[str, int], list[float]] = {}
    for row in np.flatnonzero(total).tolist():
        sums = merged.setdefault((ops.name[row], int(ops.kind[row])), [0, 0])
        sums[0] += count[row]
        sums[1] += total[row]
    step, lines = simulation.timeline.end_of_step_ps, Origin.of(simulation.program).source_lines
    rows = [
        KernelTime(name, OpKind(kind).name.lower(), int(n), time_ps / PS_PER_S, time_ps / step, lines.get(name, ()))
        for (name, kind), (n, time_ps) in merged.items()
    ]
    return sorted(rows, key=lambda row: -row.total_s)


def stream_times(simulation: Simulation, rank_class: int) -> list[StreamTime]:
    """Returns the busy time of every stream that has nodes, in order of streams, the host last."""
    nodes, spent = _spent(simulation, rank_class)
    stream, step = simulation.flat.stream[nodes], simulation.timeline.end_of_step_ps
    rows = []
    for number in np.unique(stream).tolist():
        mine = stream == number
        busy = int(spent[mine].sum())
        rows.append(StreamTime(Stream(number).name.lower(), int(mine.sum()), busy / PS_PER_S, busy / step))
    op = simulation.flat.op[nodes]
    launches, busy = int(simulation.program.ops.launches[op].sum()), int(simulation.costs.issue_ps[op].sum())
    return [*rows, StreamTime(HOST, launches, busy / PS_PER_S, busy / step)]


def module_times(simulation: Simulation, rank_class: int, depth: int) -> list[ModuleTime]:
    """Returns the device time by the first `depth` parts of module paths, longest first."""
    nodes, spent = _spent(simulation, rank_class)
    paths = simulation.program.modules
    module, phase = simulation.flat.module[nodes], simulation.flat.phase[nodes]
    keys = [".".join(path.split(".")[:depth]) for path in paths]
    total = float(spent.sum()) or 1.0
    sums: dict[str, tuple[int, I64]] = {}
    for number in np.unique(module).tolist():
        mine = module == number
        by_phase = np.bincount(phase[mine], weights=spent[mine], minlength=len(Phase)).astype(np.int64)
        key = (keys[number] if 0 <= number < len(keys) else "") or "(none)"
        count, before = sums.get(key, (0, np.zeros(len(Phase), np.int64)))
        sums[key] = count + int(mine.sum()), before + by_phase
    rows = [
        ModuleTime(
            name=key,
            count=count,
            total_s=float(by_phase.sum()) / PS_PER_S,
            share=float(by_phase.sum()) / total,
            by_phase_s={one.name.lower(): float(by_phase[one]) / PS_PER_S for one in Phase},
        )
        for key, (count, by_phase) in sums.items()
    ]
    return sorted(rows, key=lambda row: -row.total_s)


def _spent(simulation: Simulation, rank_class: int) -> tuple[slice, I64]:
    """Returns the nodes of a rank class, and the picoseconds that each runs, (nodes,)."""
    nodes = slice(int(simulation.flat.class_ptr[rank_class]), int(simulation.flat.class_ptr[rank_class + 1]))
    return nodes, simulation.timeline.end_ps[nodes] - simulation.timeline.start_ps[nodes]
