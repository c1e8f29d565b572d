"""A profiled step as a Program, and how well it replays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.common.errors import ForerunError
from forerun.common.units import PS_PER_S
from forerun.core.engine.simulate import Timeline, simulate
from forerun.core.program.origin import Origin
from forerun.core.program.types import FlatProgram, Program
from forerun.core.program.unfold import unfold
from forerun.core.program.validate import check
from forerun.describe.cluster.catalog import load_device
from forerun.sources.profile.device import device_of
from forerun.sources.profile.graph_breaks import GraphBreak, graph_breaks_of
from forerun.sources.profile.profile import STEP, Profile
from forerun.sources.profile.schedule import Schedule, schedule_of, typical
from forerun.sources.profile.step import steps_of
from forerun.sources.profile.to_program import to_program


@dataclass(frozen=True)
class Imported:
    """A Program of a profiled step, with the measured and the replayed time."""

    program: Program
    name: str
    """of the step"""
    measured_s: float
    """time of the step: that of the slowest rank"""
    replayed_s: float
    """time of the Program with every recorded time as it is"""
    step_times_s: tuple[float, ...]
    """times of all steps of the first rank"""
    device: str
    """name of the device; empty for one that Forerun does not know"""
    graph_breaks: tuple[tuple[GraphBreak, ...], ...]
    """places at which graphs of torch.compile break, for each profile"""
    notes: tuple[str, ...]
    """the missing and the inferred parts"""

    @property
    def error(self) -> float:
        """Returns the replayed time over the measured one, less 1."""
        return self.replayed_s / self.measured_s - 1.0


def import_step(profiles: Sequence[Profile], number: int | None = None, device: str | None = None) -> Imported:
    """Makes a Program of one step of one profile for each rank.

    `number` is that of the profiler (`ProfilerStep#12`); unless given, it is the step of the first rank whose time is
    the median of all but the last. `device` names the device unless the file's GPU tells it.

    Raises ForerunError for a step that a file lacks, and for a profile without work of a device.
    """
    found = [[schedule_of(step) for step in steps_of(one)] for one in profiles]
    name = typical(found[0]).step.name if number is None else f"{STEP}#{number}"
    steps = [_named(one, name) for one in found]
    known = load_device(device) if device else device_of(profiles[0])
    program = to_program(steps, known)
    check(program)
    return Imported(
        program=program,
        name=name,
        measured_s=max(one.measured_ns for one in steps) / 1e9,
        replayed_s=replayed_s(program),
        step_times_s=tuple(one.measured_ns / 1e9 for one in found[0]),
        device=known.name if known else "",
        graph_breaks=tuple(graph_breaks_of(one.step) for one in steps),
        notes=Origin.of(program).notes,
    )


def replayed_s(program: Program) -> float:
    """Returns the step time of an imported Program with every recorded time as it is."""
    return replay(program)[1].end_of_step_ps / PS_PER_S


def replay(program: Program) -> tuple[FlatProgram, Timeline]:
    """Returns the nodes of an imported Program and when they run, with every recorded time as it is."""
    flat, n_ops = unfold(program), len(program.ops)
    recorded = Origin.of(program).recorded
    times = np.array(recorded.time_ps if recorded else (), np.int64)
    fixed = program.ops.is_delay
    duration = np.where(fixed, program.ops.delay(np.arange(n_ops)).duration_ps, times)
    nothing, never = np.zeros(n_ops), np.zeros(n_ops, np.bool_)
    return flat, simulate(flat, duration, np.zeros(n_ops, np.int64), nothing, nothing, never)


def _named(schedules: Sequence[Schedule], name: str) -> Schedule:
    for one in schedules:
        if one.step.name == name:
            return one
    names = ", ".join(one.step.name for one in schedules[:8])
    path = schedules[0].step.profile.path
    raise ForerunError(f"{path}: has no step {name} that launches work of a device; it has {names}")
