"""Graph breaks of a step: the places where Python continues after code that torch.compile could not capture.

Dynamo runs the rest of a broken function as a function of its own, `torch_dynamo_resume_in_FUNCTION_at_LINE`. Profiles
with stacks (`with_stack=True`) show each call of it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from forerun.sources.profile.labels import MODULE
from forerun.sources.profile.profile import I64
from forerun.sources.profile.step import NONE, Step

_RESUMED = re.compile(r"^(?P<file>[^(]*)\(\d+\): torch_dynamo_resume_in_(?P<function>.+)_at_(?P<line>\d+)$")


class GraphBreak(NamedTuple):
    """One place at which graphs break."""

    function: str
    place: str
    """file:line of the code that breaks the graph"""
    module: str
    """path of modules around it, joined by dots; empty if the profile names none"""
    calls: int
    """times in the step"""
    idle_s: float
    """seconds in which the device runs nothing, each just before the first kernel that is launched after a break"""


def graph_breaks_of(step: Step) -> tuple[GraphBreak, ...]:
    """Returns the places at which graphs break in a step, the most idle time first."""
    profile, rows = step.profile, step.profile.rows
    found = {number: match for number, text in enumerate(profile.texts) if (match := _RESUMED.match(text))}
    if not found:
        return ()
    inside = (rows.ts_ns >= step.begin_ns) & (rows.ts_ns < step.end_ns) & (rows.dur_ns >= 0)
    resumed = np.flatnonzero(np.isin(rows.name, list(found)) & inside)
    modules = np.flatnonzero(profile.text_mask(lambda text: text.startswith(MODULE))[rows.name] & inside)
    work = np.flatnonzero(step.call != NONE)
    work = work[np.argsort(rows.ts_ns[step.call[work]], kind="stable")]
    first = np.searchsorted(rows.ts_ns[step.call[work]], rows.ts_ns[resumed])
    idle_ns = np.append(_idle_before_ns(step)[work], 0)
    counts: dict[tuple[int, str], list[int]] = {}
    used = {len(work)}
    for place in np.argsort(-rows.ts_ns[resumed], kind="stable").tolist():
        row, after = int(resumed[place]), int(first[place])
        entry = counts.setdefault((int(rows.name[row]), _modules_around(step, modules, row)), [0, 0])
        entry[0] += 1
        if after not in used:  # of nested calls the last one is the break that the kernel comes after
            used.add(after)
            entry[1] += int(idle_ns[after])
    breaks = [
        GraphBreak(found[name]["function"], f"{found[name]['file']}:{found[name]['line']}", module, calls, idle / 1e9)
        for (name, module), (calls, idle) in counts.items()
    ]
    return tuple(sorted(breaks, key=lambda one: (-one.idle_s, one.place)))


def _idle_before_ns(step: Step) -> I64:
    """Returns how long the device runs nothing right before each work of the step, (work,)."""
    order = np.argsort(step.start_ns, kind="stable")
    busy_until = np.maximum.accumulate(np.maximum(step.finish_ns[order], step.before_ns))
    idle = np.zeros(len(step), np.int64)
    idle[order[1:]] = np.maximum(0, step.start_ns[order[1:]] - busy_until[:-1])
    return idle


def _modules_around(step: Step, modules: I64, row: int) -> str:
    """Returns the path of the calls of modules, rows `modules`, in which an event lies."""
    rows = step.profile.rows
    end = rows.ts_ns[modules] + rows.dur_ns[modules]
    holds = (rows.ts_ns[modules] <= rows.ts_ns[row]) & (end >= rows.ts_ns[row] + rows.dur_ns[row])
    holds &= (rows.tid[modules] == rows.tid[row]) & (rows.pid[modules] == rows.pid[row])
    around = modules[holds]
    around = around[np.lexsort((-rows.dur_ns[around], rows.ts_ns[around]))]
    return ".".join(step.profile.texts[rows.name[one]][len(MODULE) :] for one in around.tolist())
